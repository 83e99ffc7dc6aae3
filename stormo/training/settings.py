"""Reads and checks the settings of a training: defaults, the resumed run, a file, flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stormo.config import options
from stormo.config.layout import Layout, resolve_layout
from stormo.config.plan import check_settings
from stormo.config.schema import TrainConfig
from stormo.errors import SettingError
from stormo.launch import Place
from stormo.launch.nodes import launched_by
from stormo.system.hardware import visible_gpus
from stormo.system.masking import MASK
from stormo.tasks.check import check_made, check_options
from stormo.tasks.find import TASKS, find_task
from stormo.tasks.task import Task
from stormo.training import dry_run, staging
from stormo.training.resuming.changes import changes, require_task
from stormo.training.resuming.finding import require_own, run_to_resume
from stormo.training.resuming.inherited import (
    OF_COPIES,
    inherited_effect,
    inherited_workers,
    lost_with_strategy,
    place_of,
    require_few_processes,
)


def checked(config: TrainConfig, task_class: type[Task], place: Place | None = None) -> tuple[Layout, Task]:
    """Refuse, before any process starts, what cannot hold whatever the data are; give who takes part, and the task."""
    layout = resolve_layout(config, visible_gpus(), launched_by(place))
    check_settings(config, layout)
    task = task_class(config.task_options)
    check_made(task)
    dry_run.check(config)
    staging.check(config.command, task)
    if config.run.prometheus is not None:
        from stormo.telemetry import prometheus

        prometheus.check(config.run.prometheus, config.run.prometheus_host)
    return layout, task


def read_settings(arguments: list[str]) -> tuple[TrainConfig, type[Task]]:
    """Defaults, then the settings of a resumed run, then a TOML file's, then flags: the later wins."""
    peeked = options.peek_flags(arguments, options.train_options(), _looks_like_task)
    document = options.read_toml(Path(peeked["config"])) if "config" in peeked else {}
    run = document.get("run")
    resumed = run_to_resume((run if isinstance(run, dict) else {}) | peeked)
    inherited = options.read_toml(resumed.config, f"{resumed.config} is of the run to resume") if resumed else {}
    workers = inherited.get("workers", {})
    if not isinstance(workers, dict):
        raise SettingError(
            f"{inherited['workers']!r:.40} are the workers in the config.toml of the run to resume",
            "they are no section",
            "restore that file, or start a new run",
        )
    inherited["workers"] = inherited_workers(workers, document.get("workers"), peeked)
    said = next((name for name in (peeked.get("task"), document.get("task")) if isinstance(name, str)), None)
    if resumed is not None and said is None:
        require_own(resumed, inherited.get("task"), is_built_in=inherited.get("task") in TASKS)
    names = (said, inherited.get("task"), TrainConfig.task)
    task_class = find_task(next(name for name in names if isinstance(name, str)))
    check_options(task_class)
    plain = options.train_options(task_class.Options)
    defaults, every = options.defaults_of_task(task_class.defaults, plain, task_class.name)
    flags = options.parse_flags("stormo train", arguments, every, f"Task {task_class.name}")
    options.check_masked(document, flags, peeked.get("config", ""))
    in_file = options.asked_by_file(document, every, peeked.get("config", ""))
    settings = options.left_below(in_file, flags) | flags
    if resumed is None:
        return options.make_config(settings, task_class.Options, defaults), task_class
    require_task(settings.get("task"), inherited.get("task"), resumed)
    # The file holds whatever was in force, the task's defaults of that day among it; what is not there was not set.
    options.check_masked(inherited, settings, str(resumed.config))
    before = options.settings_from_toml(inherited, every, str(resumed.config))
    before |= {key: settings[key] for key, value in before.items() if value == MASK and key in settings}
    require_few_processes(before, settings)
    effective = inherited_effect(inherited, resumed)
    keys = ("strategy", "staleness", *OF_COPIES)  # also where they are others now
    spread = {key: workers[key] for key in keys if key in workers}
    left = options.left_unasked(before, settings)
    gone = {key: None for key in before if key not in left} | lost_with_strategy(workers, before | settings)
    changed = changes(settings | gone, spread | before, plain, resumed)
    settings |= place_of(resumed)
    settings.setdefault("resume", "")  # a round of torchrun that goes on without being told to
    # What --batch-size auto rests on is not in the file, which says auto.
    number = {"batch_size": defaults["batch_size"]} if "batch_size" in defaults else {}
    config = options.make_config(left | settings, task_class.Options, number)
    return replace(config, given=frozenset(settings), resumed=effective, changed=changed), task_class


def _looks_like_task(argument: str) -> bool:
    return argument in TASKS or argument.partition(":")[0].endswith(".py") or ":" in argument
