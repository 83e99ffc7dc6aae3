"""The loaders' interface and two of the three: the data set resident on the device, or streamed by worker processes.

The third, of an iterable data set, is in `iterables`. All give the passes of a step as batches on the device, from any
position of any epoch, and tell how long the loop waited for them.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from stormo.data.batches import Collate, collate
from stormo.data.order import Pass, derive_seed, epoch_draws, epoch_order, passes
from stormo.data.streaming import Ahead, shut_down, stream
from stormo.data.tensors import TensorData


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one pass, on the device."""

    data: Any
    span: Pass
    is_ghost: bool  # no sample was left for this worker: a stand-in of weight zero keeps it in step with the others

    @property
    def weight(self) -> float:
        """This pass's share of the global batch."""
        return 0.0 if self.is_ghost else self.span.num_samples / self.span.step_samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Which part of every global batch a worker takes."""

    global_batch_size: int
    accumulate: int
    worker: int
    num_workers: int


Augment = Callable[[Any, Tensor], Any]


class Loader(ABC):
    """Gives one worker's batches of an epoch, from any position."""

    def __init__(self, num_samples: int, share: Share, seed: int, num_draws: int, augment: Augment) -> None:
        self.num_samples = num_samples
        self.share = share
        self.seed = seed
        self.wait_s = 0.0  # time the loop has waited for batches, since it was last set to zero
        self._num_draws = num_draws
        self._augment = augment
        self._order = torch.empty(0, dtype=torch.int64)

    def epoch(self, epoch: int, position: int = 0) -> Iterator[Batch]:
        """The batches from a position to the end of an epoch, each sample of the share once."""
        batches = self._open(epoch, self._spans(position))
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.wait_s += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def first_and_last(self) -> Iterator[Batch]:
        """The first full batch of epoch 1 and, where it is shorter, the last: every shape that will come."""
        return self._open(1, iter(self._first_and_last_spans()))

    def _first_and_last_spans(self) -> list[Pass]:
        spans = list(itertools.islice(self._spans(0), self.share.accumulate))
        tail = self.num_samples % self.share.global_batch_size
        if 0 < tail < self.num_samples:
            spans += self._spans(self.num_samples - tail)
        return spans

    def samples(self, span: Pass) -> Tensor:
        """The samples of the whole global batch that a pass belongs to, in order."""
        return self._order[span.step_start : span.step_stop].to(torch.int64)  # as their digest counts them

    def _open(self, epoch: int, spans: Iterator[Pass]) -> Iterator[Batch]:
        self._order = epoch_order(self.num_samples, self.seed, epoch)
        draws = epoch_draws(self.num_samples, self._num_draws, self.seed, epoch) if self._num_draws else None
        return self._batches(epoch, self._order, draws, spans)

    def _spans(self, position: int) -> Iterator[Pass]:
        share = self.share
        return passes(
            self.num_samples, share.global_batch_size, share.accumulate, share.worker, share.num_workers, position
        )

    def _made(self, data: Any, span: Pass, draws: Tensor | None, device: torch.device) -> Batch:
        if draws is not None:
            start, stop = with_ghost(span)
            data = self._augment(data, draws[start:stop].to(device))
        return Batch(data, span, is_ghost=not span.num_samples)

    @abstractmethod
    def _batches(self, epoch: int, order: Tensor, draws: Tensor | None, spans: Iterator[Pass]) -> Iterator[Batch]:
        """Turn spans of positions into batches on the device."""

    def close(self) -> None:
        """End worker processes, where there are any."""
        return


def with_ghost(span: Pass) -> tuple[int, int]:
    """The positions of a pass; an empty one borrows the first of its global batch, and `Batch.weight` is zero."""
    return (span.start, span.stop) if span.num_samples else (span.step_start, span.step_start + 1)


class ResidentLoader(Loader):
    """The whole data set on the device; a batch is one indexed read there."""

    def __init__(
        self, data: TensorData, share: Share, seed: int, num_draws: int, augment: Augment, device: torch.device
    ) -> None:
        super().__init__(len(data), share, seed, num_draws, augment)
        self._tensors = tuple(tensor.to(device) for tensor in data.tensors)
        self._device = device

    def _batches(self, epoch: int, order: Tensor, draws: Tensor | None, spans: Iterator[Pass]) -> Iterator[Batch]:
        order = order.to(self._device)
        draws = None if draws is None else draws.to(self._device)
        for span in spans:
            start, stop = with_ghost(span)
            rows = order[start:stop]
            data = tuple(tensor.index_select(0, rows) for tensor in self._tensors)
            yield self._made(data, span, draws, self._device)


class _Spans(Sampler[list[tuple[int, int]]]):
    """Hands out (sample, seed) pairs for each pass of the epoch it was last given."""

    def __init__(self) -> None:
        self.spans: Sequence[Pass] = ()
        self.order = torch.empty(0, dtype=torch.int64)
        self.epoch_seed: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return len(self.spans)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for span in self.spans:
            start, stop = with_ghost(span)
            samples = self.order[start:stop].tolist()
            yield [(i, derive_seed(*self.epoch_seed, start + n)) for n, i in enumerate(samples)]


class StreamedLoader(Loader):
    """Worker processes read ahead; pinned memory and a stream of its own overlap the copies with compute."""

    def __init__(
        self,
        data: Dataset[Any],
        share: Share,
        seed: int,
        num_draws: int,
        augment: Augment,
        device: torch.device,
        num_workers: int,
        make_batch: Collate = collate,
    ) -> None:
        super().__init__(len(data), share, seed, num_draws, augment)  # type: ignore[arg-type]
        self._sampler = _Spans()
        self._ahead: Ahead[Pass] = Ahead(stream(data, self._sampler, device, num_workers, make_batch), device)
        self._device = device

    def _batches(self, epoch: int, order: Tensor, draws: Tensor | None, spans: Iterator[Pass]) -> Iterator[Batch]:
        self._sampler.spans = list(spans)
        self._sampler.order = order
        self._sampler.epoch_seed = (self.seed, epoch)
        for data, span in self._ahead.batches(self._sampler.spans):
            yield self._made(data, span, draws, self._device)

    def close(self) -> None:
        """End the worker processes now rather than at garbage collection."""
        shut_down(self._ahead.loader)
