"""The memory of one worker as arithmetic on counted bytes, and the largest batch that fits.

Pure functions. What is a rule of thumb and not counted is in `RULES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stormo.system.hardware import GPU_SHARE

MIB, GIB = 2**20, 2**30
# By the name of a term: rules of thumb, none of which was counted.
RULES = {
    "workspace": "64 MiB for the libraries of matrix products and convolutions",
    "context": "0.75 GiB for CUDA and its kernels, and 0.5 GiB more for NCCL where there are several workers",
    "captured": "a second workspace, and other passes (a short last batch, a validation) beside the memory that one "
    "replayed as a CUDA graph keeps (--no-graph)",
    "buckets": "under zero2 four of 25 MiB each, or of the largest parameter",
    "gathered": "under fsdp what lies outside of blocks, two blocks, and one block's gradients on their way",
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


Rows = Sequence[tuple[int, int, int]]  # bytes of (other, casts, gradients) after each operation


@dataclass(frozen=True, slots=True)
class Curve:
    """What is alive after each operation of a pass, at two sizes of a batch: bytes of (other, casts, gradients).

    Operations are the same at every size, and so the bytes of each are a straight line.
    """

    sizes: tuple[int, int]
    rows: tuple[Rows, Rows]
    kept: tuple[int, int]  # alive when backward begins

    def kept_at(self, size: float) -> float:
        """Activations that are kept for backward."""
        return _line(self.sizes, self.kept, size)

    @property
    def kept_per_sample(self) -> float:
        """The slope of `kept_at`."""
        return (self.kept[1] - self.kept[0]) / (self.sizes[1] - self.sizes[0])

    def peak(self, size: float, load: Load) -> float:
        """The most that a pass holds beyond what is there all the time."""
        return max(fixed + slope * size for fixed, slope in self._lines(load))

    def largest(self, room: float, load: Load) -> int:
        """The largest size whose peak is within the room; 0 where none is."""
        most = float("inf")
        for fixed, slope in self._lines(load):
            if slope > 0:
                most = min(most, (room - fixed) / slope)
            elif fixed > room:
                return 0
        return max(0, int(min(most, 2**40)))

    def _lines(self, load: Load) -> list[tuple[float, float]]:
        first, second = (self._loaded(rows, load) for rows in self.rows)
        if len(first) != len(second):  # another number of operations: the peaks alone are comparable
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
            found.append(load.share * (other + load.cast_share * casts) + held + (1 - done) * load.falling_bytes)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a way to spread the model makes of a counted pass."""

    gradient_bytes: float = 0.0  # of this worker, when all are there
    keeps_gradients: bool = False  # they are there all the time, as under ddp
    falling_bytes: float = 0.0  # gathered weights that go as backward goes on
    cast_share: float = 1.0  # of the copies of weights in another format
    share: float = 1.0  # of the activations


def _line(sizes: tuple[int, int], values: tuple[float, float], size: float) -> float:
    slope = (values[1] - values[0]) / (sizes[1] - sizes[0])
    return values[0] + slope * (size - sizes[0])


_BUCKET_BYTES = 25 * MIB
_WORKSPACE_BYTES = 64 * MIB
_CONTEXT_BYTES, _NCCL_BYTES = GIB * 3 // 4, GIB // 2
_LONE_GROUPS = 4  # units of fsdp on one worker, which has nothing to free between them


def forecast(model: Model, spread: Spread, curve: Curve | None, memory_bytes: int, validation: Rows = ()) -> Forecast:
    """What a worker holds; of the stages of a pipeline the one that holds most."""
    names = spread.stages or (None,)
    every = [_of_stage(model, spread, curve, memory_bytes, stage, validation) for stage in names]
    most = max(every, key=lambda one: one.total_bytes)
    sizes = [one.largest_batch for one in every if one.largest_batch is not None]
    host = sum(one.host_bytes for one in every) / len(every)
    return Forecast(
        terms=most.terms,
        host_bytes=host * spread.workers_per_node,
        batch=most.batch,
        room_bytes=most.room_bytes,
        largest_batch=min(sizes) if len(sizes) == len(every) else None,
        largest_pass=min(one.largest_pass for one in every),
        kept_bytes=most.kept_bytes,
    )


def _of_stage(
    model: Model,
    spread: Spread,
    curve: Curve | None,
    memory_bytes: int,
    stage: frozenset[str] | None,
    validation: Rows,
) -> Forecast:
    is_captured = spread.graph and spread.accumulate == 1
    own = [one for one in model.parameters if stage is None or one.name in stage]
    zero, trained = spread.zero, [one for one in own if one.is_trained]
    weights = sum(_bytes(one, one.num_bytes, spread, zero >= 3) for one in own)
    gradients = sum(_bytes(one, one.num_bytes, spread, zero >= 2) for one in trained)
    state = sum(_bytes(one, one.state_bytes, spread, zero >= 1) for one in own)
    rows = sum(_bytes(one, one.num_bytes, spread, cut=True) for one in own)
    part = sum(one.num_bytes for one in own) / max(model.weight_bytes, 1)  # of the layers
    step = model.step_bytes * sum(_bytes(one, one.num_bytes, spread, zero >= 1) for one in own)
    step /= max(model.weight_bytes, 1)
    buckets = _buckets(own, spread)
    if zero == 1:  # in which weights travel after a step, when no activations are there
        step, buckets = step + buckets, 0.0
    host = 0.0
    trained_bytes = float(sum(one.num_bytes for one in trained))
    state += spread.kept_copies * trained_bytes
    if spread.servers:
        host = trained_bytes + _kept_by_servers(spread, trained_bytes, state + step) / spread.workers_per_node
        state = step = 0.0
    if spread.offload:
        host = rows + state + sum(_bytes(one, one.num_bytes, spread, cut=True) for one in trained)
        state, step = 0.0, step if zero == 1 else 0.0
        if zero == 3:
            weights = gradients = 0.0
    gathered, falling = _gathered(own, spread) if zero == 3 else (0.0, 0.0)
    terms = {
        "weights": weights,
        "gradients": gradients,
        "state": state,
        "activations": 0.0,
        "gathered": gathered,
        "buckets": buckets,
        "buffers": float(model.buffer_bytes),
        "data": float(spread.data_bytes),
        "workspace": float(_WORKSPACE_BYTES),
        "context": float(_CONTEXT_BYTES + _NCCL_BYTES * (spread.num_workers > 1)),
        "captured": float(_WORKSPACE_BYTES) if is_captured else 0.0,  # of a stream of its own
    }
    room = GPU_SHARE * memory_bytes
    free = room - sum(terms.values()) + gradients
    if curve is None:
        terms["activations"] = max(step, falling)
        return Forecast(terms=terms, host_bytes=host, batch=spread.batch, room_bytes=room, largest_batch=None)
    load = Load(
        gradient_bytes=gradients,
        # Views of ddp's buckets, or those of the passes before.
        keeps_gradients=(zero < 2 and spread.copies * spread.shard > 1) or spread.accumulate > 1 or spread.pipeline > 1,
        falling_bytes=falling,
        cast_share=0.0 if zero == 3 else part,
        share=spread.in_flight / spread.pipeline,
    )
    size = spread.batch / spread.micro_batches
    at_rest = gradients if load.keeps_gradients else 0.0
    judging = max((load.share * (other + load.cast_share * casts) for other, casts, _ in validation), default=0.0)
    judging += trained_bytes if spread.averages else 0.0  # a worker's own weights, while the mean is judged
    # Weights are averaged, or stepped by their mean change, when gradients have gone, of which there is as much.
    floor = max(step + gradients, judging + at_rest, gradients)
    # A smaller pass is one of several, and finds the gradients of those before it. Several are not captured.
    again = replace(load, keeps_gradients=True)
    free_again = free + (_WORKSPACE_BYTES if is_captured else 0)
    largest_pass = curve.largest(free_again, again) * spread.micro_batches if floor <= free_again else 0
    if is_captured:
        terms["activations"], others, largest = _captured(curve, spread, load, free, state, max(step, judging))
        terms["captured"] += others
    else:
        terms["activations"] = max(curve.peak(size, load), floor) - gradients
        largest = curve.largest(free, load) * spread.micro_batches if floor <= free else 0
    return Forecast(
        terms=terms,
        host_bytes=host,
        batch=spread.batch,
        room_bytes=room,
        largest_batch=largest,
        largest_pass=largest_pass,
        kept_bytes=curve.kept_at(size) * load.share,
    )


def _captured(
    curve: Curve, spread: Spread, load: Load, free: float, state: float, beside: float
) -> tuple[float, float, int]:
    """What a pass keeps that is replayed as a CUDA graph, what others take beside it, and the largest batch.

    Args:
        curve: of a pass.
        spread: over one worker.
        load: of its passes, which make gradients of their own.
        free: what is left of the room for passes and gradients.
        state: of the optimizer, which is not there yet when the pass is captured.
        beside: what a step or a validation takes.
    """
    gradients, size = load.gradient_bytes, spread.batch
    kept = max(curve.peak(size, load), gradients)
    short = curve.peak(size if spread.tail is None else spread.tail, load) if spread.tail != 0 else 0.0
    # What is captured has been run before, twice in a row.
    again = replace(load, keeps_gradients=True)
    others = max(beside, short, curve.peak(size, again) - kept - state)
    sizes = curve.largest(free / 2, load), curve.largest(free - beside, load), curve.largest(free + state, again)
    largest = min(sizes) if gradients + beside <= free else 0
    if kept + others <= free:  # its last batch may be shorter than that of other sizes
        largest = max(largest, size)
    return kept - gradients, others, largest


def _kept_by_servers(spread: Spread, trained_bytes: float, others: float) -> float:
    """Host memory of the first node's servers: weights, what comes in, and what the optimizer has and needs."""
    part = min(spread.servers, spread.workers_per_node) / spread.servers
    return part * (trained_bytes * (1 + spread.rooms) + others)


def _bytes(one: Parameter, num_bytes: float, spread: Spread, cut: bool) -> float:
    """What a worker has of something that is as large as a parameter: the longest share of its rows."""
    if one.name in spread.cut:
        num_bytes /= spread.tensor
    if not cut or spread.shard == 1:
        return float(num_bytes)
    return num_bytes * -(-one.num_rows // spread.shard) / max(one.num_rows, 1)


def _gathered(own: Sequence[Parameter], spread: Spread) -> tuple[float, float]:
    """Whole weights that fsdp has on the device: what stays, and what goes as backward goes on."""
    blocks: dict[str, float] = {}
    values: dict[str, float] = {}
    for one in own:
        narrowed = spread.half_bytes is not None and not one.keeps_format
        per_value = spread.half_bytes if narrowed and spread.half_bytes else one.num_bytes / max(one.num_values, 1)
        parts = spread.tensor if one.name in spread.cut else 1
        blocks[one.block] = blocks.get(one.block, 0.0) + one.num_values * per_value / parts
        # Its gradients in the format of the pass, and once more in float32, in which they are summed.
        values[one.block] = values.get(one.block, 0.0) + one.is_trained * one.num_values * (per_value + 4) / parts
    root, root_values = blocks.pop("", 0.0), values.pop("", 0.0)
    sizes, on_their_way = list(blocks.values()), list(values.values())
    if spread.shard > 1:
        return root + 2 * max(sizes, default=0.0) + max([*on_their_way, root_values]), 0.0
    if spread.merges and sizes:
        count = -(-len(sizes) // _LONE_GROUPS)
        on_their_way = [sum(on_their_way[start : start + count]) for start in range(0, len(sizes), count)]
    return max([*on_their_way, root_values]), root + sum(sizes)


def _buckets(own: Sequence[Parameter], spread: Spread) -> float:
    if spread.zero not in (1, 2) or spread.shard * spread.copies == 1:
        return 0.0
    largest = max((one.num_bytes for one in own), default=0)
    return float(max(_BUCKET_BYTES, largest) * (2 if spread.zero == 1 else 4))


def gpus_needed(model: Model, spread: Spread, one: Forecast) -> int | None:
    """How many workers along shard would hold it under fsdp with this batch; None where no number would."""
    cut = model.weight_bytes + model.gradient_bytes + model.state_bytes
    whole = one.total_bytes - sum(one.terms[name] for name in ("weights", "gradients", "state"))
    if whole >= one.room_bytes:
        return None
    return max(spread.num_workers, int(-(-cut // (one.room_bytes - whole))))
