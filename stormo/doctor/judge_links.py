"""Which node or link is slow, by comparison with those of its kind in the same job."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, median_high

from stormo.doctor.finding import Finding, Level
from stormo.doctor.measured import Link, Measured, Overall
from stormo.doctor.naming import Names, time_text
from stormo.errors import counted
from stormo.telemetry.text import format_bytes

SLOW, VERY_SLOW = 0.5, 0.1  # of the usual rate
LATE, LATE_S = 10.0, 1e-3  # times the usual latency, and never below this
_MOST_LISTED = 16
_MEND_NODE = "look at that node's network card, cable and switch port (ethtool, ibstat); leave the node out until then"
_MEND_LINK = "look at the way between the two (switches, routes); leave one of them out until then"


def judge_links(measured: Measured, names: Names) -> list[Finding]:
    """The findings on data that moves inside the nodes, between them, and through all workers."""
    return [
        *_judge_inside(measured.inside, names),
        *_judge_between(measured.between, names),
        *_judge_overall(measured.overall),
    ]


def doubtful(links: Sequence[Link]) -> list[Link]:
    """The links that are to be measured again before anybody is blamed: something else may have run just then."""
    found = []
    for likes in _alike(links):
        usual, typical_s = _usual(likes), median(link.latency_s for link in likes)
        found += [link for link in likes if _level(link.bytes_per_s, usual) or _is_late(link, typical_s, likes)]
    return found


def _judge_inside(links: Sequence[Link], names: Names) -> list[Finding]:
    found = []
    for likes in _alike(links):
        usual, width = _usual(likes), likes[0].width
        for link in likes:
            if _level(link.bytes_per_s, usual) is not None:
                text = f"moves {_rate(link)} between its {link.width} workers, {_against(link, usual)}"
                mend = "compare nvidia-smi topo -m and NVLink's state on that node with the others"
                found.append(_finding("inside", "warning", names.node(link.a), text, mend, link))
        if not any(_level(link.bytes_per_s, usual) for link in likes):
            text = (
                f"{format_bytes(min(link.bytes_per_s for link in likes))}/s or more between {counted(width, 'worker')}"
            )
            text += f" of each node, {time_text(max(link.latency_s for link in likes))} or less"
            found.append(Finding(check="inside", level="ok", group="links", text=text))
    return found


def _judge_between(links: Sequence[Link], names: Names) -> list[Finding]:
    return [finding for likes in _alike(links) for finding in _judge_likes(likes, names)]


def _alike(links: Sequence[Link]) -> list[list[Link]]:
    """Links by how many workers take part in them."""
    return [[link for link in links if link.width == width] for width in sorted({link.width for link in links})]


def _of_nodes(links: Sequence[Link]) -> dict[int, list[Link]]:
    found: dict[int, list[Link]] = {}
    for link in links:
        for node in {link.a, link.b}:
            found.setdefault(node, []).append(link)
    return dict(sorted(found.items()))


def _usual(links: Sequence[Link]) -> float:
    """A node's best link says what the node can do; the median over nodes stands when one node, or one link, is bad."""
    return median_high(max(link.bytes_per_s for link in own) for own in _of_nodes(links).values())


def _judge_likes(links: Sequence[Link], names: Names) -> list[Finding]:
    usual = _usual(links)
    slow = [link for link in links if _level(link.bytes_per_s, usual)]
    found, bad = [], []
    for node, own in _of_nodes(links).items():
        if len(own) > 1 and all(link in slow for link in own):
            best = max(own, key=lambda link: link.bytes_per_s)
            level = _level(best.bytes_per_s, usual)
            assert level is not None
            bad.append(node)
            text = f"is slow to all of the {len(own)} nodes it was tried with: {_rate(best)} at best, "
            found.append(_finding("node", level, names.node(node), text + _against(best, usual), _MEND_NODE, best))
    for link in slow:
        level = _level(link.bytes_per_s, usual)
        if level is not None and link.a not in bad and link.b not in bad:
            text = f"exchange {_rate(link)}, {_against(link, usual)}"
            found.append(_finding("link", level, names.nodes([link.a, link.b]), text, _MEND_LINK, link))
    typical_s = median(link.latency_s for link in links)
    for link in links:
        if link not in slow and _is_late(link, typical_s, links):
            text = f"answer each other after {time_text(link.latency_s)}, the others after {time_text(typical_s)}"
            found.append(_finding("latency", "warning", names.nodes([link.a, link.b]), text, _MEND_LINK, link))
    quiet = [link for link in sorted(links, key=lambda link: link.bytes_per_s) if link not in slow]
    if len(quiet) <= _MOST_LISTED:
        return found + [_link_is_well(link, names) for link in quiet]
    slowest, fastest = (format_bytes(link.bytes_per_s) for link in (quiet[0], quiet[-1]))
    text = f"{len(quiet)} pairs of nodes exchange {slowest} to {fastest}/s"
    return [*found, Finding(check="links", level="ok", group="links", text=text)]


def _link_is_well(link: Link, names: Names) -> Finding:
    return _finding("link", "ok", names.nodes([link.a, link.b]), f"exchange {_rate(link)}, {_latency(link)}", "", link)


def _judge_overall(overall: Overall | None) -> list[Finding]:
    if overall is None:
        return []
    text = (
        f"all-reduce over {counted(overall.num_ranks, 'worker')}: {format_bytes(overall.bus_bytes_per_s)}/s "
        f"each sends and receives, {time_text(overall.latency_s)} for the smallest"
    )
    facts = {"bus_bytes_per_s": overall.bus_bytes_per_s, "latency_s": overall.latency_s}
    return [Finding(check="all-reduce", level="ok", group="links", text=text, facts=facts)]


def _is_late(link: Link, typical_s: float, likes: Sequence[Link]) -> bool:
    return link.latency_s > max(LATE * typical_s, LATE_S) and len(likes) > 2


def _level(rate: float, usual: float) -> Level | None:
    return "error" if rate < VERY_SLOW * usual else "warning" if rate < SLOW * usual else None


def _rate(link: Link) -> str:
    return f"{format_bytes(link.bytes_per_s)}/s"


def _latency(link: Link) -> str:
    return f"{time_text(link.latency_s)} for the smallest message"


def _against(link: Link, usual: float) -> str:
    share = link.bytes_per_s / usual
    return f"{f'{share:.0%}' if share >= 0.01 else f'1/{1 / share:.0f}'} of the usual {format_bytes(usual)}/s"


def _finding(check: str, level: Level, where: str, text: str, mend: str, link: Link) -> Finding:
    facts = {
        "node_a": link.a,
        "node_b": link.b,
        "num_workers": link.width,
        "bytes_per_s": link.bytes_per_s,
        "latency_s": link.latency_s,
    }
    return Finding(check=check, level=level, group="links", where=where, text=text, mend=mend, facts=facts)
