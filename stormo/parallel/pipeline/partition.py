"""Which pieces make which stage: as the task groups them, or so that the slowest stage is as fast as possible."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stormo.errors import SettingError, pluralize
from stormo.parallel.meta_init import no_side_effects, temporary_weights
from stormo.parallel.pipeline.split_points import Piece, Pieces
from stormo.parallel.pytree import tree_leaves, tree_map_only, tree_tensors


def into_stages(
    pieces: Pieces, num_stages: int, costs: Callable[[], Sequence[float]] | None = None
) -> list[tuple[Piece, ...]]:
    """The pieces of every stage.

    Args:
        pieces: of the model.
        num_stages: of all workers together.
        costs: gives the cost of each piece, the same on all workers; called unless the task groups its pieces. Without
            it all pieces cost the same.
    """
    count = len(pieces.items)
    if pieces.stage_lengths is not None and len(pieces.stage_lengths) != num_stages:
        raise SettingError(
            f"a pipeline of {pluralize(num_stages, 'stage')} was set",
            f"{pieces.origin} groups {pluralize(count, 'piece')} into {pluralize(len(pieces.stage_lengths), 'list')}",
            f"return {num_stages} lists, or one flat list of pieces, which is then split by measured times",
        )
    if num_stages > count and pieces.tied:
        raise SettingError(
            f"a pipeline of {pluralize(num_stages, 'stage')} was set",
            f"{' and '.join(pieces.tied)} are one parameter (tied weights): all from the first of these layers to the "
            f"last is one piece, and the model has {pluralize(count, 'piece')}, one a stage at most",
            "untie these weights, or set " + (f"{count} stages or fewer" if count > 1 else "another --strategy"),
        )
    if num_stages > count:
        raise SettingError(
            f"a pipeline of {pluralize(num_stages, 'stage')} was set",
            f"the model has {pluralize(count, 'piece')} ({pieces.origin}), one a stage at most",
            f"set {count} stages or fewer, or cut the model finer with the task's pieces(model)",
        )
    if pieces.stage_lengths is not None:
        stops = [sum(pieces.stage_lengths[: index + 1]) for index in range(num_stages)]
    else:
        stops = balanced([1.0] * count if costs is None else costs(), num_stages)
    return [pieces.items[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def balanced(costs: Sequence[float], num_stages: int) -> list[int]:
    """Where each stage ends so that the costliest is as cheap as possible; of equal splits the most even one."""
    count = len(costs)
    assert 1 <= num_stages <= count
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[stop]: the largest cost of a stage, the sum of squares, and the ends, for the pieces before `stop`.
    best: list[tuple[float, float, list[int]] | None] = [None] * (count + 1)
    best[0] = (0.0, 0.0, [])
    for stage in range(num_stages):
        after: list[tuple[float, float, list[int]] | None] = [None] * (count + 1)
        for stop in range(stage + 1, count - (num_stages - stage - 1) + 1):
            options = []
            for start in range(stage, stop):
                before = best[start]
                if before is not None:
                    own = sums[stop] - sums[start]
                    options.append((max(before[0], own), before[1] + own * own, [*before[2], stop]))
            after[stop] = min(options) if options else None
        best = after
    found = best[count]
    assert found is not None
    return found[2]


def measured_costs(
    pieces: Pieces, call: tuple[Sequence[Any], Mapping[str, Any]], device: torch.device, *, repeats: int = 3
) -> list[float]:
    """Seconds of forward and backward of each piece on one micro-batch: the median of some runs after a first one.

    Pieces on meta get memory one after the other. One worker measures for all, since no two measure the same.
    """
    modules = [module for piece in pieces.items for module in piece.modules]
    times: list[list[float]] = [[] for _ in pieces.items]
    with no_side_effects(modules, device), torch.enable_grad():
        args, kwargs = call
        value: Any = None
        for index, piece in enumerate(pieces.items):
            with temporary_weights(piece.modules, device, piece.direct):
                for _ in range(1 + repeats):
                    seconds, value = _timed(piece, args, kwargs, device)
                    times[index].append(seconds)
            args, kwargs = (value,), {}
    return [statistics.median(own[1:]) for own in times]


def _timed(piece: Piece, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> tuple[float, Any]:
    args, kwargs = tree_map_only(Tensor, _fresh, (tuple(args), dict(kwargs)))
    _wait(device)
    start = time.perf_counter()
    output = piece.run(*args, **kwargs)
    ends = [tensor for tensor in tree_tensors(output) if tensor.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    _wait(device)
    return time.perf_counter() - start, output


def _fresh(tensor: Tensor) -> Tensor:
    """As it arrives from another worker: it needs a gradient, and is no leaf, which could not be changed in place."""
    tensor = tensor.detach()
    return tensor.requires_grad_().clone() if tensor.is_floating_point() else tensor


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_pieces(
    model: nn.Module, pieces: Pieces, call: tuple[Sequence[Any], Mapping[str, Any]], device: torch.device
) -> None:
    """Raise SettingError if the pieces, one after the other, give another output than the model in eval mode."""
    args, kwargs = call
    with no_side_effects([model], device), torch.no_grad():
        model.eval()
        wanted = model(*args, **kwargs)
        value = pieces.items[0].run(*args, **kwargs)
        for piece in pieces.items[1:]:
            value = piece.run(value)
        ours, theirs = tree_leaves(value), tree_leaves(wanted)
    if len(ours) != len(theirs) or not all(_is_close(one, other) for one, other in zip(ours, theirs, strict=True)):
        raise SettingError(
            f"the model was cut into {pluralize(len(pieces.items), 'piece')} by {pieces.origin}",
            "run one after the other they do not give what the model gives",
            "return from the task's pieces(model) all that forward does, in its order",
        )


def _is_close(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    tolerance = 100 * torch.finfo(one.dtype).eps
    scale = float(other.abs().max()) if other.numel() else 1.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * max(scale, 1e-30), equal_nan=True)
