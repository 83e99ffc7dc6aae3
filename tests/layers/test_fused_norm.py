"""The norm kernels against float64, in Triton's interpreter and, marked `gpu`, on a device."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from stormo.layers.norm_act import NormAct, add_residual, plain_norm_act
from stormo.layers.sync_batch_norm import SyncNorm

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_HAS_TRITON = importlib.util.find_spec("triton") is not None

interpreted = pytest.mark.skipif(not (_HAS_TRITON and _INTERPRETED), reason="runs inside test_interpreter.py")
needs_cuda = pytest.mark.skipif(
    not (_HAS_TRITON and torch.cuda.is_available()), reason="needs a CUDA device and the package triton"
)
LEAVES = ("x", "residual", "residual_bias", "weight", "bias")
SETTINGS: dict[str, Any] = {"momentum": 0.2, "eps": 1e-5, "activation": True, "dropout": 0.0, "training": True}


def _case(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", offset: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    num_channels = shape[1]

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    def large() -> Tensor:
        values = (normal(*shape) + offset).to(device, dtype)
        return values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values

    return {
        "x": large(),
        "residual": large(),
        "grad": large(),
        "weight": (1.0 + 0.3 * normal(num_channels)).to(device),
        "bias": (0.3 * normal(num_channels)).to(device),
        "residual_bias": normal(num_channels).to(device),
        "running_mean": normal(num_channels).to(device),
        "running_var": normal(num_channels).square().add(0.5).to(device),
    }


def _run(
    function: Any,
    case: dict[str, Tensor],
    *,
    residual: bool,
    wide: bool,
    residual_bias: bool = False,
    **settings: Any,
) -> dict[str, Tensor]:
    """Forward and backward; `wide` computes in float64 on the same values."""
    tensors = {name: value.double() if wide else value.clone() for name, value in case.items()}
    leaves = {name: tensors[name].detach().requires_grad_() for name in LEAVES}
    if residual_bias:
        settings["residual_bias"] = leaves["residual_bias"]
    y = function(
        leaves["x"],
        leaves["residual"] if residual else None,
        leaves["weight"],
        leaves["bias"],
        tensors["running_mean"],
        tensors["running_var"],
        **settings,
    )
    y.backward(tensors["grad"])
    results = {"y": y.detach(), "running_mean": tensors["running_mean"], "running_var": tensors["running_var"]}
    results |= {f"grad_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return results


def _assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = (actual[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-30)
        assert error < tolerance, f"{name}: relative error {error:.2e}"  # NaN fails too


def _check(case: dict[str, Tensor], *, residual: bool, tolerance: float, **changes: Any) -> None:
    from stormo.layers.fused_norm import norm_act

    settings = SETTINGS | changes  # with `residual_bias` among them, if it is to be there
    actual = _run(norm_act, case, residual=residual, wide=False, **settings)
    _assert_close(actual, _run(plain_norm_act, case, residual=residual, wide=True, **settings), tolerance)
    assert actual["y"].dtype == case["x"].dtype
    assert actual["y"].stride() == case["x"].stride()


# More rows than one tile (128), tails in both directions, channel counts that are odd, below and above a block of 32.
SHAPES = [(9, 16, 5, 5), (140, 96), (3, 7, 11, 13), (2, 33, 4, 4), (2, 1, 3, 3), (6, 40, 1, 1)]


@interpreted
@pytest.mark.parametrize(("shape", "residual"), list(zip(SHAPES, [False, True] * 3, strict=True)))
def test_interpreted_float32_equals_float64_torch(shape: tuple[int, ...], residual: bool) -> None:
    _check(_case(shape, torch.float32), residual=residual, tolerance=2e-6)


@interpreted
@pytest.mark.parametrize(
    ("shape", "residual", "training"),
    [((140, 40), True, True), ((3, 7, 5, 13), False, True), ((3, 7, 5, 13), True, False)],
)
def test_interpreted_residual_bias_and_its_gradient_equal_float64_torch(
    shape: tuple[int, ...], residual: bool, training: bool
) -> None:
    _check(_case(shape, torch.float32), residual=residual, residual_bias=True, training=training, tolerance=2e-6)


@interpreted
def test_interpreted_residual_bias_takes_the_gradient_without_masks() -> None:
    from stormo.layers.fused_norm import norm_act

    case = _case((6, 40, 5, 5), torch.bfloat16)
    settings = SETTINGS | {"dropout": 0.5}
    actual = _run(norm_act, case, residual=True, residual_bias=True, wide=False, **settings)
    expected = case["grad"].double().sum((0, 2, 3))
    torch.testing.assert_close(actual["grad_residual_bias"].double(), expected, rtol=1e-6, atol=1e-4)
    assert actual["grad_residual_bias"].dtype == torch.float32


@interpreted
def test_interpreted_frozen_residual_bias_is_added_and_takes_no_gradient() -> None:
    from stormo.layers.fused_norm import norm_act

    case = _case((4, 16, 5, 5), torch.float32)
    expected = _run(plain_norm_act, case, residual=True, residual_bias=True, wide=True, **SETTINGS)
    del expected["grad_residual_bias"]

    def frozen(*operands: Any, residual_bias: Tensor, **settings: Any) -> Tensor:
        return norm_act(*operands, **settings, residual_bias=residual_bias.detach())

    _assert_close(_run(frozen, case, residual=True, residual_bias=True, wide=False, **SETTINGS), expected, 2e-6)


@interpreted
def test_interpreted_tile_shapes_change_neither_results_nor_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    from stormo.layers.fused_norm import norm_act
    from stormo.layers.norm_tiles import TILES, Tile

    case, settings = _case((70, 80), torch.bfloat16), SETTINGS | {"dropout": 0.3}
    torch.manual_seed(5)
    expected = _run(norm_act, case, residual=True, residual_bias=True, wide=False, **settings)
    for width, num_stages in ((16, 1), (64, 3)):
        tile = Tile(block_rows=64, block_channels=width, num_warps=8, programs_per_sm=32, num_stages=num_stages)
        for name in TILES:
            monkeypatch.setitem(TILES, name, tile)
        torch.manual_seed(5)
        actual = _run(norm_act, case, residual=True, residual_bias=True, wide=False, **settings)
        _assert_close(actual, expected, 2e-3)
        assert torch.equal(actual["y"] == 0, expected["y"] == 0)


@interpreted
@pytest.mark.parametrize(("dtype", "activation"), [(torch.bfloat16, False), (torch.float16, True)])
def test_interpreted_half_precision_is_rounded_once(dtype: torch.dtype, activation: bool) -> None:
    _check(_case((4, 24, 6, 6), dtype), residual=True, activation=activation, tolerance=4e-3)


@interpreted
@pytest.mark.parametrize("residual", [False, True])
def test_interpreted_evaluation_uses_and_keeps_the_running_statistics(residual: bool) -> None:
    _check(_case((4, 24, 6, 6), torch.float32), residual=residual, training=False, dropout=0.5, tolerance=2e-6)


@interpreted
def test_interpreted_variance_survives_a_mean_far_from_zero() -> None:
    case = _case((40, 16, 4, 4), torch.float32, offset=3000.0)
    _check(case, residual=False, tolerance=2e-3)  # naive float32 sums of squares are wrong by more than 1 here


@interpreted
def test_interpreted_nan_is_not_hidden_by_the_activation() -> None:
    from stormo.layers.fused_norm import norm_act

    case = _case((8, 16), torch.float32)
    case["x"][3, 5] = float("nan")
    y = _run(norm_act, case, residual=False, wide=False, **SETTINGS)["y"]
    assert y[:, 5].isnan().all()
    assert not y[:, :5].isnan().any()


@interpreted
def test_interpreted_batches_are_counted() -> None:
    from stormo.layers.fused_norm import norm_act

    case, num_batches = _case((64, 160), torch.float32), torch.tensor(6)
    del case["grad"]
    norm_act(*_operands(case), **SETTINGS, num_batches_tracked=num_batches)
    assert num_batches.item() == 7


def _operands(case: dict[str, Tensor]) -> list[Any]:
    names = ("weight", "bias", "running_mean", "running_var")
    return [case["x"], None, *(case[name] for name in names)]


@interpreted
@pytest.mark.parametrize(("shape", "dtype"), [((140, 40), torch.bfloat16), ((2, 33, 9, 9), torch.float32)])
def test_interpreted_dropout_has_one_mask_in_both_directions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _check_dropout(_case(shape, dtype), dropout=0.3)


def _check_dropout(case: dict[str, Tensor], dropout: float) -> None:
    from stormo.layers.fused_norm import norm_act

    settings = SETTINGS | {"activation": False, "dropout": dropout}
    torch.manual_seed(5)
    actual = _run(norm_act, case, residual=False, wide=False, **settings)
    torch.manual_seed(5)
    again = _run(norm_act, case, residual=False, wide=False, **settings)
    assert all(torch.equal(actual[name], again[name]) for name in actual)  # the seed is torch's, the sums repeatable
    other = _run(norm_act, case, residual=False, wide=False, **settings)
    keep = actual["y"] != 0
    assert not torch.equal(keep, other["y"] != 0)

    num = keep.numel()
    deviation = (dropout * (1 - dropout) / num) ** 0.5
    assert abs(keep.double().mean().item() - (1 - dropout)) < 4 * deviation + 2**-16
    # Neighbours in a row share one call of the generator, and rows differ in one counter: neither may be correlated.
    rows = keep.movedim(1, -1).flatten(0, -2).double() - (1 - dropout)
    for left, right in ((rows[:, :-1], rows[:, 1:]), (rows[:-1], rows[1:])):
        correlation = (left * right).mean().item() / (dropout * (1 - dropout))
        assert abs(correlation) < 5 / num**0.5

    # The same function in float64 with the forward pass's mask: its gradients are right only if the masks agree.
    scale = (actual["y"].double() / _plain_wide(case)["y"])[keep].median()
    assert abs(scale.item() * (1 - dropout) - 1) < (1e-4 if case["x"].dtype == torch.float32 else 1e-2)
    masked = dict(case) | {"grad": case["grad"].double() * keep * scale}
    expected = _plain_wide(masked)
    tolerance = 1e-5 if case["x"].dtype == torch.float32 else 4e-3
    names = ("grad_x", "grad_weight", "grad_bias")
    _assert_close({n: actual[n] for n in names}, {n: expected[n] for n in names}, tolerance)


def _plain_wide(case: dict[str, Tensor]) -> dict[str, Tensor]:
    return _run(plain_norm_act, case, residual=False, wide=True, **(SETTINGS | {"activation": False}))


@interpreted
@pytest.mark.parametrize(
    ("dropout", "threshold"), [(0.0, 0), (1e-9, 1), (0.01, 655), (0.3, 19661), (0.5, 32768), (0.999999, 65535)]
)
def test_interpreted_scale_makes_up_for_the_rounded_probability(dropout: float, threshold: int) -> None:
    from stormo.layers.fused_norm import _Mask

    mask = _Mask.of(dropout, True)
    assert mask.threshold == threshold
    assert mask.keep_scale * (65536 - threshold) == pytest.approx(65536, rel=1e-12)
    seed = mask.draw_seed(torch.device("cpu"))
    assert (seed is not None) is (dropout > 0.0)


@interpreted
@pytest.mark.parametrize(("absent", "residual_bias"), [(False, True), (True, False)])
def test_interpreted_global_statistics_equal_the_plain_function(absent: bool, residual_bias: bool) -> None:
    from stormo.layers.fused_norm import norm_act

    case = _case((5, 40, 6, 6), torch.float32)
    elsewhere = _case((3, 40, 6, 6), torch.float64, offset=-2.0)["x"].movedim(1, 0).flatten(1)
    calls: list[int] = []

    def add_other_rank(vector: Tensor) -> None:
        assert vector.dtype == torch.float64
        calls.append(len(vector))
        if len(vector) == 81:
            count = torch.tensor([float(elsewhere.shape[1])], dtype=torch.float64)
            vector += torch.cat((count, elsewhere.sum(1), elsewhere.square().sum(1)))
        else:
            vector += torch.linspace(-1.0, 2.0, 80, dtype=torch.float64)

    def fused(*operands: Any, **settings: Any) -> Tensor:
        return norm_act(*operands, **settings, reduce=add_other_rank, absent=absent)

    def plain(
        x: Tensor, residual: Tensor, *rest: Tensor, residual_bias: Tensor | None = None, **settings: Any
    ) -> Tensor:
        y: Tensor = SyncNorm.apply(x, *rest, None, settings["momentum"], settings["eps"], add_other_rank, absent)  # type: ignore[no-untyped-call]
        return add_residual(y.relu(), residual, residual_bias)

    actual = _run(fused, case, residual=True, residual_bias=residual_bias, wide=False, **SETTINGS)
    expected = _run(plain, case, residual=True, residual_bias=residual_bias, wide=True, **SETTINGS)
    assert calls == [81, 80, 81, 80]  # one collective each way
    _assert_close(actual, expected, 2e-6)


@interpreted
def test_interpreted_residual_of_another_dtype_or_layout_is_added_by_torchs_rules() -> None:
    from stormo.layers.fused_norm import norm_act

    case = _case((4, 16, 5, 5), torch.bfloat16)
    operands = _operands(case)
    operands[1] = torch.randn(1, 16, 1, 1)
    y = norm_act(*operands, **SETTINGS)
    operands[1] = None
    expected = norm_act(*operands, **SETTINGS)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y - expected, (y - expected)[:1, :, :1, :1].expand_as(y), rtol=1e-4, atol=1e-4)
    operands[1] = torch.randn(4, 16, 5, 5, dtype=torch.bfloat16)  # not channels_last
    y = norm_act(*operands, **SETTINGS, residual_bias=case["residual_bias"])
    torch.testing.assert_close(y, add_residual(expected, operands[1], case["residual_bias"]), rtol=0.0, atol=0.0)


@interpreted
def test_interpreted_residual_gets_its_gradient_in_the_layout_of_the_layer() -> None:
    from stormo.layers.fused_norm import norm_act

    case, seen = _case((4, 16, 5, 5), torch.float32), []
    operands = _operands(case)
    operands[1] = case["residual"].requires_grad_() * 1
    operands[1].register_hook(seen.append)
    grad = torch.randn(4, 16, 5, 5, generator=torch.Generator().manual_seed(0))  # not channels_last
    norm_act(*operands, **SETTINGS).backward(grad)
    assert torch.equal(seen[0], grad)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [*SHAPES, (64, 160, 28, 28), (65, 320, 14, 14), (64, 640, 7, 7)])
@pytest.mark.parametrize("residual", [False, True])
def test_gpu_kernels_equal_float64_torch(shape: tuple[int, ...], dtype: torch.dtype, residual: bool) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    _check(_case(shape, dtype, "cuda"), residual=residual, tolerance=tolerance)
    _check(_case(shape, dtype, "cuda"), residual=residual, training=False, tolerance=tolerance)
    _check(_case(shape, dtype, "cuda"), residual=residual, residual_bias=True, tolerance=tolerance)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(16, 160, 28, 28), (10, 33, 10, 10)])
def test_gpu_dropout_has_one_mask_in_both_directions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _check_dropout(_case(shape, dtype, "cuda"), dropout=0.3)


@pytest.mark.gpu
@needs_cuda
def test_gpu_captured_layer_is_fused_and_every_replay_has_another_mask() -> None:
    layer = NormAct(32, dropout=0.5, activation=False).cuda()
    x = torch.randn(64, 32, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert layer.is_fused(x)
        y = layer(x)
        y.backward(torch.ones_like(y))
    assert x.grad is not None
    torch.manual_seed(1)
    masks, gradients = [], []
    for _ in range(3):
        graph.replay()
        masks.append((y == 0).clone())
        gradients.append(x.grad.clone())
    torch.manual_seed(1)
    graph.replay()
    assert torch.equal(y == 0, masks[0])
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])
    assert not torch.equal(gradients[0], gradients[1])
    assert all(abs(mask.float().mean().item() - 0.5) < 0.05 for mask in masks)


@pytest.mark.gpu
@needs_cuda
def test_gpu_layer_under_autocast_is_fused_and_keeps_bfloat16() -> None:
    layer = NormAct(32, dropout=0.1).cuda()
    conv = torch.nn.Conv2d(3, 32, 3).cuda()
    images = torch.randn(8, 3, 12, 12, device="cuda").contiguous(memory_format=torch.channels_last)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        hidden = conv(images)
        assert layer.is_fused(hidden)
        y = layer(hidden, residual=hidden)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert layer.num_batches_tracked.item() == 1


@pytest.mark.gpu
@needs_cuda
def test_gpu_tensors_beyond_two_to_the_31_elements_are_indexed_right() -> None:
    num_rows, num_channels = 2**26 + 5, 32
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free device memory")
    from stormo.layers.fused_norm import norm_act

    x = torch.randn(num_rows, num_channels, device="cuda", dtype=torch.bfloat16)
    ones, zeros = torch.ones(num_channels, device="cuda"), torch.zeros(num_channels, device="cuda")
    y = norm_act(x, None, ones, zeros, zeros.clone(), ones.clone(), **SETTINGS)
    torch.testing.assert_close(y[-1000:], x[-1000:].relu(), rtol=2e-2, atol=2e-2)
