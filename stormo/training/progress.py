"""How far a run is: plain counters, saved in every checkpoint and restored by a resume."""

from __future__ import annotations

import hashlib
import typing
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor

from stormo.errors import StormoError
from stormo.system.files import fits, printable
from stormo.training.divergence import Trend

_MOST_COUNTED = 2**62


@dataclass(kw_only=True)
class Progress:
    """The counters of a run: JSON-able, and the same on every rank."""

    epoch: int = 1  # the current one
    position: int = 0  # samples of it that are done
    step: int = 0  # optimizer steps since the start
    samples_seen: int = 0
    samples_trained: int = 0  # with those that a rollback has undone
    train_time_s: float = 0.0  # without validation and checkpoints
    epoch_time_s: float = 0.0  # the part of it in the current epoch
    wait_s: float = 0.0  # for the loaders
    wall_time_s: float = 0.0  # of earlier attempts
    num_resumes: int = 0
    num_rollbacks: int = 0
    rate_factor: float = 1.0  # of the learning rate; every rollback lowers it
    diverged_rate: float | None = None  # the lowest learning rate after warm-up that has diverged
    trend: Trend = field(default_factory=Trend)  # of the training loss
    calm_steps: list[int] = field(default_factory=list)  # of the last two checkpoints with a stable loss
    peak_memory_bytes: int | None = None
    peak_reserved_memory_bytes: int | None = None  # of a GPU
    epochs_done: int = 0  # validated ones
    target_streak: int = 0  # epochs in a row that reached the target
    time_to_target_s: float | None = None
    target_unix_s: float | None = None  # when it was reached
    validation: dict[str, float] | None = None  # of the last validated epoch
    best_validation: dict[str, float] | None = None
    sample_order_sha256: str = ""  # chain over every sample trained on, in order

    def advance(self, samples: Tensor) -> None:
        """Count one global batch of these samples."""
        chain = hashlib.sha256(bytes.fromhex(self.sample_order_sha256))
        chain.update(samples.numpy().data)
        self.sample_order_sha256 = chain.hexdigest()
        self.step += 1
        self.position += len(samples)
        self.samples_seen += len(samples)
        self.samples_trained += len(samples)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def take(self, values: dict[str, Any]) -> None:
        """Restore what `to_json` gave."""
        values = {"samples_trained": values.get("samples_seen", 0), **values}  # older releases did not count it
        for name, hint in typing.get_type_hints(Progress).items():
            if name not in values:
                continue
            is_count = hint is int
            if not fits(values[name], hint) or (is_count and not 0 <= values[name] < _MOST_COUNTED):
                shown = "out of range" if type(values[name]) is int else printable(repr(values[name])[:40])
                raise StormoError(f"The checkpoint cannot be resumed: its counter {name} is {shown}.")
        for one in fields(self):
            # What an older release did not save keeps its default.
            if one.name in values:
                setattr(self, one.name, Trend(**values[one.name]) if one.name == "trend" else values[one.name])
