"""The energy of a script: one worker of each node measures it, and rank 0 prints the sum at the end.

Each node writes a file beside the checkpoints, which covers all starts of a script, as for `stormo train`.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stormo.distributed.world import World
from stormo.energy import Meter, own_meter, read_bill
from stormo.energy.ledger import owners
from stormo.energy.meter import Window
from stormo.energy.node_recorder import NodeRecorder, NoNodeRecorder
from stormo.energy.summary import SMALLEST_SHOWN_SHARE, amount_text, rounded
from stormo.errors import pluralize
from stormo.training.clock import gpus_by_node

_LAST_READINGS_S = 5.0  # the other nodes end when rank 0 does, or are not waited for


@dataclass(frozen=True, kw_only=True, slots=True)
class Energy:
    """What all nodes drew since `stormo.World()`; less an earlier one of these, what they drew in between."""

    joules: float | None  # None: nothing could be read on any node
    error_j: float  # by how much that can be wrong
    kinds_j: Mapping[str, float]  # "gpu", "cpu", "dram"
    seconds: float
    num_nodes: int  # in these figures
    num_silent: int = 0  # nodes that are not in them
    reasons: tuple[str, ...]  # what is not in them, or is in them besides the script

    def __sub__(self, earlier: Energy) -> Energy:
        total = None if self.joules is None or earlier.joules is None else self.joules - earlier.joules
        return replace(
            self,
            joules=total,
            error_j=self.error_j + earlier.error_j,
            kinds_j={kind: joules - earlier.kinds_j.get(kind, 0.0) for kind, joules in self.kinds_j.items()},
            seconds=self.seconds - earlier.seconds,
        )

    def __str__(self) -> str:
        if self.joules is None:
            return f"Energy: {'; '.join(self.reasons)}."
        text = f"Energy: {amount_text(self.joules, self.error_j, self.kinds_j)} in {rounded(self.seconds)} s"
        num_all = self.num_nodes + self.num_silent
        if self.num_silent:
            return f"{text}, on {self.num_nodes} of {num_all} nodes: the others did not report."
        return f"{text}, on {num_all} nodes." if num_all > 1 else f"{text}."


class StartRecorder:
    """The energy of this start, counted in the folder that it first saves to."""

    def __init__(self, recorder: NodeRecorder, node_id: int | str) -> None:
        self._recorder = recorder
        self._node_id = node_id
        self._loaded: dict[Path, int] = {}  # folder -> the step that was loaded
        self._folder: Path | None = None
        self._has_waited = False  # for a save to a folder that was loaded from
        self._is_training = False

    def loaded(self, folder: Path, step: int) -> None:
        """A checkpoint of that step was loaded."""
        self._loaded[folder.resolve()] = step

    def advance(self, step: int) -> None:
        """So many steps are done."""
        if self._is_training:
            self._recorder.advance(step)
        else:
            self._recorder.enter("training", step)
            self._is_training = True

    @contextmanager
    def saving(self, folder: Path, step: int) -> Iterator[None]:
        """While a checkpoint is written."""
        self._recorder.enter("checkpoint", step)
        try:
            yield
            self._attach(folder)
        finally:
            self._recorder.enter("training", step)

    def _attach(self, folder: Path) -> None:
        # A node that does not see the folder writes nothing, rather than making one that nobody looks into.
        if self._folder is not None or not folder.is_dir():
            return
        step = self._loaded.get(folder.resolve())
        # A script may save its best and its last checkpoints to two folders: it is counted where it resumes from.
        if self._loaded and step is None and not self._has_waited:
            self._has_waited = True
            return
        self._folder = folder.resolve()
        self._recorder.attach(self._folder / "nodes" / f"{self._node_id}.jsonl", step, step or 0)

    def close(self) -> None:
        """End this node's file."""
        self._recorder.close()

    def sentence(self) -> str | None:
        """The energy of all starts, once all nodes have ended their files; None if this is the first one."""
        if self._folder is None:
            return None
        bill = read_bill(self._folder)
        if bill.total_j is None or len(bill.attempts) < 2:
            return None
        drawn = amount_text(bill.total_j, bill.total_error_j, bill.kinds_j)
        text = f"Over all {len(bill.attempts)} starts: {drawn}"
        share = bill.parts_j.get("recomputed", 0.0) / bill.total_j if bill.total_j else 0.0
        if share >= SMALLEST_SHOWN_SHARE:
            text += f", {100 * share:.0f} % of it for recomputed work"
        if num_absent := sum(attempt.num_nodes - len(attempt.node_ids) for attempt in bill.attempts):
            text += f", without {pluralize(num_absent, 'file')} that a node did not write"
        if self._recorder.failure is not None:
            text += f"; what this start drew is not all in it: {self._recorder.failure}"
        return f"{text}."


class ScriptMeter:
    """Measures this node where this is its first worker; all workers make one, at the same point."""

    def __init__(self, world: World) -> None:
        self._world = world
        gpus, clock = gpus_by_node(world, devices_per_worker=1)
        self._nodes = sorted(gpus, key=int)
        rank_info = world.rank_info
        self._meter: Meter | None = None
        self.starts = StartRecorder(NoNodeRecorder(), 0)
        if rank_info.local_rank == 0:
            self._meter, _ = own_meter(gpus.get(str(rank_info.node_id), []), rank_info.node_id)
            if self._meter.sources:
                host = socket.gethostname()
                recorder = NodeRecorder(self._meter, None, rank_info.node_id, host, num_nodes=len(gpus), clock=clock)
                self.starts = StartRecorder(recorder, rank_info.node_id)
        self._began_s = time.monotonic()
        self.is_closed = False

    def total(self) -> Energy:
        """What all nodes drew so far; all workers ask together."""
        gathered = self._world.gather_objects(self._reading())
        readings = self._world.broadcast_object([reading for reading in gathered or [] if reading is not None])
        return add_up(readings, self._nodes)

    def close(self) -> Energy | None:
        """End measuring without waiting for a worker that may be gone; on rank 0, what the nodes drew.

        None elsewhere, where nothing was measured, and at a second call.
        """
        if self.is_closed:
            return None
        self.is_closed = True
        world, reading = self._world, self._reading()
        self.starts.close()
        if self._meter is not None:
            self._meter.close()
        if not world.is_main:
            if reading is not None:
                world.store_put(f"energy/{world.rank_info.node_id}", reading)
            return None
        own = str(world.rank_info.node_id) if reading is not None else None
        others = world.store_get([f"energy/{node}" for node in self._nodes if node != own], _LAST_READINGS_S)
        total = add_up([one for one in (reading, *others) if one is not None], self._nodes)
        return total if total.joules is not None else None

    def _reading(self) -> dict[str, Any] | None:
        """The reading of this node, sent to the others; None where another worker takes it."""
        if self._meter is None:
            return None
        joules, seconds = self._meter.read(), time.monotonic() - self._began_s
        window = Window(self._meter.sources)
        window.close(joules, seconds, {})
        sources = [
            [source.id, source.kind, joules[source.id], window.error_by_source_j[source.id]]
            for source in self._meter.sources
        ]
        missing = [f"{one.kind} not measured: {one.reason}" for one in self._meter.missing]
        return {
            "node": str(self._world.rank_info.node_id),
            "machine": self._meter.machine,
            "seconds": seconds,
            "sources": sources,
            "reasons": [*missing, *self._meter.notes],
        }


def add_up(readings: Sequence[Mapping[str, Any]], nodes: Sequence[str]) -> Energy:
    """The energy of these readings, of which there should be one from each node."""
    owner_of, said = owners(
        (reading["machine"], source_id, reading["node"], joules)
        for reading in readings
        for source_id, _, joules, _ in reading["sources"]
    )
    kinds_j: dict[str, float] = {}
    errors_j: list[float] = []
    reasons = dict.fromkeys(said)  # in order, each once
    for reading in readings:
        for source_id, kind, joules, error_j in reading["sources"]:
            if owner_of[reading["machine"], source_id] == reading["node"]:
                kinds_j[kind] = kinds_j.get(kind, 0.0) + joules
                errors_j.append(error_j)
        where = f"node {reading['node']}: " if len(nodes) > 1 else ""
        reasons |= dict.fromkeys(f"{where}{reason}" for reason in reading["reasons"])
    reported = {reading["node"] for reading in readings}
    reasons |= dict.fromkeys(f"node {node} did not report its energy" for node in nodes if node not in reported)
    return Energy(
        joules=math.fsum(kinds_j.values()) if owner_of else None,
        error_j=math.fsum(errors_j),
        kinds_j=kinds_j,
        seconds=max((reading["seconds"] for reading in readings), default=0.0),
        num_nodes=len(reported),
        num_silent=len(nodes) - len(reported),
        reasons=tuple(reasons),
    )
