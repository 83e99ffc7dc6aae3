"""The one worker of a study whose strategy one worker cannot have: it trains as `stormo train` does with one worker."""

from __future__ import annotations

from collections.abc import Sequence

from stormo.config.mesh import Mesh, parse_mesh
from stormo.config.options import flat_settings, train_options, without_effect, without_flags
from stormo.config.schema import TrainConfig
from stormo.config.strategies import names


def lone_note(config: TrainConfig) -> str:
    """What one worker has instead of what was set, and why; nothing where it can have it."""
    workers = config.workers
    if workers.mesh is not None:
        return "" if Mesh(**parse_mesh(workers.mesh)).size == 1 else _note(f"--mesh {workers.mesh}")
    return (
        _note(f"--strategy {workers.strategy}") if workers.strategy in names(lambda row: row.least_workers > 1) else ""
    )


def _note(asked: str) -> str:
    return f"strategy single, as one worker cannot have {asked}"


def lone_arguments(arguments: Sequence[str], config: TrainConfig) -> tuple[str, ...]:
    """What `stormo train` is told for one worker instead."""
    alone = {"strategy": "single", "mesh": None}
    theirs = {*alone, *without_effect({**flat_settings(config), **alone})}
    flags = {option.flag: int(option.kind is not bool) for option in train_options() if option.key in theirs}
    return (*without_flags(arguments, flags), "--strategy", "single")  # over what a file of settings says of another
