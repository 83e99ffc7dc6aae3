"""Tunes NCCL's sockets by measuring, before the workers join. NCCL's defaults stay unless others are clearly faster."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import torch

from stormo.config.layout import Layout
from stormo.config.link import (
    BUCKET_MIB,
    Link,
    candidates,
    keeps_defaults,
    link_before,
    sends_half_gradients,
    too_few_cores,
    too_few_cores_planned,
    uses_sockets,
)
from stormo.config.schema import TrainConfig
from stormo.distributed.nccl_probe import LARGE_BYTES, SMALL_BYTES
from stormo.distributed.store import SignedStore, Store
from stormo.errors import StormoError, pluralize
from stormo.launch import RankInfo
from stormo.system.files import BadFileError, data_cache, private_folder, read_object
from stormo.telemetry.folder import write_json

LIMIT_S = 8.0  # for all measurements
_ANSWER_S = 10.0  # for one, in which CUDA starts
_END_S = 3.0
_GAIN = 0.95  # of the time with NCCL's defaults
_TIE = 1.03  # times the least: small messages decide
_CALLS, _CALLS_S = 5, 0.2  # of large messages
_BUCKET, _SMALL = BUCKET_MIB << 20, SMALL_BYTES[0]
_Tried = tuple[Mapping[str, str], dict[int, float]]  # NCCL's variables, and seconds by size
Figures = dict[str, dict[int, float]]  # "seconds" by size, and those by "tree"
Measure = Callable[[Mapping[str, str], int, bool], Figures]  # of NCCL's variables, calls, and whether of every size


class ProbeError(StormoError):
    """A measurement that failed; the run takes NCCL's defaults."""


def search(
    to_try: Sequence[Mapping[str, str]],
    measure: Measure,
    world_size: int,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Link, int]:
    """The fastest settings, and how many of them were not tried for lack of time.

    NCCL's defaults are measured first and last, and the best of the others twice: its worse time must beat their better
    one. So a disturbance cannot make a slower setting win.
    """
    times_s, tried = [clock()], list[_Tried]()
    first = measure({}, _CALLS, False)["seconds"]
    calls = min(_CALLS, max(1, int(_CALLS_S / first[_BUCKET])))
    for variables in to_try:
        times_s.append(clock())
        shortest_s = min(later - earlier for earlier, later in pairwise(times_s))
        if times_s[-1] - times_s[0] + 2 * shortest_s > LIMIT_S:  # two are compared at the end
            break
        tried.append((variables, measure(variables, calls, False)["seconds"]))
    last = measure({}, calls, True)
    default_s = min(first[_BUCKET], last["seconds"][_BUCKET])
    chosen, figures, bucket_s = dict[str, str](), last, default_s
    best = _best(tried)
    if best is not None and best[1][_BUCKET] <= _GAIN * default_s:
        again = measure(best[0], calls, True)
        confirmed_s = max(best[1][_BUCKET], again["seconds"][_BUCKET])
        if confirmed_s <= _GAIN * default_s:
            chosen, figures, bucket_s = dict(best[0]), again, confirmed_s
    link = Link(
        world_size=world_size,
        variables=chosen,
        bucket_mb=_bucket_mb(figures["seconds"]),
        small_algo="tree" if _is_tree_faster(figures) else None,
        bucket_s=bucket_s,
        default_s=default_s,
    )
    return link, len(to_try) - len(tried)


def _best(tried: Sequence[_Tried]) -> _Tried | None:
    least_s = min((seconds[_BUCKET] for _, seconds in tried), default=0.0)
    near = [one for one in tried if one[1][_BUCKET] <= _TIE * least_s]
    return min(near, key=lambda one: one[1][_SMALL], default=None)


def _bucket_mb(seconds: Mapping[int, float]) -> int | None:
    """A smaller bucket, where its bytes are sent faster than DDP's."""
    fastest = min(LARGE_BYTES, key=lambda size: seconds[size] / size)
    return fastest >> 20 if seconds[fastest] / fastest <= _GAIN * seconds[_BUCKET] / _BUCKET else None


def _is_tree_faster(figures: Figures) -> bool:
    tree = figures.get("tree")  # missing where the user has set the algorithm
    return tree is not None and all(tree[size] <= _GAIN * figures["seconds"][size] for size in SMALL_BYTES)


class Probe:
    """A process beside this worker that measures for it."""

    def __init__(self, command: Callable[[int], Sequence[str]], limit_s: float = _ANSWER_S) -> None:
        self._limit_s = limit_s
        self._connection, theirs = Pipe()
        null = subprocess.DEVNULL
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                command(descriptor), pass_fds=[descriptor], stdin=null, stdout=null, stderr=null
            )

    def order(self, order: Mapping[str, Any]) -> None:
        """Have it measure; a process that is gone says so in `answer`."""
        with suppress(OSError):
            self._connection.send_bytes(json.dumps(order).encode())

    def answer(self, number: int) -> dict[str, Any]:
        """What it found for an order; an error where it did not end in time."""
        deadline = time.monotonic() + self._limit_s
        with suppress(OSError, EOFError):
            while self._connection.poll(max(0.0, deadline - time.monotonic())):
                found: dict[str, Any] = json.loads(self._connection.recv_bytes())
                if found.pop("number") == number:
                    return found
            return {"error": f"it took longer than {self._limit_s:g} s"}
        return {"error": "the measuring process is gone"}

    def close(self) -> None:
        """End it, and free its memory on the GPU."""
        self._connection.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ProbeGroup:
    """The probes of all ranks, seen from one of them: rank 0 gives the orders, and gathers the figures."""

    def __init__(self, store: SignedStore, rank: int, world_size: int, timeout: timedelta) -> None:
        self.world_size = world_size
        self._store, self._rank = store, rank
        self._timeout = max(timeout, timedelta(seconds=3 * _ANSWER_S))  # a rank may wait for another's probe
        self._number = 0

    def share(self, name: str, value: Any) -> Any:
        """The value of rank 0, on all ranks."""
        if self._rank == 0:
            self._store.put(name, value)
            return value
        return self._store.get(name, self._timeout)

    def gather(self, name: str, value: Any) -> list[Any] | None:
        """The values of all ranks on rank 0, None on the others."""
        self._store.put(f"{name}/{self._rank}", value)
        names = [f"{name}/{rank}" for rank in range(self.world_size)]
        return self._store.get_all(names, self._timeout) if self._rank == 0 else None

    def measure(
        self, probe: Probe, may_tree: bool, variables: Mapping[str, str], calls: int, every_size: bool
    ) -> Figures:
        """On rank 0: the slowest rank's figures under these settings."""
        sizes = (*SMALL_BYTES, *LARGE_BYTES) if every_size else (_SMALL, _BUCKET)
        order = {"variables": dict(variables), "calls": calls, "sizes": sizes, "tree": every_size and may_tree}
        gathered = self._take_part(probe, order)
        assert gathered is not None
        for rank, found in enumerate(gathered):
            if "error" in found:
                raise ProbeError(f"rank {rank}: {found['error']}")
        return {
            kind: {int(size): max(found[kind][size] for found in gathered) for size in gathered[0][kind]}
            for kind in gathered[0]
        }

    def serve_orders(self, probe: Probe) -> None:
        """On the other ranks: measure until rank 0 has decided."""
        while self._take_part(probe) is not None:
            pass

    def stop(self) -> None:
        """On rank 0: let the others go."""
        self.share(f"order/{self._number}", None)

    def _take_part(self, probe: Probe, order: Mapping[str, Any] | None = None) -> list[Any] | None:
        """Measure what rank 0 orders; None where it orders nothing more."""
        number = self._number
        order = self.share(f"order/{number}", order)
        if order is None:
            return None
        self._number += 1
        made = None
        if self._rank == 0:  # whose probe makes the ids of the communicators
            probe.order({**order, "number": number, "ids": None})
            made = probe.answer(number)
        made = self.share(f"ids/{number}", made)
        if self._rank and "error" not in made:
            probe.order({**order, "number": number, "ids": made["ids"]})
        found = made if "error" in made else probe.answer(number)
        return self.gather(f"found/{number}", found) or []


def choose_link(
    config: TrainConfig, layout: Layout, rank_info: RankInfo, store: Store, device: torch.device
) -> tuple[Link | None, str]:
    """NCCL's settings (of the resumed run, cached or measured) and a sentence about them. All ranks call it."""
    asked, before = config.workers.tune_link, link_before(config, layout)
    if asked is False:
        return None, ""
    if before is not None:
        return before, f"The link is set as when the run began: {before}"
    measures = bool(asked) or not keeps_defaults(config, layout)
    half_gradients = sends_half_gradients(config, layout)
    if not (measures or half_gradients):
        return None, ""
    group = ProbeGroup(store.signed("link"), rank_info.rank, rank_info.world_size, store.timeout)
    cores = group.gather("cores", [rank_info.host, sorted(os.sched_getaffinity(0))])
    # Rank 0 decides for all: a node may see other network cards.
    decided = None if cores is None else [uses_sockets(layout, os.environ), crowded_host(cores)]
    over_sockets, crowded = group.share("over_sockets", decided)
    half_gradients = half_gradients and over_sockets
    if not (asked or (measures and over_sockets and not crowded)):
        link = Link(world_size=rank_info.world_size, half_gradients=True) if half_gradients else None
        is_news = measures and over_sockets and not too_few_cores_planned(layout)
        return link, f"NCCL's own settings stay: {crowded}" if is_news else ""
    library = nccl_library()
    told = {key: value for key, value in os.environ.items() if key.startswith("NCCL_")}
    told.pop("NCCL_HOSTID", None)  # differs between ranks
    member = {
        "host": rank_info.host,
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),  # towards the others, unless the user chose another
        "gpu": torch.cuda.get_device_name(device),
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count,
        "nccl": torch.cuda.nccl.version(),
        "has_library": library is not None,
        "variables": told,
    }
    words = [str(library), str(device.index or 0), str(rank_info.rank), str(rank_info.world_size)]
    command = [sys.executable, "-P", "-m", "stormo.distributed.nccl_probe"]
    link, text = tune(group, member, lambda: Probe(lambda descriptor: [*command, str(descriptor), *words]))
    return replace(link, half_gradients=half_gradients), text


def crowded_host(cores: Sequence[tuple[str, Sequence[int]]]) -> str:
    """Why NCCL's own settings stay, from the host and the cores of every rank; empty where all have enough."""
    hosts: dict[str, list[Sequence[int]]] = {}
    for host, own in cores:
        hosts.setdefault(host, []).append(own)
    return next(filter(None, (too_few_cores(len(set().union(*some)), len(some)) for some in hosts.values())), "")


def nccl_library(maps: Path = Path("/proc/self/maps")) -> str | None:
    """The file of the NCCL that torch has loaded; None where NCCL is a part of torch itself."""
    lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.split(maxsplit=5)[5] for line in lines if "/libnccl.so" in line), None)


def tune(group: ProbeGroup, member: Mapping[str, Any], start: Callable[[], Probe]) -> tuple[Link, str]:
    """The link of these ranks, each of which describes itself, cached or measured; the sentence is on rank 0."""
    members = group.gather("member", member)
    known, text = _known(members) if members is not None else (None, "")
    known = group.share("known", known)
    if known is None:
        with closing(start()) as probe:
            if members is None:
                group.serve_orders(probe)
            else:
                found, text = _measured(group, probe, members, text)
                known = asdict(found)
        known = group.share("found", known)
    return Link.read(known), text


def _known(members: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any] | None, str]:
    """The link where nothing need be measured; a sentence."""
    if not all(member["has_library"] for member in members):
        return asdict(Link(world_size=len(members))), "The link is not tuned: NCCL is a part of this torch"
    try:
        path = _cache_file(members)
        link = Link.read(read_object(path)["link"])
    except (BadFileError, KeyError, ValueError):
        return None, f"{path} is damaged and is replaced. "
    except OSError:  # missing, or a folder that cannot be used, which is said where it is written
        return None, ""
    return asdict(link), f"The link was measured earlier ({path}): {link}"


def _measured(group: ProbeGroup, probe: Probe, members: Sequence[Mapping[str, Any]], text: str) -> tuple[Link, str]:
    """On rank 0: the link by measuring, kept for later runs; NCCL's defaults if that fails."""
    began = time.monotonic()
    users = {name: value for member in members for name, value in member["variables"].items()}
    to_try = candidates(users, min(member["multiprocessors"] for member in members))
    try:
        measure = partial(group.measure, probe, "NCCL_ALGO" not in users)
        link, num_left = search(to_try, measure, group.world_size)
    except ProbeError as error:
        return Link(world_size=group.world_size), f"{text}The link is not tuned, NCCL's defaults stay: {error}"
    finally:
        group.stop()
    text += f"The link was measured in {time.monotonic() - began:.1f} s: {link}"
    if not link.variables:
        text += f"; no other of {pluralize(len(to_try) - num_left, 'setting')} was 5 % faster"
    if num_left:
        text += f"; {num_left} more were not tried, as {LIMIT_S:g} s were over"
    if num_left == len(to_try) > 0:  # the machine was slow this time
        return link, text
    try:
        path = _cache_file(members)
        private_folder(path.parent)
        write_json(path, {"members": members, "link": asdict(link)})
    except OSError as error:
        text += f"; it is not kept for later runs ({error.strerror or error})"
    return link, text


def _cache_file(members: Sequence[Mapping[str, Any]]) -> Path:
    """The file of a link: another one for other hosts, GPUs, versions of NCCL or variables of the user."""
    digest = hashlib.sha256(json.dumps(members, sort_keys=True).encode()).hexdigest()
    own = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", "")}  # $STORMO_DATA may be shared with other users
    try:
        return data_cache(own).expanduser() / "links" / f"{digest[:32]}.json"
    except RuntimeError as error:  # a container's user without a home folder
        raise OSError(str(error)) from None
