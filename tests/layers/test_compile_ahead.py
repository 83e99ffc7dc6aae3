"""No device is needed: triton is given a stand-in for its driver, and mostly one for its compiler."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stormo.layers.compile_ahead import compile_ahead, compile_calls, needed_calls
from stormo.layers.kernel_calls import KernelCall, recorded_calls
from stormo.layers.max_pool import MaxPool2x2
from stormo.layers.norm_act import NormAct
from stormo.layers.sync_batch_norm import convert_sync_batch_norm

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(not _HAS_TRITON or _INTERPRETED, reason="needs the package triton's compiler")
needs_cuda = pytest.mark.skipif(
    not (_HAS_TRITON and torch.cuda.is_available()), reason="needs a CUDA device and the package triton"
)


class _Model(nn.Module):
    """A layer of each kind, called in each way the library knows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.dropping, self.adding = NormAct(16), NormAct(160, dropout=0.01), NormAct(160)
        self.pool, self.odd = MaxPool2x2(), NormAct(33)


class _Driver:
    """What triton asks about a device before it compiles: here a Hopper GPU that is not there."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _kernels() -> list[Any]:
    from stormo.layers import fused_pool, norm_kernels

    names = ("statistics", "finish_statistics", "apply", "gradient_sums", "finish_gradients", "input_gradient")
    pools = (fused_pool.max_pool_kernel, fused_pool.max_pool_gradient_kernel)
    return [*(getattr(norm_kernels, f"{name}_kernel") for name in names), *pools]


@pytest.fixture
def _no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", _Driver())
    for kernel in _kernels():
        kernel.device_caches.clear()
    yield
    for kernel in _kernels():
        kernel.device_caches.clear()  # what a stand-in compiled is of no use to anyone else


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, _no_device: None) -> list[str]:
    """The names of the kernels compiled so far, by a compiler that does nothing else."""
    import triton.compiler

    names: list[str] = []

    def compile_nothing(source: Any, **options: Any) -> object:
        names.append(source.fn.fn.__name__)
        return object()

    monkeypatch.setattr(triton.compiler, "compile", compile_nothing)
    return names


def _calls_of_a_step(model: _Model, dtype: torch.dtype, shape: tuple[int, int], training: bool) -> list[KernelCall]:
    """The calls that steps of this size make, in training with their backward passes."""
    from stormo.layers import fused_norm, fused_pool

    num_images, side = shape

    def images(num_channels: int) -> torch.Tensor:
        x = torch.randn(num_images, num_channels, side, side).to(dtype)
        return x.contiguous(memory_format=torch.channels_last).requires_grad_()

    def norm(layer: NormAct, residual: bool, bias: bool) -> torch.Tensor:
        reduce = layer.reduce if training else None
        return fused_norm.norm_act(
            images(layer.num_channels),
            images(layer.num_channels) if residual else None,
            layer.weight,
            layer.bias,
            layer.running_mean,
            layer.running_var,
            training=training,
            momentum=layer.momentum,
            eps=layer.eps,
            dropout=layer.dropout,
            activation=layer.activation,
            residual_bias=nn.Parameter(torch.zeros(layer.num_channels)) if bias else None,
            num_batches_tracked=layer.num_batches_tracked,
            reduce=reduce,
        )

    with recorded_calls() as calls:
        results = [
            norm(model.stem, False, False),
            norm(model.dropping, False, False),
            norm(model.adding, True, False),
            norm(model.adding, True, True),
            norm(model.odd, True, False),
            fused_pool.max_pool(images(160)),
        ]
        for result in results if training else ():
            result.sum().backward()
    return calls


def _look_up(calls: list[KernelCall]) -> None:
    """What a launch does before it launches: look the kernel up, compile it if it is not there."""
    for call in calls:
        call.kernel.warmup(*call.operands, grid=call.grid, **call.settings)


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "synchronised", "shape"),
    [(torch.bfloat16, False, (2, 2)), (torch.bfloat16, False, (17, 28)), (torch.float32, True, (17, 28))],
)
def test_steps_find_every_kernel_compiled(
    dtype: torch.dtype, synchronised: bool, shape: tuple[int, int], compiled: list[str]
) -> None:
    model = _Model()
    if synchronised:
        convert_sync_batch_norm(model, lambda vector: None)
    num_kernels, obstacle = compile_calls(needed_calls(model, dtype), None)
    assert obstacle is None
    assert num_kernels == len(compiled)
    before = list(compiled)
    _look_up(_calls_of_a_step(model, dtype, shape, training=True))
    _look_up(_calls_of_a_step(model, dtype, shape, training=False))
    assert compiled == before
    # And the other way round: the test would notice a specialisation that was not foreseen.
    other = torch.float16
    _look_up(_calls_of_a_step(model, other, shape, training=True))
    assert len(compiled) > len(before)


@needs_triton
def test_each_specialisation_is_compiled_once_and_none_in_vain(compiled: list[str]) -> None:
    model = nn.Sequential(NormAct(16), NormAct(160, dropout=0.01), NormAct(320), NormAct(640), MaxPool2x2())
    compile_calls(needed_calls(model, torch.bfloat16), None)
    counts = {name: compiled.count(name) for name in set(compiled)}
    assert counts == {
        "statistics_kernel": 1,
        "finish_statistics_kernel": 1,
        "apply_kernel": 4,  # no residual, a residual, a residual with bias; dropout without a residual
        "gradient_sums_kernel": 3,
        "finish_gradients_kernel": 2,
        "input_gradient_kernel": 2,
        "max_pool_kernel": 1,
        "max_pool_gradient_kernel": 1,
    }


@needs_triton
def test_parameters_at_odd_addresses_are_compiled_as_such(compiled: list[str]) -> None:
    model = _Model()
    flat = torch.zeros(161)
    model.adding.weight = nn.Parameter(flat[1:])
    assert model.adding.weight.data_ptr() % 16 == 4
    compile_calls(needed_calls(model, torch.bfloat16), None)
    before = len(compiled)
    _look_up(_calls_of_a_step(model, torch.bfloat16, (4, 4), training=True))
    assert len(compiled) == before


@needs_triton
def test_noting_moves_no_state() -> None:
    model = _Model()
    convert_sync_batch_norm(model, lambda vector: pytest.fail("no collective may run"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch.no_grad():
        assert needed_calls(model, torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@needs_triton
@pytest.mark.usefixtures("_no_device")
def test_a_kernel_that_does_not_compile_is_reported_and_the_others_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import triton.compiler
    from triton.runtime import _async_compile

    def fail_at_pools(source: Any, **options: Any) -> object:
        if "pool" in source.fn.fn.__name__:
            raise RuntimeError("no pools today")
        return object()

    monkeypatch.setattr(triton.compiler, "compile", fail_at_pools)
    calls = needed_calls(_Model(), torch.bfloat16)
    num_kernels, obstacle = compile_calls(calls, None)
    assert obstacle == "RuntimeError: no pools today"
    assert num_kernels > 10
    assert _async_compile.active_mode.get() is None  # later launches compile as always


@needs_triton
@pytest.mark.usefixtures("_no_device")
def test_no_garbage_is_collected_while_threads_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.compiler

    collecting: list[bool] = []

    def compile_one(source: Any, **options: Any) -> object:
        collecting.append(gc.isenabled())
        if len(collecting) == 1:
            raise RuntimeError("also after an error")
        return object()

    monkeypatch.setattr(triton.compiler, "compile", compile_one)
    assert gc.isenabled()
    compile_calls(needed_calls(_Model(), torch.bfloat16), None)
    assert collecting
    assert not any(collecting)
    assert gc.isenabled()


@needs_triton
@pytest.mark.usefixtures("_no_device")
def test_real_compiler_takes_the_kernels_for_hopper_with_16_byte_accesses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        get_ptxas(90)
    except RuntimeError:
        pytest.skip("this triton brings no assembler for NVIDIA devices")
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    model = nn.Sequential(NormAct(32, dropout=0.1), MaxPool2x2())
    # Of each kernel the last, which has the most in it: dropout, a residual and its bias.
    calls = {call.kernel: call for call in needed_calls(model, torch.bfloat16) if call.settings.get("DROPOUT", True)}
    assert set(calls) == set(_kernels())
    num_kernels, obstacle = compile_calls(list(calls.values()), None)
    assert obstacle is None
    assert num_kernels == len(calls)
    for call in calls.values():
        name = call.kernel.fn.__name__
        text = call.kernel.warmup(*call.operands, grid=call.grid, **call.settings).asm["ptx"]
        assert name.startswith("finish") or "ld.global.v4" in text, name
        assert "pool" not in name or text.count("ld.global") == text.count("ld.global.v4"), name
        if name in ("apply_kernel", "input_gradient_kernel", "max_pool_kernel", "max_pool_gradient_kernel"):
            assert text.count("st.global") == text.count("st.global.v4"), name


def test_what_cannot_be_compiled_is_said_not_raised() -> None:
    cpu = torch.device("cpu")
    assert compile_ahead(nn.Linear(2, 2), torch.float32, cpu) == (0, None)
    obstacle = "the fused kernels are for CUDA and the device is cpu"
    assert compile_ahead(nn.Sequential(NormAct(3)), torch.float32, cpu) == (0, obstacle)


@pytest.mark.gpu
@needs_cuda
def test_gpu_steps_compile_nothing_after_compile_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    from stormo.tasks.wide_resnet import WideResNet

    model = WideResNet(width=2).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    num_kernels, obstacle = compile_ahead(model, torch.bfloat16, torch.device("cuda"))
    assert obstacle is None
    assert num_kernels > 10
    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts["repr"]))
    images = torch.rand(8, 1, 28, 28, device="cuda")
    for training in (True, False):
        model.train(training)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(images)
        if training:
            logits.float().sum().backward()
    assert compiled == []
