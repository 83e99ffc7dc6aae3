"""The energy of a script: one worker of each node measures it, all may ask for it, and the main one tells the sum."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stormo.distributed.world import World
from stormo.energy import Meter, own_meter
from stormo.energy.keeper import Keeper
from stormo.energy.ledger import owners
from stormo.energy.meter import Window
from stormo.energy.summary import amount_text, rounded
from stormo.script.starts import Starts, no_starts
from stormo.training.measuring import gpus_by_node, shared_clock

_LAST_WORDS_S = 5.0  # the other nodes end when the main worker does, or are not waited for


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
        return Energy(
            joules=total,
            error_j=self.error_j + earlier.error_j,
            kinds_j={kind: joules - earlier.kinds_j.get(kind, 0.0) for kind, joules in self.kinds_j.items()},
            seconds=self.seconds - earlier.seconds,
            num_nodes=self.num_nodes,
            num_silent=self.num_silent,
            reasons=self.reasons,
        )

    def __str__(self) -> str:
        if self.joules is None:
            return f"Energy: {'; '.join(self.reasons)}."
        text = f"Energy: {amount_text(self.joules, self.error_j, self.kinds_j)} in {rounded(self.seconds)} s"
        num_all = self.num_nodes + self.num_silent
        if self.num_silent:
            return f"{text}, on {self.num_nodes} of {num_all} nodes: the others have not told what they drew."
        return f"{text}, on {num_all} nodes." if num_all > 1 else f"{text}."


class ScriptMeter:
    """Measures this node where this is its first worker; all workers make one, at the same point."""

    def __init__(self, world: World) -> None:
        self._world = world
        gpus, main_unix_s = gpus_by_node(world, devices_per_worker=1)
        clock = shared_clock(world, main_unix_s)
        self._nodes = sorted(gpus, key=int)
        place = world.place
        self._meter: Meter | None = None
        self.starts = no_starts()
        if place.local_rank == 0:
            self._meter, _ = own_meter(gpus.get(str(place.node_id), []), place.node_id)
            if self._meter.sources:
                host = socket.gethostname()
                keeper = Keeper(self._meter, None, place.node_id, host, num_nodes=len(gpus), clock=clock)
                self.starts = Starts(keeper, place.node_id)
        self._began_s = time.monotonic()
        self.is_closed = False

    def total(self) -> Energy:
        """What all nodes drew so far; all workers ask together."""
        gathered = self._world.gather_json(self._reading())
        readings = self._world.share_json([reading for reading in gathered or [] if reading is not None])
        return add_up(readings, self._nodes)

    def close(self) -> Energy | None:
        """End measuring without waiting for a worker that may be gone; on the main worker, what the nodes drew.

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
                world.leave_word(_key(world.place.node_id), reading)
            return None
        own = str(world.place.node_id) if reading is not None else None
        words = world.words([_key(node) for node in self._nodes if node != own], _LAST_WORDS_S)
        total = add_up([one for one in (reading, *words) if one is not None], self._nodes)
        return total if total.joules is not None else None

    def _reading(self) -> dict[str, Any] | None:
        """Of this node, as the others are told; None where another worker has it."""
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
            "node": str(self._world.place.node_id),
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
    told = {reading["node"] for reading in readings}
    reasons |= dict.fromkeys(f"node {node} has not told what it drew" for node in nodes if node not in told)
    return Energy(
        joules=math.fsum(kinds_j.values()) if owner_of else None,
        error_j=math.fsum(errors_j),
        kinds_j=kinds_j,
        seconds=max((reading["seconds"] for reading in readings), default=0.0),
        num_nodes=len(told),
        num_silent=len(nodes) - len(told),
        reasons=tuple(reasons),
    )


def _key(node: int | str) -> str:
    return f"energy/{node}"
