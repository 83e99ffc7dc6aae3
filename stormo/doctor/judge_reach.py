"""Which nodes cannot be reached, and whose clocks are off."""

from __future__ import annotations

from collections.abc import Sequence

from stormo.doctor.finding import Fact, Finding, Level
from stormo.doctor.measured import Attempt
from stormo.doctor.naming import Names, time_text
from stormo.doctor.reach import OPEN_PORTS, OUTCOMES

CLOCK_NOTE_S, CLOCK_WARNING_S = 0.1, 1.0
_MENDS = {
    "stranger": (
        "give that node an address of its own in this network, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an "
        "interface whose address no other node has (docker0 and virbr0 have the same on all)"
    ),
    "packets": "give all interfaces and switches between these nodes the same MTU (ip link set NAME mtu 1500)",
}


def judge_reach(attempts: Sequence[Attempt], names: Names) -> list[Finding]:
    """A node that nobody reaches is named as such; else the pair that has no way to each other."""
    failed = {(one.node, one.to): one for one in attempts if one.outcome != "ok"}
    if not failed:
        num_nodes = len({one.node for one in attempts})
        text = f"{num_nodes} nodes reach one another over {len(attempts)} connections"
        return [Finding(check="reach", level="ok", group="job", text=text)] if attempts else []
    lost = [node for node in sorted({one.to for one in attempts}) if _is_lost(node, attempts)]
    found = []
    for node in lost:
        tried = [one for one in attempts if one.to == node]
        text = f"cannot be reached from any other node: {_why(tried[0])}"
        found.append(_finding(names.node(node, address=True), text, tried[0]))
    told: set[tuple[int, int]] = set()
    for (node, to), one in failed.items():
        if node in lost or to in lost or (to, node) in told:
            continue
        told.add((node, to))
        text = f"cannot be reached from {names.node(node)}: {_why(one)}"
        if (to, node) in failed:
            text += ", nor the other way round"
        found.append(_finding(names.node(to, address=True), text, one))
    return found


def judge_clocks(attempts: Sequence[Attempt], names: Names) -> list[Finding]:
    """Clocks that are off against node 0's by more than the measurement may be."""
    found = []
    for one in attempts:
        if one.to != 0 or one.outcome != "ok" or one.clock_ahead_s is None:
            continue
        off_s = abs(one.clock_ahead_s) - one.clock_error_s
        if off_s < CLOCK_NOTE_S:
            continue
        way = "behind" if one.clock_ahead_s > 0 else "ahead of"
        level: Level = "warning" if off_s >= CLOCK_WARNING_S else "note"
        found.append(
            Finding(
                check="clock",
                level=level,
                group="job",
                where=names.node(one.node),
                text=f"has a clock that is {time_text(abs(one.clock_ahead_s))} {way} that of {names.node(0)}",
                mend="set its clock by chrony or ntpd: the times in its files and logs do not fit the others'",
                facts={"clock_ahead_s": -one.clock_ahead_s, "clock_error_s": one.clock_error_s},
            )
        )
    return found


def _is_lost(node: int, attempts: Sequence[Attempt]) -> bool:
    outcomes = [one.outcome for one in attempts if one.to == node]
    return len(outcomes) > 1 and "ok" not in outcomes


def _why(one: Attempt) -> str:
    return OUTCOMES[one.outcome] + (f" ({one.detail})" if one.detail else "")


def _finding(where: str, text: str, one: Attempt) -> Finding:
    facts: dict[str, Fact] = {"node": one.to, "from_node": one.node, "outcome": one.outcome}
    mend = _MENDS.get(one.outcome, OPEN_PORTS)
    return Finding(check="reach", level="error", group="job", where=where, text=text, mend=mend, facts=facts)
