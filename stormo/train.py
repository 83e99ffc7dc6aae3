"""The verb `train`: reads the settings, then starts the workers of this node or, inside one, trains."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from stormo import __version__, dry_run, options
from stormo.config import TrainConfig
from stormo.early_signals import leave_if_warned
from stormo.errors import EXIT_FAILURE, SettingError, StormoError, full_disk
from stormo.hardware import visible_gpus
from stormo.hosts import hosts_of, on_hosts, start_on_hosts
from stormo.launch import Place, alone, open_lifeline, run_node
from stormo.launch.lifeline import die_with_parent
from stormo.launch.local import hush_tracker
from stormo.launch.restarts import run_with_restarts
from stormo.launch.torchrun import note_failure
from stormo.layout import Layout, resolve_layout
from stormo.masking import MASK
from stormo.nodes import check_restarts, find_place, launched_by, node_of
from stormo.plan import check_settings, resolve
from stormo.process import STARTED, own_command, process_start_unix_s
from stormo.resuming.changes import changes, require_task
from stormo.resuming.finding import require_own, run_to_resume
from stormo.resuming.inherited import (
    OF_COPIES,
    inherited_effect,
    inherited_workers,
    lost_with_strategy,
    place_of,
    require_few_processes,
)
from stormo.staging import of_task as staging
from stormo.tasks.check import check_made, check_options, check_task, note_method
from stormo.tasks.find import TASKS, find_task
from stormo.tasks.task import Task
from stormo.telemetry.finding import default_run_name


def main(arguments: list[str]) -> int:
    """Read the settings, see who this process is, and go."""
    config, task_class = read_settings(arguments)
    check_task(task_class)
    place = find_place(config)
    hosts = hosts_of(config)
    check_restarts(on_hosts(config, hosts), place)
    if hosts and not config.command.dry_run:
        return start_on_hosts(config, hosts, "train", arguments)
    config = on_hosts(config, hosts)
    layout, task = checked(config, task_class, place)
    if config.command.dry_run:
        if place is None or place.is_main:
            if task.needs_data_for_facts():
                task.fetch()
            has_own = task_class.optimizer is not Task.optimizer
            plan = resolve(config, layout, task.facts())
            dry_run.show(config, plan, sys.stdout, has_own=has_own, loss_reduction=task.loss_reduction)
        return 0
    if place is None and (layout.world_size > 1 or config.workers.max_restarts):
        if not task.needs_data_for_facts():
            resolve(config, layout, task.facts())  # whatever is wrong is said before any process starts
        with staging.cleaned_up(config.command):
            return _start_workers(arguments, config, layout)
    return _work(config, layout, task, place or alone())


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


def _start_workers(arguments: list[str], config: TrainConfig, layout: Layout) -> int:
    """Become the agent of this node: the workers run this very command again, told who they are."""
    leave_if_warned()
    workers, run, signals = config.workers, config.run, set[int]()
    # Restarts go on with the run of the first attempt, so that its name is settled here.
    named = [*arguments, "--runs-folder", run.runs_folder, "--run-name", run.run_name or default_run_name(config.task)]
    first = named if workers.max_restarts and run.resume is None else arguments

    def attempt(number: int) -> int:
        words = [*named, "--resume"] if number else first
        os.environ[STARTED] = str(time.time() if number else process_start_unix_s())
        same = _same_on_all(read_settings(words)[0] if number else config, layout)
        command = [*own_command("train"), *words]
        return run_node(command, node_of(config, layout), timeout_s=workers.timeout, signals=signals, **same)

    return run_with_restarts(attempt, restarts=workers.max_restarts, signals=signals, join_s=workers.timeout)


def _work(config: TrainConfig, layout: Layout, task: Task, place: Place) -> int:
    """Be a worker; whatever goes wrong is told to the others before this process ends."""
    if place.launcher == "torchrun":
        die_with_parent()  # nobody else would end it
    hush_tracker(os.environ)
    # Taken up before torch is imported where it can be: an agent wants signs of life from the start.
    lifeline = open_lifeline(place) if place.launcher in ("local", "alone") else None
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's sockets warn of every name they cannot look up
    try:
        from stormo.worker import run_worker
        from stormo.world.store import Store, board_of

        if config.command.preflight:
            from stormo.doctor.reach import require_meeting_point

            require_meeting_point(place)
        timeout_s = config.workers.timeout
        if lifeline is None:
            same = _same_on_all(config, layout)
            lifeline = open_lifeline(place, board=board_of(place, timeout_s), timeout_s=timeout_s, **same)
        store = Store(place, timeout_s, lifeline.meeting_point) if place.world_size > 1 else None
        code = run_worker(config, layout, task, place, store, lifeline)
    except (Exception, SystemExit) as raised:
        error = _no_exit(raised) if isinstance(raised, SystemExit) else full_disk(raised) or raised
        if not isinstance(error, StormoError):
            note_method(error, task)
        if lifeline is None or not lifeline.shows_failures:
            note_failure(os.environ, f"{type(error).__name__}: {error}")
            raise error from None if error is not raised else raised.__cause__
        from stormo.world.store import is_secondary

        lifeline.report_failure(error, secondary=is_secondary(error))
        return error.exit_code if isinstance(error, StormoError) else EXIT_FAILURE
    lifeline.close()
    return code


def _no_exit(raised: SystemExit) -> StormoError:
    return StormoError(
        f"the task ended its process with exit code {raised.code} in the middle of training; "
        "raise an error instead, or let training end by --epochs or --target-accuracy."
    )


def _same_on_all(config: TrainConfig, layout: Layout) -> dict[str, Any]:
    """What must agree on all nodes, as a digest and in words."""
    settings = {f"--{key.replace('_', '-')}": str(value) for key, value in options.flat_settings(config).items()}
    settings |= {
        "the release of stormo": __version__,
        "the device": layout.device_type,
        "the communication library": layout.backend,
        "the resumed run": str(config.resumed),  # a node that does not see its folder would start anew
    }
    return {"digest": hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest(), "options": settings}
