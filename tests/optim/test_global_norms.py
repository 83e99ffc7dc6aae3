"""Layers that are cut over workers are stepped as whole ones: by norms of all their parts, in one exchange a step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stormo.distributed.world import World
from stormo.optim.global_norms import GlobalSquares
from stormo.optim.sharded import to_local_params
from tests.optim.layers import KINDS

NUM_STEPS = 10
DOUBLE, SINGLE, HALF = torch.float64, torch.float32, torch.bfloat16
# Shape, dtype, and who holds it: "rows" are cut over the workers, "one" of them has all, or all have "copies".
LAYERS: list[tuple[tuple[int, ...], torch.dtype, str]] = [
    *[((rows, 3), DOUBLE, "rows") for rows in (9, 6, 2, 5)],
    ((7, 2, 2, 2), DOUBLE, "rows"),
    ((8,), DOUBLE, "rows"),
    ((4, 5), DOUBLE, "one"),
    ((), DOUBLE, "one"),
    ((3, 4), DOUBLE, "copies"),
    ((6,), DOUBLE, "copies"),
    *[((11, 4), dtype, "rows") for dtype in (SINGLE, HALF)],
    ((5,), SINGLE, "copies"),
]
IDLE, PARTLY = 3, (0, 1, 5, 11)  # without a gradient in some steps: this one anywhere, these on the first worker
TOLERANCE = {DOUBLE: 1e-12, SINGLE: 2e-5, HALF: 2.0**-6}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lars": ("lars", {"trust_coefficient": 0.3}),
    "larc": ("larc", {"trust_coefficient": 0.3, "nesterov": True}),
    "lamb": ("lamb", {"norm_bounds": (0.5, 3.0)}),
    "novograd": ("novograd", {}),
}


@dataclass(frozen=True)
class RankInfo:
    number: int
    start: int
    stop: int
    is_counted: bool

    def of(self, whole: Tensor) -> Tensor:
        return whole[self.start : self.stop] if whole.ndim else whole


def _places(rank: int, size: int) -> list[RankInfo]:
    """Cut at random, the same for all; of four workers the last has nothing."""
    draw, found = random.Random(size), []
    size = min(size, 3)
    for number, (shape, _, who) in enumerate(LAYERS):
        rows = shape[0] if shape else 1
        cuts = [0, *sorted(draw.randint(0, rows) for _ in range(size - 1)), rows]
        owner = draw.randrange(size)
        if rank >= size or (who == "one" and rank != owner):
            continue
        if who == "rows":
            found.append(RankInfo(number, cuts[rank], cuts[rank + 1], True))
        else:
            found.append(RankInfo(number, 0, rows, who == "one" or rank == owner))
    return found


def _whole() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=DOUBLE).to(dtype)) for s, dtype, _ in LAYERS]


def _optimizer(case: str, layers: Sequence[nn.Parameter]) -> Any:
    kind, options = CASES[case]
    groups = [{"params": list(layers[:6])}, {"params": list(layers[6:]), "adapt": True, "weight_decay": 0.02}]
    return KINDS[kind](groups, lr=0.1, weight_decay=0.01, **options)


def _gradients(step: int, size: int) -> list[Tensor | None]:
    """Of the whole layers; what the first worker has no gradient of is zeros, or none where it holds all of it."""
    generator = torch.Generator().manual_seed(100 + step)
    gradients: list[Tensor | None] = [
        torch.randn(shape, generator=generator, dtype=DOUBLE).to(dtype) for shape, dtype, _ in LAYERS
    ]
    if step % 3 == 0:
        gradients[IDLE] = None
    for place in _places(0, size):
        gradient = gradients[place.number]
        if gradient is not None and place.number in PARTLY and step % 4 == 1:
            place.of(gradient).zero_()
            if place.stop - place.start == len(gradient):
                gradients[place.number] = None
    return gradients


def _arrays(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {key: value.detach().double().numpy().copy() for key, value in tensors.items()}


def _all_state(optimizer: Any, parameter: Tensor) -> dict[str, Any]:
    return _arrays({"weight": parameter, **optimizer.state.get(parameter, {})})


def _train(world: World, case: str) -> tuple[list[tuple[RankInfo, dict[str, Any]]], list[int], list[Any]]:
    whole, places = _whole(), _places(world.rank, world.size)
    own = {place.number: nn.Parameter(place.of(whole[place.number]).detach().clone()) for place in places}
    optimizer = _optimizer(case, whole)
    to_local_params(optimizer, {layer: own.get(number) for number, layer in enumerate(whole)})
    squares = GlobalSquares(
        layer_of={own[place.number]: (place.number, place.is_counted) for place in places},
        num_layers=len(LAYERS),
        reduce=world.sum,
        device=world.device,
    )
    optimizer.global_squares = squares
    calls, norms = [], []
    for step in range(NUM_STEPS):
        gradients = _gradients(step, world.size)
        for place in places:
            gradient, part = gradients[place.number], own[place.number]
            is_absent = world.rank == 0 and place.number in PARTLY and step % 4 == 1
            part.grad = None if gradient is None or is_absent else place.of(gradient).clone()
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
            norms.append(squares.total([part.grad for part in own.values()]))
            calls.append(reduced.call_count)
            optimizer.step()
            calls.append(reduced.call_count)
    states = [(place, _all_state(optimizer, own[place.number])) for place in places]
    return states, calls, [(norm.dtype, norm.item()) for norm in norms]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_parts_take_the_steps_of_whole_layers(run_ranks: Callable[..., list[Any]], case: str, size: int) -> None:
    whole = _whole()
    optimizer, norms = _optimizer(case, whole), []
    for step in range(NUM_STEPS):
        for layer, gradient in zip(whole, _gradients(step, size), strict=True):
            layer.grad = gradient
        given = [layer.grad.double().flatten() for layer in whole if layer.grad is not None]
        norms.append(torch.cat(given).norm().item())
        optimizer.step()
    expected, seen = [_all_state(optimizer, layer) for layer in whole], np.zeros(len(LAYERS))
    shared: dict[tuple[int, str], Any] = {}
    for states, calls, totals in run_ranks(_train, size, case):
        assert calls == [1, 2] * NUM_STEPS
        for (dtype, total), norm in zip(totals, norms, strict=True):
            assert dtype == (DOUBLE if states else SINGLE)
            assert total == pytest.approx(norm, rel=1e-12 if states else 1e-6)
        for place, state in states:
            (shape, dtype, _), answers = LAYERS[place.number], expected[place.number]
            seen[place.number] += int(np.prod(state["weight"].shape)) * place.is_counted
            if not state["weight"].size:
                assert set(state) == {"weight"}
                continue
            assert state.keys() == answers.keys()
            for key, value in state.items():
                answer = answers[key]
                if answer.shape == shape and shape:
                    answer = answer[place.start : place.stop]
                else:  # one number for the layer, the same to the last bit on all workers that hold some of it
                    assert np.array_equal(shared.setdefault((place.number, key), value), value)
                np.testing.assert_allclose(value, answer, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], err_msg=key)
    assert seen.tolist() == [layer.numel() for layer in whole]


@pytest.mark.parametrize("size", [2, 4])
def test_the_cuts_are_of_every_kind(size: int) -> None:
    """Or the test above would show less than it says."""
    places = [place for rank in range(size) for place in _places(rank, size)]
    lengths: dict[int, list[int]] = {}
    for place in places:
        if LAYERS[place.number][2] == "rows":
            lengths.setdefault(place.number, []).append(place.stop - place.start)
    assert min(map(min, lengths.values())) == 0
    for dtype in (DOUBLE, HALF):  # a part has no gradient in some steps, and another of its layer has
        found = [lengths[number] for number in PARTLY if LAYERS[number][1] == dtype]
        assert any(first and any(others) for first, *others in found)
    assert {LAYERS[place.number][2] for place in places if not place.is_counted} == {"copies"}
    assert bool(_places(size - 1, size)) == (size < 4)


def _sums(**changes: Any) -> tuple[GlobalSquares, list[Tensor]]:
    parameters: list[Tensor] = [torch.zeros(2, 2), torch.zeros(1, 2), torch.zeros(3), torch.zeros(4)]
    options: dict[str, Any] = {
        "layer_of": dict(zip(parameters, [(1, True), (1, True), (0, False), (3, True)], strict=True)),
        "num_layers": 5,
        "reduce": lambda sums: sums,
        "device": torch.device("cpu"),
    }
    return GlobalSquares(**{**options, **changes}), parameters


def test_chunks_of_one_layer_add_up_and_what_is_not_counted_stays_out() -> None:
    exchanged: list[Tensor] = []

    def reduce(sums: Tensor) -> Tensor:
        exchanged.append(sums.clone())
        return sums

    squares, (first, second, copy, last) = _sums(reduce=reduce)
    given = torch.tensor([[1.0, 2.0, torch.nan, 8.0], [16.0, 32.0, torch.inf, 64.0]], dtype=DOUBLE)
    whole = squares([first, second, copy, last], given)
    assert exchanged[-1].tolist() == [[0, 3, 0, 8, 0], [0, 48, 0, 64, 0]]
    assert whole.tolist() == [[3, 3, 0, 8], [48, 48, 0, 64]]
    assert squares([last, second], torch.tensor([5.0, 6.0], dtype=DOUBLE)).tolist() == [5, 6]  # a vector, as well
    assert squares([], torch.zeros(2, 0, dtype=DOUBLE)).shape == (2, 0)
    assert exchanged[-1].tolist() == [[0.0] * 5] * 2


def test_the_total_norm_is_wide_and_finite_where_squares_of_float32_are_not() -> None:
    squares, _ = _sums()
    large = [torch.full((4,), 2e25), torch.full((2,), 3e4, dtype=HALF), torch.full((3,), torch.inf), None]
    assert squares.total(large).item() == pytest.approx(4e25)
    assert squares.total(large).dtype == SINGLE
    assert squares.total([None, None, None, torch.zeros(0, dtype=DOUBLE)]).tolist() == 0.0
    assert squares.total([None, torch.ones(4, dtype=DOUBLE), None, torch.ones(5, dtype=HALF)]).dtype == DOUBLE
    with pytest.raises(ValueError, match="zip"):
        squares.total([torch.ones(1)])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # that it does not see every operation
@pytest.mark.parametrize("case", CASES)
def test_a_step_of_parts_never_waits_for_the_device(case: str) -> None:
    layers = [nn.Parameter(layer.detach().cuda()) for layer in _whole()]
    optimizer = _optimizer(case, layers)
    squares = GlobalSquares(
        layer_of={layer: (number, True) for number, layer in enumerate(layers)},
        num_layers=len(layers),
        reduce=lambda sums: sums,
        device=layers[0].device,
    )
    optimizer.global_squares = squares
    for layer in layers:
        layer.grad = torch.ones_like(layer)
    optimizer.step()  # learns which layers there are
    before = [layer.detach().clone() for layer in layers]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        norm = squares.total([layer.grad for layer in layers])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert norm.item() == pytest.approx(sum(layer.numel() for layer in layers) ** 0.5)
    assert all(not torch.equal(layer, old) for layer, old in zip(layers, before, strict=True))
