"""Settings by key, from wherever they come, as a configuration; and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from stormo.config.options.belonging import left_unasked
from stormo.config.schema import OF_ONE_CALL, SECTIONS, TrainConfig


def make_config(
    settings: Mapping[str, Any], task_options: type[Any] | None, defaults: Mapping[str, Any] | None = None
) -> TrainConfig:
    """The configuration that holds the given settings and the defaults of the rest, a task's own before the usual."""
    weak = left_unasked(defaults or {}, settings)
    if settings.get("batch_size", "auto") != "auto":
        weak.pop("global_batch_size", None)  # the two say the same, and what the user says wins
    effective = {**weak, **settings}
    number = weak.get("batch_size")
    sections = {
        section: cls(**{f.name: effective[f.name] for f in dataclasses.fields(cls) if f.name in effective})
        for section, cls in SECTIONS.items()
    }
    own = {key.removeprefix("task."): value for key, value in settings.items() if key.startswith("task.")}
    return TrainConfig(
        task=settings.get("task", TrainConfig.task),
        task_options=task_options(**own) if task_options else None,
        given=frozenset(settings),
        auto_batch_size=number if isinstance(number, int) else TrainConfig.auto_batch_size,
        **sections,
    )


def flat_settings(config: TrainConfig) -> dict[str, Any]:
    """Every setting that must be the same on all nodes, by key."""
    settings: dict[str, Any] = {"task": config.task}
    for section in SECTIONS:
        settings |= dataclasses.asdict(getattr(config, section))
    if config.task_options is not None:
        settings |= {f"task.{key}": value for key, value in dataclasses.asdict(config.task_options).items()}
    own = ("node_id", "task.data_folder", "stage", *OF_ONE_CALL)
    return {key: value for key, value in settings.items() if key not in own}
