"""Traces the memory of a forward and backward pass on tensors that have shapes and no memory."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.graph import _engine_run_backward

from stormo.data.batches import repeat_rows, tensors_in
from stormo.errors import StormoError
from stormo.layers.ghost_batch_norm import convert_ghost_batch_norm
from stormo.parallel.compression import HALF_DTYPES
from stormo.parallel.meta_init import sample_batch
from stormo.parallel.units import Recomputed, recompute, units_of
from stormo.predict.fake_tensors import OTHER, FakeModel, GpuKernels, MemoryTrace, fuse_layers
from stormo.predict.forecast import MemoryCurve, Rows
from stormo.predict.model import keep_tensor_shard
from stormo.tasks.fashion_mnist import FashionMnist
from stormo.tasks.returned import read_loss
from stormo.tasks.task import Task

_FEW = 2  # real samples; every batch repeats their rows


class PassKind(NamedTuple):
    """How a micro-batch runs, as far as it changes what the pass holds."""

    recomputes: bool = False
    is_sharded: bool = False  # by fsdp, which gathers weights in half precision
    channels_last: bool = False
    num_parts: int = 1  # workers along tensor


class UntraceableError(Exception):
    """A pass that cannot run without values; the text says why."""


def forbid_fetching(task: Task) -> None:
    """Let the task find its data here, and fetch nothing."""
    if isinstance(task, FashionMnist):
        from stormo.data.fashion_mnist import find_or_fetch

        folder = task.options.data_folder
        task._folder = find_or_fetch(Path(folder) if folder else None, offline=True)

    def refuse() -> None:
        raise FileNotFoundError(f"{type(task).__name__}.fetch() would fetch the data")

    task.fetch = refuse  # type: ignore[method-assign]


def few_samples(task: Task) -> Any:
    """A batch of a few real samples, in host memory."""
    return sample_batch(task, _FEW, torch.device("cpu"))


class Tracer:
    """Traces micro-batches of one task's model.

    `batch` holds a few real samples. With `on_gpu` it counts what GPU kernels keep, with `has_fused` also those of
    stormo's fused layers.
    """

    def __init__(
        self,
        task: Task,
        fake_model: FakeModel,
        batch: Any,
        precision: str,
        *,
        on_gpu: bool = True,
        has_fused: bool = True,
        shard_modules: str | None = None,
        ghost_batch_size: int | None = None,
    ) -> None:
        self._task, self._fake_model, self._batch, self._fake = task, fake_model, batch, fake_model.fake
        self._half, self._precision = HALF_DTYPES.get(precision), precision
        self._on_gpu, self._has_fused = on_gpu, has_fused
        self._shard_modules, self._ghost_batch_size = shard_modules, ghost_batch_size

    def curve(self, size: int, kind: PassKind) -> MemoryCurve:
        """The memory of a training pass by its samples, traced at a size and at twice that size."""
        model = self._built(kind)
        (rows, kept), (rows_of_twice, kept_of_twice) = (self._traced(model, one) for one in (size, 2 * size))
        return MemoryCurve((size, 2 * size), (rows, rows_of_twice), (kept, kept_of_twice))

    def batch_bytes(self, size: int) -> int:
        """Bytes of the tensors of a batch."""
        with self._fake:
            data = repeat_rows(self._batch, size)
        return sum(tensor.nbytes for tensor in tensors_in(data))

    def validation(self, size: int, *, channels_last: bool) -> Rows:
        """Bytes after every operation of a validation batch."""
        model = self._built(PassKind(channels_last=channels_last)).eval()
        with self._reasons(), torch.no_grad(), self._tracing(model, size) as (trace, data), self._autocast():
            self._task.metrics(model, data)
        return trace.rows

    def _built(self, kind: PassKind) -> nn.Module:
        model = self._fake_model.model()
        if kind.num_parts > 1:
            with self._fake_model.fake:
                keep_tensor_shard(self._task, model, kind.num_parts)
        if self._ghost_batch_size is not None:
            model = convert_ghost_batch_norm(model, self._ghost_batch_size)
        if self._on_gpu and self._has_fused and kind.channels_last:
            fuse_layers(model)
        if kind.is_sharded and self._half is not None:  # fully_shard gathers weights in that dtype
            half = self._half
            self._fake_model.convert(model, lambda tensor: tensor.to(half), of_norms=False)
        if kind.recomputes:
            recompute(model, units_of(model, self._shard_modules) or [""])
            for layer in model.modules():
                if isinstance(layer, Recomputed):
                    layer._changing_buffers = []  # finding those that change takes values
        return model

    def _traced(self, model: nn.Module, size: int) -> tuple[Rows, int]:
        """Bytes after every operation, and the activations when backward starts."""
        model.train()
        with self._reasons(), self._tracing(model, size) as (trace, data):
            with self._autocast():
                loss, _ = read_loss(self._task, self._task.loss(model, data))
            loss = loss * 1.0
            kept = trace.now[OTHER]
            # Not torch.autograd.backward: a torch function turns the function mode off, and recomputed layers need it.
            _engine_run_backward(
                (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        for parameter in model.parameters():
            parameter.grad = None
        return trace.rows, kept

    @contextmanager
    def _tracing(self, model: nn.Module, size: int) -> Iterator[tuple[MemoryTrace, Any]]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if self._precision == "fp64" else torch.float32)
        try:
            with self._fake, GpuKernels(self._half) if self._on_gpu else nullcontext():
                data = repeat_rows(self._batch, size)
                with MemoryTrace(model) as trace:
                    trace.add(tensors_in(data))
                    yield trace, data
        finally:
            torch.set_default_dtype(before)

    def _autocast(self) -> Any:
        return nullcontext() if self._half is None else torch.autocast("cpu", self._half)

    @contextmanager
    def _reasons(self) -> Iterator[None]:
        """Turn any failure of a micro-batch without values into a reason."""
        log = logging.getLogger("torch._subclasses.fake_tensor")
        level = log.level
        log.setLevel(logging.CRITICAL)
        try:
            with warnings.catch_warnings(action="ignore"):  # training shows them
                yield
        except StormoError:
            raise
        except Exception as error:
            raise UntraceableError(_reason(error)) from error
        finally:
            log.setLevel(level)


def _reason(error: Exception) -> str:
    """Why a micro-batch cannot run without values; torch has only the name of an operation."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    if isinstance(error, DataDependentOutputException):
        return f"it reads a value, as .item(), float() and if do: {first}"
    if isinstance(error, DynamicOutputShapeException):
        return f"how many values there are depends on values, as with a mask: {first}"
    return f"{type(error).__name__}: {first}"
