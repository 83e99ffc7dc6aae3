"""The measurements of a job, phase by phase on all workers: who came, who reaches whom, devices, links.

Every phase has a time limit. The workers report over the store where they have met, which is no part of what is
measured: when a collective hangs, rank 0 still learns who has finished and who has not. Rank 0 judges, names the
culprit in one sentence, and the others end with it.
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

from stormo.doctor.finding import Finding
from stormo.doctor.judge import Names, best_of, doubtful, inside_links, judge, round_links, sentence
from stormo.doctor.measure import (
    Attempt,
    Device,
    LinkTimer,
    Measurements,
    Overall,
    WorkerInfo,
    disjoint,
    give_back,
    is_seen,
    measure_device,
    partners,
    rounds,
    write_token,
)
from stormo.doctor.network import OPEN_PORTS, Greeter, own_address
from stormo.errors import EXIT_FAILURE, StormoError
from stormo.launch import FailureReporter, RankInfo

if TYPE_CHECKING:
    import torch

    from stormo.distributed.store import SignedStore, Store
    from stormo.distributed.world import World


_POLL_S = 0.005
_GRACE_S = 2.0  # for workers that began a little later
_VERDICT_S = 60.0  # for rank 0's decision, after the limit
_ATTEMPTS = 3  # at what looks slow, before anybody is blamed
_MOST_AGAIN = 4  # rounds of such pairs
_MOST_FAILURES = 3  # that are named
Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long each part may take; what goes well takes a fraction of it."""

    arrival_s: float
    reach_s: float = 5.0
    joining_s: float = 60.0
    device_s: float = 30.0
    exchange_s: float = 10.0
    one_measurement_s: float = 0.15
    all_rounds_s: float = 3.0
    whole_s: float = math.inf


class PreflightError(StormoError):
    """What was found keeps the job from running well; the first error in one sentence.

    Args:
        is_hang: whether some workers are stuck, and have to be ended.
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
    """One worker's part of the phases.

    Args:
        store: of this use alone; what strangers write into the store is refused.
        on_hang: called in a thread of rank 0 when that one itself hangs; ends the process.
    """

    def __init__(self, store: SignedStore, rank: int, size: int, on_hang: Callable[[HungError], None]) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._on_hang = on_hang

    def run(
        self, phase: str, part: Callable[[], Any], limit_s: float, decide: Callable[[list[Any]], Any] | None = None
    ) -> Any:
        """Do this worker's part; returns on all workers what rank 0 decides from the values of all of them."""
        began = time.monotonic()
        watch = watchdog(limit_s + _GRACE_S, lambda: self._on_hang(self._hang(phase, limit_s, self._answers(phase))))
        try:
            if self._rank == 0:
                watch.start()
            answer = {"value": part()}
        except Exception as error:
            answer = {"failure": _in_words(error)}
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
        """Tell the workers that ask for it."""
        self._store.put(f"shared/{name}", value)

    def shared(self, name: str) -> Any:
        """What a worker shares, once it does."""
        return self._store.get(f"shared/{name}", timedelta(seconds=_VERDICT_S))

    def stop(self, phase: str, sentence: str) -> None:
        """End the phases on all workers; rank 0 says so instead of a decision."""
        self._store.put(f"{phase}/verdict", {"stop": sentence})

    def _verdict(self, phase: str, limit_s: float) -> Any:
        verdict = self._store.get(f"{phase}/verdict", timedelta(seconds=limit_s + _VERDICT_S))
        if "stop" in verdict:
            raise PreflightStoppedError(verdict["stop"])
        return verdict["decided"]

    def _answers(self, phase: str) -> dict[int, dict[str, Any]]:
        """What has been answered so far, by rank."""
        names = {rank: f"{phase}/{rank}" for rank in range(self._size)}
        if not self._store.has(list(names.values())):
            names = {rank: name for rank, name in names.items() if self._store.has([name])}
        found = self._store.get_all(list(names.values()), timedelta(seconds=_VERDICT_S)) if names else []
        return dict(zip(names, found, strict=True))

    def _hang(self, phase: str, limit_s: float, answers: Mapping[int, Mapping[str, Any]]) -> HungError:
        failures = {rank: answer["failure"] for rank, answer in answers.items() if "failure" in answer}
        return HungError(phase, limit_s, [rank for rank in range(self._size) if rank not in answers], failures)


def watchdog(limit_s: float, call: Callable[[], None]) -> threading.Timer:
    """Calls something unless it is cancelled in time; to be started."""
    timer = threading.Timer(limit_s, call)
    timer.daemon = True
    return timer


def end_process(error: StormoError, lifeline: FailureReporter) -> None:
    """Report the error to all workers and end this process, whatever its main thread waits for."""
    if lifeline.shows_failures:
        lifeline.report_failure(error, secondary=False)
    else:
        print(f"stormo: {error}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(EXIT_FAILURE)


def _in_words(error: Exception) -> str:
    if isinstance(error, StormoError):
        return str(error).rstrip(".")
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


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


def describe_hang(hung: HungError, names: Names, schedule: Sequence[Sequence[tuple[int, int]]]) -> list[Finding]:
    """The findings on a phase that hung or failed."""
    found = []
    phase = hung.phase.split()[0]  # without its number
    if hung.missing and hung.phase.startswith("round "):
        found += _hung_pairs(hung, names, schedule[int(hung.phase.split()[1])])
    elif hung.missing:
        text, fix = _TEXTS.get(phase, (f"did not finish {hung.phase}", _LOOK))
        found.append(_hung(hung.phase, names.ranks(hung.missing), f"{text} within {hung.limit_s:g} s", fix))
    for rank, failure in list(hung.failures.items())[:_MOST_FAILURES]:
        text = f"failed in the phase {hung.phase}: {failure}"
        found.append(_hung(hung.phase, names.rank(rank), text, _TEXTS.get(phase, ("", _LOOK))[1]))
    return found


def _hung_pairs(hung: HungError, names: Names, pairs: Sequence[tuple[int, int]]) -> list[Finding]:
    nodes = {names.node_of(rank) for rank in hung.missing}
    text = f"opened connections, but an exchange between them did not end within {hung.limit_s:g} s"
    fix = "look at the way between the two: packets are lost, or their MTU differs; leave one of them out until then"
    return [_hung("link", names.nodes(pair), text, fix) for pair in pairs if nodes & set(pair)]


def _hung(check: str, where: str, text: str, fix: str) -> Finding:
    return Finding(check, "error", text, fix, where=where, group="job")


def _around(timer: LinkTimer, ranks: list[int]) -> tuple[float, float] | None:
    return timer.around(ranks) if len(ranks) > 1 else None


class Preflight:
    """One worker's part of the measurements; every worker calls the same methods in the same order.

    Args:
        store: where the workers meet; None for a single one.
        backend: "gloo" or "nccl".
        runs_folder: checked for space, and whether all nodes see it; None: not checked.
        needs_shared_folder: whether every worker writes there.
        on_hang: called with the error when rank 0 itself hangs; ends the process.
    """

    def __init__(
        self,
        place: RankInfo,
        store: Store | None,
        *,
        backend: str,
        limits: Limits,
        runs_folder: Path | None,
        needs_shared_folder: bool,
        on_hang: Callable[[PreflightError], None],
    ) -> None:
        import torch.distributed as dist

        from stormo.distributed.store import SignedStore

        self._place, self._backend, self._limits = place, backend, limits
        self._runs_folder = runs_folder
        self._deadline = time.monotonic() + limits.whole_s
        self.measured = Measurements(needs_shared_folder=needs_shared_folder)
        self._schedule = rounds(place.num_nodes, 2 * math.ceil(math.log2(max(place.num_nodes, 2))) + 8)
        # A connection of its own: the other one may be what hangs.
        alone = SignedStore(dist.HashStore(), "preflight", b"")
        signed = store.signed("preflight", own_connection=True) if store else alone
        self._phases = Phases(signed, place.rank, place.world_size, self._hang)
        self._on_hang = on_hang
        self._token: Path | None = None  # that rank 0 has written for the others to see
        self._played: list[Pairs] = []
        self._greeter: Greeter | None = None
        self._ranks: dict[int, list[int]] = {}  # of the nodes that this worker has to do with

    @property
    def names(self) -> Names:
        """The names of the nodes and workers that have come so far."""
        return Names(self.measured.workers)

    def findings(self) -> list[Finding]:
        """What rank 0 has found so far."""
        return judge(self.measured)

    def gather(self, phase: str, part: Callable[[], Any], limit_s: float) -> list[Any]:
        """Run a phase of the caller's; returns the values of all workers on rank 0, and nothing on the others."""
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
        """Before the workers join: have they come, and can their nodes reach one another?"""
        try:
            self._run("arrival", self._arrive, self._limits.arrival_s, self._take_workers)
            if self._place.num_nodes > 1:
                self._run("reach", self._reach, self._limits.reach_s + 5.0, self._take_attempts, is_verdict=True)
        finally:
            if self._greeter is not None:
                self._greeter.close()

    def join(self, make: Callable[[], World]) -> World:
        """Join the process group, as a phase with its limit."""
        made: list[World] = []
        self._run("joining", lambda: made.append(make()), self._limits.joining_s)
        return made[0]

    def measure(self, device: torch.device) -> None:
        """Devices, then data inside each node, between pairs of nodes, and through all workers."""
        limits, place = self._limits, self._place
        try:
            self._run("folder", self._offer_token, limits.exchange_s)
            self._run("device", lambda: self._measure_device(device), limits.device_s, self._take_devices)
        finally:
            self._take_token_back()
        if place.world_size == 1:
            return
        timer = LinkTimer(device, self._backend, place.rank, limits.one_measurement_s)
        own = self._ranks_of(place.node_id)
        for attempt in range(_ATTEMPTS):
            phase = f"inside {attempt}"
            if not self._run(phase, lambda: _around(timer, own), limits.exchange_s, self._take_inside):
                break
        began = time.monotonic()
        again = self._exchange_all(timer, self._schedule, began)
        for _ in range(_ATTEMPTS - 1):
            if again:
                again = self._exchange_all(timer, again, began)
        self._run("all", lambda: timer.all_reduce(place.world_size), limits.exchange_s, self._take_overall)
        give_back(device)

    def _exchange_all(self, timer: LinkTimer, schedule: Sequence[Pairs], began: float) -> list[Pairs]:
        """Run rounds of pairs while there is time; returns the pairs that were slow, to be measured again."""
        told: dict[str, Any] = {}
        for pairs in schedule:
            self._played.append(pairs)
            told = self._exchange(timer, pairs, began)
            if not told["has_time"]:
                break
        return [[(a, b) for a, b in pairs] for pairs in told.get("again", [])]

    def _exchange(self, timer: LinkTimer, pairs: Pairs, began: float) -> Any:
        peer = self._peer(pairs)
        return self._run(
            f"round {len(self._played) - 1}",
            lambda: None if peer is None else timer.swap(peer),
            self._limits.exchange_s,
            lambda values: self._take_round(pairs, values, began),
        )

    # --- each worker's part --------------------------------------------------------------------------------------

    def _arrive(self) -> dict[str, Any]:
        place = self._place
        worker = WorkerInfo(rank=place.rank, node=place.node_id, local_rank=place.local_rank, host=place.host)
        if place.num_nodes > 1 and worker.leads_node:
            self._greeter = Greeter(place.node_id, own_address(place))
            worker = replace(worker, address=self._greeter.address, port=self._greeter.port)
        return asdict(worker)

    def _reach(self) -> list[dict[str, Any]]:
        if self._greeter is None:
            return []
        wanted = partners(self._place.node_id, self._place.num_nodes)
        workers = [WorkerInfo(**self._phases.shared(f"leader/{node}")) for node in wanted]
        return [asdict(attempt) for attempt in self._greeter.try_all(workers, self._limits.reach_s)]

    def _offer_token(self) -> None:
        """Rank 0 writes a file that the other nodes then look for."""
        if self._runs_folder is None or not self._place.is_main:
            return
        free, why = None, ""
        try:
            self._token = write_token(self._runs_folder)
            free = shutil.disk_usage(self._token.parent).free
        except OSError as error:
            why = error.strerror or str(error)
        folder = str(self._runs_folder)
        self.measured = replace(self.measured, runs_folder=folder, runs_folder_free_bytes=free, runs_folder_error=why)
        self._phases.share("token", None if self._token is None else str(self._token))

    def _take_token_back(self) -> None:
        if self._token is not None:
            self._token.unlink(missing_ok=True)

    def _measure_device(self, device: torch.device) -> dict[str, Any]:
        found = measure_device(device, self._place.rank, self._limits.one_measurement_s)
        if self._runs_folder is not None and self._place.local_rank == 0 and self._place.node_id:
            token = self._phases.shared("token")
            found = replace(found, sees_runs_folder=None if token is None else is_seen(Path(token)))
        return asdict(found)

    def _peer(self, pairs: Pairs) -> int | None:
        """The worker of the same local position on the paired node; None where there is none."""
        node = self._place.node_id
        for pair in pairs:
            if node in pair:
                own, theirs = self._ranks_of(node), self._ranks_of(sum(pair) - node)
                index = own.index(self._place.rank)
                return theirs[index] if index < len(theirs) else None
        return None

    def _ranks_of(self, node: int) -> list[int]:
        if node not in self._ranks:
            self._ranks[node] = self._phases.shared(f"ranks/{node}")
        return self._ranks[node]

    # --- what rank 0 makes of it -----------------------------------------------------------------------------------

    def _take_workers(self, values: list[Any]) -> None:
        workers = [WorkerInfo(**value) for value in values]
        self.measured = replace(self.measured, workers=workers)
        names = self.names
        for node, leader in names.leaders.items():
            self._phases.share(f"leader/{node}", asdict(leader))
            self._phases.share(f"ranks/{node}", names.ranks_on(node))

    def _take_attempts(self, values: list[Any]) -> None:
        attempts = [Attempt(**attempt) for value in values for attempt in value]
        self.measured = replace(self.measured, attempts=attempts)

    def _take_devices(self, values: list[Any]) -> None:
        self.measured = replace(self.measured, devices=[Device(**value) for value in values])

    def _take_inside(self, values: list[Any]) -> bool:
        links = best_of([*self.measured.inside, *inside_links(values, self.names)])
        self.measured = replace(self.measured, inside=links)
        return bool(doubtful(links))

    def _take_round(self, pairs: Pairs, values: list[Any], began: float) -> dict[str, Any]:
        links = best_of([*self.measured.between, *round_links(pairs, values, self.names)])
        self.measured = replace(self.measured, between=links)
        again = disjoint((link.a, link.b) for link in doubtful(links))
        return {"has_time": time.monotonic() - began < self._limits.all_rounds_s, "again": again[:_MOST_AGAIN]}

    def _take_overall(self, values: list[Any]) -> None:
        latency_s, rate = values[0]
        overall = Overall(num_ranks=len(values), latency_s=latency_s, bus_bytes_per_s=rate)
        self.measured = replace(self.measured, overall=overall)

    # --- phases --------------------------------------------------------------------------------------------------

    def _run(
        self,
        phase: str,
        part: Callable[[], Any],
        limit_s: float,
        take: Callable[[list[Any]], Any] | None = None,
        *,
        is_verdict: bool = False,
    ) -> Any:
        """Run a phase on all workers; a hang ends all of them, and so does an error at a verdict."""

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
        self._take_token_back()
        self._on_hang(self._error_of(hung))

    def _error_of(self, hung: HungError) -> PreflightError:
        findings = [*describe_hang(hung, self.names, self._played), *self.findings()]
        return PreflightError(findings, is_hang=bool(hung.missing))
