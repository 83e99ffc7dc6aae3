"""The attempts of a run over all its nodes: which sections belong together, what was done twice, what is not there."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from stormo.energy.nodefile import Section

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
    """Mark what a later attempt had to do again: all after the step at which it began or to which it went back."""
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
    """Take a device that two nodes of one machine have both read out of all but one of them; say which."""
    owner_of, reasons = owners(
        (section.machine, source_id, section.node_id, section.joules_of(source_id))
        for section in members
        for source_id in section.sources
    )
    for section in members:
        for source_id in list(section.sources):
            if owner_of[section.machine, source_id] != section.node_id:
                del section.sources[source_id]
                for interval in section.intervals:
                    interval.joules.pop(source_id, None)
    return reasons


def owners(readings: Iterable[tuple[str, str, str, float]]) -> tuple[dict[tuple[str, str], str], list[str]]:
    """The node at which each device is counted, by (machine, source id), and what is to be said of it.

    Of several nodes of one machine that have read it, the one that has seen most.

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
    """What is missing from the figures of the attempts, or is in them besides the job."""
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
    """Some nodes in words, the first few by name."""
    found = sorted(set(node_ids), key=node_order)
    return _listed(found[:_SHOWN_NODES], len(found))


def _listed(first: Sequence[str], count: int) -> str:
    more = f" and {count - len(first)} more" if count > len(first) else ""
    return f"node{'s' if count > 1 else ''} {', '.join(first)}{more}"


def node_order(node_id: str) -> tuple[bool, int, str]:
    """Numbers in their order, then names."""
    is_number = node_id.isdecimal() and len(node_id) < 20
    return (not is_number, int(node_id) if is_number else 0, node_id)
