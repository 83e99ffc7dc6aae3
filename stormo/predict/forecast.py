"""The memory of one worker as arithmetic on counted bytes, and the largest batch that fits.

Pure functions. What is a rule of thumb and not counted is in `RULES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stormo.system.hardware import GPU_SHARE

MIB, GIB = 2**20, 2**30
# Terms that are rules of thumb and not counted.
RULES = {
    "workspace": "64 MiB for cuBLAS and cuDNN",
    "context": "0.75 GiB for CUDA and its kernels, and 0.5 GiB for NCCL with several workers",
    "captured": "a second workspace, and what a short last batch or a validation needs beside the memory of the CUDA "
    "graph (--no-graph)",
    "gathered": "with fsdp what is outside of blocks, two blocks (all where they take at most 256 MiB), and the "
    "gradients of one block; with zero1 and zero2 those gradients, and with --accumulate all weights",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSize:
    """The size of one parameter."""

    name: str
    num_bytes: int
    num_values: int
    num_rows: int
    is_trained: bool
    dtype: str = "float32"
    state_bytes: int = 0  # of the optimizer
    block: str = ""  # its FSDP unit; empty outside of all
    keeps_format: bool = False  # FSDP gathers batch norms in their own dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """The size of a model and of its optimizer's state."""

    parameters: tuple[ParameterSize, ...]
    buffer_bytes: int
    step_bytes: int  # temporary memory of an optimizer step, for all parameters
    optimizer: str
    notices: tuple[str, ...] = ()

    @property
    def num_trained(self) -> int:
        """Number of trained values."""
        return sum(one.num_values for one in self.parameters if one.is_trained)

    @property
    def num_frozen(self) -> int:
        """Number of frozen values."""
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
class ParallelSpec:
    """How the model is parallelised, as far as it matters for the memory of a worker."""

    num_workers: int = 1
    workers_per_node: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    offload: bool = False
    half_bytes: int | None = None  # of a value under autocast
    batch: int = 1  # samples of one worker in one micro-batch
    accumulate: int = 1  # micro-batches of a step
    micro_batches: int = 1  # of the pipeline
    in_flight: float = 1.0  # pipeline micro-batches whose activations are held at a time
    graph: bool = False
    tail: int | None = None  # samples of an epoch's short last batch, 0: there is none, None: not known
    data_bytes: int = 0  # of the data set, or of a prefetched batch, on the device
    merge_blocks: bool = False  # into fewer FSDP units, or keep few gathered weights until backward
    half_gradients: bool = False  # copied before they are sent, and where they arrive
    copies: int = 1  # DDP replicas, whose gradient buckets stay allocated
    averages_weights: bool = False  # of workers with local updates
    extra_copies: int = 0  # of the weights for an outer step, or of the gradients for PowerSGD
    servers: int = 0
    server_buffers: int = 0  # for gradients that arrive at a server
    tensor_sharded: frozenset[str] = frozenset()  # parameters that are sharded along tensor
    stages: tuple[frozenset[str], ...] = ()  # parameters of each worker along pipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Bytes of the worker that holds the most."""

    terms: dict[str, float]
    host_bytes: float  # of all workers of a node
    batch: int
    limit_bytes: float
    largest_batch: int | None  # that fits; None where activations are not known
    largest_micro_batch: int = 0  # the same where a step has several and gradients accumulate
    kept_bytes: float | None = None  # activations when backward begins

    @property
    def total_bytes(self) -> float:
        """All terms."""
        return sum(self.terms.values())

    @property
    def allocated_bytes(self) -> float:
        """What torch's allocator sees: all terms but CUDA's own."""
        return self.total_bytes - self.terms["context"]

    @property
    def fits(self) -> bool:
        """True where the total is within the limit."""
        return self.total_bytes <= self.limit_bytes


Rows = Sequence[tuple[int, int, int]]  # bytes of (other, casts, gradients) after each operation


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Bytes alive after each operation of a forward and backward pass, at two batch sizes.

    The operations are the same at every size, so the bytes after each are linear in the size.
    """

    sizes: tuple[int, int]
    rows: tuple[Rows, Rows]
    kept: tuple[int, int]  # alive when backward begins

    def kept_at(self, size: float) -> float:
        """Bytes of activations kept for backward."""
        return self.kept[0] + self.kept_per_sample * (size - self.sizes[0])

    @property
    def kept_per_sample(self) -> float:
        """The slope of `kept_at`."""
        return (self.kept[1] - self.kept[0]) / (self.sizes[1] - self.sizes[0])

    def peak(self, size: float, load: Load) -> float:
        """The peak of a micro-batch, beyond what is always allocated."""
        return max(fixed + slope * size for fixed, slope in self._lines(load))

    def largest(self, room: float, load: Load) -> int:
        """The largest size whose peak fits; 0 where none does."""
        most = float("inf")
        for fixed, slope in self._lines(load):
            if slope > 0:
                most = min(most, (room - fixed) / slope)
            elif fixed > room:
                return 0
        return max(0, int(min(most, 2**40)))

    def _lines(self, load: Load) -> list[tuple[float, float]]:
        first, second = (self._loaded(rows, load) for rows in self.rows)
        if len(first) != len(second):  # another number of operations: only the peaks compare
            first, second = [max(first)], [max(second)]
        low, high = self.sizes
        lines = []
        for one, two in zip(first, second, strict=True):
            slope = (two - one) / (high - low)
            lines.append((one - slope * low, slope))
        return lines

    def _loaded(self, rows: Rows, load: Load) -> list[float]:
        whole = max((gradients for _, _, gradients in rows), default=0) or 1
        found = []
        for other, casts, gradients in rows:
            done = gradients / whole
            held = load.gradient_bytes if load.keeps_gradients else done * load.gradient_bytes
            found.append(load.share * (other + load.cast_share * casts) + held + (1 - done) * load.freed_bytes)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """How a strategy changes the memory of a traced pass."""

    gradient_bytes: float = 0.0  # of this worker, when all are there
    keeps_gradients: bool = False  # always allocated, as with ddp
    freed_bytes: float = 0.0  # gathered weights that are freed during backward
    cast_share: float = 1.0  # of the copies of weights in another format
    share: float = 1.0  # of the activations


_WORKSPACE_BYTES = 64 * MIB
_CONTEXT_BYTES, _NCCL_BYTES = GIB * 3 // 4, GIB // 2


def forecast(
    model: ModelSize, spec: ParallelSpec, curve: MemoryCurve | None, memory_bytes: int, validation: Rows = ()
) -> Forecast:
    """The memory of a worker; with a pipeline, of the stage that holds the most."""
    names = spec.stages or (None,)
    every = [_stage_forecast(model, spec, curve, memory_bytes, stage, validation) for stage in names]
    most = max(every, key=lambda one: one.total_bytes)
    sizes = [one.largest_batch for one in every if one.largest_batch is not None]
    host = sum(one.host_bytes for one in every) / len(every)
    return replace(
        most,
        host_bytes=host * spec.workers_per_node,
        largest_batch=min(sizes) if len(sizes) == len(every) else None,
        largest_micro_batch=min(one.largest_micro_batch for one in every),
    )


def _stage_forecast(
    model: ModelSize,
    spec: ParallelSpec,
    curve: MemoryCurve | None,
    memory_bytes: int,
    stage: frozenset[str] | None,
    validation: Rows,
) -> Forecast:
    own = [one for one in model.parameters if stage is None or one.name in stage]
    zero, trained = spec.zero, [one for one in own if one.is_trained]
    are_sharded = zero >= 2 or (zero == 1 and spec.accumulate == 1)  # zero1 sums gradients once in a step
    weights = sum(_bytes(one, one.num_bytes, spec, zero >= 1) for one in own)
    gradients = sum(_bytes(one, one.num_bytes, spec, are_sharded) for one in trained)
    state = sum(_bytes(one, one.state_bytes, spec, zero >= 1) for one in own)
    rows = sum(_bytes(one, one.num_bytes, spec, sharded=True) for one in own)
    part = sum(one.num_bytes for one in own) / max(model.weight_bytes, 1)  # of the layers
    step = model.step_bytes * sum(_bytes(one, one.num_bytes, spec, zero >= 1) for one in own)
    step /= max(model.weight_bytes, 1)
    host = 0.0
    trained_bytes = float(sum(one.num_bytes for one in trained))
    state += spec.extra_copies * trained_bytes
    if spec.servers:
        host = trained_bytes + _server_bytes(spec, trained_bytes, state + step) / spec.workers_per_node
        state = step = 0.0
    if spec.offload:
        host = rows + state + sum(_bytes(one, one.num_bytes, spec, sharded=True) for one in trained)
        weights = gradients = state = step = 0.0
    gathered, freed, gathers_again = _gathered(own, spec) if zero else (0.0, 0.0, False)
    is_captured = spec.graph and spec.accumulate == 1 and not gathers_again
    terms = {
        "weights": weights,
        "gradients": gradients,
        "state": state,
        "activations": 0.0,
        "gathered": gathered,
        "buffers": float(model.buffer_bytes),
        "data": float(spec.data_bytes),
        "workspace": float(_WORKSPACE_BYTES),
        "context": float(_CONTEXT_BYTES + _NCCL_BYTES * (spec.num_workers > 1)),
        "captured": float(_WORKSPACE_BYTES) if is_captured else 0.0,  # of its own stream
    }
    room = GPU_SHARE * memory_bytes
    free = room - sum(terms.values()) + gradients
    if curve is None:
        terms["activations"] = max(step, freed)
        return Forecast(terms=terms, host_bytes=host, batch=spec.batch, limit_bytes=room, largest_batch=None)
    load = Load(
        gradient_bytes=gradients,
        # Views of DDP's buckets, or gradients of earlier micro-batches.
        keeps_gradients=(zero == 0 and spec.copies > 1) or spec.accumulate > 1 or spec.pipeline > 1,
        freed_bytes=freed,
        cast_share=0.0 if zero == 3 else part,
        share=spec.in_flight / spec.pipeline,
    )
    size = spec.batch / spec.micro_batches
    at_rest = gradients if load.keeps_gradients else 0.0
    validating = max((load.share * (other + load.cast_share * casts) for other, casts, _ in validation), default=0.0)
    validating += trained_bytes if spec.averages_weights else 0.0  # its own weights, while the mean is validated
    # Weights are averaged after the gradients, which are as large, are freed.
    floor = max(step + gradients, validating + at_rest, gradients)
    # A smaller micro-batch is one of several: it finds earlier gradients, and is not captured.
    again = replace(load, keeps_gradients=True)
    free_again = free + (_WORKSPACE_BYTES if is_captured else 0)
    largest_micro_batch = curve.largest(free_again, again) * spec.micro_batches if floor <= free_again else 0
    if is_captured:
        terms["activations"], others, largest = _captured(curve, spec, load, free, state, max(step, validating))
        terms["captured"] += others
    else:
        terms["activations"] = max(curve.peak(size, load), floor) - gradients
        largest = curve.largest(free, load) * spec.micro_batches if floor <= free else 0
    return Forecast(
        terms=terms,
        host_bytes=host,
        batch=spec.batch,
        limit_bytes=room,
        largest_batch=largest,
        largest_micro_batch=largest_micro_batch,
        kept_bytes=curve.kept_at(size) * load.share,
    )


def _captured(
    curve: MemoryCurve, spec: ParallelSpec, load: Load, free: float, state: float, beside: float
) -> tuple[float, float, int]:
    """What a CUDA graph keeps, what runs beside it need, and the largest batch.

    `free` is left for micro-batches and gradients, `state` is allocated only after the capture, `beside` is what a step
    or a validation needs.
    """
    gradients, size = load.gradient_bytes, spec.batch
    kept = max(curve.peak(size, load), gradients)
    short = curve.peak(size if spec.tail is None else spec.tail, load) if spec.tail != 0 else 0.0
    # Before the capture the pass has run twice.
    again = replace(load, keeps_gradients=True)
    others = max(beside, short, curve.peak(size, again) - kept - state)
    sizes = curve.largest(free / 2, load), curve.largest(free - beside, load), curve.largest(free + state, again)
    largest = min(sizes) if gradients + beside <= free else 0
    if kept + others <= free:  # its last batch may be shorter than with other sizes
        largest = max(largest, size)
    return kept - gradients, others, largest


def _server_bytes(spec: ParallelSpec, trained_bytes: float, others: float) -> float:
    """Host memory of the servers on the first node: weights, incoming gradients, and the optimizer."""
    part = min(spec.servers, spec.workers_per_node) / spec.servers
    return part * (trained_bytes * (1 + spec.server_buffers) + others)


def _bytes(one: ParameterSize, num_bytes: float, spec: ParallelSpec, sharded: bool) -> float:
    """A worker's share of something as large as a parameter: the longest share of its rows."""
    if one.name in spec.tensor_sharded:
        num_bytes /= spec.tensor
    if not sharded or spec.shard == 1:
        return float(num_bytes)
    return num_bytes * -(-one.num_rows // spec.shard) / max(one.num_rows, 1)


def _gathered(own: Sequence[ParameterSize], spec: ParallelSpec) -> tuple[float, float, bool]:
    """Weights that sharding has gathered: what stays, what backward frees, and whether it gathers them again."""
    blocks: dict[str, float] = {}
    values: dict[str, float] = {}
    for one in own:
        is_half = spec.zero == 3 and spec.half_bytes is not None and not one.keeps_format
        per_value = spec.half_bytes if is_half and spec.half_bytes else one.num_bytes / max(one.num_values, 1)
        parts = spec.tensor if one.name in spec.tensor_sharded else 1
        blocks[one.block] = blocks.get(one.block, 0.0) + one.num_values * per_value / parts
        # Gradients in the dtype of the pass, and once more in float32, in which they are summed.
        per_gradient = per_value + 4 + (2 * per_value if spec.half_gradients and is_half else 0)
        values[one.block] = values.get(one.block, 0.0) + one.is_trained * one.num_values * per_gradient / parts
    root, root_values = blocks.pop("", 0.0), values.pop("", 0.0)
    sizes, in_reduction = list(blocks.values()), list(values.values())
    if spec.zero < 3 and spec.accumulate > 1:
        return root + sum(sizes) + max([*in_reduction, root_values]), 0.0, False
    from stormo.parallel.fsdp import KEPT_BYTES, UNITS_OF_ONE_WORKER  # loads torch, which --help does without

    if spec.zero == 3 and spec.shard > 1:
        keeps_all = spec.merge_blocks and spec.pipeline == 1 and root + sum(sizes) <= KEPT_BYTES
        kept = sum(sizes) if keeps_all else 2 * max(sizes, default=0.0)
        return root + kept + max([*in_reduction, root_values]), 0.0, not keeps_all
    if spec.merge_blocks and sizes:
        count = -(-len(sizes) // UNITS_OF_ONE_WORKER)
        in_reduction = [sum(in_reduction[start : start + count]) for start in range(0, len(sizes), count)]
    return max([*in_reduction, root_values]), root + sum(sizes), False


def gpus_needed(model: ModelSize, spec: ParallelSpec, one: Forecast) -> int | None:
    """How many workers fsdp needs for this batch; None where no number is enough."""
    sharded = model.weight_bytes + model.gradient_bytes + model.state_bytes
    whole = one.total_bytes - sum(one.terms[name] for name in ("weights", "gradients", "state"))
    if whole >= one.limit_bytes:
        return None
    return max(spec.num_workers, int(-(-sharded // (one.limit_bytes - whole))))
