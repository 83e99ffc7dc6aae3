"""Ghost batch norm against a plain loop over chunks with torch's own layer, and what a conversion keeps and refuses."""

from __future__ import annotations

import importlib.util
import os
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from stormo.config.plan import num_ghost_batches
from stormo.distributed.world import World as Workers
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.layers.ghost_batch_norm import GhostBatchNorm, GhostNorm, GhostNormAct, convert_ghost_batch_norm
from stormo.layers.norm_act import NormAct
from stormo.layers.sync_batch_norm import SyncBatchNorm, convert_sync_batch_norm, local_statistics, set_absent
from tests.script.loops import Weights, data, make, world_of
from tests.tiny_run import build, steps

Ranks = Callable[..., list[Any]]
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_HAS_TRITON = importlib.util.find_spec("triton") is not None
KINDS: dict[str, dict[str, Any]] = {
    "affine": {},
    "momentum": {"momentum": 0.7, "eps": 1e-3},
    "cumulative": {"momentum": None},
    "no affine": {"affine": False},
    "no running": {"track_running_stats": False},
}


def _values(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double() * 2.0 + 1.0


def _plain(num_dims: int, **settings: Any) -> nn.Module:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[num_dims]
    torch.manual_seed(2)
    layer = kind(3, **settings).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, mean=0.5)
    return layer


def _looped(layer: nn.Module, x: Tensor, sizes: list[int]) -> Tensor:
    return torch.cat([layer(chunk) for chunk in x.split(sizes)])


def _with_gradient(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = function(leaf)
    y.backward(grad)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def _assert_same_layers(one: nn.Module, other: nn.Module, rtol: float = 1e-12) -> None:
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(parameter.grad, other.get_parameter(name).grad, rtol=rtol, atol=rtol)
    for name, buffer in one.named_buffers():
        torch.testing.assert_close(buffer, other.get_buffer(name), rtol=rtol, atol=rtol)


# --- the arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rest", "sizes"),
    [((3,), [4, 4, 4]), ((3, 4), [4, 4, 3]), ((3, 2, 2), [4, 3, 3]), ((3, 2, 1, 2), [3, 3])],
)
def test_ghosts_equal_a_loop_over_chunks(kind: str, rest: tuple[int, ...], sizes: list[int]) -> None:
    plain = _plain(1 + len(rest), **KINDS[kind])
    ghosts = convert_ghost_batch_norm(deepcopy(plain), 4)
    for step in range(2):  # the second sees running statistics that have moved
        x, grad = _values(sum(sizes), *rest, seed=step), _values(sum(sizes), *rest, seed=step + 9)
        expected = _with_gradient(lambda x: _looped(plain, x, sizes), x, grad)
        actual = _with_gradient(ghosts, x, grad)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    _assert_same_layers(ghosts, plain)
    if kind != "no running":
        assert ghosts.get_buffer("num_batches_tracked") == 2 * len(sizes)  # each ghost is a batch
        x = _values(5, *rest)
        torch.testing.assert_close(ghosts.eval()(x), plain.eval()(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("num_samples", "size", "sizes"),
    [(64, 32, 2), (65, 32, 3), (33, 32, 2), (32, 32, 1), (5, 32, 1), (1, 2, 1), (0, 2, 1), (3, 2, 1), (5, 2, 2)],
)
def test_ghosts_are_few_equal_and_never_of_one_sample(num_samples: int, size: int, sizes: int) -> None:
    assert num_ghost_batches(num_samples, size) == sizes


def test_a_micro_batch_of_one_ghost_is_plain_batch_norm_and_so_are_its_errors() -> None:
    plain = _plain(2)
    ghosts = convert_ghost_batch_norm(deepcopy(plain), 8)
    for num_samples in (8, 3):
        assert torch.equal(ghosts(_values(num_samples, 3)), plain(_values(num_samples, 3)))
    assert torch.equal(ghosts.get_buffer("running_var"), plain.get_buffer("running_var"))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        ghosts(_values(1, 3))
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        ghosts(_values(16, 3, 2, 2))
    with pytest.raises(ValueError, match="batch norm of 3 channels got an input of 4"):
        ghosts(_values(16, 4))
    assert ghosts(_values(0, 3, 2)).shape == (0, 3, 2)


@pytest.mark.parametrize("sizes", [4, 3])
def test_gradients_pass_gradcheck_twice(sizes: int) -> None:
    layer = convert_ghost_batch_norm(_plain(3, track_running_stats=False), sizes)
    x = _values(8, 3, 2).requires_grad_()

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))
        return y

    operands = (x, *(_values(3, seed=seed).requires_grad_() for seed in (1, 2)))
    assert torch.autograd.gradcheck(function, operands)
    assert torch.autograd.gradgradcheck(function, operands)


LAYOUTS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("memory_format", LAYOUTS)
@pytest.mark.parametrize("num_samples", [8, 7])
def test_the_layout_stays_what_it_was(memory_format: torch.memory_format, num_samples: int) -> None:
    plain = _plain(4)
    ghosts = convert_ghost_batch_norm(deepcopy(plain), 4)
    x = _values(num_samples, 3, 4, 5).contiguous(memory_format=memory_format)
    y, grad = _with_gradient(ghosts, x, torch.ones_like(x))
    assert y.stride() == grad.stride() == x.stride()
    strided = _values(num_samples, 6, 4, 5)[:, ::2]  # neither the one nor the other
    torch.testing.assert_close(ghosts(strided), ghosts(strided.contiguous()), rtol=1e-12, atol=1e-12)


def test_a_mean_far_from_zero_costs_no_more_than_in_torch() -> None:
    x = _values(16, 3, 4).float() + 3000.0
    ghosts = convert_ghost_batch_norm(nn.BatchNorm1d(3), 4)
    assert torch.equal(ghosts(x), _looped(nn.BatchNorm1d(3), x, [4] * 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_half", [False, True])
def test_lower_precision_keeps_its_dtype_and_float32_statistics(dtype: torch.dtype, in_half: bool) -> None:
    # Weights in 16 bits too where the whole model is.
    layer = convert_ghost_batch_norm(nn.BatchNorm2d(3).to(dtype if in_half else torch.float32), 4)
    x = _values(8, 3, 2, 2).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, grad = _with_gradient(layer, x, torch.ones_like(x))
    assert y.dtype == grad.dtype == dtype
    expected = _looped(nn.BatchNorm2d(3), x.float(), [4, 4])
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=tolerance)
    if not in_half:
        wide = nn.BatchNorm2d(3)
        _looped(wide, x.float(), [4, 4])
        torch.testing.assert_close(layer.get_buffer("running_var"), wide.running_var, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("backend", "kind", "num_samples"),
    [("eager", "affine", 8), ("aot_eager", "affine", 7), ("aot_eager", "NormAct", 8)],
)
def test_it_compiles_as_one_graph(backend: str, kind: str, num_samples: int) -> None:
    torch._dynamo.reset()
    plain = NormAct(3).double() if kind == "NormAct" else _plain(4, **KINDS[kind])
    eager = convert_ghost_batch_norm(plain, 4)
    layer = deepcopy(eager)
    x, grad = _values(num_samples, 3, 4, 5).contiguous(memory_format=torch.channels_last), _values(num_samples, 3, 4, 5)
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=backend == "eager")
    expected = _with_gradient(eager, x, grad)
    torch.testing.assert_close(_with_gradient(compiled, x, grad), expected, rtol=1e-12, atol=1e-12)
    _assert_same_layers(layer, eager)


def test_every_micro_batch_size_is_compiled_separately() -> None:
    torch._dynamo.reset()
    kinds: list[set[type[Any]]] = []  # of what each graph is given

    def keep_kinds(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        kinds.append({type(given) for given in inputs})
        return graph

    compiled = torch.compile(convert_ghost_batch_norm(_plain(4), 4), backend=keep_kinds, fullgraph=True)
    looped = _plain(4)
    for num_samples, sizes in ((16, [4] * 4), (11, [4, 4, 3]), (16, [4] * 4)):
        x = _values(num_samples, 3, 2, 2)
        torch.testing.assert_close(compiled(x), _looped(looped, x, sizes), rtol=1e-12, atol=1e-12)
    assert len(kinds) == 2
    assert not any(issubclass(kind, int | torch.SymInt) for given in kinds for kind in given)  # which cost minutes


# --- NormAct ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "sizes", "rest"), [(False, [4, 4], (3,)), (True, [4, 3], (3, 2, 2)), (True, [4, 4], (3, 2, 2))]
)
def test_norm_act_equals_a_loop_over_chunks(activation: bool, sizes: list[int], rest: tuple[int, ...]) -> None:
    plain = NormAct(3, momentum=0.3, activation=activation).double()
    nn.init.normal_(plain.weight)
    ghosts = convert_ghost_batch_norm(deepcopy(plain), 4)
    assert isinstance(ghosts, GhostNormAct)
    x, other, grad = (_values(sum(sizes), *rest, seed=seed) for seed in range(3))
    vector = _values(3)

    def loop(x: Tensor) -> Tensor:
        chunks = zip(x.split(sizes), other.split(sizes), strict=True)
        return torch.cat([plain(chunk, residual, vector) for chunk, residual in chunks])

    expected = _with_gradient(loop, x, grad)
    actual = _with_gradient(lambda x: ghosts(x, other, vector), x, grad)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    _assert_same_layers(ghosts, plain)
    torch.testing.assert_close(ghosts.eval()(x, other), plain.eval()(x, other), rtol=1e-12, atol=1e-12)


def test_norm_act_drops_before_the_residual_and_scales_what_stays() -> None:
    torch.manual_seed(0)
    layer = convert_ghost_batch_norm(NormAct(4, dropout=0.4, activation=False), 50)
    x = _values(500, 4).float()
    y = layer(x, torch.full((500, 4), 100.0)) - 100.0
    assert (y == 0.0).float().mean().item() == pytest.approx(0.4, abs=0.05)
    whole = convert_ghost_batch_norm(NormAct(4, activation=False), 50)(x) / 0.6
    torch.testing.assert_close(y[y != 0.0], whole[y != 0.0], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not (_HAS_TRITON and _INTERPRETED), reason="runs inside test_interpreter.py")
@pytest.mark.parametrize(("shape", "sizes"), [((7, 16, 2, 3), [4, 3]), ((12, 40), [4] * 3)])
def test_interpreted_norm_act_equals_a_loop_over_chunks(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], sizes: list[int]
) -> None:
    plain = NormAct(shape[1], momentum=0.3)
    nn.init.normal_(plain.weight)
    ghosts = convert_ghost_batch_norm(deepcopy(plain), 4)
    x, grad = _values(*shape).float(), _values(*shape, seed=4).float()
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    expected = _with_gradient(lambda x: _looped(plain, x, sizes), x, grad)
    monkeypatch.setattr(NormAct, "is_fused", lambda layer, x: True)
    actual = _with_gradient(ghosts, x, grad)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert actual[0].stride() == x.stride()
    _assert_same_layers(ghosts, plain, rtol=1e-4)


# --- the conversion ---------------------------------------------------------------------------------------------------


class _Tagged(nn.BatchNorm2d):
    """A user's own, with the inherited forward pass."""

    def __init__(self, num_features: int, tag: str) -> None:
        super().__init__(num_features)
        self.tag = tag


def test_layers_are_converted_in_place_and_stay_what_they_are() -> None:
    calls: list[str] = []
    layers: list[Any] = [nn.BatchNorm1d(3), nn.BatchNorm2d(3).eval(), nn.BatchNorm3d(3), _Tagged(3, "mine"), NormAct(3)]
    kinds = [type(layer) for layer in layers]
    model = nn.ModuleList([*layers, layers[0], nn.GroupNorm(1, 3), nn.InstanceNorm2d(3)])
    layers[0].register_forward_hook(lambda *_: calls.append("hook"))
    names, parameters = model.state_dict().keys(), dict(model.named_parameters())
    assert convert_ghost_batch_norm(model, 4) is model
    for layer, kind in zip(layers, kinds, strict=True):
        assert isinstance(layer, kind)
        assert isinstance(layer, GhostNorm)
        assert "ghost_batch_size=4" in repr(layer)
    assert layers[3].tag == "mine"
    assert (layers[0].training, layers[1].training) == (True, False)
    assert model[5] is layers[0]
    assert model.state_dict().keys() == names
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    layers[0](torch.randn(8, 3))
    assert (calls, int(layers[0].get_buffer("num_batches_tracked"))) == (["hook"], 2)
    convert_ghost_batch_norm(model, 2)  # again: the newer size holds
    layers[0](torch.randn(8, 3))
    assert int(layers[0].get_buffer("num_batches_tracked")) == 6
    assert type(layers[0]) is type(convert_ghost_batch_norm(nn.BatchNorm1d(3), 9))


def test_copies_and_pickles_stay_ghosts() -> None:
    model = convert_ghost_batch_norm(nn.Sequential(nn.BatchNorm2d(3), _Tagged(3, "mine"), NormAct(3).eval()), 4)
    x = torch.randn(8, 3, 2, 2)
    expected = deepcopy(model)(x)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        read = pickle.loads(pickle.dumps(model, protocol))
        assert [type(layer) for layer in read] == [type(layer) for layer in model]
        assert [layer.training for layer in read] == [True, True, False]
        assert torch.equal(read(x), expected)
        assert int(read[0].get_buffer("num_batches_tracked")) == 2


class _NormWithActivation(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class _OtherNormAct(NormAct):
    def forward(self, x: Tensor, residual: Tensor | None = None, residual_bias: Tensor | None = None) -> Tensor:
        return super().forward(x, residual, residual_bias) + 1.0


def _replaced() -> nn.Module:
    layer = nn.BatchNorm1d(3)
    layer.forward = lambda input: input  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (_NormWithActivation(3), "a _NormWithActivation, but that layer replaces the forward pass of BatchNorm1d"),
        (_OtherNormAct(3), "a _OtherNormAct, but that layer replaces the forward pass of NormAct"),
        (_replaced(), "replaces the forward pass of BatchNorm1d"),
        (convert_sync_batch_norm(nn.BatchNorm1d(3), lambda vector: None), "synchronised SyncBatchNorm1d, but that"),
        (convert_sync_batch_norm(NormAct(3), lambda vector: None), "synchronised NormAct, but that takes statistics"),
        (nn.SyncBatchNorm(3), "synchronised SyncBatchNorm, but"),
        (nn.LazyBatchNorm1d(), "LazyBatchNorm1d, but its first pass would turn it into a plain batch norm"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_refused_conversion_has_changed_nothing(layer: nn.Module, sentence: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), layer)
    kind = type(layer)
    with pytest.raises(SettingError, match=sentence):
        convert_ghost_batch_norm(model, 4)
    assert [type(part) for part in model] == [nn.BatchNorm1d, kind]


@pytest.mark.parametrize("size", [1, 0, -3, True, 2.5])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(SettingError, match="one sample has no variance; set 2 or more"):
        convert_ghost_batch_norm(nn.BatchNorm1d(3), size)


def test_a_model_without_batch_norm_is_refused() -> None:
    with pytest.raises(SettingError, match="asked for a Linear, but it has no batch norm"):
        convert_ghost_batch_norm(nn.Linear(3, 3), 4)


def test_synchronisation_leaves_ghosts_alone() -> None:
    def refuse(vector: Tensor) -> None:
        raise AssertionError("a collective")

    ghosts, other = nn.Sequential(nn.BatchNorm1d(3), NormAct(3)), nn.BatchNorm1d(3)
    convert_ghost_batch_norm(ghosts, 4)
    convert_sync_batch_norm(nn.Sequential(ghosts, other), refuse)
    assert isinstance(ghosts[0], GhostBatchNorm)
    assert isinstance(other, SyncBatchNorm)
    ghosts(torch.randn(8, 3))
    assert [int(ghosts.get_buffer(f"{index}.num_batches_tracked")) for index in range(2)] == [2, 2]


def test_a_stand_in_sample_counts_in_no_ghost() -> None:
    model = convert_ghost_batch_norm(nn.Sequential(nn.BatchNorm1d(3), NormAct(3)), 4)
    model(torch.randn(8, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for num_samples in (1, 9):
        x = torch.randn(num_samples, 3) + 1e6
        set_absent(model, True)
        y = model(x)
        set_absent(model, False)
        assert torch.equal(y, deepcopy(model).eval()(x))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].training
    with local_statistics(model):
        model(torch.randn(8, 3))
    assert int(model.get_buffer("1.num_batches_tracked")) == 4


# --- runs -------------------------------------------------------------------------------------------------------------


def _one() -> Workers:
    return Workers(alone(), torch.device("cpu"))


EXACT: dict[str, Any] = {"precision": "fp64", "global_batch_size": 16, "ghost_batch_size": 4}


def _weights_of(workers: Workers, flags: dict[str, Any]) -> Weights:
    parts = build(workers, {"num_train": 48, "dropout": 0.0}, **EXACT, **flags)
    losses = steps(parts, 6)
    assert any(isinstance(layer, GhostNorm) for layer in parts.strategy.module.modules())
    weights = {name: parameter.detach() for name, parameter in parts.strategy.module.named_parameters()}
    return {"losses": torch.tensor(losses), **weights}


def test_ghosts_that_fit_the_shares_train_alike_on_any_number_of_workers(run_ranks: Ranks) -> None:
    expected = _weights_of(_one(), {})
    assert len(set(expected["losses"].tolist())) == 6
    for flags in ({}, {"accumulate": 2}):
        for weights in run_ranks(_weights_of, 2, flags):
            torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)


def test_a_task_without_batch_norm_is_told_so() -> None:
    with pytest.raises(SettingError, match="it has no batch norm"):
        build(_one(), {"norm": False}, **EXACT)


def _own_loop(workers: Workers, num_samples: int, has_places: bool) -> tuple[Weights, Weights]:
    world = world_of(workers)
    model: nn.Module
    model, optimizer = make()
    if has_places:  # a ghost of a single sample needs several values for each channel
        model = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3), nn.Flatten())
        model.append(nn.Linear(9, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert_ghost_batch_norm(model, 2)
    world.wrap(model, optimizer)  # which synchronises any other batch norm
    assert all(isinstance(layer, GhostNorm) for layer in model.modules() if isinstance(layer, nn.BatchNorm1d))
    for x, y in world.loader(DataLoader(data(num_samples), batch_size=8)):
        optimizer.zero_grad()
        world.backward(mse_loss(model(x), y))
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, dict(model.named_buffers())


def test_a_wrapped_model_keeps_its_ghosts_and_has_the_same_statistics_everywhere(run_ranks: Ranks) -> None:
    expected, _ = _own_loop(_one(), 32, False)
    answers = run_ranks(_own_loop, 2, 32, False)
    for weights, statistics in answers:
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-10)
        assert all(torch.equal(value, answers[0][1][name]) for name, value in statistics.items())


def test_a_worker_without_a_sample_leaves_the_statistics_to_the_others(run_ranks: Ranks) -> None:
    expected, _ = _own_loop(_one(), 33, True)
    answers = run_ranks(_own_loop, 2, 33, True)
    for weights, _ in answers:
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-10)
    counts = [int(statistics["2.num_batches_tracked"]) for _, statistics in answers]
    assert sorted(counts) == [4 * 2, 4 * 2 + 1]  # the last batch is one sample, and one worker's
