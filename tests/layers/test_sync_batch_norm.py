"""Ranks are threads that meet at a barrier: what they compute together must be what one process computes alone."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stormo.errors import SettingError
from stormo.layers.norm_act import NormAct
from stormo.layers.sync_batch_norm import (
    Reduce,
    SyncBatchNorm,
    SyncNorm,
    convert_sync_batch_norm,
    local_statistics,
    set_absent,
)


class _Ranks:
    """Runs one function a rank, with a `reduce` that sums over them."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.num_reductions = 0
        self._barrier = threading.Barrier(num_ranks, timeout=30)
        self._vectors: list[Tensor] = [torch.empty(0)] * num_ranks

    def run(self, function: Callable[[int, Reduce], Any]) -> list[Any]:
        """What the function returns on each rank."""

        def reduce_of(rank: int) -> Reduce:
            def reduce(vector: Tensor) -> None:
                assert vector.dtype == torch.float64
                assert vector.dim() == 1
                self._vectors[rank] = vector.clone()
                self._barrier.wait()
                vector.copy_(torch.stack(self._vectors).sum(0))
                self._barrier.wait()
                self.num_reductions += rank == 0

            return reduce

        def one(rank: int) -> Any:
            try:
                return function(rank, reduce_of(rank))
            except BaseException:
                self._barrier.abort()  # the others fail at once instead of waiting
                raise

        with ThreadPoolExecutor(self.num_ranks) as pool:
            return list(pool.map(one, range(self.num_ranks)))


def _batches(sizes: Sequence[int], *rest: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, *rest, generator=generator).double() * 2.0 + 1.0 for size in sizes]


def _model(kind: str, num_dims: int) -> nn.Module:
    torch.manual_seed(2)
    norm: nn.Module
    if kind == "NormAct":
        norm = NormAct(3, momentum=0.2)
    else:
        table: dict[str, dict[str, Any]] = {
            "affine": {},
            "cumulative": {"momentum": None},
            "no affine": {"affine": False},
            "no running": {"track_running_stats": False},
        }
        options = table[kind]
        norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[num_dims](3, **options)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, mean=0.5)
    return nn.Sequential(norm).double()


def _step(model: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad


def _assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["affine", "cumulative", "no affine", "no running", "NormAct"])
@pytest.mark.parametrize(
    ("rest", "sizes"), [((3,), (4, 4)), ((3, 4), (5, 1, 2)), ((3, 2, 2), (5, 1, 2)), ((3, 2, 1, 2), (4, 4))]
)
def test_ranks_equal_one_process_with_all_samples(kind: str, rest: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    alone = _model(kind, 1 + len(rest))
    models = [deepcopy(alone) for _ in sizes]
    ranks = _Ranks(len(sizes))
    for _ in range(2):  # the second step sees running statistics that moved
        inputs = _batches(sizes, *rest)
        grads = [torch.randn_like(x) for x in inputs]
        expected_y, expected_grad = _step(alone, torch.cat(inputs), torch.cat(grads))

        def one(
            rank: int, reduce: Reduce, inputs: list[Tensor] = inputs, grads: list[Tensor] = grads
        ) -> tuple[Tensor, Tensor]:
            models[rank] = convert_sync_batch_norm(models[rank], reduce)
            return _step(models[rank], inputs[rank], grads[rank])

        results = ranks.run(one)
        _assert_same(torch.cat([y for y, _ in results]), expected_y)
        _assert_same(torch.cat([grad for _, grad in results]), expected_grad)
    assert ranks.num_reductions == 4  # one each way, two steps
    for name, parameter in alone.named_parameters():
        assert parameter.grad is not None
        shares = [model.get_parameter(name).grad for model in models]
        _assert_same(sum(share for share in shares if share is not None), parameter.grad)  # type: ignore[arg-type]
    for name, buffer in alone.named_buffers():
        for model in models:
            _assert_same(model.get_buffer(name), buffer)


@pytest.mark.parametrize("kind", ["affine", "NormAct"])
def test_an_absent_rank_keeps_step_and_changes_nothing(kind: str) -> None:
    alone = _model(kind, 4)
    models = [deepcopy(alone) for _ in range(3)]
    inputs, grads = _batches((4, 1, 3), 3, 2, 2), _batches((4, 1, 3), 3, 2, 2)
    grads[1].zero_()  # a ghost sample has no loss
    inputs[1] += 1e6
    expected_y, expected_grad = _step(alone, torch.cat(inputs[::2]), torch.cat(grads[::2]))
    ranks = _Ranks(3)

    def one(rank: int, reduce: Reduce) -> tuple[Tensor, Tensor]:
        convert_sync_batch_norm(models[rank], reduce)
        set_absent(models[rank], rank == 1)
        return _step(models[rank], inputs[rank], grads[rank])

    results = ranks.run(one)
    _assert_same(torch.cat([results[0][0], results[2][0]]), expected_y)
    _assert_same(torch.cat([results[0][1], results[2][1]]), expected_grad)
    assert results[1][0].isfinite().all()
    assert not results[1][1].any()
    for name, buffer in alone.named_buffers():
        for model in models:
            _assert_same(model.get_buffer(name), buffer)


def test_statistics_stay_finite_and_still_when_every_rank_is_absent() -> None:
    model = convert_sync_batch_norm(_model("affine", 2), lambda vector: None)
    set_absent(model, True)
    before = model.get_buffer("0.running_var").clone()
    y, grad = _step(model, *_batches((2, 2), 3))
    assert y.isfinite().all()
    assert grad.isfinite().all()
    assert torch.equal(model.get_buffer("0.running_var"), before)


def test_gradients_pass_gradcheck_with_a_second_rank_of_fixed_samples() -> None:
    mine, other = _batches((3, 4), 2, 2)
    other_rows = other.movedim(1, 0).flatten(1)
    weight, bias = torch.tensor([0.7, -1.2]).double(), torch.tensor([0.1, 0.2]).double()

    def add_other(vector: Tensor) -> None:
        if len(vector) == 5:  # the other rank has no gradient of its own, so only the statistics gain from it
            count = torch.tensor([float(other_rows.shape[1])]).double()
            vector += torch.cat((count, other_rows.sum(1), other_rows.square().sum(1)))

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y: Tensor = SyncNorm.apply(x, w, b, None, None, None, 0.1, 1e-5, add_other, False)  # type: ignore[no-untyped-call]
        return y

    operands = tuple(operand.requires_grad_() for operand in (mine, weight, bias))
    assert torch.autograd.gradcheck(function, operands)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_keeps_its_dtype_under_autocast(dtype: torch.dtype) -> None:
    model = convert_sync_batch_norm(nn.BatchNorm2d(3), lambda vector: None)
    x = _batches((4,), 3, 2, 2)[0].to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    assert y.dtype == dtype
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    expected = nn.BatchNorm2d(3)(x.detach())
    torch.testing.assert_close(y, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


def test_conversion_keeps_objects_names_modes_and_sharing() -> None:
    shared = nn.BatchNorm1d(3, momentum=None, eps=1e-3)
    inner = nn.Sequential(shared, NormAct(3))
    model = nn.Sequential(nn.Linear(3, 3), shared, inner, nn.BatchNorm1d(3).eval())
    state, parameters = model.state_dict(), dict(model.named_parameters())

    def reduce(vector: Tensor) -> None:
        raise AssertionError("evaluation reduces nothing")

    converted = convert_sync_batch_norm(model, reduce)
    assert converted is model
    assert isinstance(model[1], SyncBatchNorm)
    assert model[1] is inner[0]
    assert (model[1].momentum, model[1].eps, model[3].training) == (None, 1e-3, False)
    assert inner[1].reduce is reduce
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert model.state_dict().keys() == state.keys()
    model.eval()(torch.randn(4, 3))
    bare = convert_sync_batch_norm(nn.BatchNorm2d(3), reduce)
    assert isinstance(bare, SyncBatchNorm)


class _Tagged(nn.BatchNorm2d):
    """A user's own, with the inherited forward pass."""

    def __init__(self, num_features: int, tag: str) -> None:
        super().__init__(num_features)
        self.tag = tag


def test_layers_are_converted_in_place_and_stay_what_they_are() -> None:
    layers = [nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.BatchNorm3d(3), _Tagged(3, "mine")]
    kinds, calls = [type(layer) for layer in layers], []
    sums: list[Tensor] = []

    def refuse(vector: Tensor) -> None:
        raise AssertionError("the older way to sum")

    layers[1].register_forward_hook(lambda *_: calls.append("hook"))
    model = nn.ModuleList(layers)
    for layer in layers:
        convert_sync_batch_norm(layer, refuse)  # a model that is a batch norm, its return value dropped
    assert list(model) == layers
    for layer, kind in zip(layers, kinds, strict=True):
        assert isinstance(layer, kind)
        assert isinstance(layer, SyncBatchNorm)
    assert layers[3].tag == "mine"
    assert type(layers[1]) is type(convert_sync_batch_norm(nn.BatchNorm2d(3), refuse))
    convert_sync_batch_norm(model, sums.append)  # again: the newer way to sum holds
    layers[1](torch.randn(2, 3, 2, 2))
    assert (calls, len(sums)) == (["hook"], 1)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eval()
    layers[1](torch.randn(2, 3, 2, 2))
    layers[3](torch.randn(2, 3, 2, 2))
    assert len(sums) == 1  # frozen as any batch norm is
    with pytest.raises(ValueError, match="expected 4D input"):
        layers[1].train()(torch.randn(2, 3))


def test_a_copy_has_the_same_ranks_and_what_is_read_from_a_file_has_none() -> None:
    sums: list[Tensor] = []
    lock = threading.Lock()

    def reduce(vector: Tensor) -> None:
        with lock:  # which can be neither copied nor pickled
            sums.append(vector)

    model = nn.Sequential(nn.BatchNorm2d(3), _Tagged(3, "mine"), nn.BatchNorm2d(3).eval(), NormAct(3))
    alone = deepcopy(model)
    convert_sync_batch_norm(model, functools.partial(reduce))
    x = torch.randn(4, 3, 2, 2)
    set_absent(model, True)
    copied, shallow = deepcopy(model), copy(model[0])
    set_absent(model, False)
    assert not copied[0].absent
    assert copied[0].weight is not model[0].weight
    assert shallow.weight is model[0].weight
    copied(x)
    shallow(x)
    assert len(sums) == 4
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        read = pickle.loads(pickle.dumps(model, protocol))
        assert [type(layer) for layer in read] == [nn.BatchNorm2d, _Tagged, nn.BatchNorm2d, NormAct]
        assert [layer.training for layer in read] == [True, True, False, True]
        assert all(vars(one).keys() == vars(other).keys() for one, other in zip(read, alone, strict=True))
        torch.testing.assert_close(read(x), deepcopy(alone)(x))
    assert len(sums) == 4
    assert isinstance(model[0], SyncBatchNorm)  # pickling has left it alone
    model[0].__class__ = nn.BatchNorm2d
    assert type(model[0]) is nn.BatchNorm2d


@pytest.mark.parametrize("refused", ["class", "object"])
def test_a_refused_conversion_has_changed_nothing(refused: str) -> None:
    class NormWithActivation(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    model = nn.Sequential(nn.BatchNorm1d(3), NormWithActivation(3) if refused == "class" else nn.BatchNorm1d(3))
    if refused == "object":
        model[1].forward = lambda input: input
    with pytest.raises(SettingError, match="replaces the forward pass of BatchNorm1d"):
        convert_sync_batch_norm(model, lambda vector: None)
    assert type(model[0]) is nn.BatchNorm1d


def test_a_batch_norm_with_another_forward_pass_is_refused() -> None:
    class NormWithActivation(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    with pytest.raises(SettingError, match="NormWithActivation"):
        convert_sync_batch_norm(nn.Sequential(NormWithActivation(3)), lambda vector: None)


def test_absence_without_synchronisation_is_evaluation_and_ends_where_it_began() -> None:
    trained, frozen = nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval()
    model = nn.Sequential(trained, frozen)
    x = torch.randn(4, 3)
    for _ in range(2):  # telling twice is telling once
        set_absent(model, True)
    model(x)
    assert model.get_buffer("0.num_batches_tracked").item() == 0
    assert torch.equal(model.get_buffer("0.running_mean"), torch.zeros(3))
    set_absent(model, False)
    assert (trained.training, frozen.training) == (True, False)
    model(x)
    assert model.get_buffer("0.num_batches_tracked").item() == 1


@pytest.mark.parametrize(
    "made", [lambda: nn.BatchNorm1d(3, momentum=None), lambda: nn.BatchNorm1d(3), lambda: NormAct(3)]
)
def test_a_batch_without_samples_on_any_rank_counts_in_no_average(made: Callable[[], nn.Module]) -> None:
    model, plain = (nn.Sequential(made()) for _ in range(2))
    convert_sync_batch_norm(model, lambda vector: None)
    for is_empty in (False, True, True, False):
        x = torch.randn(4, 3)
        set_absent(model, is_empty)
        model(x)
        if not is_empty:
            plain(x)
    assert model.get_buffer("0.num_batches_tracked") == 2
    for (name, ours), (_, theirs) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.allclose(ours, theirs), name


@pytest.mark.parametrize("ask", [nn.Module.eval, nn.Module.train])
def test_a_mode_asked_for_during_absence_holds_after_it(ask: Callable[[nn.Module], nn.Module]) -> None:
    norm, before = nn.BatchNorm1d(3), ask(nn.BatchNorm1d(3)).training
    model = nn.Sequential(nn.Sequential(norm)).train(not before)
    set_absent(model, True)
    ask(model)
    model(torch.randn(4, 3))
    assert norm.num_batches_tracked == 0  # still absent
    set_absent(model, False)
    assert norm.training is before
    assert norm.train().training
    assert "train" not in vars(norm)


def test_a_copy_made_during_absence_can_be_trained() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    set_absent(model, True)
    copied = deepcopy(model)
    set_absent(model, False)
    assert copied.train()[0].training
    assert not copied.eval()[0].training
    assert model[0].training


def test_local_statistics_are_a_single_ranks_and_no_rank_is_asked_for_them() -> None:
    def refuse(vector: Tensor) -> None:
        raise AssertionError("a collective")

    plain = nn.Sequential(nn.BatchNorm1d(3), NormAct(3), nn.BatchNorm1d(3))
    model = convert_sync_batch_norm(deepcopy(plain), refuse)
    foreign = nn.SyncBatchNorm(3)  # torch's, which a user may have put there
    model.add_module("3", foreign)
    (x,) = _batches([5], 3)
    with local_statistics(model.double()):
        y = model(x)
        y.square().sum().backward()
    expected = nn.BatchNorm1d(3).double()(plain.double()(x))
    torch.testing.assert_close(y, expected)
    assert "forward" not in vars(foreign)
    with pytest.raises(AssertionError, match="a collective"):
        model(x)
    with pytest.raises(RuntimeError, match="one of them"), local_statistics(model):
        raise RuntimeError("one of them has run out of memory")
    assert [layer.reduce for layer in model.modules() if isinstance(layer, SyncBatchNorm | NormAct)] == [refuse] * 3
    assert "forward" not in vars(foreign)
