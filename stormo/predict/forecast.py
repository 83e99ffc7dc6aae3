"""The arithmetic: what one worker holds under a way to spread the model, and the largest batch that leaves room.

Pure functions over counted bytes. What is a rule of thumb and not counted is in `terms.RULES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stormo.predict.curve import Curve, Load, Rows
from stormo.predict.terms import GIB, MIB, Forecast, Model, Parameter, Spread
from stormo.system.hardware import GPU_SHARE

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
    are_cut = zero >= 2 or (zero == 1 and spread.accumulate == 1)  # zero1 sums gradients once in a step
    weights = sum(_bytes(one, one.num_bytes, spread, zero >= 1) for one in own)
    gradients = sum(_bytes(one, one.num_bytes, spread, are_cut) for one in trained)
    state = sum(_bytes(one, one.state_bytes, spread, zero >= 1) for one in own)
    rows = sum(_bytes(one, one.num_bytes, spread, cut=True) for one in own)
    part = sum(one.num_bytes for one in own) / max(model.weight_bytes, 1)  # of the layers
    step = model.step_bytes * sum(_bytes(one, one.num_bytes, spread, zero >= 1) for one in own)
    step /= max(model.weight_bytes, 1)
    host = 0.0
    trained_bytes = float(sum(one.num_bytes for one in trained))
    state += spread.kept_copies * trained_bytes
    if spread.servers:
        host = trained_bytes + _kept_by_servers(spread, trained_bytes, state + step) / spread.workers_per_node
        state = step = 0.0
    if spread.offload:
        host = rows + state + sum(_bytes(one, one.num_bytes, spread, cut=True) for one in trained)
        weights = gradients = state = step = 0.0
    gathered, falling = _gathered(own, spread) if zero else (0.0, 0.0)
    terms = {
        "weights": weights,
        "gradients": gradients,
        "state": state,
        "activations": 0.0,
        "gathered": gathered,
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
        keeps_gradients=(zero == 0 and spread.copies > 1) or spread.accumulate > 1 or spread.pipeline > 1,
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
    """Whole weights that sharding has on the device: what stays, and what goes as backward goes on."""
    blocks: dict[str, float] = {}
    values: dict[str, float] = {}
    for one in own:
        narrowed = spread.zero == 3 and spread.half_bytes is not None and not one.keeps_format
        per_value = spread.half_bytes if narrowed and spread.half_bytes else one.num_bytes / max(one.num_values, 1)
        parts = spread.tensor if one.name in spread.cut else 1
        blocks[one.block] = blocks.get(one.block, 0.0) + one.num_values * per_value / parts
        # Its gradients in the format of the pass, and once more in float32, in which they are summed.
        values[one.block] = values.get(one.block, 0.0) + one.is_trained * one.num_values * (per_value + 4) / parts
    root, root_values = blocks.pop("", 0.0), values.pop("", 0.0)
    sizes, on_their_way = list(blocks.values()), list(values.values())
    if spread.zero < 3 and spread.accumulate > 1:
        return root + sum(sizes) + max([*on_their_way, root_values]), 0.0
    if spread.zero == 3 and spread.shard > 1:
        return root + 2 * max(sizes, default=0.0) + max([*on_their_way, root_values]), 0.0
    if spread.merges and spread.num_workers == 1 and sizes:
        count = -(-len(sizes) // _LONE_GROUPS)
        on_their_way = [sum(on_their_way[start : start + count]) for start in range(0, len(sizes), count)]
    return max([*on_their_way, root_values]), root + sum(sizes)


def gpus_needed(model: Model, spread: Spread, one: Forecast) -> int | None:
    """How many workers along shard would hold it under fsdp with this batch; None where no number would."""
    cut = model.weight_bytes + model.gradient_bytes + model.state_bytes
    whole = one.total_bytes - sum(one.terms[name] for name in ("weights", "gradients", "state"))
    if whole >= one.room_bytes:
        return None
    return max(spread.num_workers, int(-(-cut // (one.room_bytes - whole))))
