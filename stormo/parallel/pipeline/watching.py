"""What the workers of a pipeline really did: start and stop of every action of a pass, by the clock of the device.

Every worker counts from a moment that all of them pass together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stormo.distributed.parallel_dims import SubGroup
from stormo.parallel.pipeline.bubble import Span

_KINDS = "FBIW"


class Watch:
    """Notes the actions of this worker in the last pass; hand it to the engine for the passes that are to be seen."""

    def __init__(self, line: SubGroup, device: torch.device) -> None:
        self._line = line
        self._device = device
        self._zero: float | torch.cuda.Event = 0.0
        self._noted: list[tuple[str, int, int, float | torch.cuda.Event, float | torch.cuda.Event]] = []

    def begin(self) -> None:
        """A new pass; all workers of the line call it."""
        self._noted.clear()
        self._line.sum(torch.zeros(1, device=self._device))
        self._zero = self._now()

    @contextmanager
    def action(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """Note what is done in here."""
        start = self._now()
        yield
        self._noted.append((kind, stage, micro_batch, start, self._now()))

    def gather(self) -> list[Span]:
        """The actions of all workers in the order of their starts; all workers of the line call it."""
        own: dict[tuple[str, int, int], tuple[float, float]] = {}
        for kind, stage, micro_batch, start, stop in self._noted:
            # The loss follows the forward of the last stage and counts as part of it.
            began, _ = own.get((kind, stage, micro_batch), (self._seconds(start), 0.0))
            own[kind, stage, micro_batch] = began, self._seconds(stop)
        count = int(self._line.max(torch.tensor([len(own)], device=self._device)))
        table = torch.zeros(self._line.size, count, 6, dtype=torch.float64)
        for row, ((kind, stage, micro_batch), (start, stop)) in enumerate(own.items()):
            numbers = [1.0, start, stop, _KINDS.index(kind), micro_batch, stage]
            table[self._line.rank, row] = torch.tensor(numbers, dtype=torch.float64)
        table = self._line.sum(table.to(self._device)).cpu()
        spans = [
            Span(worker, start, stop, _KINDS[int(kind)], int(micro_batch), int(stage))
            for worker, rows in enumerate(table.tolist())
            for is_there, start, stop, kind, micro_batch, stage in rows
            if is_there
        ]
        return sorted(spans, key=lambda span: (span.start, span.worker))

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, moment: float | torch.cuda.Event) -> float:
        if isinstance(moment, float):
            assert isinstance(self._zero, float)
            return moment - self._zero
        moment.synchronize()
        assert not isinstance(self._zero, float)
        milliseconds: float = self._zero.elapsed_time(moment)
        return milliseconds / 1000
