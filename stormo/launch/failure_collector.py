"""Collects what may end the job and decides on the root cause, the same way in an agent and in a rank without one.

A `FailureCollector` takes what the other members tell. `WorkerFailures` adds what an agent sees of its workers.
"""

from __future__ import annotations

import time
from dataclasses import replace

from stormo.launch.control import Control, Event, Gone, RankEnded, Reported
from stormo.launch.environments.local import Node
from stormo.launch.failure import Failure, of_early_exit, of_exit, of_exit_before_world, of_signal, of_stop
from stormo.launch.output import LogMultiplexer
from stormo.launch.root_cause import (
    FailureEvent,
    MissingRank,
    OrderlyExit,
    SettleTimes,
    Severity,
    blocking_rank,
    decide_at,
    is_orderly,
    root_cause,
    severity_of,
)
from stormo.launch.worker_group import AgentTimeouts, Worker, WorkerGroup


class FailureCollector:
    """The failures that one member of a job knows of."""

    def __init__(self, settle: SettleTimes, *, noun: str, several_nodes: bool) -> None:
        self._settle = settle
        self._noun = noun  # of a member
        self._several_nodes = several_nodes
        self._events: list[FailureEvent] = []
        self._exits: list[OrderlyExit] = []

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(
        self,
        failure: Failure,
        *,
        rank: int | None = None,
        severity: Severity = Severity.CAUSE,
        from_other: bool = False,
    ) -> None:
        """Note a failure."""
        severity = Severity.SECONDARY if failure.secondary else severity
        self._events.append(
            FailureEvent(failure=failure, severity=severity, seen_at=time.monotonic(), rank=rank, from_other=from_other)
        )

    def take_event(self, event: Event) -> None:
        """Note what another member tells, or that it is gone."""
        if isinstance(event, Reported):
            self.add(event.failure, from_other=True)
        elif isinstance(event, Gone):
            self.add(Failure(kind="gone", who=f"{self._noun} {event.member}", host=event.host, what=event.why))
        elif isinstance(event, RankEnded):
            self._exits.append(OrderlyExit(rank=event.rank, host=event.host, exit_code=event.exit_code))

    def root_cause(self) -> FailureEvent | None:
        """What ends the job, once no better explanation is waited for; with the rank that blocked others, if it did."""
        settled_at = decide_at(self._events, self._settle, several_nodes=self._several_nodes)
        if not self._is_complete() and time.monotonic() < settled_at:
            return None
        return self.explained(root_cause(self._events, self._exits))

    def explained(self, event: FailureEvent) -> FailureEvent:
        """The same; a wait that was given up names whom it was for, as far as this member knows."""
        complaints = [one.failure for one in self._events if one.severity is Severity.SECONDARY]
        gave_up = any(one.loss is not None and one.loss.waited_s is not None for one in complaints)
        if event.severity is not Severity.SECONDARY or not gave_up:
            return event
        causes = [one.as_cause() for one in complaints]
        waiting = {one.rank for one in complaints}
        return replace(event, failure=blocking_rank(causes, self._missing(waiting), self._elsewhere(waiting)))

    def _is_complete(self) -> bool:
        """Whether nothing more can happen that would explain it better."""
        return False

    def _missing(self, waiting: set[int]) -> list[MissingRank]:
        """Ranks that run and are not among those that complained."""
        return []

    def _elsewhere(self, waiting: set[int]) -> list[int]:
        """Ranks of other nodes that are known not to have complained."""
        return []


class WorkerFailures(FailureCollector):
    """The failures that the agent of one node knows of."""

    def __init__(
        self,
        node: Node,
        host: str,
        workers: WorkerGroup,
        control: Control | None,
        *,
        log: LogMultiplexer,
        timeout_s: float,
        timeouts: AgentTimeouts,
    ) -> None:
        settle = timeouts.settle
        if node.node_id == 0:
            # Node 0 decides a little before the others would on their own, so that all name the same cause.
            settle = replace(settle, other_nodes_s=0.8 * settle.other_nodes_s)
        super().__init__(settle, noun="node", several_nodes=node.num_nodes > 1)
        self.passed_on: set[int] = set()  # signals that the workers were sent
        self._node = node
        self._host = host
        self._workers = workers
        self._control = control
        self._log = log
        self._timeout_s = timeout_s
        self._timeouts = timeouts

    def add(
        self,
        failure: Failure,
        *,
        rank: int | None = None,
        severity: Severity = Severity.CAUSE,
        from_other: bool = False,
    ) -> None:
        """Note a failure; a complaint of this node's goes to node 0, which may know the cause."""
        super().add(failure, rank=rank, severity=severity, from_other=from_other)
        if self._control is not None and failure.secondary and not from_other:
            self._control.report(failure)

    def hear(self, worker: Worker) -> None:
        """Hear what a worker tells, and note a failure."""
        failure = self._workers.take_messages(worker)
        if failure is not None:
            self.add(failure, rank=worker.rank)

    def look_for_exits(self) -> None:
        """Note every worker that has just ended, unless it has told why."""
        for worker in self._workers:
            if not worker.look():
                continue
            if worker.channel_closed_at is None:
                self.hear(worker)  # its last words
            if worker.failure is None:
                self._judge_exit(worker)
        if self._timeouts.is_of_script and not self.passed_on:
            self._look_for_one_that_never_joined()

    def _judge_exit(self, worker: Worker) -> None:
        code, rank, host = worker.exit_code, worker.rank, self._host
        assert code is not None
        if code == 0 and not worker.said_bye and not self._timeouts.is_of_script:
            self.add(of_early_exit(rank=rank, host=host), rank=rank)
        elif is_orderly(code):
            self._exits.append(OrderlyExit(rank=rank, host=host, exit_code=code))
            if self._control is not None:
                self._control.rank_ended(rank, code)
        elif -code in self.passed_on:
            self.add(of_stop(-code, rank=rank, host=host), rank=rank)
        elif code < 0:
            self.add(of_signal(-code, rank=rank, host=host), rank=rank, severity=severity_of(code))
        else:
            self.add(of_exit(code, rank=rank, host=host, is_of_script=self._timeouts.is_of_script), rank=rank)

    def _look_for_one_that_never_joined(self) -> None:
        """Note a worker that ended in order without stormo.World(), while another one is inside of it or behind.

        Nobody gets through it without all; a line that is still open may be in use by a process that it has started.
        """
        waiting = next((one.rank for one in self._workers if one.running and one.heard_at is not None), None)
        for worker in self._workers:
            code, is_silent = worker.exit_code, worker.heard_at is None and worker.channel_closed_at is not None
            if waiting is None or code is None or not is_silent or worker.failure is not None or not is_orderly(code):
                continue
            worker.failure = of_exit_before_world(code, rank=worker.rank, host=self._host, waiting=waiting)
            self.add(worker.failure, rank=worker.rank)

    def look_for_silence(self) -> None:
        """Warn of a worker without a sign of life, and note one that is silent beyond the timeout."""
        now = time.monotonic()
        for worker in self._workers:
            if not worker.running or worker.said_bye or worker.failure is not None:
                continue
            heard_at = worker.started_at if worker.heard_at is None else worker.heard_at
            silent_s, first_sign_s = now - heard_at, self._timeouts.first_sign_s
            limit_s = self._timeout_s if worker.heard_at is not None else max(self._timeout_s, first_sign_s or 0.0)
            if silent_s <= min(limit_s, self._timeouts.silent_warning_s):
                continue
            if worker.heard_at is None and self._timeouts.is_of_script:
                continue
            what = f"has sent no sign of life for {silent_s:.0f} s: {worker.state()}"
            if silent_s > limit_s:
                who = f"rank {worker.rank} (pid {worker.pid})"
                worker.failure = Failure(kind="silent", who=who, host=self._host, what=what)
                self.add(worker.failure, rank=worker.rank)
            elif worker.heard_at is not None and worker.silent_since is None:  # before, it still loads its libraries
                worker.silent_since = heard_at
                self._log.say(f"rank {worker.rank} (pid {worker.pid}) {what}")

    def _is_complete(self) -> bool:
        return not self._several_nodes and not self._workers.is_running

    def _missing(self, waiting: set[int]) -> list[MissingRank]:
        others = [worker for worker in self._workers if worker.running and worker.failure is None]
        return [
            MissingRank(rank=one.rank, host=self._host, state=self._state(one), has_joined=self._has_joined(one))
            for one in others
        ]

    def _elsewhere(self, waiting: set[int]) -> list[int]:
        if self._node.node_id != 0:  # to which all complaints go
            return []
        heard = waiting | {worker.rank for worker in self._workers}
        return [rank for rank in range(self._node.world_size) if rank not in heard]

    def _has_joined(self, worker: Worker) -> bool:
        return worker.heard_at is not None or not self._timeouts.is_of_script

    def _state(self, worker: Worker) -> str:
        is_of_script = self._timeouts.is_of_script
        call = "" if worker.step is None else f" is at step {worker.step}"
        call = " has called world.close()" if worker.said_bye and is_of_script else call
        call = call if self._has_joined(worker) else " has not called stormo.World()"
        line = f", in {worker.line}" if worker.line and is_of_script and not worker.said_bye else ""
        return f"(pid {worker.pid}){call}: {worker.state()}{line}"
