"""The kernels against float64, in Triton's interpreter (a process of its own, as Triton reads its mode at import)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from stormo.layers.norm_act import NormAct, plain_norm_act
from stormo.layers.sync_batch_norm import SyncNorm

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_HAS_TRITON = importlib.util.find_spec("triton") is not None

needs_triton = pytest.mark.skipif(not _HAS_TRITON, reason="the package triton is not installed")
interpreted = pytest.mark.skipif(
    not (_HAS_TRITON and _INTERPRETED), reason="runs inside test_kernels_are_right_in_the_interpreter"
)
needs_cuda = pytest.mark.skipif(
    not (_HAS_TRITON and torch.cuda.is_available()), reason="needs a CUDA device and the package triton"
)
SETTINGS: dict[str, Any] = {"momentum": 0.2, "eps": 1e-5, "activation": True, "dropout": 0.0, "training": True}


@pytest.fixture(autouse=True)
def _interpreter_takes_new_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy 2.4 no longer makes an int of an array of one element, which Triton 3.6's interpreter asks of it."""
    if not (_HAS_TRITON and _INTERPRETED):
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


@needs_triton
@pytest.mark.skipif(_INTERPRETED, reason="this is the interpreter's own process")
def test_kernels_are_right_in_the_interpreter() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-W",
            "error",
            "-p",
            "no:cacheprovider",
            "-k",
            "interpreted",
            __file__,
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


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
        "running_mean": normal(num_channels).to(device),
        "running_var": normal(num_channels).square().add(0.5).to(device),
    }


def _run(function: Any, case: dict[str, Tensor], *, residual: bool, wide: bool, **settings: Any) -> dict[str, Tensor]:
    """Forward and backward; `wide` computes in float64 on the same values."""
    tensors = {name: value.double() if wide else value.clone() for name, value in case.items()}
    leaves = {name: tensors[name].detach().requires_grad_() for name in ("x", "residual", "weight", "bias")}
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

    settings = SETTINGS | changes
    actual = _run(norm_act, case, residual=residual, wide=False, **settings)
    _assert_close(actual, _run(plain_norm_act, case, residual=residual, wide=True, **settings), tolerance)
    assert actual["y"].dtype == case["x"].dtype
    assert actual["y"].stride() == case["x"].stride()


# More rows than one tile (128), tails in both directions, channel counts that are odd, below and above a block of 32.
SHAPES = [(9, 16, 5, 5), (300, 160), (3, 7, 11, 13), (2, 33, 4, 4), (2, 1, 3, 3), (6, 40, 1, 1)]


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("residual", [False, True])
def test_interpreted_float32_equals_float64_torch(shape: tuple[int, ...], residual: bool) -> None:
    _check(_case(shape, torch.float32), residual=residual, tolerance=2e-6)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [False, True])
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1000, 40), (3, 33, 11, 11)])
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
def test_interpreted_dropout_probability_is_exact_over_calls() -> None:
    from stormo.layers.fused_norm import _Mask

    torch.manual_seed(0)
    masks = [_Mask.draw(0.01, True) for _ in range(4000)]
    assert {mask.threshold for mask in masks} == {655, 656}  # 0.01 · 65536 = 655.36
    mean = sum(mask.threshold for mask in masks) / len(masks)
    assert abs(mean - 655.36) < 4 * (0.36 * 0.64 / len(masks)) ** 0.5
    assert all(mask.keep_scale * (65536 - mask.threshold) == pytest.approx(65536) for mask in masks)


@interpreted
@pytest.mark.parametrize("absent", [False, True])
def test_interpreted_global_statistics_equal_the_plain_function(absent: bool) -> None:
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
        return norm_act(*operands, **settings, reduce_stats=add_other_rank, reduce_grads=add_other_rank, absent=absent)

    def plain(x: Tensor, residual: Tensor, *rest: Tensor, **settings: Any) -> Tensor:
        y: Tensor = SyncNorm.apply(x, *rest, settings["momentum"], settings["eps"], add_other_rank, absent)  # type: ignore[no-untyped-call]
        return y.relu() + residual

    actual = _run(fused, case, residual=True, wide=False, **SETTINGS)
    expected = _run(plain, case, residual=True, wide=True, **SETTINGS)
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


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [*SHAPES, (64, 160, 28, 28), (65, 320, 14, 14), (64, 640, 7, 7)])
@pytest.mark.parametrize("residual", [False, True])
def test_gpu_kernels_equal_float64_torch(shape: tuple[int, ...], dtype: torch.dtype, residual: bool) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    _check(_case(shape, dtype, "cuda"), residual=residual, tolerance=tolerance)
    _check(_case(shape, dtype, "cuda"), residual=residual, training=False, tolerance=tolerance)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(16, 160, 28, 28), (10, 33, 10, 10)])
def test_gpu_dropout_has_one_mask_in_both_directions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _check_dropout(_case(shape, dtype, "cuda"), dropout=0.3)


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
