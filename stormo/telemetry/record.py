"""What happens in a run, as typed records, and the protocol of everything that takes them.

Keys carry their unit. A figure that was not measured is `None`, never an invention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted:
    """Training is about to begin, or to go on after a resume."""

    run_name: str
    run_folder: str
    task: str
    world_size: int
    global_batch_size: int
    epochs: int
    steps_per_epoch: int
    resumed_at_step: int | None = None
    explanation: tuple[str, ...] = ()  # every effective value with its arithmetic, one line each
    job: Mapping[str, Any] | None = None  # of the scheduler, where there is one: its number, restarts and nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """Progress, a few times a second at most; the figures cover the steps since the record before."""

    epoch: int  # counted from 1
    step: int  # optimizer steps since the start of the run
    step_in_epoch: int
    samples_seen: int  # over all workers, since the start of the run
    loss: float  # the mean over all workers' samples of the steps that they have told of since the record before
    learning_rate: float  # of the last of them
    samples_per_s: float
    units_per_s: float
    input_wait_fraction: float
    train_time_s: float
    steps_in_epoch: int | None = None  # where the batch grows, later epochs have fewer
    global_batch_size: int | None = None
    unit: str = "samples"  # what the task counts its speed in: images, tokens, ...
    mfu: float | None = None  # share of the devices' published peak, where that is known
    noise_scale: float | None = None  # in samples, averaged over the last steps; None where it is not measured (yet)
    power_w: float | None = None  # of the main worker's node, over the last seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationProgress:
    """How far the validation pass is."""

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
    peak_reserved_memory_bytes: int | None = None  # that an allocator has taken of a GPU
    validation: Mapping[str, float] = field(default_factory=dict)  # "loss", "accuracy", ...
    unit: str = "samples"  # what the task counts its speed in: images, tokens, ...
    mfu: float | None = None  # share of the devices' published peak, where that is known
    # Of all nodes since the last epoch that has it, validation and checkpoints included; None where it is not measured,
    # and while the time is too short for the counters to be right within 5 %.
    energy_j: float | None = None
    power_w: float | None = None  # the mean of all nodes together over the same time
    # By worker: rank, node, train_time_s, input_wait_s, exposed_s (stood still for others; None where not measured).
    workers: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSampled:
    """The state of the main worker's node: the keys are those of `stormo.energy.vitals`."""

    sample: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSaved:
    """A checkpoint is durable and published."""

    epoch: int
    step: int
    path: str  # relative to the run folder
    weights_sha256: str
    save_time_s: float  # in which training stood still for it
    write_time_s: float | None = None  # until it was published, in the background or not


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """One sentence for the user: `kind` is `info`, `warning` or `stop`."""

    kind: str
    text: str
    after_step: int | None = None  # where the records before it may be of an earlier step


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceNoticed:
    """The loss is lost; the run ends, or goes on from `rolled_back_to_step` with a lower rate."""

    epoch: int
    step: int
    kind: str  # loss, weights, validation, exploded, lost
    loss: float
    learning_rate: float
    rolled_back_to_step: int | None
    rate_factor: float  # from here on
    text: str  # what happened, the likely cause, and what to try or what is done


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnded:
    """The end of a run and its summary (the content of `summary.json`)."""

    summary: Mapping[str, Any]


Record = (
    RunStarted
    | StepDone
    | ValidationProgress
    | EpochDone
    | NodeSampled
    | CheckpointSaved
    | Notice
    | DivergenceNoticed
    | RunEnded
)


class Sink(Protocol):
    """Takes the records of one run, in order, on the main process only."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Flush and let go of every resource; called once."""


def flatten(record: Record) -> dict[str, Any]:
    """A record as plain JSON-ready values."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}
