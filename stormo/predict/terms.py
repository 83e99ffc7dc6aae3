"""What was counted of a model, how it is to be spread, and what is forecast of that, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

MIB, GIB = 2**20, 2**30
# By the name of a term: rules of thumb, none of which was counted.
RULES = {
    "workspace": "64 MiB for the libraries of matrix products and convolutions",
    "context": "0.75 GiB for CUDA and its kernels, and 0.5 GiB more for NCCL where there are several workers",
    "captured": "a second workspace, and other passes (a short last batch, a validation) beside the memory that one "
    "replayed as a CUDA graph keeps (--no-graph)",
    "gathered": "under fsdp what lies outside of blocks, two blocks, and one block's gradients on their way; under "
    "zero1 and zero2 those gradients, and with --accumulate all weights",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter, as it was counted."""

    name: str
    num_bytes: int
    num_values: int
    num_rows: int
    is_trained: bool
    dtype: str = "float32"
    state_bytes: int = 0  # of the optimizer
    block: str = ""  # the unit of fsdp that it belongs to; empty outside of all
    keeps_format: bool = False  # under fsdp: batch norms are gathered in their own


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What was counted of a model and its optimizer."""

    parameters: tuple[Parameter, ...]
    buffer_bytes: int
    step_bytes: int  # that a step of the optimizer needs for a while, for all parameters
    optimizer: str
    notices: tuple[str, ...] = ()

    @property
    def num_trained(self) -> int:
        """Values that are trained."""
        return sum(one.num_values for one in self.parameters if one.is_trained)

    @property
    def num_frozen(self) -> int:
        """Values that are not."""
        return sum(one.num_values for one in self.parameters if not one.is_trained)

    @property
    def weight_bytes(self) -> int:
        """Of all parameters."""
        return sum(one.num_bytes for one in self.parameters)

    @property
    def gradient_bytes(self) -> int:
        """Of those that are trained."""
        return sum(one.num_bytes for one in self.parameters if one.is_trained)

    @property
    def state_bytes(self) -> int:
        """Of the optimizer."""
        return sum(one.state_bytes for one in self.parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How the model is spread, as far as it concerns the memory of a worker."""

    num_workers: int = 1
    workers_per_node: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    offload: bool = False
    recompute: bool = False
    half_bytes: int | None = None  # of a value in the format of autocast
    batch: int = 1  # samples of one worker in one pass
    accumulate: int = 1  # passes of a step
    micro_batches: int = 1
    in_flight: float = 1.0  # micro-batches whose activations are there at a time
    graph: bool = False
    tail: int | None = None  # samples of an epoch's short last batch, 0 if there is none; None if it is not known
    data_bytes: int = 0  # of the data set, or of a batch that waits, on the device
    merges: bool = False  # blocks of a lone worker
    copies: int = 1  # whose gradients are averaged in buckets that stay
    averages: bool = False  # weights of workers that step by themselves
    kept_copies: int = 0  # of the weights, that an outer step keeps, or of the gradients, for PowerSGD
    servers: int = 0
    rooms: int = 0  # of a server for what it keeps, in which gradients come in
    cut: frozenset[str] = frozenset()  # parameters that the axis tensor cuts
    stages: tuple[frozenset[str], ...] = ()  # parameters of each worker along pipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Bytes of the worker that holds most."""

    terms: dict[str, float]
    host_bytes: float  # of all workers of a node
    batch: int
    room_bytes: float
    largest_batch: int | None  # that fits; None where activations are not known
    largest_pass: int = 0  # the same of one of several passes, whose gradients add up
    kept_bytes: float | None = None  # activations when backward begins

    @property
    def total_bytes(self) -> float:
        """All terms."""
        return sum(self.terms.values())

    @property
    def allocated_bytes(self) -> float:
        """All terms but CUDA's own, which torch's allocator does not see."""
        return self.total_bytes - self.terms["context"]

    @property
    def fits(self) -> bool:
        """Whether the margin is left."""
        return self.total_bytes <= self.room_bytes
