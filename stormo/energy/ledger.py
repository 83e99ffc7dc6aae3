"""The energy bill of a run, from the files of its nodes alone: every joule in exactly one part, over all attempts.

Parts: training, waiting (for input and for other workers), validation, checkpoint, recomputed (done again after a
resume or a rollback), starting, idle. Waiting is a share of time: a training interval's joules times the share of its
seconds spent waiting. What was not measured is named as a reason, never guessed.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stormo.energy.meter import MAX_ERROR
from stormo.energy.node_file import Interval, Section, read_sections

PARTS = ("training", "waiting", "validation", "checkpoint", "recomputed", "starting", "idle")
JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeBill:
    """One node over all attempts."""

    node_id: str
    host: str
    total_j: float | None  # None: nothing could be read on it
    parts_j: dict[str, float]
    sources_j: dict[str, float]  # by source id
    kinds_j: dict[str, float]  # "gpu", "cpu", "dram"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptBill:
    """One attempt over all nodes."""

    number: int  # from 1
    begin_unix_s: float
    end_unix_s: float
    resumed_at_step: int | None
    total_j: float | None
    num_nodes: int
    node_ids: tuple[str, ...]  # those that wrote a file
    is_ended: bool  # False: killed, or still running


@dataclass(frozen=True, kw_only=True)
class Bill:
    """The energy of a run; `total_j` is the sum of `parts_j`."""

    total_j: float | None = None  # None: no source was read anywhere
    total_error_j: float = 0.0
    parts_j: dict[str, float] = field(default_factory=dict)
    error_j: dict[str, float] = field(default_factory=dict)  # by part
    kinds_j: dict[str, float] = field(default_factory=dict)  # "gpu", "cpu", "dram"
    nodes: tuple[NodeBill, ...] = ()
    attempts: tuple[AttemptBill, ...] = ()
    intervals: tuple[Interval, ...] = ()  # by node, in order of time
    reasons: tuple[str, ...]  # what is missing from the figures, or included besides the job

    @property
    def total_wh(self) -> float | None:
        """The total in watt-hours."""
        return None if self.total_j is None else self.total_j / 3600

    @property
    def uncertain_parts(self) -> tuple[str, ...]:
        """The parts whose bound is over 5 %: too short for their counters, even all intervals together."""
        return tuple(part for part, joules in self.parts_j.items() if 0 < MAX_ERROR * joules < self.error_j[part])

    def joules_until(self, time_unix_s: float) -> float | None:
        """Joules of all nodes and attempts up to a moment; None where nothing was read."""
        if self.total_j is None:
            return None
        return math.fsum(one.joules_until(time_unix_s) for one in self.intervals)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Emissions and price of the energy; None where the user gave no figure, or nothing was read."""

    co2e_g: float | None
    money: float | None


def cost(bill: Bill, grid_intensity: float | None, price: float | None) -> Cost:
    """Grams of CO2e and money of a bill: grid intensity in grams per kWh, price per kWh."""
    kwh = None if bill.total_j is None else bill.total_j / JOULES_PER_KWH
    co2e_g, money = (None if kwh is None or factor is None else kwh * factor for factor in (grid_intensity, price))
    return Cost(co2e_g=co2e_g, money=money)


def read_bill(run_folder: Path) -> Bill:
    """The bill of the run in this folder, finished or not."""
    reasons: list[str] = []
    files = sorted((run_folder / "nodes").glob("*.jsonl"), key=lambda path: node_order(path.stem))
    sections = [section for path in files for section in read_sections(path, reasons)]
    if not sections and not reasons:
        reasons.append("no node wrote what it drew: measuring was turned off, or the run ended before it began")
    for section in sections:
        _merge_seams(section)
    attempts = group(sections)
    for members in attempts:
        reasons += count_once(members)
    mark_lost(attempts)
    by_node: dict[str, list[Interval]] = {path.stem: [] for path in files}
    for number, members in enumerate(attempts, start=1):
        for section in members:
            for interval in section.intervals:
                interval.attempt = number
                by_node[section.node_id].append(interval)
    for own in by_node.values():
        own.sort(key=lambda one: one.begin_unix_s)
    intervals = tuple(itertools.chain.from_iterable(by_node.values()))
    errors_j, total_error_j = _errors(sections)
    total_j, parts_j = _by_part(sections, intervals)
    return Bill(
        total_j=total_j,
        total_error_j=total_error_j,
        parts_j=parts_j,
        error_j={part: errors_j.get(part, 0.0) for part in parts_j},
        kinds_j=_by_kind(sections),
        nodes=tuple(_node_bill(node_id, sections, own) for node_id, own in by_node.items()),
        attempts=tuple(_attempt_bill(number, members) for number, members in enumerate(attempts, start=1)),
        intervals=intervals,
        reasons=tuple(dict.fromkeys(reasons + reasons_of(attempts))),
    )


def _merge_seams(section: Section) -> None:
    """Assign an idle moment that is too short for the counters to the phase after it."""
    longest_s = max((float(source["interval_s"]) for source in section.sources.values()), default=0.0)
    runs = [list(run) for _, run in itertools.groupby(section.intervals, lambda one: one.phase)]
    for run, after in itertools.pairwise(runs):
        if run[0].phase == "idle" and math.fsum(one.seconds for one in run) < longest_s:
            for one in run:
                one.phase, one.is_after_save = after[0].phase, after[0].is_after_save


def _sums(figures: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The sum of the figures of each name."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, figure in figures:
        by_name[name].append(figure)
    return {name: math.fsum(found) for name, found in by_name.items()}


def _by_part(sections: Iterable[Section], intervals: Iterable[Interval]) -> tuple[float | None, dict[str, float]]:
    """The joules of all parts together and of each; None and nothing where no source was read."""
    if not any(section.sources for section in sections):
        return None, {}
    parts_j = dict.fromkeys(PARTS, 0.0) | _sums(part for one in intervals for part in one.parts_j.items())
    return math.fsum(parts_j.values()), parts_j


def _by_kind(sections: Iterable[Section]) -> dict[str, float]:
    return _sums((str(source["kind"]), one.drawn_j[key]) for one in sections for key, source in one.sources.items())


def _node_bill(node_id: str, sections: Iterable[Section], intervals: Iterable[Interval]) -> NodeBill:
    own = [section for section in sections if section.node_id == node_id]
    total_j, parts_j = _by_part(own, intervals)
    return NodeBill(
        node_id=node_id,
        host=", ".join(dict.fromkeys(section.host for section in own)),
        total_j=total_j,
        parts_j=parts_j,
        sources_j=_sums((key, section.drawn_j[key]) for section in own for key in section.sources),
        kinds_j=_by_kind(own),
    )


def _attempt_bill(number: int, members: Sequence[Section]) -> AttemptBill:
    is_measured = any(section.sources for section in members)
    return AttemptBill(
        number=number,
        begin_unix_s=min(section.begin_unix_s for section in members),
        end_unix_s=max(section.end_unix_s for section in members),
        resumed_at_step=members[0].resumed_at_step,
        total_j=math.fsum(_by_kind(members).values()) if is_measured else None,
        num_nodes=max(section.num_nodes for section in members),
        node_ids=tuple(section.node_id for section in members),
        is_ended=all(section.is_ended for section in members),
    )


def _errors(sections: Iterable[Section]) -> tuple[dict[str, float], float]:
    """How wrong each part and the total can be: at every boundary, power × interval of every source."""
    by_part: list[tuple[str, float]] = []
    ends = []
    for section in sections:
        # Between consecutive intervals of the same part there is no error.
        grouped = itertools.groupby(section.intervals, lambda one: one.is_lost or one.phase)
        runs = [list(run) for _, run in grouped]
        for before, after in zip([[], *runs], [*runs, []], strict=True):  # both ends of the attempt are boundaries too
            error_j = _error_at(section, before, after)
            if not before or not after:
                ends.append(error_j)
            for side in (*before[-1:], *after[:1]):
                by_part += [(part, error_j * share) for part, share in side.shares.items()]
    return _sums(by_part), math.fsum(ends)


def _error_at(section: Section, before: Sequence[Interval], after: Sequence[Interval]) -> float:
    """A reading is up to one interval old: the energy of that time may be on the wrong side."""
    errors = []
    sides = [(side, math.fsum(one.seconds for one in side)) for side in (before, after)]
    for source_id, source in section.sources.items():
        power_w = 0.0
        for side, seconds in sides:  # the larger one: a short side does not show its power
            if seconds > 0:
                power_w = max(power_w, sum(one.sources_j.get(source_id, 0.0) for one in side) / seconds)
        errors.append(power_w * float(source["interval_s"]) + float(source["resolution_j"]))
    return math.fsum(errors)


_SHOWN_NODES = 4


def group(sections: Iterable[Section]) -> list[list[Section]]:
    """The sections of each attempt, first attempt first.

    Nodes of one attempt begin before any other of them has ended, at the same step; their clocks may differ a little.
    """
    attempts: list[list[Section]] = []
    for section in sorted(sections, key=lambda one: one.begin_unix_s):
        last = attempts[-1] if attempts else []
        if (
            last
            and all(one.node_id != section.node_id for one in last)
            and last[0].resumed_at_step == section.resumed_at_step
            and section.begin_unix_s <= max(one.end_unix_s for one in last)
        ):
            last.append(section)
        else:
            attempts.append([section])
    return attempts


def mark_lost(attempts: Sequence[Sequence[Section]]) -> None:
    """Mark what a later attempt recomputed: everything after the step that it resumed from or rolled back to."""
    back_to = math.inf  # the earliest step decides
    validated_again: set[int] = set()
    for members in reversed(attempts):
        first_step = members[0].resumed_at_step or 0
        intervals = [interval for section in members for interval in section.intervals]
        for interval in intervals:
            interval.lose_after(back_to)
            interval.is_lost |= interval.phase == "validation" and interval.step in validated_again
        # An epoch whose validation was cut short is saved as it is, and validated as a whole after the resume.
        if any(interval.phase == "validation" and interval.step == first_step for interval in intervals):
            validated_again.add(first_step)
        back_to = min(back_to, first_step, *(step for section in members for step in section.rollbacks))


def count_once(members: Sequence[Section]) -> list[str]:
    """Count a device that several nodes of one machine have read at one of them only; return the reasons."""
    owner_of, reasons = owners(
        (section.machine, source_id, section.node_id, section.drawn_j[source_id])
        for section in members
        for source_id in section.sources
    )
    for section in members:
        for source_id in list(section.sources):
            if owner_of[section.machine, source_id] != section.node_id:
                del section.sources[source_id]
                for interval in section.intervals:
                    interval.sources_j.pop(source_id, None)
    return reasons


def owners(readings: Iterable[tuple[str, str, str, float]]) -> tuple[dict[tuple[str, str], str], list[str]]:
    """The node at which each device is counted, by (machine, source id), and the reasons.

    Of several nodes of one machine that have read a device, it is the one with the most joules.

    Args:
        readings: machine, source id, node and joules, of every node's every device.
    """
    readers: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for machine, source_id, node_id, joules in readings:
        readers[machine, source_id][node_id] = joules
    owner_of = {device: max(found, key=lambda node_id: found[node_id]) for device, found in readers.items()}
    reasons = [
        f"{source_id} is one device that {named(found)} have read: it is counted once, "
        f"at node {owner_of[machine, source_id]}"
        for (machine, source_id), found in readers.items()
        if len(found) > 1
    ]
    return owner_of, reasons


def reasons_of(attempts: Sequence[Sequence[Section]]) -> list[str]:
    """What is missing from the figures of the attempts, or included besides the job."""
    nodes_of: dict[str, list[str]] = defaultdict(list)
    texts = []
    if attempts and attempts[0][0].resumed_at_step:
        texts.append(f"what was done up to step {attempts[0][0].resumed_at_step} is not counted: no file tells of it")
    for number, members in enumerate(attempts, start=1):
        where = f" in attempt {number}" if len(attempts) > 1 else ""
        present = {section.node_id for section in members}
        num_nodes = members[0].num_nodes
        num_absent = num_nodes - sum(node_order(node_id) < (False, num_nodes, "") for node_id in present)
        if num_absent > 0 and len(present) < num_nodes:
            first = (str(number) for number in range(num_nodes) if str(number) not in present)
            absent = _listed(list(itertools.islice(first, _SHOWN_NODES)), num_absent)
            texts.append(f"{absent} of {num_nodes} wrote no file{where}: the energy is not counted")
        for section in members:
            for reason in _reasons_of(section, where):
                nodes_of[reason].append(section.node_id)
    if all(section.num_nodes == 1 for members in attempts for section in members):
        return [*texts, *nodes_of]
    return [*texts, *(f"{named(node_ids)}: {reason}" for reason, node_ids in nodes_of.items())]


def _reasons_of(section: Section, where: str) -> list[str]:
    reasons = [f"{kind} not measured: {reason}" for kind, reason in section.missing]
    reasons += section.notes
    if not section.is_ended:
        reasons.append(f"no end was written{where} (killed, or still running): what came after the last line is lost")
    is_trained = any(interval.phase == "training" for interval in section.intervals)
    if section.sources and is_trained and not section.is_waiting_known:
        reasons.append("waiting was not measured: it is part of training")
    elif section.is_waiting_known and not section.is_communication_known:
        reasons.append("waiting for other workers was not measured: it is part of training")
    return reasons


def named(node_ids: Iterable[str]) -> str:
    """A list of nodes, the first few by name."""
    found = sorted(set(node_ids), key=node_order)
    return _listed(found[:_SHOWN_NODES], len(found))


def _listed(first: Sequence[str], count: int) -> str:
    more = f" and {count - len(first)} more" if count > len(first) else ""
    return f"node{'s' if count > 1 else ''} {', '.join(first)}{more}"


def node_order(node_id: str) -> tuple[bool, int, str]:
    """Numbers in their order, then names."""
    is_number = node_id.isdecimal() and len(node_id) < 20
    return (not is_number, int(node_id) if is_number else 0, node_id)
