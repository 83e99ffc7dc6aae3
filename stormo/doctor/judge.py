"""From what was measured across a job to findings: which node, link or device is bad, and what to do about it.

Pure functions. Nodes, links and devices are compared with their peers in the same job, never with a data sheet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from statistics import median, median_high
from typing import Any

from stormo.doctor.finding import Fact, Finding, Level
from stormo.doctor.measure import Attempt, Device, Link, Measurements, Overall, WorkerInfo
from stormo.doctor.network import OPEN_PORTS, OUTCOMES
from stormo.errors import counted
from stormo.telemetry.text import format_bytes

SLOW_DEVICE, VERY_SLOW_DEVICE = 0.8, 0.5  # of the median of its peers
SLOW_PROCESSOR = 0.4  # its cores may be shared with anything
SLOW_COPY = 0.5
TAKEN_MEMORY = 0.9
LITTLE_SPACE_BYTES = 1 << 30
_MUST_BE_EQUAL = ("stormo", "torch", "CUDA", "NCCL")


def judge(measured: Measurements) -> list[Finding]:
    """Everything that the measurements say, what is well included."""
    names = Names(measured.workers)
    return [
        *judge_reach(measured.attempts, names),
        *judge_clocks(measured.attempts, names),
        *_judge_versions(measured.devices, names),
        *_judge_folder(measured, names),
        *_judge_devices(measured.devices, names),
        *judge_links(measured, names),
    ]


def _judge_devices(devices: Sequence[Device], names: Names) -> list[Finding]:
    """Wrong results, other bits, slow devices, slow copies and memory that somebody else holds."""
    found = [_wrong(device, names) for device in devices if not device.is_exact]
    for peers in _groups(devices, lambda one: (one.name, one.num_threads, *sorted(one.versions.items()))):
        found += _other_bits(peers, names)
    for peers in _groups(devices, lambda one: one.name):
        found += [*_slow_devices(peers, names), *_slow_copies(peers, names), *_taken_memory(peers, names)]
        speeds = [one.flops_per_s for one in peers]
        text = f"{len(peers)} × {peers[0].name}: {flops_text(min(speeds))} to {flops_text(max(speeds))}"
        facts = {"count": len(peers), "least_flops_per_s": min(speeds), "most_flops_per_s": max(speeds)}
        found.append(Finding("devices", "ok", text, facts=facts, group="devices"))
    return found


def _wrong(device: Device, names: Names) -> Finding:
    fix = "leave this node out and have the device tested; it would spoil any training"
    return _about(device, names, "arithmetic", "error", f"computes wrong results on {device.name}", fix)


def _other_bits(peers: Sequence[Device], names: Names) -> Iterable[Finding]:
    digests = [one.digest for one in peers]
    usual = _commonest(digests)
    for device in peers:
        if device.digest != usual and device.is_exact:
            text = f"gets other bits from the same product than most of the {len(peers)} × {device.name}"
            fix = "compare its libraries and ECC errors with the others'; runs on it are not repeatable bit by bit"
            yield _about(device, names, "bits", "warning" if device.kind == "cuda" else "note", text, fix)


def _slow_devices(peers: Sequence[Device], names: Names) -> Iterable[Finding]:
    usual, uuids = median_high(one.flops_per_s for one in peers), Counter(one.uuid for one in peers)
    for device in peers:
        share, is_gpu = device.flops_per_s / usual, device.kind == "cuda"
        is_shared = is_gpu and uuids[device.uuid] > 1  # on purpose, and then each slows the other down
        if share >= (SLOW_DEVICE if is_gpu else SLOW_PROCESSOR) or is_shared:
            continue
        text = f"computes at {share:.0%} of the usual speed ({flops_text(device.flops_per_s)}, not {flops_text(usual)})"
        fix = "look at what else runs on that node; all workers wait for it"
        if is_gpu:
            fix = "see nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER there; all workers wait for it"
        level: Level = "error" if is_gpu and share < VERY_SLOW_DEVICE else "warning"
        yield _about(device, names, "device-speed", level, text, fix)


def _slow_copies(peers: Sequence[Device], names: Names) -> Iterable[Finding]:
    for way, field in (("from its host", "copy_in_bytes_per_s"), ("to its host", "copy_out_bytes_per_s")):
        usual = median_high(getattr(one, field) for one in peers)
        for device in peers:
            rate = getattr(device, field)
            if device.kind == "cuda" and rate < SLOW_COPY * usual:
                text = f"copies {way} at {format_bytes(rate)}/s, the others at {format_bytes(usual)}/s"
                fix = "compare PCIe width and generation (nvidia-smi -q -d PCIE) and the cores it is bound to"
                yield _about(device, names, "copy-speed", "warning", text, fix)


def _taken_memory(peers: Sequence[Device], names: Names) -> Iterable[Finding]:
    most = max(one.free_bytes for one in peers)
    for device in peers:
        if device.kind == "cuda" and device.free_bytes < TAKEN_MEMORY * most:
            text = f"has {format_bytes(device.free_bytes)} of memory free, the others up to {format_bytes(most)}"
            fix = "end what else uses that GPU; nvidia-smi lists it"
            yield _about(device, names, "device-memory", "warning", text, fix)


def _judge_versions(devices: Sequence[Device], names: Names) -> list[Finding]:
    found = []
    for kind in dict.fromkeys(kind for device in devices for kind in device.versions):
        values = [device.versions.get(kind, "none") for device in devices]
        usual = _commonest(values)
        odd = [device for device, value in zip(devices, values, strict=True) if value != usual]
        if odd:
            text = f"{kind} is {odd[0].versions.get(kind, 'none')} on {names.ranks([one.rank for one in odd])}"
            level: Level = "error" if kind in _MUST_BE_EQUAL else "warning"
            fix = f"install the same {kind} on every node"
            found.append(_about_job("versions", level, f"{text} and {usual} on the others", fix))
    if devices and not found:
        text = ", ".join(f"{kind} {version}" for kind, version in devices[0].versions.items())
        found.append(_about_job("versions", "ok", f"the same on all workers: {text}"))
    return found


def _judge_folder(measured: Measurements, names: Names) -> list[Finding]:
    """Only rank 0 writes, but for checkpoints of a model that is spread, and for the energy of each node."""
    folder, free = measured.runs_folder, measured.runs_folder_free_bytes
    if not folder:
        return []
    if free is None:
        fix = "set --runs-folder to one that can be written"
        why = f" ({measured.runs_folder_error})" if measured.runs_folder_error else ""
        return [_about_job("runs-folder", "error", f"{folder} cannot be written by rank 0{why}", fix)]
    found = []
    if free < LITTLE_SPACE_BYTES:
        fix = "make room, or set --runs-folder to another file system"
        found.append(_about_job("runs-folder", "warning", f"{folder} has {format_bytes(free)} left", fix))
    blind = [device.rank for device in measured.devices if device.sees_runs_folder is False]
    if blind:
        who = names.nodes(names.node_of(rank) for rank in blind)
        text, fix = f"{folder} is not seen on {who}", "set --runs-folder to a file system that all nodes share"
        if measured.needs_shared_folder:
            found.append(_about_job("shared-folder", "error", f"{text}, where parts of checkpoints are written", fix))
        else:
            found.append(_about_job("shared-folder", "note", f"{text}, whose energy would be missing", fix))
    return found or [_about_job("runs-folder", "ok", f"{folder} is seen on all nodes, {format_bytes(free)} free")]


def _about(device: Device, names: Names, check: str, level: Level, text: str, fix: str) -> Finding:
    facts: dict[str, Fact] = {"rank": device.rank, "uuid": device.uuid, "flops_per_s": device.flops_per_s}
    where = names.rank(device.rank)
    return Finding(check, level, text, fix, facts=facts, where=where, group="devices")


def _about_job(check: str, level: Level, text: str, fix: str = "") -> Finding:
    return Finding(check, level, text, fix, group="job")


def _commonest(values: Iterable[str]) -> str:
    return Counter(values).most_common(1)[0][0]


def _groups(devices: Iterable[Device], key: Callable[[Device], Hashable]) -> list[list[Device]]:
    groups: dict[Hashable, list[Device]] = {}
    for device in devices:
        groups.setdefault(key(device), []).append(device)
    return list(groups.values())


CLOCK_NOTE_S, CLOCK_WARNING_S = 0.1, 1.0
_REACH_FIXES = {
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
        return [Finding("reach", "ok", text, group="job")] if attempts else []
    lost = [node for node in sorted({one.to for one in attempts}) if _is_lost(node, attempts)]
    found = []
    for node in lost:
        tried = [one for one in attempts if one.to == node]
        text = f"cannot be reached from any other node: {_why(tried[0])}"
        found.append(_about_reach(names.node(node, address=True), text, tried[0]))
    told: set[tuple[int, int]] = set()
    for (node, to), one in failed.items():
        if node in lost or to in lost or (to, node) in told:
            continue
        told.add((node, to))
        text = f"cannot be reached from {names.node(node)}: {_why(one)}"
        if (to, node) in failed:
            text += ", nor the other way round"
        found.append(_about_reach(names.node(to, address=True), text, one))
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
                "clock",
                level,
                f"has a clock that is {time_text(abs(one.clock_ahead_s))} {way} that of {names.node(0)}",
                "set its clock by chrony or ntpd: the times in its files and logs do not fit the others'",
                facts={"clock_ahead_s": -one.clock_ahead_s, "clock_error_s": one.clock_error_s},
                where=names.node(one.node),
                group="job",
            )
        )
    return found


def _is_lost(node: int, attempts: Sequence[Attempt]) -> bool:
    outcomes = [one.outcome for one in attempts if one.to == node]
    return len(outcomes) > 1 and "ok" not in outcomes


def _why(one: Attempt) -> str:
    return OUTCOMES[one.outcome] + (f" ({one.detail})" if one.detail else "")


def _about_reach(where: str, text: str, one: Attempt) -> Finding:
    facts: dict[str, Fact] = {"node": one.to, "from_node": one.node, "outcome": one.outcome}
    fix = _REACH_FIXES.get(one.outcome, OPEN_PORTS)
    return Finding("reach", "error", text, fix, facts=facts, where=where, group="job")


SLOW, VERY_SLOW = 0.5, 0.1  # of the usual rate
LATE, LATE_S = 10.0, 1e-3  # times the usual latency, and never below this
_MOST_LISTED = 16
_FIX_NODE = "look at that node's network card, cable and switch port (ethtool, ibstat); leave the node out until then"
_FIX_LINK = "look at the way between the two (switches, routes); leave one of them out until then"


def judge_links(measured: Measurements, names: Names) -> list[Finding]:
    """The findings on data that moves inside the nodes, between them, and through all workers."""
    return [
        *_judge_inside(measured.inside, names),
        *_judge_between(measured.between, names),
        *_judge_overall(measured.overall),
    ]


def doubtful(links: Sequence[Link]) -> list[Link]:
    """The links that are to be measured again before anybody is blamed: something else may have run just then."""
    found = []
    for peers in _alike(links):
        usual, typical_s = _usual(peers), median(link.latency_s for link in peers)
        found += [link for link in peers if _level(link.bytes_per_s, usual) or _is_late(link, typical_s, peers)]
    return found


def _judge_inside(links: Sequence[Link], names: Names) -> list[Finding]:
    found = []
    for peers in _alike(links):
        usual, width = _usual(peers), peers[0].width
        for link in peers:
            if _level(link.bytes_per_s, usual) is not None:
                text = f"moves {_rate(link)} between its {link.width} workers, {_against(link, usual)}"
                fix = "compare nvidia-smi topo -m and NVLink's state on that node with the others"
                found.append(_about_link("inside", "warning", names.node(link.a), text, fix, link))
        if not any(_level(link.bytes_per_s, usual) for link in peers):
            text = (
                f"{format_bytes(min(link.bytes_per_s for link in peers))}/s or more between {counted(width, 'worker')}"
            )
            text += f" of each node, {time_text(max(link.latency_s for link in peers))} or less"
            found.append(Finding("inside", "ok", text, group="links"))
    return found


def _judge_between(links: Sequence[Link], names: Names) -> list[Finding]:
    return [finding for peers in _alike(links) for finding in _judge_peers(peers, names)]


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
            found.append(_about_link("node", level, names.node(node), text + _against(best, usual), _FIX_NODE, best))
    for link in slow:
        level = _level(link.bytes_per_s, usual)
        if level is not None and link.a not in bad and link.b not in bad:
            text = f"exchange {_rate(link)}, {_against(link, usual)}"
            found.append(_about_link("link", level, names.nodes([link.a, link.b]), text, _FIX_LINK, link))
    typical_s = median(link.latency_s for link in links)
    for link in links:
        if link not in slow and _is_late(link, typical_s, links):
            text = f"answer each other after {time_text(link.latency_s)}, the others after {time_text(typical_s)}"
            found.append(_about_link("latency", "warning", names.nodes([link.a, link.b]), text, _FIX_LINK, link))
    quiet = [link for link in sorted(links, key=lambda link: link.bytes_per_s) if link not in slow]
    if len(quiet) <= _MOST_LISTED:
        return found + [_link_is_well(link, names) for link in quiet]
    slowest, fastest = (format_bytes(link.bytes_per_s) for link in (quiet[0], quiet[-1]))
    text = f"{len(quiet)} pairs of nodes exchange {slowest} to {fastest}/s"
    return [*found, Finding("links", "ok", text, group="links")]


def _link_is_well(link: Link, names: Names) -> Finding:
    return _about_link(
        "link", "ok", names.nodes([link.a, link.b]), f"exchange {_rate(link)}, {_latency(link)}", "", link
    )


def _judge_overall(overall: Overall | None) -> list[Finding]:
    if overall is None:
        return []
    text = (
        f"all-reduce over {counted(overall.num_ranks, 'worker')}: {format_bytes(overall.bus_bytes_per_s)}/s "
        f"each sends and receives, {time_text(overall.latency_s)} for the smallest"
    )
    facts = {"bus_bytes_per_s": overall.bus_bytes_per_s, "latency_s": overall.latency_s}
    return [Finding("all-reduce", "ok", text, facts=facts, group="links")]


def _is_late(link: Link, typical_s: float, peers: Sequence[Link]) -> bool:
    return link.latency_s > max(LATE * typical_s, LATE_S) and len(peers) > 2


def _level(rate: float, usual: float) -> Level | None:
    return "error" if rate < VERY_SLOW * usual else "warning" if rate < SLOW * usual else None


def _rate(link: Link) -> str:
    return f"{format_bytes(link.bytes_per_s)}/s"


def _latency(link: Link) -> str:
    return f"{time_text(link.latency_s)} for the smallest message"


def _against(link: Link, usual: float) -> str:
    share = link.bytes_per_s / usual
    return f"{f'{share:.0%}' if share >= 0.01 else f'1/{1 / share:.0f}'} of the usual {format_bytes(usual)}/s"


def _about_link(check: str, level: Level, where: str, text: str, fix: str, link: Link) -> Finding:
    facts = {
        "node_a": link.a,
        "node_b": link.b,
        "num_workers": link.width,
        "bytes_per_s": link.bytes_per_s,
        "latency_s": link.latency_s,
    }
    return Finding(check, level, text, fix, facts=facts, where=where, group="links")


_MOST_NAMED = 6


class Names:
    """The words for the nodes and workers of a job."""

    def __init__(self, workers: Iterable[WorkerInfo]) -> None:
        self.workers = {worker.rank: worker for worker in workers}
        self.leaders = {worker.node: worker for worker in self.workers.values() if worker.leads_node}
        self._on_node: dict[int, list[int]] = {}
        for rank, worker in sorted(self.workers.items()):
            self._on_node.setdefault(worker.node, []).append(rank)

    def node(self, node: int, *, address: bool = False) -> str:
        """Node 2 (n3), or with the address that its workers use."""
        worker = self.leaders.get(node)
        if worker is None:
            return f"node {node}"
        return (
            f"node {node} ({worker.host}, {worker.address})"
            if address and worker.address
            else f"node {node} ({worker.host})"
        )

    def nodes(self, nodes: Iterable[int]) -> str:
        """Several nodes, of which the first few are named."""
        return _listed([self.node(node) for node in sorted(set(nodes))])

    def rank(self, rank: int) -> str:
        """Rank 3 (n2, local rank 1)."""
        worker = self.workers.get(rank)
        if worker is None:
            return f"rank {rank}"
        local = f", local rank {worker.local_rank}" if len(self._on_node[worker.node]) > 1 else ""
        return f"rank {rank} ({worker.host}{local})"

    def ranks(self, ranks: Sequence[int]) -> str:
        """Several workers; a node all of whose workers are meant is named instead of them."""
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self.workers[rank].node if rank in self.workers else -1, []).append(rank)
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
    said = f"{finding.where} {finding.text}" if finding.where else finding.text
    return f"{said}; {finding.fix}" if finding.fix else said


def time_text(seconds: float) -> str:
    """A short time in words, such as 35 µs."""
    return (
        f"{seconds * 1e6:.0f} µs"
        if seconds < 1e-3
        else f"{seconds * 1e3:.3g} ms"
        if seconds < 1
        else f"{seconds:.3g} s"
    )


def flops_text(flops_per_s: float) -> str:
    """A speed of arithmetic in words, such as 640 TFLOP/s."""
    return f"{flops_per_s / 1e12:.0f} TFLOP/s" if flops_per_s >= 1e13 else f"{flops_per_s / 1e9:.0f} GFLOP/s"


def _listed(names: Sequence[str]) -> str:
    if len(names) > _MOST_NAMED:
        return f"{', '.join(names[: _MOST_NAMED - 1])} and {len(names) - _MOST_NAMED + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def inside_links(values: Sequence[Any], names: Names) -> list[Link]:
    """The links inside the nodes, from what each worker measured around its node."""
    found = []
    for node, leader in names.leaders.items():
        if values[leader.rank] is not None:
            latency_s, rate = values[leader.rank]
            width = len(names.ranks_on(node))
            found.append(Link(a=node, b=node, width=width, latency_s=latency_s, bytes_per_s=rate))
    return found


def best_of(links: Sequence[Link]) -> list[Link]:
    """Each link once, as the best of its measurements shows it."""
    found: dict[tuple[int, int], Link] = {}
    for link in links:
        known = found.get((link.a, link.b), link)
        latency_s, rate = min(known.latency_s, link.latency_s), max(known.bytes_per_s, link.bytes_per_s)
        found[link.a, link.b] = replace(link, latency_s=latency_s, bytes_per_s=rate)
    return list(found.values())


def round_links(pairs: Sequence[tuple[int, int]], values: Sequence[Any], names: Names) -> list[Link]:
    """The links between pairs of nodes, from what each worker measured with its peer, all of them at once."""
    found = []
    for a, b in pairs:
        swaps = [values[rank] for rank in names.ranks_on(a) if values[rank] is not None]
        latency_s, rate = min(swap[0] for swap in swaps), sum(swap[1] for swap in swaps)
        found.append(Link(a=a, b=b, width=len(swaps), latency_s=latency_s, bytes_per_s=rate))
    return found
