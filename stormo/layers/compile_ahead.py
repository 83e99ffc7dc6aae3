# mypy: disable-error-code="import-untyped, import-not-found, attr-defined, unused-ignore"
"""Compiles the fused kernels that a model will need before its first step, all at once.

The layers run on small tensors with their kernel calls recorded instead of launched, so what is compiled is what a step
looks up. Nothing is launched and no random state changes.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from stormo.layers.kernel_calls import KernelCall, recorded_calls
from stormo.layers.max_pool import MaxPool2x2
from stormo.layers.norm_act import FUSED_DTYPES, NormAct, fused_obstacle

_MAX_THREADS = 16


def compile_ahead(model: nn.Module, dtype: torch.dtype, device: torch.device) -> tuple[int, str | None]:
    """Compile and load every kernel for the model's `NormAct` and `MaxPool2x2` layers, in parallel threads.

    `dtype` is that of the activations (autocast's, say). Returns the number of compiled kernels, and why not more; the
    others are compiled when a step first calls them.
    """
    if not any(isinstance(layer, NormAct | MaxPool2x2) for layer in model.modules()):
        return 0, None
    obstacle = fused_obstacle(device)
    if obstacle is None and dtype not in FUSED_DTYPES:
        obstacle = f"the fused kernels do not compute in {dtype}"
    if obstacle is not None:
        return 0, obstacle
    try:
        with torch.cuda.device(device):
            # In a context of its own: an error inside leaves triton's asynchronous mode switched on.
            context = contextvars.copy_context()
            return context.run(compile_calls, needed_calls(model, dtype), device)
    except Exception as error:  # whatever this triton cannot do ahead, it does or reports at the first call
        return 0, f"{type(error).__name__}: {error}"


def needed_calls(model: nn.Module, dtype: torch.dtype) -> list[KernelCall]:
    """The kernel calls of all fused layers.

    Only a step knows which norm layers add a residual: those with dropout are taken for layers inside a block, without
    one, and the others are compiled for both.
    """
    norms: dict[tuple[Any, ...], NormAct] = {}
    has_pool = False
    num_channels: set[int] = set()
    for layer in model.modules():
        has_pool = has_pool or isinstance(layer, MaxPool2x2)
        if isinstance(layer, NormAct) and all(t.dtype == torch.float32 for t in _tensors(layer)[:4]):
            offsets = [tensor.data_ptr() % 16 for tensor in _tensors(layer)]
            numbers = (type(layer.momentum), type(layer.eps))
            num_channels.add(layer.num_channels)
            key = (layer.num_channels, layer.dropout > 0.0, layer.reduce is None, *offsets, *numbers)
            norms.setdefault(key, layer)
    # Recording draws masks from the CPU's generator, whose state must not change.
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), recorded_calls() as calls:
        for layer in norms.values():
            for in_training in (True, False):
                _record_norm(layer, dtype, in_training)
        # A pool's own channels are not known to it: those of the norms around it are the best guess there is.
        for channels in sorted(num_channels) if has_pool else ():
            _record_pool(channels, dtype)
    return calls


def _tensors(layer: NormAct) -> list[Tensor]:
    return [layer.weight, layer.bias, layer.running_mean, layer.running_var, layer.num_batches_tracked]


def _stand_in(tensor: Tensor) -> Tensor:
    """Zeros at the same address modulo 16: kernels are compiled either for such addresses or for any."""
    offset = tensor.data_ptr() % 16 // tensor.element_size()
    return torch.zeros(offset + tensor.numel(), dtype=tensor.dtype)[offset:].view(tensor.shape)


def _activations(num_channels: int, dtype: torch.dtype) -> Tensor:
    # The number of images and their sides change a grid, not a kernel. On the CPU rather than the meta device, whose
    # arithmetic imports torch.compile's machinery: seconds.
    x = torch.zeros(2, num_channels, 2, 2, dtype=dtype).contiguous(memory_format=torch.channels_last)
    return x.requires_grad_()


def _record_norm(layer: NormAct, dtype: torch.dtype, in_training: bool) -> None:
    from stormo.layers.fused_norm import norm_act

    weight, bias, running_mean, running_var, num_batches_tracked = map(_stand_in, _tensors(layer))
    weight.requires_grad_()
    bias.requires_grad_()
    reduce = (lambda vector: None) if in_training and layer.reduce is not None else None
    other = _activations(layer.num_channels, dtype)
    other_bias = torch.zeros(layer.num_channels).requires_grad_()
    residuals = ((other, None), (other, other_bias)) if layer.dropout == 0.0 else ()
    for residual, residual_bias in ((None, None), *residuals):
        y = norm_act(
            _activations(layer.num_channels, dtype),
            residual,
            weight,
            bias,
            running_mean,
            running_var,
            training=in_training,
            momentum=layer.momentum,
            eps=layer.eps,
            dropout=layer.dropout,
            activation=layer.activation,
            residual_bias=residual_bias,
            num_batches_tracked=num_batches_tracked,
            reduce=reduce,
        )
        if in_training:
            y.sum().backward()  # as a loss does; an explicit gradient makes torch import sympy: a second


def _record_pool(num_channels: int, dtype: torch.dtype) -> None:
    from stormo.layers.fused_pool import max_pool

    max_pool(_activations(num_channels, dtype)).sum().backward()


def compile_calls(calls: Sequence[KernelCall], device: torch.device | None) -> tuple[int, str | None]:
    """Compile what is not compiled yet and load it on a CUDA device; return the number of kernels and what failed."""
    import triton

    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    kernels: dict[int, Any] = {}
    loads: list[Future[None]] = []
    with (
        _no_collection(),
        ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for call in calls:
            # Calls of one specialisation come back as one object: a kernel, or the promise of one.
            kernel = call.kernel.warmup(*call.operands, grid=call.grid, **call.settings)
            kernels[id(kernel)] = kernel
        # Queued behind all compilations, so that a thread never waits for one that has not begun.
        loads = [pool.submit(_load, kernel, device) for kernel in kernels.values()]
    errors = [error for load in loads if (error := load.exception()) is not None]
    obstacle = f"{type(errors[0]).__name__}: {errors[0]}" if errors else None
    return len(kernels) - len(errors), obstacle


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector while several threads parse kernels.

    Python counts the depth of the tree it is parsing in one place for all threads, and a collection in mid-tree can
    let another thread in: both then end in "SystemError: AST constructor recursion depth mismatch".
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _load(kernel: Any, device: torch.device | None) -> None:
    compiled = kernel.future.result() if hasattr(kernel, "future") else kernel
    with contextlib.nullcontext() if device is None else torch.cuda.device(device):
        if device is not None:
            # Builds the host's launcher with a C compiler and loads the machine code, which a first launch would do.
            _ = compiled.run
