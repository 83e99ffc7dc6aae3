"""Reads and checks the settings of a training: defaults, the task's, the resumed run's, a file's, flags."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stormo.config import options, precedence, toml
from stormo.config.layout import Layout, resolve_layout
from stormo.config.plan import check_settings
from stormo.config.schema import Change, ResolvedBatch, TrainConfig
from stormo.launch import RankInfo
from stormo.launch.nodes import launched_by
from stormo.system.hardware import visible_gpus
from stormo.tasks.check import check_init, check_options, has_several_optimizers
from stormo.tasks.find import TASKS, find_task
from stormo.tasks.task import Task
from stormo.telemetry import trackers
from stormo.training import staging
from stormo.training.resume import ResumedRun, read_resumed_run, require_own

_VARIABLE = "STORMO_SETTINGS"


def read_settings(arguments: list[str]) -> tuple[TrainConfig, type[Task]]:
    """The configuration that a command line asks for, and the class of its task, whose module is imported."""
    settings, task_class = merged_settings(arguments)
    return settings.config(task_class.Options), task_class


def merged_settings(arguments: list[str]) -> tuple[Settings, type[Task]]:
    """The settings of a command line with those of all files it names."""
    peeked = options.peek_flags(arguments, options.train_options(), _looks_like_task)
    source = peeked.get("config", "")
    document = toml.read_toml(Path(source)) if source else {}
    resumed = read_resumed_run(document, peeked)
    task_class = _find_task(peeked.get("task"), document.get("task"), resumed)
    check_options(task_class)
    defaults = options.train_options(task_class.Options)
    of_task, shown = options.defaults_of_task(task_class.defaults, defaults, task_class.name)
    flags = options.parse_flags("stormo train", arguments, shown, f"Task {task_class.name}")
    toml.require_secrets(document, flags, source)
    return merge(defaults, of_task, resumed, toml.file_settings(document, defaults, source), flags), task_class


def merge(
    defaults: list[options.Option],
    of_task: dict[str, Any],
    resumed: ResumedRun | None,
    in_file: dict[str, Any],
    flags: dict[str, Any],
) -> Settings:
    """One set of settings, in which the later source wins: defaults, task, resumed run, file, flags."""
    given = precedence.drop_overridden(in_file, flags) | flags
    if resumed is None:
        return Settings(values=given, of_task=of_task, given=sorted(given))
    effective = resumed.effective()
    kept, changed = resumed.merge(given, defaults)
    given |= resumed.location()
    given.setdefault("resume", "")  # torchrun's next round resumes without --resume
    return Settings(
        values=kept | given,
        # The file of the run holds the task's defaults too, except the number that --batch-size auto starts from.
        of_task={key: value for key, value in of_task.items() if key == "batch_size"},
        given=sorted(given),
        resumed=dataclasses.asdict(effective),
        changed=[dataclasses.asdict(change) for change in changed],
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Merged settings as plain values, which the process that the user started passes to its ranks as JSON."""

    values: dict[str, Any]
    of_task: dict[str, Any]  # the task's defaults
    given: list[str]  # keys that the user has set, by flag or file
    resumed: dict[str, Any] | None = None
    changed: list[dict[str, Any]] = field(default_factory=list)

    def config(self, task_options: type[Any]) -> TrainConfig:
        """The configuration, with the task's options."""
        return dataclasses.replace(
            options.make_config(self.values, task_options, self.of_task),
            given=frozenset(self.given),
            resumed=None if self.resumed is None else ResolvedBatch(**self.resumed),
            changed=tuple(Change(**change) for change in self.changed),
        )

    def to_environment(self) -> dict[str, str]:
        """The variable that a rank reads with `inherited_settings`."""
        return {_VARIABLE: json.dumps(dataclasses.asdict(self))}


def inherited_settings(environ: MutableMapping[str, str]) -> tuple[TrainConfig, type[Task]] | None:
    """What the agent that started this rank has read; taken out of the environment, as child processes are no ranks."""
    text = environ.pop(_VARIABLE, None)
    if text is None:
        return None
    settings = Settings(**json.loads(text))
    task_class = find_task(settings.values.get("task", TrainConfig.task))
    return settings.config(task_class.Options), task_class


def checked(config: TrainConfig, task_class: type[Task], rank_info: RankInfo | None = None) -> tuple[Layout, Task]:
    """The layout and the task; refuses, before any process starts, settings that hold for no data."""
    layout = resolve_layout(config, visible_gpus(), launched_by(rank_info))
    check_settings(config, layout)
    task = task_class(config.task_options)
    check_init(task)
    if has_several_optimizers(task_class):
        from stormo.parallel import alternating, table  # which import torch

        table.strategy_class(layout, task)
        alternating.check(config)
    staging.check(config.command, task)
    trackers.check(trackers.asked_trackers(config.run))
    if config.run.prometheus is not None:
        from stormo.telemetry import prometheus

        prometheus.check(config.run.prometheus, config.run.prometheus_host)
    return layout, task


def _find_task(by_flag: Any, in_file: Any, resumed: ResumedRun | None) -> type[Task]:
    of_run = resumed.document.get("task") if resumed else None
    named = next((name for name in (by_flag, in_file) if isinstance(name, str)), None)
    if resumed is not None and named is None:
        require_own(resumed.folder, of_run, is_built_in=of_run in TASKS)
    return find_task(named or (of_run if isinstance(of_run, str) else TrainConfig.task))


def _looks_like_task(argument: str) -> bool:
    return argument in TASKS or argument.partition(":")[0].endswith(".py") or ":" in argument
