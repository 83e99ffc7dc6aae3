"""What happens in a run, as typed records, and the protocol of the sinks that take them.

Names carry their unit. A figure that was not measured is `None`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted:
    """Training starts or resumes."""

    run_name: str
    run_folder: str
    task: str
    world_size: int
    global_batch_size: int | None = None  # this and the next two: not known for a user's own loop
    epochs: int | None = None
    steps_per_epoch: int | None = None
    resumed_at_step: int | None = None
    explanation: tuple[str, ...] = ()  # every effective value with its reason, one line each
    job: Mapping[str, Any] | None = None  # of the scheduler, if any: its number, restarts and nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """Progress, at most a few times a second; the figures cover the steps since the last record."""

    epoch: int  # counted from 1
    step: int  # optimizer steps since the start of the run
    step_in_epoch: int
    samples_seen: int  # over all workers, since the start of the run
    loss: float  # mean over all workers' samples of the steps since the last record
    learning_rate: float  # of the last step
    samples_per_s: float
    units_per_s: float
    input_wait_fraction: float
    train_time_s: float
    steps_in_epoch: int | None = None  # fewer in later epochs where the batch grows
    global_batch_size: int | None = None
    unit: str = "samples"  # of the speed: images, tokens, ...
    mfu: float | None = None  # share of the devices' published peak, where that is known
    noise_scale: float | None = None  # in samples, averaged over the last steps
    power_w: float | None = None  # of rank 0's node, over the last seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationProgress:
    """Progress of the validation."""

    epoch: int
    done: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochDone:
    """One epoch: its time is that of the slowest rank, its metrics are sums over all ranks."""

    epoch: int
    step: int
    samples_seen: int
    epoch_time_s: float  # training only
    cumulative_time_s: float
    validation_time_s: float
    samples_per_s: float
    units_per_s: float
    train_loss: float
    learning_rate: float
    input_wait_fraction: float
    peak_memory_bytes: int | None
    peak_reserved_memory_bytes: int | None = None  # reserved by the GPU's allocator
    validation: Mapping[str, float] = field(default_factory=dict)  # "loss", "accuracy", ...
    unit: str = "samples"  # of the speed: images, tokens, ...
    mfu: float | None = None  # share of the devices' published peak, where that is known
    # Of all nodes since the last epoch that has it, with validation and checkpoints; None where it is not measured, and
    # while the time is too short for the counters to be right within 5 %.
    energy_j: float | None = None
    power_w: float | None = None  # mean of all nodes together over the same time
    # By worker: rank, node, train_time_s, input_wait_s, exposed_s (waited for others; None where not measured).
    workers: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLogged:
    """Something the user's code has logged: a number, or a picture in a PNG file."""

    name: str
    step: int
    value: float | None = None
    file: str | None = None  # relative to the run folder


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSampled:
    """The state of rank 0's node, with the keys of `stormo.energy.node_metrics`."""

    sample: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSaved:
    """A checkpoint is durable and published."""

    epoch: int
    step: int
    path: str  # relative to the run folder
    weights_sha256: str
    save_time_s: float  # in which training waited for it
    write_time_s: float | None = None  # until it was published, in the background or not


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """One sentence for the user: `kind` is `info`, `warning`, `stop` or, after a failure, `error`."""

    kind: str
    text: str
    after_step: int | None = None  # where earlier records may be of an earlier step


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceNoticed:
    """Training diverged; the run ends, or resumes from `rolled_back_to_step` with a lower learning rate."""

    epoch: int
    step: int
    kind: str  # loss, weights, validation, exploded, lost
    loss: float
    learning_rate: float
    rolled_back_to_step: int | None
    rate_factor: float  # from here on
    text: str  # what happened, the likely cause, and what to do or what is done


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnded:
    """The run has ended; `summary` is the content of `summary.json`."""

    summary: Mapping[str, Any]


Record = (
    RunStarted
    | StepDone
    | ValidationProgress
    | EpochDone
    | ValueLogged
    | NodeSampled
    | CheckpointSaved
    | Notice
    | DivergenceNoticed
    | RunEnded
)


class Sink(Protocol):
    """Takes the records of one run, in order, on rank 0 only."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Flush and free every resource; called once."""
