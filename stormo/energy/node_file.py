"""Reads the file that one node wrote (`nodes/<node id>.jsonl`): its attempts, each a list of measured intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from stormo.system.files import BadFileError, Fields, parse_json
from stormo.system.files import read_lines as lines_in

PHASES = ("starting", "training", "validation", "checkpoint", "idle")
_SAMPLE = b'{"kind": "sample"'  # as the recorder writes it: most of a file, and without energy


class _Source(TypedDict):
    id: str
    kind: str
    resolution_j: float
    interval_s: float


class _Gpu(TypedDict, total=False):
    index: int | None


# What a line holds, by name and type.
_LINE = Fields(
    {
        "kind": str,
        "time_unix_s": float,
        "host": str | None,
        "machine": str | None,
        "phase": str,
        "num_nodes": int,
        "step": int | None,
        "to_step": int,
        "resumed_at_step": int | None,
        "sources": list[_Source],
        "missing": list[Mapping[str, str]],
        "notes": list[str],
        "joules": Mapping[str, float],
        "waiting_s": Mapping[str, float | None] | None,
        "gpus": list[_Gpu] | None,
    }
)


@dataclass(slots=True)
class Interval:
    """The energy of a node between two lines of its file."""

    node_id: str
    begin_unix_s: float
    end_unix_s: float
    step: int  # at its end
    phase: str
    sources_j: dict[str, float]  # by source id
    is_after_save: bool  # training after the checkpoint of its step, lost by a rollback to that step
    waiting: float = 0.0  # share of its time spent waiting
    is_lost: bool = False  # recomputed later
    attempt: int = 1

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_unix_s - self.begin_unix_s

    @property
    def joules(self) -> float:
        """The energy of all sources."""
        return math.fsum(self.sources_j.values())

    @property
    def shares(self) -> dict[str, float]:
        """By part of the bill; they add up to one."""
        if self.is_lost:
            return {"recomputed": 1.0}
        if self.phase == "training":
            return {"training": 1.0 - self.waiting, "waiting": self.waiting}
        return {self.phase: 1.0}

    @property
    def parts_j(self) -> dict[str, float]:
        """Its energy by part of the bill."""
        joules = self.joules
        return {part: joules * share for part, share in self.shares.items()}

    def joules_until(self, time_unix_s: float) -> float:
        """Its energy up to a moment."""
        if self.seconds <= 0:
            return self.joules * float(self.end_unix_s <= time_unix_s)
        return self.joules * min(max((time_unix_s - self.begin_unix_s) / self.seconds, 0.0), 1.0)

    def lose_after(self, step: float) -> None:
        """Mark it as lost if a rollback to this step loses it."""
        self.is_lost |= self.step > step or (self.step == step and self.is_after_save)


@dataclass(slots=True)
class Section:
    """One attempt of a run on one node."""

    node_id: str
    host: str
    machine: str
    num_nodes: int
    begin_unix_s: float
    resumed_at_step: int | None
    sources: dict[str, Mapping[str, Any]]
    missing: list[tuple[str, str]]  # kind, reason
    notes: list[str]
    drawn_j: dict[str, float]  # by source, up to its last line
    intervals: list[Interval] = field(default_factory=list)
    rollbacks: list[int] = field(default_factory=list)
    is_ended: bool = False
    is_waiting_known: bool = False
    is_communication_known: bool = True

    @property
    def end_unix_s(self) -> float:
        """When its last line was written."""
        return self.intervals[-1].end_unix_s if self.intervals else self.begin_unix_s


def parse_line(line: bytes) -> dict[str, Any]:
    """The object of a line; `ValueError` if it is none, or has a field of a wrong type."""
    entry = parse_json(line)
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        raise ValueError("it is no object with a kind")
    _LINE.check(entry)
    if entry["kind"] == "energy" and "joules" not in entry:
        raise ValueError("it has no joules")
    return entry


def read_lines(path: Path, damage: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """The lines of a node's file except its samples; damaged lines and a truncated last one are left out."""
    for number, line in enumerate(lines_in(path), start=1):
        if line.startswith(_SAMPLE):
            continue
        try:
            entry = parse_line(line)
        except ValueError:
            if line.endswith(b"\n") and damage is not None:
                damage.append(f"{path.name}: line {number} is damaged and left out")
            continue
        yield entry


def read_sections(path: Path, damage: list[str]) -> list[Section]:
    """The attempts of one node in order; `damage` gets what could not be understood."""
    sections: list[Section] = []
    try:
        _read_into(sections, path, damage)
    except OSError as error:
        why = error.problem if isinstance(error, BadFileError) else str(error.strerror or error)
        damage.append(f"{path.name}: {why}: what it holds is not counted")
    return sections


def _read_into(sections: list[Section], path: Path, damage: list[str]) -> None:
    reader: _Reader | None = None
    for entry in read_lines(path, damage):
        try:
            if entry.get("kind") == "start":
                reader = None  # a damaged start ends the attempt before it
                reader = _Reader(path.stem, entry)
                sections.append(reader.section)
            elif reader is not None:
                reader.take(entry)
            else:
                raise ValueError("there is no start before it")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            damage.append(f"{path.name}: a line of kind {entry.get('kind')!r} is left out ({error!r})")


class _Reader:
    """Turns the lines of one attempt into intervals."""

    def __init__(self, node_id: str, start: Mapping[str, Any]) -> None:
        self.section = Section(
            node_id=node_id,
            host=str(start.get("host", "")),
            machine=str(start.get("machine") or start.get("host") or node_id),
            num_nodes=int(start.get("num_nodes", 1)),
            begin_unix_s=float(start["time_unix_s"]),
            resumed_at_step=start["resumed_at_step"],
            sources={str(source["id"]): source for source in start["sources"]},
            missing=[(str(one["kind"]), str(one["reason"])) for one in start.get("missing", ())],
            notes=[str(note) for note in start.get("notes", ())],
            drawn_j={str(source["id"]): 0.0 for source in start["sources"]},
        )
        self._time_s = self.section.begin_unix_s
        self._saved_step = int(start["resumed_at_step"] or 0)
        self._waited_s = 0.0
        self._has_trained = False
        self._unattributed: list[Interval] = []  # training whose waiting is not known yet

    def take(self, entry: Mapping[str, Any]) -> None:
        kind = entry.get("kind")
        if kind == "energy":
            self._take_energy(entry)
        elif kind == "rollback":
            self._saved_step = int(entry["to_step"])
            self.section.rollbacks.append(self._saved_step)
            for interval in self.section.intervals:
                interval.lose_after(self._saved_step)
        elif kind == "end":
            self.section.is_ended = True

    def _take_energy(self, entry: Mapping[str, Any]) -> None:
        time_s, step, phase = float(entry["time_unix_s"]), int(entry["step"]), str(entry["phase"])
        if phase not in PHASES:
            raise ValueError(f"{phase} is no phase")
        drawn_j = self.section.drawn_j
        reading = {key: float(value) for key, value in entry["joules"].items() if key in drawn_j}
        interval = Interval(
            node_id=self.section.node_id,
            begin_unix_s=self._time_s,
            end_unix_s=max(time_s, self._time_s),
            step=step,
            phase=phase,
            sources_j={key: value - drawn_j[key] for key, value in reading.items()},
            is_after_save=phase == "training" and step == self._saved_step,
        )
        self._time_s = interval.end_unix_s
        drawn_j |= reading
        self.section.intervals.append(interval)
        self.section.notes += [str(note) for note in entry.get("notes", ())]
        if phase == "checkpoint":
            self._saved_step = step
        if phase == "training":
            self._unattributed.append(interval)
            self._has_trained = True
        if entry.get("waiting_s") is not None:
            self._take_waiting(entry["waiting_s"])

    def _take_waiting(self, waiting_s: Mapping[str, float | None]) -> None:
        """Distribute the waiting since the last figure over the training since then."""
        self.section.is_waiting_known = True
        self.section.is_communication_known &= waiting_s.get("communication") is not None
        waited_s = sum(value for value in waiting_s.values() if value is not None)
        seconds = sum(interval.seconds for interval in self._unattributed)
        share = min(max((waited_s - self._waited_s) / seconds, 0.0), 1.0) if seconds > 0 else 0.0
        for interval in self._unattributed:
            interval.waiting = share
        # A figure before the first training is the start value (the sanity check waits too); one that grows outside
        # training was late, and belongs to the training that follows.
        if self._unattributed or not self._has_trained:
            self._waited_s = waited_s
        self._unattributed = []
