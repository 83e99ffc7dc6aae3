"""What the arithmetic needs to know of a task."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the arithmetic needs to know of a task."""

    num_train: int  # 0 for a stream that does not tell
    num_validation: int | None  # None for a stream that does not tell: they are counted while it is read
    is_stream: bool = False  # the training set can only be read in its own order
    flops_per_sample: float | None = None  # forward and backward
    compile_saves: float | None = None  # share of a step's time that torch.compile is known to save
    train_bytes: int | None = None  # of the whole training set, where it can be kept on a device
    unit: str = "samples"  # what speed is counted in: images, tokens, ...
    units_per_sample: int = 1
    has_accuracy: bool | None = None  # whether metrics() reports an `accuracy`; None is not known beforehand
    has_convolutions: bool | None = None  # whether the model has any; None is not known beforehand
    has_batch_norms: bool | None = None
    data: str = ""  # what the training set is, in words
    data_sha256: str | None = None  # of all data, where it is known beforehand: it must be the same on every node
