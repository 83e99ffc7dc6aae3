"""The trainer's loaders: the data set resident on the device, read by index, or read in order as a stream.

All give the micro-batches of a step on the device, from any position of any epoch, and count how long the loop waited.
Every worker reads a whole stream and keeps its share of each global batch: samples, their randomness and their weights
do not depend on the number of workers. A position in a stream is found again by its own state (`bookmarks`), or by
reading up to it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from stormo.data.batches import Collate, collate
from stormo.data.bookmarks import Bookmark
from stormo.data.order import MicroBatch, epoch_draws, epoch_order, micro_batches, split_step
from stormo.data.processes import DevicePrefetcher
from stormo.data.reading import SeededDataset, SeekableStream, StreamRequest, collate_stream
from stormo.data.tensors import TensorData
from stormo.telemetry.text import tell


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one micro-batch, on the device."""

    data: Any
    span: MicroBatch
    is_padding: bool  # no sample was left for this worker: one of weight zero keeps it in step with the others

    @property
    def weight(self) -> float:
        """This micro-batch's share of the global batch."""
        return 0.0 if self.is_padding else self.span.num_samples / self.span.step_samples


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

    _reads_on_gpu = False  # by kernels on its stream: the time to launch them is no wait for input

    def __init__(
        self, num_samples: int, share: Share, seed: int, num_draws: int, augment: Augment, device: torch.device
    ) -> None:
        self.num_samples = num_samples
        self.share = share
        self.seed = seed
        self.wait_s = 0.0  # time the loop has waited for batches, since it was last set to zero
        self._num_draws = num_draws
        self._augment = augment
        self._device = device

    def epoch(self, epoch: int, position: int = 0) -> Iterator[Batch]:
        """The batches from a position to the end of an epoch, each sample of the share once."""
        batches = self._batches(epoch, self._spans(position))
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            if not self._reads_on_gpu:
                self.wait_s += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def first_and_last(self) -> Iterator[Batch]:
        """The first full batch of epoch 1 and, where it is shorter, the last: every shape that will come."""
        return self._batches(1, self._first_and_last_spans())

    @abstractmethod
    def samples(self, span: MicroBatch) -> Tensor:
        """The samples of the whole global batch that a micro-batch belongs to, in order."""

    @abstractmethod
    def _batches(self, epoch: int, spans: list[MicroBatch]) -> Iterator[Batch]:
        """Turn spans of positions into batches on the device."""

    def bookmark(self, epoch: int, position: int) -> dict[str, Any] | None:
        """What a checkpoint should hold to find this position again; None where it can be computed."""
        return None

    def resume_from(self, bookmark: dict[str, Any] | None) -> None:
        """Take what a checkpoint holds."""
        return

    def close(self) -> None:
        """End loading processes, where there are any."""
        return

    def _spans(self, position: int) -> list[MicroBatch]:
        share = self.share
        sizes = share.global_batch_size, share.accumulate, share.worker, share.num_workers
        return list(micro_batches(self.num_samples, *sizes, position))

    def _first_and_last_spans(self) -> list[MicroBatch]:
        share = self.share
        stop = min(share.global_batch_size, self.num_samples)
        spans = split_step(0, stop, share.accumulate, share.worker, share.num_workers)
        tail = self.num_samples % share.global_batch_size
        return spans + self._spans(self.num_samples - tail) if 0 < tail < self.num_samples else spans

    def _draws(self, epoch: int) -> Tensor | None:
        return epoch_draws(self.num_samples, self._num_draws, self.seed, epoch) if self._num_draws else None

    def _batch(self, data: Any, span: MicroBatch, draws: Tensor | None) -> Batch:
        if draws is not None:
            data = self._augment(data, draws[slice(*span.padded)].to(self._device))
        return Batch(data, span, is_padding=not span.num_samples)


class _ShuffledLoader(Loader):
    """Reads by index, in the order of the epoch."""

    _order: Tensor

    def samples(self, span: MicroBatch) -> Tensor:
        """The samples of the whole global batch that a micro-batch belongs to, in order."""
        return self._order[span.step_start : span.step_stop].to(torch.int64)  # as their digest counts them

    def _batches(self, epoch: int, spans: list[MicroBatch]) -> Iterator[Batch]:
        self._order = epoch_order(self.num_samples, self.seed, epoch)
        return self._read(epoch, self._order, self._draws(epoch), spans)

    @abstractmethod
    def _read(self, epoch: int, order: Tensor, draws: Tensor | None, spans: list[MicroBatch]) -> Iterator[Batch]:
        """The samples at these positions of the order."""


class ResidentLoader(_ShuffledLoader):
    """The whole data set on the device; a batch is one indexed read there."""

    def __init__(
        self, data: TensorData, share: Share, seed: int, num_draws: int, augment: Augment, device: torch.device
    ) -> None:
        super().__init__(len(data), share, seed, num_draws, augment, device)
        self._tensors = tuple(tensor.to(device) for tensor in data.tensors)
        self._reads_on_gpu = device.type == "cuda"

    def _read(self, epoch: int, order: Tensor, draws: Tensor | None, spans: list[MicroBatch]) -> Iterator[Batch]:
        order = order.to(self._device)
        draws = None if draws is None else draws.to(self._device)
        for span in spans:
            rows = order[slice(*span.padded)]
            yield self._batch(tuple(tensor.index_select(0, rows) for tensor in self._tensors), span, draws)


class StreamedLoader(_ShuffledLoader):
    """Processes read ahead; pinned memory and a CUDA stream overlap the copies with compute."""

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
        super().__init__(len(data), share, seed, num_draws, augment, device)  # type: ignore[arg-type]
        self._data = SeededDataset(data)
        self._prefetcher = DevicePrefetcher(self._data, device, num_workers, make_batch)

    def _read(self, epoch: int, order: Tensor, draws: Tensor | None, spans: list[MicroBatch]) -> Iterator[Batch]:
        keys = (self._data.keys(order, *span.padded, self.seed, epoch) for span in spans)
        for data, span in self._prefetcher.batches(keys, spans):
            yield self._batch(data, span, draws)

    def close(self) -> None:
        """End the loading processes now rather than at garbage collection."""
        self._prefetcher.close()


class IterableLoader(Loader):
    """A stream, read by the worker itself or by one process ahead of it."""

    def __init__(
        self,
        data: Any,
        num_samples: int,
        share: Share,
        seed: int,
        num_draws: int,
        augment: Augment,
        device: torch.device,
        num_workers: int,
        make_batch: Collate = collate,
        *,
        repeat: bool = False,
    ) -> None:
        assert num_workers <= 1, "a stream is read by one process: two would take the same samples"
        super().__init__(num_samples, share, seed, num_draws, augment, device)
        stream = SeekableStream(data, num_samples, seed, repeat)
        self._prefetcher = DevicePrefetcher(stream, device, num_workers, partial(collate_stream, make_batch))
        self._bookmarks: list[dict[str, Any]] = []  # the last ones
        self._start = 0  # of the epoch, in the stream
        self._repeat = repeat

    def first_and_last(self) -> Iterator[Batch]:
        """The first full batch and one as short as the last, cut from the first: the last is at the stream's end."""
        spans = self._first_and_last_spans()
        first = self._request(spans[0], 0)
        rows = sorted({0, *chain(*first.share)})
        requests = []
        for span in spans:
            start, stop = span.padded
            of_last = replace(first, rows=rows[: stop - start], is_first=False)
            requests.append(of_last if span.step_start else self._request(span, 0))
        return self._read(1, spans, requests)

    def start(self, num_samples: int) -> Any:
        """The first samples of the stream as one batch, on every worker the same ones."""
        stop = min(num_samples, self.num_samples)
        request = StreamRequest(0, stop, share=(range(stop),), rows=range(stop), is_first=True, ends_epoch=False)
        ((batch, _, _),) = (data for data, _ in self._prefetcher.batches([request], split_step(0, stop, 1, 0, 1)))
        return batch

    def bookmark(self, epoch: int, position: int) -> dict[str, Any] | None:
        """The last place before this position from which the stream can continue, for a checkpoint."""
        here = (epoch - 1) * self.num_samples + position
        return next((mark for mark in reversed(self._bookmarks) if mark["position"] <= here), None)

    def resume_from(self, bookmark: dict[str, Any] | None) -> None:
        """Continue from the bookmark of a checkpoint, if the same samples follow."""
        found = None if bookmark is None else Bookmark.read(bookmark)
        self._bookmarks = [] if found is None else [asdict(found)]

    def samples(self, span: MicroBatch) -> Tensor:
        """The positions of the whole global batch in the stream, which stand for its samples."""
        offset = self._start if self._repeat else 0
        return torch.arange(offset + span.step_start, offset + span.step_stop)

    def _batches(self, epoch: int, spans: list[MicroBatch]) -> Iterator[Batch]:
        start = (epoch - 1) * self.num_samples
        requests = [self._request(span, start) for span in spans]
        mark = self.bookmark(epoch, spans[0].step_start) if spans else None
        if mark is not None:
            requests[0] = replace(requests[0], bookmark=Bookmark(**mark))
        return self._read(epoch, spans, requests)

    def _request(self, span: MicroBatch, epoch_start: int) -> StreamRequest:
        # The first micro-batch of a step reads for all of them.
        own = self.share.accumulate, self.share.worker, self.share.num_workers
        spans = split_step(span.step_start, span.step_stop, *own) if span.is_first else [span]
        share = tuple(range(epoch_start + one.start, epoch_start + one.stop) for one in spans if one.num_samples)
        ends_epoch = span.step_stop == self.num_samples
        return StreamRequest(
            step_start=epoch_start + span.step_start,
            # Every worker sees the end of the stream; before that it reads no further than it must.
            read_to=epoch_start + (span.step_stop if ends_epoch else max(spans[-1].stop, span.step_start + 1)),
            share=share,
            rows=range(*(epoch_start + position for position in span.padded)),
            is_first=span.is_first,
            ends_epoch=ends_epoch,
        )

    def _read(self, epoch: int, spans: list[MicroBatch], requests: list[StreamRequest]) -> Iterator[Batch]:
        self._start = (epoch - 1) * self.num_samples
        draws = self._draws(epoch)
        for (data, mark, note), span in self._prefetcher.batches(requests, spans):
            if mark is not None:
                self._bookmarks = [*self._bookmarks[-3:], mark]
            if note is not None and self.share.worker == 0:
                tell(f"{note}.")
            yield self._batch(data, span, draws)

    def close(self) -> None:
        """End the reading process now rather than at garbage collection."""
        self._prefetcher.close()
