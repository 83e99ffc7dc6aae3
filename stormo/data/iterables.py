"""Data sets that can only be read in order: the stream's own order is the global order.

Every worker reads the whole stream and keeps its share of each global batch, so the samples, their randomness and
their weights do not depend on the number of workers. A position is found again by reading up to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from stormo.data.batches import Collate, collate
from stormo.data.loaders import Augment, Batch, Loader, Share, with_ghost
from stormo.data.order import Pass, epoch_draws, part
from stormo.data.reading import InTurn, Reading, Wanted
from stormo.data.streaming import Ahead, Answering, open_loader, shut_down


class _Requests(Sampler[Wanted]):
    """Hands out what each pass of the epoch wants."""

    def __init__(self) -> None:
        self.wanted: Sequence[Wanted] = ()

    def __len__(self) -> int:
        return len(self.wanted)

    def __iter__(self) -> Iterator[Wanted]:
        return iter(self.wanted)


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
        goes_on: bool = False,
    ) -> None:
        assert num_workers <= 1, "a stream is read by one process: two would take the same samples"
        super().__init__(num_samples, share, seed, num_draws, augment)
        self._requests = _Requests()
        reading = Reading(data, num_samples, seed, goes_on)
        how: dict[str, Any] = {"batch_sampler": self._requests, "collate_fn": Answering(make_batch)}
        self._ahead: Ahead[Pass] = Ahead(open_loader(reading, device, num_workers, **how), device)
        self._device = device
        self._start = 0  # of the epoch, in the stream
        self._goes_on = goes_on

    def first_and_last(self) -> Iterator[Batch]:
        """The first full batch and one as short as the last, cut from the first: the last is at the stream's end."""
        spans = self._first_and_last_spans()
        first = self._wanted(spans[0], 0)
        rows = sorted({0, *range(*first.share)})
        wanted = []
        for span in spans:
            start, stop = with_ghost(span)
            is_first = span.step_start == 0
            wanted.append(
                self._wanted(span, 0) if is_first else replace(first, rows=rows[: stop - start], is_first=False)
            )
        return self._give(1, spans, wanted)

    def start(self, num_samples: int) -> Any:
        """The first samples of the stream as one batch, on every worker the same ones."""
        stop = min(num_samples, self.num_samples)
        every = range(stop)
        self._requests.wanted = [
            Wanted(step_start=0, read_to=stop, share=(0, stop), rows=every, is_first=True, ends_epoch=False)
        ]
        (batch,) = (data for data, _ in self._ahead.batches([Pass(0, stop, 0, stop, is_first=True, is_last=True)]))
        return batch

    def samples(self, span: Pass) -> Tensor:
        """The positions of the whole global batch in the stream, which stand for its samples."""
        offset = self._start if self._goes_on else 0
        return torch.arange(offset + span.step_start, offset + span.step_stop)

    def _open(self, epoch: int, spans: Iterator[Pass]) -> Iterator[Batch]:
        start = (epoch - 1) * self.num_samples
        every = list(spans)
        return self._give(epoch, every, [self._wanted(span, start) for span in every])

    def _wanted(self, span: Pass, epoch_start: int) -> Wanted:
        share = part(span.step_start, span.step_stop, self.share.worker, self.share.num_workers)
        ends_epoch = span.step_stop == self.num_samples
        return Wanted(
            step_start=epoch_start + span.step_start,
            # Every worker sees how a pass over the stream ends; else it reads no further than it must.
            read_to=epoch_start + (span.step_stop if ends_epoch else max(share[1], span.step_start + 1)),
            share=(epoch_start + share[0], epoch_start + share[1]),
            rows=range(*(epoch_start + position for position in with_ghost(span))),
            is_first=span.is_first,
            ends_epoch=ends_epoch,
        )

    def _give(self, epoch: int, spans: list[Pass], wanted: list[Wanted]) -> Iterator[Batch]:
        self._start = (epoch - 1) * self.num_samples
        self._requests.wanted = wanted
        draws = epoch_draws(self.num_samples, self._num_draws, self.seed, epoch) if self._num_draws else None
        for data, span in self._ahead.batches(spans):
            yield self._made(data, span, draws, self._device)

    def _batches(self, epoch: int, order: Tensor, draws: Tensor | None, spans: Iterator[Pass]) -> Iterator[Batch]:
        raise AssertionError("a stream has no order but its own")

    def close(self) -> None:
        """End the reading process now rather than at garbage collection."""
        shut_down(self._ahead.loader)


def batches_in_turn(
    data: Any,
    batch_size: int,
    worker: int,
    num_workers: int,
    device: torch.device,
    num_processes: int,
    make_batch: Collate,
) -> DataLoader[Any]:
    """Every batch of a stream as (number of samples, data); data is None in other workers' turns, but for the first."""
    stream = InTurn(data, batch_size, worker, num_workers, make_batch)
    return open_loader(stream, device, min(1, num_processes), batch_size=None, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch
