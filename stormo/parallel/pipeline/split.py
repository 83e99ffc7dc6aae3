"""Which pieces make which stage: as the task has grouped them, or so that the slowest stage is as fast as can be."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from stormo.errors import SettingError, counted
from stormo.parallel.pipeline.lend import lent
from stormo.parallel.pipeline.pieces import Piece, Pieces
from stormo.parallel.pipeline.trial import trial


def into_stages(
    pieces: Pieces, num_stages: int, costs: Callable[[], Sequence[float]] | None = None
) -> list[tuple[Piece, ...]]:
    """The pieces of every stage.

    Args:
        pieces: of the model.
        num_stages: of all workers together.
        costs: called where the task has not grouped its pieces; gives the cost of each piece, the same on all workers.
            None counts every piece alike.
    """
    count = len(pieces.items)
    if pieces.marks is not None and len(pieces.marks) != num_stages:
        raise SettingError(
            f"a pipeline of {counted(num_stages, 'stage')} was set",
            f"{pieces.origin} groups its {counted(count, 'piece')} into {counted(len(pieces.marks), 'list')}",
            f"return {num_stages} lists, or one flat list of pieces, which is then split by their times",
        )
    if num_stages > count and pieces.tied:
        raise SettingError(
            f"a pipeline of {counted(num_stages, 'stage')} was set",
            f"{' and '.join(pieces.tied)} are one parameter (tied weights): all from the first of these layers to the "
            f"last is one piece, and the model has {counted(count, 'piece')}, one a stage at most",
            "give each layer a weight of its own, or set "
            + (f"{count} stages or fewer" if count > 1 else "another --strategy"),
        )
    if num_stages > count:
        raise SettingError(
            f"a pipeline of {counted(num_stages, 'stage')} was set",
            f"the model has {counted(count, 'piece')} ({pieces.origin}), one a stage at most",
            f"set {count} stages or fewer, or cut the model finer with the task's pieces(model)",
        )
    if pieces.marks is not None:
        stops = [sum(pieces.marks[: index + 1]) for index in range(num_stages)]
    else:
        stops = balanced([1.0] * count if costs is None else costs(), num_stages)
    return [pieces.items[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def balanced(costs: Sequence[float], num_stages: int) -> list[int]:
    """Where each stage ends, so that the costliest is as cheap as possible; of equal splits the most even one."""
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
    """Seconds of forward and backward of each piece on one micro-batch: the median of some passes after a first one.

    The first worker measures, and the caller shares what it found, since no two measure alike. Pieces without memory
    are lent some, one after the other.
    """
    modules = [module for piece in pieces.items for module in piece.modules]
    times: list[list[float]] = [[] for _ in pieces.items]
    with trial(modules, device), torch.enable_grad():
        args, kwargs = call
        value: Any = None
        for index, piece in enumerate(pieces.items):
            with lent(piece.modules, device, piece.own):
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
    ends = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    _wait(device)
    return time.perf_counter() - start, output


def _fresh(tensor: Tensor) -> Tensor:
    """As it arrives from another worker: with a gradient to give back, and no leaf, which may not be changed."""
    tensor = tensor.detach()
    return tensor.requires_grad_().clone() if tensor.is_floating_point() else tensor


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_same(
    model: nn.Module, pieces: Pieces, call: tuple[Sequence[Any], Mapping[str, Any]], device: torch.device
) -> None:
    """Raise a sentence where the pieces, one after the other, give another output than the model (in validation)."""
    args, kwargs = call
    with trial([model], device), torch.no_grad():
        model.eval()
        wanted = model(*args, **kwargs)
        value = pieces.items[0].run(*args, **kwargs)
        for piece in pieces.items[1:]:
            value = piece.run(value)
        ours, theirs = tree_leaves(value), tree_leaves(wanted)
    if len(ours) != len(theirs) or not all(_is_close(one, other) for one, other in zip(ours, theirs, strict=True)):
        raise SettingError(
            f"the model was cut into {counted(len(pieces.items), 'piece')} by {pieces.origin}",
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
