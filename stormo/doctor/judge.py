"""Turns the measurements of a job into findings: which node, link or device is bad, and how to fix it.

Pure functions. Nodes, links and devices are compared with their peers in the same job, never with a data sheet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median, median_high
from typing import Any

from stormo.doctor.finding import Fact, Finding, Level, grouped
from stormo.doctor.measure import OPEN_PORTS, OUTCOMES, AllReduce, Attempt, Device, Link, Measurements, WorkerInfo
from stormo.errors import pluralize
from stormo.telemetry.text import format_bytes, format_time

SLOW_DEVICE, VERY_SLOW_DEVICE = 0.8, 0.5  # of the median of its peers
SLOW_CPU = 0.4  # other programs may share its cores
LEAST_FREE_MEMORY = 0.9
LITTLE_SPACE_BYTES = 1 << 30
SLOW_LINK, VERY_SLOW_LINK = 0.5, 0.1  # of the usual bytes per second
LATE_RATIO, LATE_S = 10.0, 1e-3  # times the usual latency, and never below this
_MOST_LISTED = 16
_MOST_NAMED = 6
_FIX_NODE = "look at that node's network card, cable and switch port (ethtool, ibstat); leave the node out until then"
_FIX_LINK = "look at the path between the two (switches, routes); leave one of them out until then"
_REACH_FIXES = {
    "wrong_peer": (
        "give that node a unique address in this network, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an "
        "interface whose address no other node has (docker0 and virbr0 have the same on all)"
    ),
    "packets": "give all interfaces and switches between these nodes the same MTU (ip link set NAME mtu 1500)",
}
_MUST_BE_EQUAL = ("stormo", "torch", "CUDA", "NCCL")


def judge(measured: Measurements) -> list[Finding]:
    """All findings, those that are ok included."""
    names = Names(measured.workers)
    return [
        *_judge_reach(measured.attempts, names),
        *_judge_versions(measured.devices, names),
        *_judge_folder(measured, names),
        *_judge_devices(measured.devices, names),
        *_judge_inside(measured.inside, names),
        *(finding for peers in _by_width(measured.between) for finding in _judge_peers(peers, names)),
        *_judge_all_reduce(measured.all_reduce),
    ]


def _judge_devices(devices: Sequence[Device], names: Names) -> list[Finding]:
    """Wrong results, differing bits, slow devices and memory in use."""
    fix = "leave this node out and have the device tested; it would spoil any training"
    found = [
        _device_finding(device, names, "arithmetic", "error", f"computes wrong results on {device.name}", fix)
        for device in devices
        if not device.is_exact
    ]
    for peers in grouped(devices, lambda one: (one.name, one.num_threads, *sorted(one.versions.items()))).values():
        found += _differing_bits(peers, names)
    for peers in grouped(devices, lambda one: one.name).values():
        found += [*_slow_devices(peers, names), *_used_memory(peers, names)]
        speeds = [one.flops_per_s for one in peers]
        text = f"{len(peers)} × {peers[0].name}: {flops_text(min(speeds))} to {flops_text(max(speeds))}"
        facts = {"count": len(peers), "least_flops_per_s": min(speeds), "most_flops_per_s": max(speeds)}
        found.append(Finding("devices", "ok", text, facts=facts, group="devices"))
    return found


def _differing_bits(peers: Sequence[Device], names: Names) -> Iterable[Finding]:
    digests = [one.digest for one in peers]
    usual = _most_common(digests)
    for device in peers:
        if device.digest != usual and device.is_exact:
            text = f"computes other bits for the same product than most of the {len(peers)} × {device.name}"
            fix = "compare its libraries and ECC errors with the others'; runs on it are not bit-identical"
            yield _device_finding(device, names, "bits", "warning" if device.kind == "cuda" else "note", text, fix)


def _slow_devices(peers: Sequence[Device], names: Names) -> Iterable[Finding]:
    usual, uuids = median_high(one.flops_per_s for one in peers), Counter(one.uuid for one in peers)
    for device in peers:
        share, is_gpu = device.flops_per_s / usual, device.kind == "cuda"
        is_shared = is_gpu and uuids[device.uuid] > 1  # on purpose: each slows the other
        if share >= (SLOW_DEVICE if is_gpu else SLOW_CPU) or is_shared:
            continue
        text = f"computes at {share:.0%} of the usual speed ({flops_text(device.flops_per_s)}, not {flops_text(usual)})"
        fix = "look at what else runs on that node; all workers wait for it"
        if is_gpu:
            fix = "see nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER there; all workers wait for it"
        level: Level = "error" if is_gpu and share < VERY_SLOW_DEVICE else "warning"
        yield _device_finding(device, names, "device-speed", level, text, fix)


def _used_memory(peers: Sequence[Device], names: Names) -> Iterable[Finding]:
    most = max(one.free_bytes for one in peers)
    for device in peers:
        if device.kind == "cuda" and device.free_bytes < LEAST_FREE_MEMORY * most:
            text = f"has {format_bytes(device.free_bytes)} of memory free, the others up to {format_bytes(most)}"
            fix = "end what else uses that GPU; nvidia-smi lists it"
            yield _device_finding(device, names, "device-memory", "warning", text, fix)


def _judge_versions(devices: Sequence[Device], names: Names) -> list[Finding]:
    found = []
    for kind in dict.fromkeys(kind for device in devices for kind in device.versions):
        values = [device.versions.get(kind, "none") for device in devices]
        usual = _most_common(values)
        odd = [device for device, value in zip(devices, values, strict=True) if value != usual]
        if odd:
            text = f"{kind} is {odd[0].versions.get(kind, 'none')} on {names.ranks([one.rank for one in odd])}"
            level: Level = "error" if kind in _MUST_BE_EQUAL else "warning"
            fix = f"install the same {kind} on every node"
            found.append(_job_finding("versions", level, f"{text} and {usual} on the others", fix))
    if devices and not found:
        text = ", ".join(f"{kind} {version}" for kind, version in devices[0].versions.items())
        found.append(_job_finding("versions", "ok", f"the same on all workers: {text}"))
    return found


def _judge_folder(measured: Measurements, names: Names) -> list[Finding]:
    """Rank 0 writes there; all ranks write sharded checkpoints, and each node its energy."""
    folder, free = measured.runs_folder, measured.runs_folder_free_bytes
    if not folder:
        return []
    if free is None:
        fix = "set --runs-folder to one that can be written"
        why = f" ({measured.runs_folder_error})" if measured.runs_folder_error else ""
        return [_job_finding("runs-folder", "error", f"{folder} cannot be written by rank 0{why}", fix)]
    found = []
    if free < LITTLE_SPACE_BYTES:
        fix = "make room, or set --runs-folder to another file system"
        found.append(_job_finding("runs-folder", "warning", f"{folder} has {format_bytes(free)} left", fix))
    without_folder = [device.rank for device in measured.devices if device.sees_runs_folder is False]
    if without_folder:
        who = names.nodes(names.node_of(rank) for rank in without_folder)
        text, fix = f"{folder} is not visible on {who}", "set --runs-folder to a file system that all nodes share"
        if measured.needs_shared_folder:
            found.append(
                _job_finding("shared-folder", "error", f"{text}, where shards of checkpoints are written", fix)
            )
        else:
            found.append(_job_finding("shared-folder", "note", f"{text}, whose energy would be missing", fix))
    return found or [_job_finding("runs-folder", "ok", f"{folder} is visible on all nodes, {format_bytes(free)} free")]


def _device_finding(device: Device, names: Names, check: str, level: Level, text: str, fix: str) -> Finding:
    facts: dict[str, Fact] = {"rank": device.rank, "uuid": device.uuid, "flops_per_s": device.flops_per_s}
    where = names.rank(device.rank)
    return Finding(check, level, text, fix, facts=facts, where=where, group="devices")


def _job_finding(check: str, level: Level, text: str, fix: str = "") -> Finding:
    return Finding(check, level, text, fix, group="job")


def _most_common(values: Iterable[str]) -> str:
    return Counter(values).most_common(1)[0][0]


def _judge_reach(attempts: Sequence[Attempt], names: Names) -> list[Finding]:
    """A node that no other node reaches, else each pair that cannot connect."""
    failed = {(one.node, one.to): one for one in attempts if one.outcome != "ok"}
    if not failed:
        num_nodes = len({one.node for one in attempts})
        text = f"{num_nodes} nodes reach one another over {len(attempts)} connections"
        return [Finding("reach", "ok", text, group="job")] if attempts else []
    unreachable = [node for node in sorted({one.to for one in attempts}) if _is_unreachable(node, attempts)]
    found = []
    for node in unreachable:
        tried = [one for one in attempts if one.to == node]
        text = f"cannot be reached from any other node: {_why(tried[0])}"
        found.append(_reach_finding(names.node(node, address=True), text, tried[0]))
    reported: set[tuple[int, int]] = set()
    for (node, to), one in failed.items():
        if node in unreachable or to in unreachable or (to, node) in reported:
            continue
        reported.add((node, to))
        text = f"cannot be reached from {names.node(node)}: {_why(one)}"
        if (to, node) in failed:
            text += ", nor the other way round"
        found.append(_reach_finding(names.node(to, address=True), text, one))
    return found


def _is_unreachable(node: int, attempts: Sequence[Attempt]) -> bool:
    outcomes = [one.outcome for one in attempts if one.to == node]
    return len(outcomes) > 1 and "ok" not in outcomes


def _why(one: Attempt) -> str:
    return OUTCOMES[one.outcome] + (f" ({one.detail})" if one.detail else "")


def _reach_finding(where: str, text: str, one: Attempt) -> Finding:
    facts: dict[str, Fact] = {"node": one.to, "from_node": one.node, "outcome": one.outcome}
    fix = _REACH_FIXES.get(one.outcome, OPEN_PORTS)
    return Finding("reach", "error", text, fix, facts=facts, where=where, group="job")


def outliers(links: Sequence[Link]) -> list[Link]:
    """Slow links, to be measured again: another program may have slowed them."""
    found = []
    for peers in _by_width(links):
        usual, typical_s = _usual(peers), median(link.latency_s for link in peers)
        found += [link for link in peers if _level(link.bytes_per_s, usual) or _is_late(link, typical_s, peers)]
    return found


def _judge_inside(links: Sequence[Link], names: Names) -> list[Finding]:
    found = []
    for peers in _by_width(links):
        usual, width = _usual(peers), peers[0].width
        slow = [link for link in peers if _level(link.bytes_per_s, usual)]
        for link in slow:
            text = f"moves {_rate(link)} between its {link.width} workers, {_against(link, usual)}"
            fix = "compare nvidia-smi topo -m and NVLink's state on that node with the others"
            found.append(_link_finding("inside", "warning", names.node(link.a), text, fix, link))
        if not slow:
            slowest, latency_s = min(link.bytes_per_s for link in peers), max(link.latency_s for link in peers)
            text = f"{format_bytes(slowest)}/s or more between {pluralize(width, 'worker')} of each node, "
            text += f"{format_time(latency_s)} or less"
            found.append(Finding("inside", "ok", text, group="links"))
    return found


def _by_width(links: Sequence[Link]) -> list[list[Link]]:
    """Links grouped by their number of workers."""
    return list(grouped(sorted(links, key=lambda link: link.width), lambda link: link.width).values())


def _of_nodes(links: Sequence[Link]) -> dict[int, list[Link]]:
    found: dict[int, list[Link]] = {}
    for link in links:
        for node in {link.a, link.b}:
            found.setdefault(node, []).append(link)
    return dict(sorted(found.items()))


def _usual(links: Sequence[Link]) -> float:
    """The median over nodes of each node's best link, which one bad node or link does not change."""
    return median_high(max(link.bytes_per_s for link in own) for own in _of_nodes(links).values())


def _judge_peers(links: Sequence[Link], names: Names) -> list[Finding]:
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
            found.append(_link_finding("node", level, names.node(node), text + _against(best, usual), _FIX_NODE, best))
    for link in slow:
        level = _level(link.bytes_per_s, usual)
        if level is not None and link.a not in bad and link.b not in bad:
            text = f"exchange {_rate(link)}, {_against(link, usual)}"
            found.append(_link_finding("link", level, names.nodes([link.a, link.b]), text, _FIX_LINK, link))
    typical_s = median(link.latency_s for link in links)
    for link in links:
        if link not in slow and _is_late(link, typical_s, links):
            text = f"answer each other after {format_time(link.latency_s)}, the others after {format_time(typical_s)}"
            found.append(_link_finding("latency", "warning", names.nodes([link.a, link.b]), text, _FIX_LINK, link))
    fast = [link for link in sorted(links, key=lambda link: link.bytes_per_s) if link not in slow]
    if len(fast) <= _MOST_LISTED:
        for link in fast:
            text = f"exchange {_rate(link)}, {format_time(link.latency_s)} for the smallest message"
            found.append(_link_finding("link", "ok", names.nodes([link.a, link.b]), text, "", link))
        return found
    slowest, fastest = (format_bytes(link.bytes_per_s) for link in (fast[0], fast[-1]))
    text = f"{len(fast)} pairs of nodes exchange {slowest} to {fastest}/s"
    return [*found, Finding("links", "ok", text, group="links")]


def _judge_all_reduce(all_reduce: AllReduce | None) -> list[Finding]:
    if all_reduce is None:
        return []
    text = (
        f"all-reduce over {pluralize(all_reduce.num_ranks, 'worker')}: {format_bytes(all_reduce.bus_bytes_per_s)}/s "
        f"each sends and receives, {format_time(all_reduce.latency_s)} for the smallest"
    )
    facts = {"bus_bytes_per_s": all_reduce.bus_bytes_per_s, "latency_s": all_reduce.latency_s}
    return [Finding("all-reduce", "ok", text, facts=facts, group="links")]


def _is_late(link: Link, typical_s: float, peers: Sequence[Link]) -> bool:
    return link.latency_s > max(LATE_RATIO * typical_s, LATE_S) and len(peers) > 2


def _level(rate: float, usual: float) -> Level | None:
    return "error" if rate < VERY_SLOW_LINK * usual else "warning" if rate < SLOW_LINK * usual else None


def _rate(link: Link) -> str:
    return f"{format_bytes(link.bytes_per_s)}/s"


def _against(link: Link, usual: float) -> str:
    share = link.bytes_per_s / usual
    return f"{f'{share:.0%}' if share >= 0.01 else f'1/{1 / share:.0f}'} of the usual {format_bytes(usual)}/s"


def _link_finding(check: str, level: Level, where: str, text: str, fix: str, link: Link) -> Finding:
    facts = {
        "node_a": link.a,
        "node_b": link.b,
        "num_workers": link.width,
        "bytes_per_s": link.bytes_per_s,
        "latency_s": link.latency_s,
    }
    return Finding(check, level, text, fix, facts=facts, where=where, group="links")


class Names:
    """How the nodes and workers of a job are named in messages."""

    def __init__(self, workers: Iterable[WorkerInfo]) -> None:
        self.workers = {worker.rank: worker for worker in workers}
        self.leaders = {worker.node: worker for worker in self.workers.values() if worker.leads_node}
        self._on_node = grouped(sorted(self.workers), self.node_of)

    def node(self, node: int, *, address: bool = False) -> str:
        """Node 2 (n3), or with the address that its workers use."""
        worker = self.leaders.get(node)
        if worker is None:
            return f"node {node}"
        where = f", {worker.address}" if address and worker.address else ""
        return f"node {node} ({worker.host}{where})"

    def nodes(self, nodes: Iterable[int]) -> str:
        """Several nodes; at most six are named."""
        return _listed([self.node(node) for node in sorted(set(nodes))])

    def rank(self, rank: int) -> str:
        """Rank 3 (n2, local rank 1)."""
        worker = self.workers.get(rank)
        if worker is None:
            return f"rank {rank}"
        local = f", local rank {worker.local_rank}" if len(self._on_node[worker.node]) > 1 else ""
        return f"rank {rank} ({worker.host}{local})"

    def ranks(self, ranks: Sequence[int]) -> str:
        """Several workers; a node is named instead of all its workers."""
        by_node = grouped(ranks, lambda rank: self.node_of(rank) if rank in self.workers else -1)
        whole = [node for node, members in by_node.items() if node >= 0 and len(members) == len(self._on_node[node])]
        rest = [rank for node, members in by_node.items() if node not in whole for rank in members]
        return _listed([*(self.node(node) for node in sorted(whole)), *(self.rank(rank) for rank in sorted(rest))])

    def ranks_on(self, node: int) -> list[int]:
        """The workers of a node."""
        return self._on_node[node]

    def node_of(self, rank: int) -> int:
        """The node that a worker runs on."""
        return self.workers[rank].node


def sentence(finding: Finding) -> str:
    """A finding in one sentence with its fix."""
    text = f"{finding.where} {finding.text}" if finding.where else finding.text
    return f"{text}; {finding.fix}" if finding.fix else text


def flops_text(flops_per_s: float) -> str:
    """A speed, such as 640 TFLOP/s."""
    return f"{flops_per_s / 1e12:.0f} TFLOP/s" if flops_per_s >= 1e13 else f"{flops_per_s / 1e9:.0f} GFLOP/s"


def _listed(names: Sequence[str]) -> str:
    if len(names) > _MOST_NAMED:
        return f"{', '.join(names[: _MOST_NAMED - 1])} and {len(names) - _MOST_NAMED + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def inside_links(values: Sequence[Any], names: Names) -> list[Link]:
    """The links inside the nodes, from the ring of each node's workers."""
    found = []
    for node, leader in names.leaders.items():
        if values[leader.rank] is not None:
            latency_s, rate = values[leader.rank]
            width = len(names.ranks_on(node))
            found.append(Link(a=node, b=node, width=width, latency_s=latency_s, bytes_per_s=rate))
    return found


def merge_links(links: Sequence[Link]) -> list[Link]:
    """Each link once, with the best of its measurements."""
    found: dict[tuple[int, int], Link] = {}
    for link in links:
        known = found.get((link.a, link.b), link)
        latency_s, rate = min(known.latency_s, link.latency_s), max(known.bytes_per_s, link.bytes_per_s)
        found[link.a, link.b] = replace(link, latency_s=latency_s, bytes_per_s=rate)
    return list(found.values())


def round_links(pairs: Sequence[tuple[int, int]], values: Sequence[Any], names: Names) -> list[Link]:
    """The links between pairs of nodes, from what each worker measured with its peer, all at once."""
    found = []
    for a, b in pairs:
        swaps = [values[rank] for rank in names.ranks_on(a) if values[rank] is not None]
        latency_s, rate = min(swap[0] for swap in swaps), sum(swap[1] for swap in swaps)
        found.append(Link(a=a, b=b, width=len(swaps), latency_s=latency_s, bytes_per_s=rate))
    return found
