"""A job whose energy is known: recorded counters, a clock that the test moves, and nodes that keep their files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from stormo.energy import Meter, ReplayProbe, Source
from stormo.energy.node_recorder import NodeRecorder, NoNodeRecorder

WRAPS_AT_J = 1200.0  # goes round every few seconds at the powers below


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def gpu(name: str) -> Source:
    return Source(id=name, kind="gpu", name="H200", method="counter", resolution_j=0.001, interval_s=0.1)


def cpu(name: str) -> Source:
    return Source(
        id=name,
        kind="cpu",
        name="package-0",
        method="counter",
        resolution_j=2.0**-14,
        interval_s=0.001,
        wraps_at_j=WRAPS_AT_J,
    )


def power(source: Source, second: int) -> float:
    """Watts in one second: of every source and second its own, with no pattern that hides a mistake."""
    seed = sum(map(ord, source.id)) + 31 * second
    return (100.0 + seed * 7919 % 211) if source.kind == "gpu" else (40.0 + seed * 104729 % 59)


def truth(source: Source, begin_s: float, end_s: float) -> float:
    """Joules of a source between two moments."""
    seconds = range(math.floor(begin_s), math.ceil(end_s))
    return math.fsum(power(source, one) * (min(one + 1, end_s) - max(one, begin_s)) for one in seconds)


def write_trace(path: Path, sources: Sequence[Source], seconds: int) -> Path:
    """The trace of these sources from second 0 of the clock, with counters as the hardware would show them."""
    lines = [json.dumps({"origin_unix_s": 0.0, "sources": [asdict(source) for source in sources]})]
    counters = {source.id: 123.0 for source in sources}
    for second in range(seconds + 1):
        raw = {one.id: counters[one.id] % one.wraps_at_j if one.wraps_at_j else counters[one.id] for one in sources}
        lines.append(json.dumps({"time_s": float(second), "raw": raw}))
        for source in sources:
            counters[source.id] += power(source, second)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


class Job:
    """Nodes with recorded counters; `attempt` runs one attempt on all of them, second by second."""

    def __init__(self, folder: Path, num_nodes: int, *, ranks_per_node: int = 1, seconds: int = 400) -> None:
        self.run_folder = folder / "run"
        self.clock = Clock()
        self.sources = [[gpu(f"GPU-{node}-{rank}") for rank in range(ranks_per_node)] for node in range(num_nodes)]
        for node, sources in enumerate(self.sources):
            sources.append(cpu("intel-rapl:0"))  # named alike on every machine
            write_trace(folder / f"{node}.trace", sources, seconds)
        self._folder, self._ranks_per_node = folder, ranks_per_node
        self.spans: list[tuple[str, float, float]] = []  # phase, begin, end: the truth of the last attempt

    def path(self, node: int) -> Path:
        return self.run_folder / "nodes" / f"{node}.jsonl"

    def recorder(self, node: int, local_rank: int = 0) -> NodeRecorder:
        if local_rank > 0:
            return NoNodeRecorder()
        meter = Meter(
            [ReplayProbe(self._folder / f"{node}.trace", self.clock)],
            self.clock,
            machine=f"machine-{node}",
            background=False,
        )
        return NodeRecorder(
            meter, None, node, f"host{node}", num_nodes=len(self.sources), clock=self.clock, background=False
        )

    def attempt(
        self,
        script: Iterable[tuple[str, float, int]],
        *,
        resumed_at_step: int | None = None,
        killed: bool = False,
        nodes: Sequence[int] | None = None,
    ) -> None:
        """Run phases of (name, seconds, step at its end); "rollback" goes back to its step instead."""
        chosen = range(len(self.sources)) if nodes is None else nodes
        workers = [self.recorder(node, rank) for node in chosen for rank in range(self._ranks_per_node)]
        first_step = resumed_at_step or 0
        self.spans = []
        places = [self.path(node) for node in chosen for _ in range(self._ranks_per_node)]
        for number, (phase, seconds, step) in enumerate(script):
            if phase == "rollback":
                for worker in workers:
                    worker.rolled_back(step)
                continue
            if number:
                for worker in workers:
                    worker.enter(phase, first_step)
            elif phase == "starting":
                for worker, place in zip(workers, places, strict=True):
                    worker.attach(place, resumed_at_step, first_step)
            self.spans.append((phase, self.clock.now_s, self.clock.now_s + seconds))
            end_s = self.clock.now_s + seconds
            while self.clock.now_s < end_s:
                self.clock.now_s = min(self.clock.now_s + 1.0, end_s)
                for worker in workers:
                    worker.advance(step if self.clock.now_s == end_s else first_step)
                    worker.tick()
            first_step = step
        sizes_bytes = {place: place.stat().st_size for place in places}
        for worker in workers:
            worker.close()
        for place in places if killed else ():  # as if nothing had been written at the end
            os.truncate(place, sizes_bytes[place])

    def truth(self, begin_s: float, end_s: float, nodes: Sequence[int] | None = None) -> float:
        chosen = range(len(self.sources)) if nodes is None else nodes
        return math.fsum(truth(source, begin_s, end_s) for node in chosen for source in self.sources[node])

    def truth_of(self, phase: str) -> float:
        """Joules of all nodes in one phase of the last attempt."""
        return math.fsum(self.truth(begin_s, end_s) for name, begin_s, end_s in self.spans if name == phase)
