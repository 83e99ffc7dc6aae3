"""Measures a job in phases on all workers: arrival, connections between nodes, devices, links.

Every phase has a time limit. The workers report over the store, not over what is measured: when a collective hangs,
rank 0 still learns who has finished. Rank 0 names the culprit in one sentence, and all workers end with it.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stormo.doctor.finding import Finding, in_one_line
from stormo.doctor.judge import Names, inside_links, judge, merge_links, outliers, round_links, sentence
from stormo.doctor.measure import (
    OPEN_PORTS,
    AllReduce,
    Attempt,
    Device,
    LinkTimer,
    Measurements,
    ProbeServer,
    WorkerInfo,
    disjoint,
    free_memory,
    is_visible,
    measure_device,
    own_address,
    partners,
    rounds,
    write_probe_file,
)
from stormo.errors import EXIT_FAILURE, StormoError, pluralize
from stormo.launch import FailureReporter, RankInfo
from stormo.telemetry.record import Notice
from stormo.telemetry.text import format_bytes

if TYPE_CHECKING:
    import torch

    from stormo.config.layout import Layout
    from stormo.config.schema import TrainConfig
    from stormo.distributed.store import SignedStore, Store
    from stormo.distributed.world import World


_POLL_S = 0.005
_GRACE_S = 2.0  # for workers that began a little later
_VERDICT_S = 60.0  # for rank 0's decision, after the limit
_ATTEMPTS = 3  # at what looks slow
_MOST_AGAIN = 4  # rounds of such pairs
_MOST_FAILURES = 3  # that are named
Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The longest that each phase may take."""

    arrival_s: float
    reach_s: float = 5.0
    joining_s: float = 60.0
    device_s: float = 30.0
    exchange_s: float = 10.0
    one_measurement_s: float = 0.15
    all_rounds_s: float = 3.0
    whole_s: float = math.inf


class PreflightError(StormoError):
    """The first error found, in one sentence.

    Args:
        is_hang: whether some workers hang, and have to be ended.
    """

    def __init__(self, findings: Sequence[Finding], *, is_hang: bool = False) -> None:
        self.findings, self.is_hang = list(findings), is_hang
        errors = [finding for finding in findings if finding.level == "error"]
        more = f" ({len(errors) - 1} more of {len(errors)} errors: stormo doctor lists them)" if len(errors) > 1 else ""
        super().__init__(f"preflight: {sentence(errors[0])}{more}.")


class HungError(StormoError):
    """Some workers did not finish a phase in time, or failed in it; raised by rank 0."""

    def __init__(self, phase: str, limit_s: float, missing: Sequence[int], failures: dict[int, str]) -> None:
        super().__init__(f"{phase} did not end within {limit_s:g} s" if missing else f"{phase} failed")
        self.phase, self.limit_s, self.missing, self.failures = phase, limit_s, list(missing), failures


class PreflightStoppedError(StormoError):
    """Rank 0 has found an error and ends the phases; raised by the others."""


class Phases:
    """Runs phases on all workers, which report to rank 0 over a store.

    Args:
        on_hang: called in a thread of rank 0 when rank 0 itself hangs; ends the process.
    """

    def __init__(self, store: SignedStore, rank: int, size: int, on_hang: Callable[[HungError], None]) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._on_hang = on_hang

    def run(
        self, phase: str, part: Callable[[], Any], limit_s: float, decide: Callable[[list[Any]], Any] | None = None
    ) -> Any:
        """Do this worker's part; returns on all workers what rank 0 decides from all values."""
        began = time.monotonic()
        watch = watchdog(limit_s + _GRACE_S, lambda: self._on_hang(self._hang(phase, limit_s, self._answers(phase))))
        try:
            if self._rank == 0:
                watch.start()
            answer = {"value": part()}
        except Exception as error:
            answer = {"failure": in_one_line(error)}
        finally:
            watch.cancel()
        self._store.put(f"{phase}/{self._rank}", answer)
        self._store.count(f"{phase}/count")
        if self._rank:
            return self._verdict(phase, limit_s)
        while self._store.count(f"{phase}/count", 0) < self._size and time.monotonic() - began <= limit_s + _GRACE_S:
            time.sleep(_POLL_S)
        answers = self._answers(phase)
        hung = self._hang(phase, limit_s, answers)
        if hung.missing or hung.failures:
            raise hung
        decided = decide([answer["value"] for answer in answers.values()]) if decide else None
        self._store.put(f"{phase}/verdict", {"decided": decided})
        return decided

    def share(self, name: str, value: Any) -> None:
        """Publish a value to all workers."""
        self._store.put(f"shared/{name}", value)

    def shared(self, name: str) -> Any:
        """Wait for a published value."""
        return self._store.get(f"shared/{name}", timedelta(seconds=_VERDICT_S))

    def stop(self, phase: str, sentence: str) -> None:
        """End the phases on all workers; called by rank 0 in place of a decision."""
        self._store.put(f"{phase}/verdict", {"stop": sentence})

    def _verdict(self, phase: str, limit_s: float) -> Any:
        verdict = self._store.get(f"{phase}/verdict", timedelta(seconds=limit_s + _VERDICT_S))
        if "stop" in verdict:
            raise PreflightStoppedError(verdict["stop"])
        return verdict["decided"]

    def _answers(self, phase: str) -> dict[int, dict[str, Any]]:
        """The answers so far, by rank."""
        names = {rank: f"{phase}/{rank}" for rank in range(self._size)}
        if not self._store.has(list(names.values())):
            names = {rank: name for rank, name in names.items() if self._store.has([name])}
        found = self._store.get_all(list(names.values()), timedelta(seconds=_VERDICT_S)) if names else []
        return dict(zip(names, found, strict=True))

    def _hang(self, phase: str, limit_s: float, answers: Mapping[int, Mapping[str, Any]]) -> HungError:
        failures = {rank: answer["failure"] for rank, answer in answers.items() if "failure" in answer}
        return HungError(phase, limit_s, [rank for rank in range(self._size) if rank not in answers], failures)


def watchdog(limit_s: float, call: Callable[[], None]) -> threading.Timer:
    """A timer, not yet started, that does not keep the process alive."""
    timer = threading.Timer(limit_s, call)
    timer.daemon = True
    return timer


def end_process(error: StormoError, reporter: FailureReporter) -> None:
    """Report the error to all workers and end this process, even if its main thread hangs."""
    if reporter.shows_failures:
        reporter.report_failure(error, secondary=False)
    else:
        print(f"stormo: {error}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(EXIT_FAILURE)


_CHECK_MACHINE = "look at that machine: its kernel log (dmesg), its load, and nvidia-smi, which should answer at once"
_TEXTS = {
    "arrival": ("did not arrive", "check that every worker was started and can reach rank 0, or raise --timeout"),
    "reach": ("did not report which nodes they reach", _CHECK_MACHINE),
    "joining": ("did not join the others", OPEN_PORTS),
    "folder": (
        "did not write a small file into the folder of the runs",
        "see whether its file system answers on that machine (ls), or choose another folder with --runs-folder",
    ),
    "device": ("did not finish a small computation", _CHECK_MACHINE),
    "inside": (
        "did not finish an exchange between the workers of their node",
        "run again with NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 tells whether the path between the GPUs is the cause",
    ),
    "all": (
        "did not finish an all-reduce over all workers, though every measured pair of nodes works",
        "run again with NCCL_DEBUG=INFO and fewer nodes at a time",
    ),
}


def describe_hang(hung: HungError, names: Names, schedule: Sequence[Sequence[tuple[int, int]]]) -> list[Finding]:
    """The findings on a phase that hung or failed."""
    found = []
    phase, _, number = hung.phase.partition(" ")
    if hung.missing and phase == "round":
        found += _hung_pairs(hung, names, schedule[int(number)])
    elif hung.missing:
        text, fix = _TEXTS.get(phase, (f"did not finish {hung.phase}", _CHECK_MACHINE))
        found.append(_hung(hung.phase, names.ranks(hung.missing), f"{text} within {hung.limit_s:g} s", fix))
    for rank, failure in list(hung.failures.items())[:_MOST_FAILURES]:
        text = f"failed in the phase {hung.phase}: {failure}"
        found.append(_hung(hung.phase, names.rank(rank), text, _TEXTS.get(phase, ("", _CHECK_MACHINE))[1]))
    return found


def _hung_pairs(hung: HungError, names: Names, pairs: Sequence[tuple[int, int]]) -> list[Finding]:
    nodes = {names.node_of(rank) for rank in hung.missing}
    text = f"opened connections, but an exchange between them did not end within {hung.limit_s:g} s"
    fix = "look at the path between the two: packets are lost, or their MTU differs; leave one of them out until then"
    return [_hung("link", names.nodes(pair), text, fix) for pair in pairs if nodes & set(pair)]


def _hung(check: str, where: str, text: str, fix: str) -> Finding:
    return Finding(check, "error", text, fix, where=where, group="job")


class Preflight:
    """One worker's part of the measurements; every worker calls the same methods in the same order.

    Args:
        store: of the job; None for a single worker.
        backend: "gloo" or "nccl".
        runs_folder: checked for space, and whether all nodes see it.
        needs_shared_folder: whether every worker writes there.
        on_hang: called with the error when rank 0 itself hangs; ends the process.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        store: Store | None,
        *,
        backend: str,
        limits: Limits,
        runs_folder: Path,
        needs_shared_folder: bool,
        on_hang: Callable[[PreflightError], None],
    ) -> None:
        import torch.distributed as dist

        from stormo.distributed.store import SignedStore

        self._rank_info, self._backend, self._limits = rank_info, backend, limits
        self._runs_folder = runs_folder
        self._deadline = time.monotonic() + limits.whole_s
        self.measured = Measurements(needs_shared_folder=needs_shared_folder)
        self._schedule = rounds(rank_info.num_nodes, 2 * math.ceil(math.log2(max(rank_info.num_nodes, 2))) + 8)
        # A separate connection: the shared one may be what hangs.
        local = SignedStore(dist.HashStore(), "preflight", b"")
        signed = store.signed("preflight", own_connection=True) if store else local
        self._phases = Phases(signed, rank_info.rank, rank_info.world_size, self._hang)
        self._on_hang = on_hang
        self._probe_file: Path | None = None  # written by rank 0, looked for by the other nodes
        self._rounds_run: list[Pairs] = []
        self._server: ProbeServer | None = None
        self._ranks: dict[int, list[int]] = {}  # by node

    @property
    def names(self) -> Names:
        """The names of the nodes and workers that have arrived."""
        return Names(self.measured.workers)

    def findings(self) -> list[Finding]:
        """The findings so far, on rank 0."""
        return judge(self.measured)

    def gather(self, phase: str, part: Callable[[], Any], limit_s: float) -> list[Any]:
        """Run the caller's phase; returns the values of all workers on rank 0, and nothing on the others."""
        found: list[Any] = []
        self._run(phase, part, limit_s, found.extend)
        return found

    def decide(self, choose: Callable[[], Any]) -> Any:
        """Returns what rank 0 chooses, on all workers."""
        return self._run("decision", lambda: None, self._limits.exchange_s, lambda _: choose())

    def conclude(self) -> None:
        """Raise the first error, on all workers."""
        self._run("verdict", lambda: None, self._limits.exchange_s, is_verdict=True)

    def connect(self) -> None:
        """Before the workers join: have all arrived, and do their nodes reach one another?"""
        try:
            self._run("arrival", self._arrive, self._limits.arrival_s, self._take_workers)
            if self._rank_info.num_nodes > 1:
                self._run("reach", self._reach, self._limits.reach_s + 5.0, self._take_attempts, is_verdict=True)
        finally:
            if self._server is not None:
                self._server.close()

    def join(self, make: Callable[[], World]) -> World:
        """Join the process group within the limit of this phase."""
        made: list[World] = []
        self._run("joining", lambda: made.append(make()), self._limits.joining_s)
        return made[0]

    def measure(self, device: torch.device) -> None:
        """Measure devices, then exchange inside each node, between pairs of nodes, and over all workers."""
        limits, rank_info = self._limits, self._rank_info
        try:
            self._run("folder", self._write_probe_file, limits.exchange_s)
            self._run("device", lambda: self._measure_device(device), limits.device_s, self._take_devices)
        finally:
            self._delete_probe_file()
        if rank_info.world_size == 1:
            return
        timer = LinkTimer(device, self._backend, rank_info.rank, limits.one_measurement_s)
        own = self._ranks_of(rank_info.node_id)

        def exchange_inside() -> tuple[float, float] | None:
            return timer.ring(own) if len(own) > 1 else None

        for attempt in range(_ATTEMPTS):
            if not self._run(f"inside {attempt}", exchange_inside, limits.exchange_s, self._take_inside):
                break
        began = time.monotonic()
        again = self._exchange_all(timer, self._schedule, began)
        for _ in range(_ATTEMPTS - 1):
            if again:
                again = self._exchange_all(timer, again, began)
        self._run("all", lambda: timer.all_reduce(rank_info.world_size), limits.exchange_s, self._take_all_reduce)
        free_memory(device)

    def _exchange_all(self, timer: LinkTimer, schedule: Sequence[Pairs], began: float) -> list[Pairs]:
        """Run rounds of pairs while there is time; returns the slow pairs, to be measured again."""
        decided: dict[str, Any] = {}
        for pairs in schedule:
            self._rounds_run.append(pairs)
            decided = self._exchange(timer, pairs, began)
            if not decided["has_time"]:
                break
        return [[(a, b) for a, b in pairs] for pairs in decided.get("again", [])]

    def _exchange(self, timer: LinkTimer, pairs: Pairs, began: float) -> Any:
        peer = self._peer(pairs)
        return self._run(
            f"round {len(self._rounds_run) - 1}",
            lambda: None if peer is None else timer.ring(sorted((self._rank_info.rank, peer))),
            self._limits.exchange_s,
            lambda values: self._take_round(pairs, values, began),
        )

    def _arrive(self) -> dict[str, Any]:
        rank_info = self._rank_info
        worker = WorkerInfo(
            rank=rank_info.rank, node=rank_info.node_id, local_rank=rank_info.local_rank, host=rank_info.host
        )
        if rank_info.num_nodes > 1 and worker.leads_node:
            self._server = ProbeServer(rank_info.node_id, own_address(rank_info))
            worker = replace(worker, address=self._server.address, port=self._server.port)
        return asdict(worker)

    def _reach(self) -> list[dict[str, Any]]:
        if self._server is None:
            return []
        wanted = partners(self._rank_info.node_id, self._rank_info.num_nodes)
        workers = [WorkerInfo(**self._phases.shared(f"leader/{node}")) for node in wanted]
        return [asdict(attempt) for attempt in self._server.connect_all(workers, self._limits.reach_s)]

    def _write_probe_file(self) -> None:
        """Rank 0 writes a file that the other nodes then look for."""
        if not self._rank_info.is_main:
            return
        free, why = None, ""
        try:
            self._probe_file = write_probe_file(self._runs_folder)
            free = shutil.disk_usage(self._probe_file.parent).free
        except OSError as error:
            why = error.strerror or str(error)
        self.measured.runs_folder = str(self._runs_folder)
        self.measured.runs_folder_free_bytes, self.measured.runs_folder_error = free, why
        self._phases.share("probe_file", None if self._probe_file is None else str(self._probe_file))

    def _delete_probe_file(self) -> None:
        if self._probe_file is not None:
            self._probe_file.unlink(missing_ok=True)

    def _measure_device(self, device: torch.device) -> dict[str, Any]:
        found = measure_device(device, self._rank_info.rank, self._limits.one_measurement_s)
        if self._rank_info.local_rank == 0 and self._rank_info.node_id:
            probe_file = self._phases.shared("probe_file")
            found = replace(found, sees_runs_folder=None if probe_file is None else is_visible(Path(probe_file)))
        return asdict(found)

    def _peer(self, pairs: Pairs) -> int | None:
        """The worker of the same local position on the paired node; None where there is none."""
        node = self._rank_info.node_id
        for pair in pairs:
            if node in pair:
                own, theirs = self._ranks_of(node), self._ranks_of(sum(pair) - node)
                index = own.index(self._rank_info.rank)
                return theirs[index] if index < len(theirs) else None
        return None

    def _ranks_of(self, node: int) -> list[int]:
        if node not in self._ranks:
            self._ranks[node] = self._phases.shared(f"ranks/{node}")
        return self._ranks[node]

    def _take_workers(self, values: list[Any]) -> None:
        self.measured.workers = [WorkerInfo(**value) for value in values]
        names = self.names
        for node, leader in names.leaders.items():
            self._phases.share(f"leader/{node}", asdict(leader))
            self._phases.share(f"ranks/{node}", names.ranks_on(node))

    def _take_attempts(self, values: list[Any]) -> None:
        self.measured.attempts = [Attempt(**attempt) for value in values for attempt in value]

    def _take_devices(self, values: list[Any]) -> None:
        self.measured.devices = [Device(**value) for value in values]

    def _take_inside(self, values: list[Any]) -> bool:
        self.measured.inside = merge_links([*self.measured.inside, *inside_links(values, self.names)])
        return bool(outliers(self.measured.inside))

    def _take_round(self, pairs: Pairs, values: list[Any], began: float) -> dict[str, Any]:
        self.measured.between = merge_links([*self.measured.between, *round_links(pairs, values, self.names)])
        again = disjoint((link.a, link.b) for link in outliers(self.measured.between))
        return {"has_time": time.monotonic() - began < self._limits.all_rounds_s, "again": again[:_MOST_AGAIN]}

    def _take_all_reduce(self, values: list[Any]) -> None:
        latency_s, rate = values[0]
        self.measured.all_reduce = AllReduce(num_ranks=len(values), latency_s=latency_s, bus_bytes_per_s=rate)

    def _run(
        self,
        phase: str,
        part: Callable[[], Any],
        limit_s: float,
        take: Callable[[list[Any]], Any] | None = None,
        *,
        is_verdict: bool = False,
    ) -> Any:
        """Run a phase on all workers; a hang ends all of them, and at a verdict so does any error."""

        def decide(values: list[Any]) -> Any:
            decided = take(values) if take else None
            findings = self.findings() if is_verdict else []
            if any(finding.level == "error" for finding in findings):
                raise PreflightError(findings)
            return decided

        limit_s = min(limit_s, max(self._deadline - time.monotonic(), 1.0))
        try:
            return self._phases.run(phase, part, limit_s, decide)
        except HungError as hung:
            error = self._error_of(hung)
            self._phases.stop(phase, str(error))
            raise error from None
        except PreflightError as error:
            self._phases.stop(phase, str(error))
            raise

    def _hang(self, hung: HungError) -> None:
        self._delete_probe_file()
        self._on_hang(self._error_of(hung))

    def _error_of(self, hung: HungError) -> PreflightError:
        findings = [*describe_hang(hung, self.names, self._rounds_run), *self.findings()]
        return PreflightError(findings, is_hang=bool(hung.missing))


def join_after_preflight(
    make: Callable[[], World],
    device: torch.device,
    config: TrainConfig,
    layout: Layout,
    rank_info: RankInfo,
    store: Store | None,
    reporter: FailureReporter,
) -> tuple[World, list[Notice]]:
    """Join the workers and measure them; returns the notices of a training, or raises with the culprit named."""
    from stormo.distributed.store import PeerFailedError

    preflight = Preflight(
        rank_info,
        store,
        backend=layout.backend,
        limits=Limits(arrival_s=config.workers.timeout),
        runs_folder=Path(config.run.runs_folder),
        needs_shared_folder=layout.spec.sharded_checkpoint,
        on_hang=lambda error: end_process(error, reporter),
    )
    try:
        preflight.connect()
        world = preflight.join(make)
        preflight.measure(device)
        preflight.conclude()
    except PreflightStoppedError as stopped:
        raise PeerFailedError(str(stopped)) from None
    return world, notices_of(preflight.measured, preflight.findings())


def notices_of(measured: Measurements, findings: list[Finding]) -> list[Notice]:
    """A summary, and one notice for each warning."""
    warnings = [finding for finding in findings if finding.level == "warning"]
    nodes = {worker.node for worker in measured.workers}
    parts = [f"{pluralize(len(measured.workers), 'worker')} on {pluralize(len(nodes), 'node')}"]
    if measured.all_reduce is not None:
        parts.append(f"all-reduce {format_bytes(measured.all_reduce.bus_bytes_per_s)}/s")
    if measured.between:
        parts.append(f"{format_bytes(min(link.bytes_per_s for link in measured.between))}/s or more between nodes")
    parts.append("no slow device or link" if not warnings else pluralize(len(warnings), "warning"))
    summary = Notice(kind="info", text=f"preflight: {', '.join(parts)}")
    return [summary] + [Notice(kind="warning", text=f"preflight: {sentence(finding)}") for finding in warnings]
