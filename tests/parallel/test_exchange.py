"""Gradients summed over workers are those of one process with the union of the batches."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.command import relative_difference
from stormo.distributed.world import World
from stormo.errors import SettingError, StormoError
from stormo.launch import alone
from stormo.layers.sync_batch_norm import convert_sync_batch_norm
from stormo.parallel.buckets import make_buckets
from stormo.parallel.exchange import GradientExchange

Ranks = Callable[..., list[Any]]
Gradients = dict[str, Tensor]

TINY = 64  # bytes: a bucket for nearly every parameter


class Net(nn.Module):
    """Two branches, a parameter used twice, and two that are used only when the batch or the caller says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.last_again = self.last
        self.extra = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(5))
        self.uses_extra = False
        self.is_mirrored = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        branches = (self.right, self.left) if self.is_mirrored else (self.left, self.right)
        # The order of these calls is the order, turned round, in which autograd comes to them.
        outputs = {branch: torch.tanh(branch(hidden)) for branch in branches}
        found: Tensor = self.last(outputs[self.left] * outputs[self.right]) + self.last_again(hidden)
        return found * self.extra if self.uses_extra else found


def _model(kind: Callable[[], nn.Module] = Net) -> Any:
    torch.manual_seed(7)
    return kind().double()


def _batch(step: int = 0, num_samples: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    draw = {"generator": generator, "dtype": torch.float64}
    return torch.randn(num_samples, 6, **draw), torch.randn(num_samples, 3, **draw)  # type: ignore[call-overload]


def _loss(model: nn.Module, x: Tensor, y: Tensor, num_samples: int) -> Tensor:
    return F.mse_loss(model(x), y, reduction="sum") / (num_samples * y.shape[1])


def _shares(world: World | _Rank, num_samples: int, num_parts: int = 1) -> list[slice]:
    """Unequal parts of a batch for this worker: rank 0 gets most."""
    cut = [num_samples // 2 + rank * (num_samples // 2) // world.size for rank in range(1, world.size)]
    starts, stops = [0, *cut], [*cut, num_samples]
    start, stop = starts[world.rank], stops[world.rank]
    edges = [start + (stop - start) * part // num_parts for part in range(num_parts + 1)]
    assert start < stop
    return [slice(first, last) for first, last in itertools.pairwise(edges)]


def _gradients(model: nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _step(world: World, exchange: GradientExchange, model: nn.Module, step: int = 0, num_parts: int = 1) -> Gradients:
    x, y = _batch(step)
    *before, last = (_loss(model, x[rows], y[rows], len(x)) for rows in _shares(world, len(x), num_parts))
    for loss in before:
        loss.backward()
    exchange.arm()
    last.backward()
    exchange.finish()
    return _gradients(model)


def _expected(model: nn.Module, step: int = 0) -> Gradients:
    x, y = _batch(step)
    model.zero_grad()
    _loss(model, x, y, len(x)).backward()
    return _gradients(model)


def _alone() -> World:
    return World(alone(), torch.device("cpu"))


def _require_equal(found: list[Gradients], expected: Mapping[str, Tensor], tolerance: float = 1e-12) -> None:
    for gradients in found:
        assert relative_difference(gradients, expected) < tolerance
        assert all(torch.equal(value, found[0][name]) for name, value in gradients.items())


def _train(world: World, num_parts: int, limits: dict[str, Any]) -> tuple[Gradients, int, Gradients]:
    model = _model()
    exchange = GradientExchange(model, world, **limits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gradients: Gradients = {}
    for step in range(3):
        optimizer.zero_grad()
        gradients = _step(world, exchange, model, step, num_parts)
        optimizer.step()
    return gradients, len(exchange._buckets), {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("size", "num_parts", "limits"),
    [(2, 1, {}), (2, 3, {}), (3, 3, {"bucket_bytes": TINY, "first_bucket_bytes": 1})],
    ids=["one bucket", "accumulated", "many buckets"],
)
def test_steps_are_those_of_one_process(run_ranks: Ranks, size: int, num_parts: int, limits: dict[str, int]) -> None:
    expected, _, parameters = _train(_alone(), 1, {})
    results = run_ranks(_train, size, num_parts, limits)
    assert "never" not in expected
    _require_equal([gradients for gradients, _, _ in results], expected)
    _require_equal([trained for _, _, trained in results], parameters)
    assert all(num_buckets == (10 if limits else 1) for _, num_buckets, _ in results)


def _unused(world: World) -> list[tuple[Gradients, bool]]:
    model = _model()
    exchange = GradientExchange(model, world, bucket_bytes=TINY)
    found = []
    for step, uses_extra in enumerate((world.rank == 1, True, False)):
        model.zero_grad()
        model.uses_extra = uses_extra
        found.append((_step(world, exchange, model, step), model.extra.grad is None))
    return found


def test_a_parameter_used_by_some_workers_gets_the_sum_on_all(run_ranks: Ranks) -> None:
    results = run_ranks(_unused, 3)
    for step, is_none in enumerate((False, False, True)):
        assert [absent for _, absent in (result[step] for result in results)] == [is_none] * 3
    some = [result[0][0] for result in results]
    assert all(torch.equal(gradients["extra"], some[0]["extra"]) for gradients in some)
    model = _model()
    x, y = _batch(0)
    (share,) = _shares(_Rank(1, 3), len(x))
    model.uses_extra = True
    _loss(model, x[share], y[share], len(x)).backward()
    assert relative_difference({"extra": some[0]["extra"]}, {"extra": model.extra.grad}) < 1e-12
    _require_equal([result[1][0] for result in results], _expected(model, 1))


def _sixteen_bits(world: World, compress: str, size: float) -> list[Gradients]:
    """Steps of which the first leaves `extra` to one worker, in buckets of several parameters with dirty gaps."""

    def dirty(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full((length,), 1e30, dtype=dtype, device=device)

    found = []
    model = _model().float()
    model.register_parameter("turned", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    exchange = GradientExchange(model, world, bucket_bytes=256, first_bucket_bytes=1, compress=compress)
    for step, uses_extra in enumerate((world.rank == 1, True, False)):
        model.zero_grad()
        model.uses_extra = uses_extra
        x, y = (part.float() for part in _batch(step))
        (rows,) = _shares(world, len(x))
        exchange.arm()
        with mock.patch("stormo.parallel.buckets.torch.empty", dirty):
            turned = (model.turned * complex(world.rank + 1, 2)).real.sum()
            (size * (_loss(model, x[rows], y[rows], len(x)) + turned)).backward()
            exchange.finish()
        found.append(_gradients(model))
    return found


@pytest.mark.parametrize(("compress", "digits", "size"), [("bf16", 8, 1.0), ("fp16", 11, 2.0**24)])
def test_gradients_can_be_exchanged_in_sixteen_bits(run_ranks: Ranks, compress: str, digits: int, size: float) -> None:
    expected = run_ranks(_sixteen_bits, 3, "none", size)
    found = run_ranks(_sixteen_bits, 3, compress, size)
    assert [["extra" in step for step in each] for each in found] == [[True, True, False]] * 3
    for step, exact in enumerate(expected[0]):
        assert exact.keys() == found[0][step].keys()
        assert torch.equal(found[0][step]["turned"], exact["turned"])  # small whole numbers, times a power of two
        for name, value in exact.items():
            error = (found[0][step][name] - value).abs()
            assert float(error.max()) <= 8 * float(value.abs().max()) * 2.0**-digits, name  # parts may cancel out
            assert all(torch.equal(each[step][name], found[0][step][name]) for each in found)
        assert any(not torch.equal(found[0][step][name], value) for name, value in exact.items())


class _Rank:
    """As much of a world as `_shares` asks for."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def _early_only(world: World) -> Gradients:
    model = _model()
    exchange = GradientExchange(model, world, bucket_bytes=TINY)
    x, y = _batch()
    (rows,) = _shares(world, len(x))
    model.uses_extra = True
    _loss(model, x[rows], y[rows], len(x)).backward()
    model.uses_extra = False
    exchange.arm()
    (_loss(model, x[rows], y[rows], len(x)) * 0).backward()
    exchange.finish()
    return _gradients(model)


def test_a_gradient_of_an_earlier_micro_batch_is_sent_with_the_last(run_ranks: Ranks) -> None:
    model = _model()
    model.uses_extra = True
    _require_equal(run_ranks(_early_only, 2), _expected(model))


def _mirrored(world: World) -> Gradients:
    model = _model()
    model.is_mirrored = world.rank == 1
    return _step(world, GradientExchange(model, world, bucket_bytes=TINY), model)


def test_buckets_are_sent_in_the_same_order_on_all_workers(run_ranks: Ranks) -> None:
    _require_equal(run_ranks(_mirrored, 2), _expected(_model()))


class Normed(nn.Module):
    """With a layer that communicates in the middle of backward, and one whose gradient is the first to leave."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.net = Net()
        self.tail = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.tail.weight)
        self.uses_tail = False

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(self.norm(x))
        return self.tail(found) if self.uses_tail else found


def _normed(world: World) -> Gradients:
    model = _model(Normed)
    model.norm = convert_sync_batch_norm(model.norm, world.sum)
    model.uses_tail = world.rank == 1  # the others send their first bucket when all is over
    exchange = GradientExchange(model, world, bucket_bytes=TINY, first_bucket_bytes=1)
    return {name: value for name, value in _step(world, exchange, model).items() if name != "tail.weight"}


def test_communication_inside_backward_is_not_mixed_up_with_buckets(run_ranks: Ranks) -> None:
    expected = _expected(_model(Normed))  # the tail changes nothing, so no other gradient either
    _require_equal(run_ranks(_normed, 3), expected)


def _unfreeze(world: World) -> list[Gradients]:
    model = _model()
    model.first.requires_grad_(False)
    exchange = GradientExchange(model, world, bucket_bytes=TINY)
    found = [_step(world, exchange, model)]
    for frozen, free in (("left", "first"), ("first", "left")):
        model.zero_grad()
        model.get_submodule(frozen).requires_grad_(False)
        model.get_submodule(free).requires_grad_(True)
        found.append(_step(world, exchange, model, len(found), num_parts=2))
    model.zero_grad()
    model.last = model.last_again = nn.Linear(8, 3).double()
    nn.init.constant_(model.last.weight, 0.5)
    nn.init.zeros_(model.last.bias)
    found.append(_step(world, exchange, model, len(found)))
    model.zero_grad()
    model.float()
    for name, gradient in model.named_parameters():
        assert gradient.dtype == torch.float32, name
    x, y = _batch()
    (rows,) = _shares(world, len(x))
    exchange.arm()
    _loss(model, x[rows].float(), y[rows].float(), len(x)).backward()
    exchange.finish()
    found.append({name: gradient.double() for name, gradient in _gradients(model).items()})
    return found


def test_frozen_unfrozen_replaced_and_converted_parameters_are_noticed(run_ranks: Ranks) -> None:
    expected = _unfreeze(_alone())
    assert [len(gradients) for gradients in expected] == [6, 6, 6, 6, 6]
    assert "left.weight" not in expected[1]
    assert "first.weight" in expected[1]
    results = run_ranks(_unfreeze, 2)
    for step, reference in enumerate(expected):
        _require_equal([found[step] for found in results], reference, 1e-12 if step < 4 else 1e-6)


def _two_models(world: World) -> list[Gradients]:
    models = [_model(), _model(Normed)]
    models[1].norm.eval()
    exchanges = [GradientExchange(model, world, bucket_bytes=TINY) for model in models]
    # The second loss also flows into the first model, whose exchange is at rest.
    first = _step(world, exchanges[0], models[0])
    x, y = _batch()
    (rows,) = _shares(world, len(x))
    models[0].zero_grad()
    exchanges[1].arm()
    F.mse_loss(models[1](x[rows]) + models[0](x[rows]), y[rows], reduction="sum").div(y.numel()).backward()
    exchanges[1].finish()
    second = _gradients(models[1])
    models[0].zero_grad()
    return [first, second, _step(world, exchanges[0], models[0], 5)]


def test_two_models_take_turns(run_ranks: Ranks) -> None:
    results = run_ranks(_two_models, 2)
    for index, expected in enumerate(_two_models(_alone())):
        _require_equal([found[index] for found in results], expected)


def _uncleared(world: World, set_to_none: bool | None) -> Gradients:
    model = _model()
    exchange = GradientExchange(model, world, bucket_bytes=TINY)
    model.uses_extra = True
    _step(world, exchange, model, 0)
    model.uses_extra = False
    if set_to_none is not None:
        model.zero_grad(set_to_none=set_to_none)
    return _step(world, exchange, model, 1, 1 if set_to_none is None else 2)


@pytest.mark.parametrize("set_to_none", [None, False, True])
def test_a_sum_that_is_not_cleared_counts_once(run_ranks: Ranks, set_to_none: bool | None) -> None:
    expected = _uncleared(_alone(), set_to_none)
    assert ("extra" in expected) == (set_to_none is not True)
    _require_equal(run_ranks(_uncleared, 3, set_to_none), expected)


def _kept(world: World) -> bool:
    model = _model()
    exchange = GradientExchange(model, world)
    _step(world, exchange, model, 0)
    kept = model.first.weight.grad
    before = kept.clone()
    model.zero_grad()
    _step(world, exchange, model, 1)
    return torch.equal(kept, before)


def test_a_gradient_that_was_kept_stays_as_it_was(run_ranks: Ranks) -> None:
    assert run_ranks(_kept, 2) == [True, True]


class Images(nn.Module):
    """Convolutions with weights in channels-last order, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.table = nn.Parameter(torch.ones(8, 6)[:, ::2].t())  # with gaps in memory

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.conv(x)).mean((2, 3))
        return found[:, :3] @ self.table


def _images(world: World, averages: bool) -> tuple[Gradients, dict[str, Tensor], bool]:
    model = _model(Images).to(memory_format=torch.channels_last)
    model.table.data = torch.ones(8, 6, dtype=torch.float64)[:, ::2].t()
    exchange = GradientExchange(model, world, bucket_bytes=TINY, average_buffers=averages)
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(world.rank))
    exchange.arm()
    model(x).square().sum().backward()
    strides = [p.grad.stride() for p in model.parameters()]
    exchange.finish()
    same = strides == [p.grad.stride() for p in model.parameters()]
    return _gradients(model), dict(model.named_buffers()), same


def test_strides_stay_and_buffers_become_the_mean(run_ranks: Ranks) -> None:
    size = 3
    singles = [_images(_Rank(rank, 1), False) for rank in range(size)]  # type: ignore[arg-type]
    expected = {name: sum(found[0][name] for found in singles) + torch.zeros(()) for name in singles[0][0]}
    means = {
        name: sum(found[1][name] for found in singles) / torch.tensor(size)
        for name in ("norm.running_mean", "norm.running_var")
    }
    averaged, kept = run_ranks(_images, size, True), run_ranks(_images, size, False)
    for rank in range(size):
        gradients, buffers, same = averaged[rank]
        assert same
        assert gradients["conv.weight"].is_contiguous(memory_format=torch.channels_last)
        assert relative_difference(gradients, expected) < 1e-12
        assert int(buffers.pop("norm.num_batches_tracked")) == 1
        assert relative_difference(buffers, means) < 1e-12
        assert relative_difference(kept[rank][1], singles[rank][1]) == 0


class Dtypes(nn.Module):
    """A parameter of every dtype, each in its own bucket."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128):
            self.register_parameter(str(dtype).replace("torch.", "of_"), nn.Parameter(torch.ones(5, dtype=dtype)))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, factor: float) -> Tensor:
        real = sum(p.float().sum() for p in self.parameters() if not p.is_complex())
        imaginary = sum((p * 1j).real.float().sum() for p in self.parameters() if p.is_complex())
        assert isinstance(real, Tensor)
        return (real + imaginary) * factor


def _dtypes(world: World) -> Gradients:
    model = Dtypes()
    exchange = GradientExchange(model, world)
    exchange.arm()
    model(2.0**world.rank).backward()
    exchange.finish()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype
    return _gradients(model)


def test_every_dtype_is_summed(run_ranks: Ranks) -> None:
    for gradients in run_ranks(_dtypes, 3):
        for name, gradient in gradients.items():
            expected = torch.full_like(gradient, 7)  # 1 + 2 + 4
            assert torch.equal(gradient, expected * -1j if gradient.is_complex() else expected), name


def _overlap(world: World) -> tuple[int, int, list[int]]:
    model = _model()
    exchange = GradientExchange(model, world, bucket_bytes=TINY, first_bucket_bytes=1)
    sizes: list[int] = []
    real = dist.all_reduce

    def recorded(tensor: Tensor, *arguments: Any, **more: Any) -> Any:
        sizes.append(tensor.numel())
        return real(tensor, *arguments, **more)

    with mock.patch.object(dist, "all_reduce", recorded):
        model.never.requires_grad_(False)
        model.uses_extra = True
        x, y = _batch()
        exchange.arm()
        seen: list[int] = []
        model.first.weight.register_hook(lambda gradient: seen.append(len(sizes)))
        _loss(model, x, y, len(x)).backward()
        after_backward = len(sizes)
        exchange.finish()
    return seen[0], after_backward, sizes


def test_buckets_are_sent_before_backward_ends(run_ranks: Ranks) -> None:
    (seen, after_backward, sizes), other = run_ranks(_overlap, 2)
    assert other == (seen, after_backward, sizes)
    assert len(sizes) == 9
    assert seen >= 7  # all but those of the first layer
    assert after_backward == 9


def _delayed(world: World) -> tuple[list[int], Gradients]:
    model = _model()
    sends_after = (10**6, 4)[world.rank]  # rank 0 not before backward is over, rank 1 in the middle of it
    looks, sent = itertools.count(1), []
    exchange = GradientExchange(
        *(model, world),
        bucket_bytes=TINY,
        first_bucket_bytes=1,
        before_sending=lambda: sent.append(len(seen)),
        may_send=lambda: next(looks) > sends_after,
    )
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    found = _step(world, exchange, model)
    return [*sent, len(seen)], found


def test_backward_continues_until_it_may_send(run_ranks: Ranks) -> None:
    found = run_ranks(_delayed, 2)
    (late, num_gradients), (early, _) = (calls for calls, _ in found)
    assert late == num_gradients
    assert 0 < early < num_gradients
    _require_equal([gradients for _, gradients in found], _expected(_model()))


def _same_bits(world: World) -> list[Gradients]:
    model = _model()
    exchange = GradientExchange(model, world, bucket_bytes=300)
    found = []
    for _ in range(3):
        model.zero_grad()
        found.append(_step(world, exchange, model))
    return found


def test_the_same_step_gives_the_same_bits_the_first_time_too(run_ranks: Ranks) -> None:
    for found in run_ranks(_same_bits, 3):
        for name, gradient in found[0].items():
            assert torch.equal(gradient, found[1][name])
            assert torch.equal(gradient, found[2][name])


def _fails(call: Callable[[], object], kind: type[StormoError] = StormoError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "nothing was raised"


def _twice_while_armed(world: World) -> tuple[str, str, bool]:
    model = _model()
    exchange = GradientExchange(model, world, first_bucket_bytes=1)
    model.uses_extra = True
    model.never.requires_grad_(False)
    x, y = _batch()
    losses = [_loss(model, x, y, len(x)) for _ in range(2)]
    exchange.arm()
    losses[0].backward()
    text = _fails(losses[1].backward)
    exchange.cancel()
    return text, _fails(exchange.arm), all(p.grad is None for p in exchange._buckets[0].parameters)


def test_a_second_backward_of_a_step_is_refused(run_ranks: Ranks) -> None:
    for text, then, dropped in run_ranks(_twice_while_armed, 2):
        assert text.startswith("the gradient of extra grew after it had been sent")
        assert "world.backward(loss, more=True)" in text
        assert "resume from a checkpoint" in then
        assert dropped


def _checkpointed(world: World, use_reentrant: bool) -> str | Gradients:
    model = _model()
    model.never.requires_grad_(False)
    model.uses_extra = True
    exchange = GradientExchange(model, world, bucket_bytes=TINY, first_bucket_bytes=1)
    x, y = _batch()
    (rows,) = _shares(world, len(x))
    x.requires_grad_()

    def through(inputs: Tensor) -> Tensor:
        found = checkpoint(model, inputs, use_reentrant=use_reentrant)
        assert isinstance(found, Tensor)
        return found

    outputs = (through(x[rows]) + through(x[rows])) / 2
    exchange.arm()
    loss = F.mse_loss(outputs, y[rows], reduction="sum") / y.numel()
    if use_reentrant:
        text = _fails(loss.backward)
        exchange.cancel()
        return text
    loss.backward()
    exchange.finish()
    return _gradients(model)


def test_checkpointing_is_exact_and_refused_where_it_is_re_entrant(run_ranks: Ranks) -> None:
    model = _model()
    model.uses_extra = True
    _require_equal(run_ranks(_checkpointed, 2, False), _expected(model))
    for text in run_ranks(_checkpointed, 2, True):
        assert text.startswith("the gradient of ")
        assert "use_reentrant=False" in text


def _accumulated_on_a_sum(world: World) -> str:
    model = _model()
    exchange = GradientExchange(model, world)
    _step(world, exchange, model, 0)
    return _fails(lambda: _step(world, exchange, model, 1, num_parts=2))


def test_accumulating_on_the_last_steps_sum_is_refused(run_ranks: Ranks) -> None:
    for text in run_ranks(_accumulated_on_a_sum, 2):
        assert "held the last step's sum over all 2 workers; call optimizer.zero_grad() between steps" in text


def _refusals(world: World) -> list[str]:
    def sparse() -> None:
        model = nn.Embedding(4, 2, sparse=True)
        exchange = GradientExchange(model, world)
        exchange.arm()
        try:
            model(torch.tensor([1])).sum().backward()
        finally:
            exchange.cancel()

    def stepped_inside() -> None:
        model = nn.Linear(2, 2)
        exchange = GradientExchange(model, world, bucket_bytes=1)
        model.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        exchange.arm()
        try:
            model(torch.ones(1, 2)).sum().backward()
            exchange.finish()
        finally:
            exchange.cancel()

    eighth = nn.Module()
    eighth.register_parameter("small", nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn)))
    return [
        _fails(sparse, SettingError),
        _fails(lambda: GradientExchange(nn.LazyLinear(3), world), SettingError),
        _fails(lambda: GradientExchange(eighth, world), SettingError),
        _fails(stepped_inside),
    ]


def test_gradients_that_cannot_be_summed_are_refused(run_ranks: Ranks) -> None:
    for sparse, lazy, eighth, stepped in run_ranks(_refusals, 2):
        assert sparse.startswith("the gradient of weight is sparse, but")
        assert sparse.endswith("leave out sparse=True where its layer is made.")
        assert lazy.startswith("the parameter bias has no shape yet, but")
        assert eighth.startswith("the parameter small has the dtype float8_e4m3fn, but")
        assert stepped.startswith("the gradient of weight was changed or removed while it was summed")


def _retry(world: World) -> Gradients:
    model = _model()
    exchange = GradientExchange(model, world, bucket_bytes=TINY)
    if world.rank == 1:  # fails before any bucket is full
        handle = model.extra.register_hook(lambda gradient: 1 / 0)
        model.uses_extra = True
        with pytest.raises(ZeroDivisionError):
            _step(world, exchange, model)
        exchange.cancel()
        handle.remove()
        model.uses_extra = False
        model.zero_grad()
    return _step(world, exchange, model)


def test_a_backward_that_failed_before_sending_can_be_repeated(run_ranks: Ranks) -> None:
    _require_equal(run_ranks(_retry, 2), _expected(_model()))


def _model_is_untouched(world: World) -> tuple[bool, bool]:
    model = _model()
    names, methods = list(model.state_dict()), dir(model)
    exchange = GradientExchange(model, world)
    _step(world, exchange, model)
    file = io.BytesIO()
    torch.save(model, file)  # neither a copy nor a file takes hooks along
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert not any(p._post_accumulate_grad_hooks for p in other.parameters())
    hooked = all(p._post_accumulate_grad_hooks for p in model.parameters())
    exchange.close()
    exchange.close()
    same = (list(model.state_dict()), dir(model)) == (names, methods)
    return hooked and same, any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_closing_removes_the_hooks(run_ranks: Ranks) -> None:
    assert run_ranks(_model_is_untouched, 2) == [(True, False)] * 2


def test_one_worker_has_no_hooks_and_nothing_to_do() -> None:
    model = _model()
    exchange = GradientExchange(model, _alone(), average_buffers=True)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    gradients = _step(_alone(), exchange, model)
    assert relative_difference(gradients, _expected(model)) == 0
    exchange.cancel()
    exchange.close()


@given(
    sizes=st.lists(st.tuples(st.integers(0, 70), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))),
    first_bytes=st.integers(1, 600),
    other_bytes=st.integers(1, 2000),
)
@settings(max_examples=60)
def test_buckets_hold_every_parameter_once_without_overlap(
    sizes: list[tuple[int, torch.dtype]], first_bytes: int, other_bytes: int
) -> None:
    named = [(str(i), nn.Parameter(torch.zeros(size, dtype=dtype))) for i, (size, dtype) in enumerate(sizes)]
    buckets = make_buckets(named, first_bytes, other_bytes)
    held = [id(p) for bucket in buckets for p in bucket.parameters]
    assert sorted(held) == sorted(id(p) for _, p in named)
    place = {id(p): index for index, (_, p) in enumerate(named)}
    for bucket in buckets:
        indices = [place[id(p)] for p in bucket.parameters]
        assert indices == sorted(indices)
        bucket.arm()
        for index, parameter in enumerate(bucket.parameters):
            parameter.grad = torch.full_like(parameter, index + 1)
            bucket.arrived(index)
        flat, _ = bucket.pack()
        assert flat[-len(indices) :].tolist() == [1] * len(indices)
        for index, parameter in enumerate(bucket.parameters):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, torch.full_like(parameter, index + 1))
            assert parameter.grad.data_ptr() % 64 == flat.data_ptr() % 64 or not parameter.numel()
