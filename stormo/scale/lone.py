"""The one worker of a study whose strategy one worker cannot have: it trains as `stormo train` does with one worker."""

from __future__ import annotations

from collections.abc import Sequence

from stormo.config import TrainConfig
from stormo.layout import OF_SEVERAL
from stormo.mesh import Mesh, parse_mesh
from stormo.options import without_flags

# Settings that only such strategies have.
_THEIRS = ("strategy", "mesh", "zero", "servers", "staleness", "micro_batches", "schedule", "shard_modules", "offload")


def lone_note(config: TrainConfig) -> str:
    """What one worker has instead of what was set, and why; nothing where it can have it."""
    workers = config.workers
    if workers.mesh is not None:
        return "" if Mesh(**parse_mesh(workers.mesh)).size == 1 else _note(f"--mesh {workers.mesh}")
    return _note(f"--strategy {workers.strategy}") if workers.strategy in OF_SEVERAL else ""


def _note(asked: str) -> str:
    return f"strategy single, as one worker cannot have {asked}"


def lone_arguments(arguments: Sequence[str], config: TrainConfig) -> tuple[str, ...]:
    """What `stormo train` is told for one worker instead."""
    has_units = config.sharding.checkpoint_activations or config.speed.compile  # of which one worker may name some
    theirs = set(_THEIRS) - ({"shard_modules"} if has_units else set())
    kept = without_flags(arguments, {f"--{key.replace('_', '-')}": int(key != "offload") for key in theirs})
    return (*kept, "--strategy", "single")  # which takes back what a file of settings says of another
