"""A pass of the task's own loss on a model without memory, watched; and a validation, and the data that go in."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.graph import _engine_run_backward

from stormo.data.batches import repeat_rows, tensors_in
from stormo.errors import StormoError
from stormo.layers.ghost_batch_norm import convert_ghost_batch_norm
from stormo.parallel.compression import HALVES
from stormo.parallel.meta_init import sample_batch
from stormo.parallel.units import Recomputed, blocks_of, recompute
from stormo.predict.blank import Blank
from stormo.predict.curve import Curve, Rows
from stormo.predict.gpu_kernels import AsOnGpu, fuse
from stormo.predict.model import keep_one_part
from stormo.predict.rounds import keep_one_round
from stormo.predict.watching import OTHER, Watch
from stormo.tasks.fashion_mnist import FashionMnist
from stormo.tasks.returned import read_loss
from stormo.tasks.task import Task

_FEW = 2  # real samples that are read; their rows make up every batch


class NotKnownError(Exception):
    """A pass that cannot be run without values; the text says why."""


def without_fetching(task: Task) -> None:
    """Let the task find its data here, and let nothing be fetched for a forecast."""
    if isinstance(task, FashionMnist):
        from stormo.data.fashion_mnist import find_or_fetch

        folder = task.options.data_folder
        task._folder = find_or_fetch(Path(folder) if folder else None, offline=True)

    def refuse() -> None:
        raise FileNotFoundError(f"{type(task).__name__}.fetch() would bring the data")

    task.fetch = refuse  # type: ignore[method-assign]


def few_samples(task: Task) -> Any:
    """A real batch of a few samples, in host memory."""
    return sample_batch(task, _FEW, torch.device("cpu"))


class Passes:
    """Passes of one task's model, each kind watched once.

    Args:
        task: whose loss it is.
        blank: the model; it stays as it is.
        batch: a real one of a few samples.
        precision: of the plan.
        on_gpu: count as a GPU computes; else as a CPU does.
        has_fused: whether stormo's fused layers run on that GPU.
        shard_modules: as set.
        ghost_batch_size: as set.
    """

    def __init__(
        self,
        task: Task,
        blank: Blank,
        batch: Any,
        precision: str,
        *,
        on_gpu: bool = True,
        has_fused: bool = True,
        shard_modules: str | None = None,
        ghost_batch_size: int | None = None,
    ) -> None:
        self._task, self._blank, self._batch, self._fake = task, blank, batch, blank.fake
        self._half, self._precision = HALVES.get(precision), precision
        self._on_gpu, self._has_fused = on_gpu, has_fused
        self._shard_modules, self._ghosts = shard_modules, ghost_batch_size
        self._seen: dict[tuple[Any, ...], Curve] = {}

    def curve(
        self,
        size: int,
        *,
        recomputes: bool,
        is_sharded: bool,
        channels_last: bool,
        num_parts: int = 1,
        is_hybrid: bool = False,
    ) -> Curve:
        """What a training pass holds, as a function of its samples; counted at a size and at twice that size.

        `num_parts` are the workers along the axis tensor, over which the hybrid cuts its classifier alone.
        """
        key = (size, recomputes, is_sharded, channels_last, num_parts, is_hybrid)
        if key not in self._seen:
            model = self._made(
                recomputes=recomputes,
                is_sharded=is_sharded,
                is_fused=channels_last,
                num_parts=num_parts,
                is_hybrid=is_hybrid,
            )
            watched = [self._watched(model, one) for one in (size, 2 * size)]
            self._seen[key] = Curve((size, 2 * size), (watched[0][0], watched[1][0]), (watched[0][1], watched[1][1]))
        return self._seen[key]

    def batch_bytes(self, size: int) -> int:
        """Of the tensors that go in."""
        with self._fake:
            data = repeat_rows(self._batch, size)
        return sum(tensor.nbytes for tensor in tensors_in(data))

    def validation(self, size: int, *, channels_last: bool) -> Rows:
        """What a validation of so many samples holds after every operation."""
        model = self._made(recomputes=False, is_sharded=False, is_fused=channels_last).eval()
        with self._told(), torch.no_grad(), self._watching(model, size) as (watch, data), self._autocast():
            self._task.metrics(model, data)
        return watch.rows

    def _made(
        self, *, recomputes: bool, is_sharded: bool, is_fused: bool, num_parts: int = 1, is_hybrid: bool = False
    ) -> nn.Module:
        model = self._blank.model()
        if num_parts > 1:
            with self._blank.fake:
                (keep_one_round if is_hybrid else keep_one_part)(self._task, model, num_parts)
        if self._ghosts is not None:
            model = convert_ghost_batch_norm(model, self._ghosts)
        if self._on_gpu and self._has_fused and is_fused:
            fuse(model)
        if is_sharded and self._half is not None:  # fully_shard gathers weights in that format
            half = self._half
            self._blank.convert(model, lambda tensor: tensor.to(half), of_norms=False)
        if recomputes:
            recompute(model, blocks_of(model, self._shard_modules) or [""])
            for layer in model.modules():
                if isinstance(layer, Recomputed):
                    layer._changing_buffers = []  # to see which change takes values
        return model

    def _watched(self, model: nn.Module, size: int) -> tuple[Rows, int]:
        """Bytes after every operation, and those of activations when backward begins."""
        model.train()
        with self._told(), self._watching(model, size) as (watch, data):
            with self._autocast():
                loss, _ = read_loss(self._task, self._task.loss(model, data))
            loss = loss * 1.0
            kept = watch.now[OTHER]
            # Not torch.autograd.backward: within a function a mode of functions does not hold, which what is computed
            # again must find.
            _engine_run_backward(
                (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        for parameter in model.parameters():
            parameter.grad = None
        return watch.rows, kept

    @contextmanager
    def _watching(self, model: nn.Module, size: int) -> Iterator[tuple[Watch, Any]]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if self._precision == "fp64" else torch.float32)
        try:
            with self._fake, AsOnGpu(self._half) if self._on_gpu else nullcontext():
                data = repeat_rows(self._batch, size)
                with Watch(model) as watch:
                    watch.hold(tensors_in(data))
                    yield watch, data
        finally:
            torch.set_default_dtype(before)

    def _autocast(self) -> Any:
        return nullcontext() if self._half is None else torch.autocast("cpu", self._half)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Whatever ends a pass that has no values is a reason, not a failure."""
        log = logging.getLogger("torch._subclasses.fake_tensor")
        level = log.level
        log.setLevel(logging.CRITICAL)
        try:
            with warnings.catch_warnings(action="ignore"):  # training will say them
                yield
        except StormoError:
            raise
        except Exception as error:
            raise NotKnownError(_reason(error)) from error
        finally:
            log.setLevel(level)


def _reason(error: Exception) -> str:
    """Why a pass cannot be run without values, in words where torch has only the name of an operation."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    if isinstance(error, DataDependentOutputException):
        return f"it reads a value, as .item(), float() and if do: {first}"
    if isinstance(error, DynamicOutputShapeException):
        return f"how many values there are depends on values, as with a mask: {first}"
    return f"{type(error).__name__}: {first}"
