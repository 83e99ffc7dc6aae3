"""Who is to blame when a phase did not end in time, or failed: from who has finished it and who has not."""

from __future__ import annotations

from collections.abc import Sequence

from stormo.doctor.finding import Finding
from stormo.doctor.naming import Names
from stormo.doctor.phases import HungError
from stormo.doctor.reach import OPEN_PORTS

_MOST_FAILURES = 3
_LOOK = "look at that machine: its kernel log (dmesg), its load, and nvidia-smi, which should answer at once"
_TEXTS = {
    "arrival": ("did not come", "check that every worker was started and can reach rank 0, or raise --timeout"),
    "reach": ("did not say whom they reach", _LOOK),
    "joining": ("did not join the others", OPEN_PORTS),
    "folder": (
        "did not write a small file into the folder of the runs",
        "see whether its file system answers on that machine (ls), or choose another folder with --runs-folder",
    ),
    "device": ("did not finish a small computation", _LOOK),
    "inside": (
        "did not finish an exchange between the workers of their node",
        "run again with NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 tells whether the way between the GPUs is to blame",
    ),
    "all": (
        "did not finish an all-reduce over all workers, though every pair of nodes that was tried works",
        "run again with NCCL_DEBUG=INFO and fewer nodes at a time",
    ),
}


def describe(hung: HungError, names: Names, schedule: Sequence[Sequence[tuple[int, int]]]) -> list[Finding]:
    """The findings on a phase that hung or failed."""
    found = []
    phase = hung.phase.split()[0]  # without its number
    if hung.missing and hung.phase.startswith("round "):
        found += _hung_pairs(hung, names, schedule[int(hung.phase.split()[1])])
    elif hung.missing:
        text, mend = _TEXTS.get(phase, (f"did not finish {hung.phase}", _LOOK))
        found.append(_finding(hung.phase, names.ranks(hung.missing), f"{text} within {hung.limit_s:g} s", mend))
    for rank, failure in list(hung.failures.items())[:_MOST_FAILURES]:
        text = f"failed in the phase {hung.phase}: {failure}"
        found.append(_finding(hung.phase, names.rank(rank), text, _TEXTS.get(phase, ("", _LOOK))[1]))
    return found


def _hung_pairs(hung: HungError, names: Names, pairs: Sequence[tuple[int, int]]) -> list[Finding]:
    nodes = {names.node_of(rank) for rank in hung.missing}
    text = f"opened connections, but an exchange between them did not end within {hung.limit_s:g} s"
    mend = "look at the way between the two: packets are lost, or their MTU differs; leave one of them out until then"
    return [_finding("link", names.nodes(pair), text, mend) for pair in pairs if nodes & set(pair)]


def _finding(check: str, where: str, text: str, mend: str) -> Finding:
    return Finding(check=check, level="error", group="job", where=where, text=text, mend=mend)
