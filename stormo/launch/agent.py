"""The agent of one node: starts its workers, forwards output and signals, and ends all within seconds when one fails.

One thread, one loop. Trains nothing and imports nothing heavy.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from stormo.errors import EXIT_FAILURE, EXIT_INTERRUPTED
from stormo.launch.control import AWAY_S, Ended, Hello, RankEnded
from stormo.launch.environments.local import Node
from stormo.launch.failure import (
    CLEAN_EXIT_CODES,
    Failure,
    combined_exit_code,
    of_early_exit,
    of_exit,
    of_exit_before_world,
    of_signal,
    of_stop,
    of_watchdog,
)
from stormo.launch.output import LogMultiplexer, Stream, read_rest
from stormo.launch.rank_info import host_name
from stormo.launch.rendezvous import Rendezvous, StoppedError, join_nodes
from stormo.launch.root_cause import FailureCollector, FailureEvent, MissingRank, Severity, severity_of
from stormo.launch.worker_group import AgentTimeouts, Worker, WorkerGroup
from stormo.system.process import is_stopped
from stormo.system.signals import SignalQueue, stopping_text

_SEND_TIMEOUT_S = 1.0


def run_node(
    command: Sequence[str],
    node: Node,
    *,
    digest: str = "",
    options: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    environ: Mapping[str, str] | None = None,
    timeouts: AgentTimeouts | None = None,
    signals: set[int] | None = None,
    failures: list[Failure] | None = None,
) -> int:
    """Run the workers of one node to their end and return the exit code of the whole job.

    Args:
        command: what each worker runs; the environment tells it which rank it is.
        node: which node of the job this is, and how many workers it has.
        digest: of everything that must be the same on all nodes.
        options: what the digest is made of, to name a difference.
        timeout_s: for all nodes to join, and for a worker without a heartbeat.
        signals: gets the signals that were forwarded to the workers.
        failures: gets what ended the job, if it failed.
    """
    timeouts = timeouts or AgentTimeouts()
    hello = Hello(
        member=node.node_id,
        num_members=node.num_nodes,
        host=host_name(),
        digest=f"{digest} {node.num_workers}",
        options={"--num-gpus": str(node.num_workers), **(options or {})},
    )
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it may have been closed
            stream.flush()
    with ExitStack() as stack:
        # In the background of a shell, `stty tostop` must not stop it for what it shows.
        stack.callback(signal.signal, signal.SIGTTOU, signal.signal(signal.SIGTTOU, signal.SIG_IGN))
        signal_queue = stack.enter_context(SignalQueue())
        log = LogMultiplexer(timeouts.hold_s)
        channel = replace(timeouts.channel, join_s=timeout_s)
        try:
            rendezvous = join_nodes(command, node, hello=hello, timeouts=channel, signals=signal_queue, stack=stack)
        except StoppedError as stopped:
            log.say(str(stopped))
            return stopped.exit_code
        agent = Agent(node, rendezvous, signals=signal_queue, log=log, timeout_s=timeout_s, timeouts=timeouts)
        stack.callback(agent.close)
        agent.start(command, os.environ if environ is None else environ)
        code = agent.watch()
        if signals is not None:
            signals |= agent.forwarded
        if failures is not None and agent.failure is not None:
            failures.append(agent.failure)
        return code


class Agent:
    """The loop around the workers of one node."""

    def __init__(
        self,
        node: Node,
        rendezvous: Rendezvous,
        *,
        signals: SignalQueue,
        log: LogMultiplexer,
        timeout_s: float,
        timeouts: AgentTimeouts,
    ) -> None:
        self._node = node
        self._host = host_name()
        self._rendezvous = rendezvous
        self._control = rendezvous.control
        self._signals = signals
        self._log = log
        self._timeout_s = timeout_s
        self._timeouts = timeouts
        self._selector = selectors.DefaultSelector()
        self._workers = WorkerGroup(self._selector, log, timeouts)
        is_first, several_nodes = node.node_id == 0, node.num_nodes > 1
        self._failures = FailureCollector(timeouts.settle, noun="node", several_nodes=several_nodes, is_first=is_first)
        self.forwarded: set[int] = set()  # signals that the workers were sent
        self._looked_at = time.monotonic()  # at the heartbeats
        self._stop_deadline: float | None = None
        self._interrupt_deadline: float | None = None
        # A script may open torch's process group itself; only node 0 can see whether it did.
        self._may_lack_group = timeouts.runs_script and node.node_id == 0
        self._has_left = False  # the other nodes know that this one has exited cleanly
        self._exit_code: int | None = None  # once known, the loop ends
        self.failure: Failure | None = None  # that ended the job
        self._selector.register(signals, selectors.EVENT_READ)
        if self._control is not None:
            self._selector.register(self._control, selectors.EVENT_READ)

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start every worker of the node."""
        # In between, a slow file system must not look like a lost node.
        self._workers.start(self._node, command, environ, rendezvous=self._rendezvous, between=self._poll_control)
        if self._rendezvous.store is not None:
            self._rendezvous.store.close()  # rank 0 holds it now: without rank 0, nobody may seem to listen

    def watch(self) -> int:
        """Watch the workers to their end."""
        while self._exit_code is None:
            self._wait()
            self._look_for_script_group()
            self._check_exits()
            self._check_heartbeats()
            self._check_stop_deadline()
            if not self._failures and not self._workers.is_vanishing:
                self._log.show_held_lines()  # else the cause of what is about to fail comes first
            self._decide()
        return self._exit_code

    def close(self) -> None:
        """Leave no process behind, whatever happened, and no line of theirs unshown."""
        self._workers.close()
        self._selector.close()

    # --- one round of the loop -----------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Sleep until something happens, and handle it."""
        hurry = self._failures or self._log.holds_lines
        # Signals last: what they mean depends on what the workers have reported before.
        ready = self._selector.select(0.05 if hurry else 0.25)
        for key, _ in sorted(ready, key=lambda event: event[0].fileobj is self._signals):
            if key.fileobj is self._signals:
                self._handle_signals()
            elif isinstance(key.data, Worker):
                self._receive(key.data)
            elif isinstance(key.data, Stream):
                self._workers.read_output(key.data)
        self._poll_control()

    def _poll_control(self) -> None:
        if self._control is not None:
            for event in self._control.poll():
                self._failures.add_event(event)
                if isinstance(event, Ended) and self._exit_code is None:
                    self._exit_code = event.exit_code

    def _handle_signals(self) -> None:
        for number in self._signals.read():
            if number == signal.SIGINT and number in self.forwarded:
                self._end_as_stopped("was stopped at once by Ctrl-C")
                continue
            if number == signal.SIGINT:
                self._begin_interrupt()
            if number == signal.SIGTERM and self._stop_deadline is None:
                self._stop_deadline = time.monotonic() + self._timeouts.stop_s
            self.forwarded.add(number)
            self._workers.send_signal(number)

    def _begin_interrupt(self) -> None:
        if self._timeouts.interrupted_s is not None:
            self._interrupt_deadline = time.monotonic() + self._timeouts.interrupted_s
            return
        is_training = any(worker.step is not None for worker in self._workers)
        self._log.say(stopping_text(is_training=None if self._timeouts.runs_script else is_training))

    def _look_for_script_group(self) -> None:
        if self._may_lack_group:
            has_world = any(worker.heard_at is not None for worker in self._workers)
            self._may_lack_group = not has_world and not self._rendezvous.script_has_group()

    def _check_stop_deadline(self) -> None:
        late = [worker for worker in self._workers if worker.running]
        if self._stop_deadline is None or not late:
            return
        now = time.monotonic()
        # Workers with a heartbeat may take their time to save, up to the timeout; a silent one may not.
        silent_s = min(self._timeouts.silent_warning_s, self._timeouts.stop_s)
        is_silent = any(now - (worker.heard_at or worker.started_at) > silent_s for worker in late)
        if now < self._stop_deadline or (not is_silent and now < self._stop_deadline + self._timeout_s):
            return
        ranks = ", ".join(str(worker.rank) for worker in late)
        states = "; ".join(f"rank {worker.rank} (pid {worker.pid}): {worker.state()}" for worker in late)
        self._end_as_stopped(
            f"did not end within {self._timeouts.stop_s:g} s of SIGTERM and had to be killed ({states})",
            who=f"rank{'s' if len(late) > 1 else ''} {ranks}",
            exit_code=EXIT_FAILURE,
        )

    # --- what fails ----------------------------------------------------------------------------------------------

    def _add(self, failure: Failure, severity: Severity = Severity.CAUSE) -> None:
        """Add a failure; a complaint of this node goes to node 0, which may know the cause."""
        self._failures.add(failure, severity)
        if self._control is not None and failure.secondary:
            self._control.report(failure)

    def _receive(self, worker: Worker) -> None:
        failure = self._workers.receive(worker)
        if failure is not None:
            self._add(failure)

    def _check_exits(self) -> None:
        """Add every worker that has just exited without a report."""
        for worker in self._workers:
            if not worker.poll():
                continue
            if worker.channel_closed_at is None:
                self._receive(worker)  # its last messages
            if worker.failure is None:
                self._add_exit(worker)
        if self._timeouts.runs_script and not self.forwarded:
            self._check_exits_before_world()

    def _add_exit(self, worker: Worker) -> None:
        code, rank, host = worker.exit_code, worker.rank, self._host
        assert code is not None
        if code == 0 and not worker.has_left and not self._timeouts.runs_script:
            self._add(of_early_exit(rank=rank, host=host))
        elif code in CLEAN_EXIT_CODES:
            self._failures.add_event(RankEnded(rank=rank, host=host, exit_code=code))
            if self._control is not None:
                self._control.rank_ended(rank, code)
        elif -code in self.forwarded:
            self._add(of_stop(-code, rank=rank, host=host, is_script=self._timeouts.runs_script))
        elif code < 0:
            by_watchdog = self._ended_by_watchdog(worker) if code == -signal.SIGABRT else None
            self._add(by_watchdog or of_signal(-code, rank=rank, host=host), severity_of(code))
        else:
            self._add(of_exit(code, rank=rank, host=host, keeps_code=self._timeouts.runs_script))

    def _ended_by_watchdog(self, worker: Worker) -> Failure | None:
        read_rest(worker.streams, self._workers.read_output)
        worker.failure = of_watchdog(self._log.last_lines(worker.rank), rank=worker.rank, host=self._host)
        return worker.failure

    def _check_exits_before_world(self) -> None:
        """Add a worker that exited cleanly without stormo.World() while another one is inside it: all must join.

        A channel that is still open may be in use by a process that the worker has started.
        """
        waiting = next((one.rank for one in self._workers if one.running and one.heard_at is not None), None)
        for worker in self._workers:
            code, is_silent = worker.exit_code, worker.heard_at is None and worker.channel_closed_at is not None
            if waiting is None or not is_silent or worker.failure is not None or code not in CLEAN_EXIT_CODES:
                continue
            worker.failure = of_exit_before_world(code, rank=worker.rank, host=self._host, waiting=waiting)
            self._add(worker.failure)

    def _check_heartbeats(self) -> None:
        """Warn of a worker without a heartbeat, and add one that stays stopped, or silent beyond the timeout."""
        now = time.monotonic()
        away_s, self._looked_at = now - self._looked_at, now
        for worker in self._workers:
            if away_s > AWAY_S:
                worker.wait_anew()
            if not worker.running or worker.has_left or worker.failure is not None:
                continue
            heard_at = worker.started_at if worker.heard_at is None else worker.heard_at
            silent_s, first_sign_s = now - heard_at, self._timeouts.first_sign_s
            limit_s = self._timeout_s if worker.heard_at is not None else max(self._timeout_s, first_sign_s or 0.0)
            is_silent = silent_s > min(limit_s, self._timeouts.silent_warning_s)
            holds_others = is_silent and self._node.world_size > 1 and is_stopped(worker.pid)
            worker.stopped_since = (worker.stopped_since or now) if holds_others else None
            if not is_silent:
                continue
            stopped_s = 0.0 if worker.stopped_since is None else now - worker.stopped_since
            who = f"rank {worker.rank} (pid {worker.pid})"
            what = f"has sent no sign of life for {silent_s:.0f} s: {worker.state()}"
            may_be_silent = worker.heard_at is None and self._timeouts.runs_script  # a script that has not joined yet
            if stopped_s > self._timeouts.stopped_s or (silent_s > limit_s and not may_be_silent):
                worker.failure = Failure(kind="silent", who=who, host=self._host, what=what)
                self._add(worker.failure)
            elif worker.silent_since is None and (worker.heard_at is not None or holds_others):
                # Others without a heartbeat still load their libraries.
                worker.silent_since = heard_at
                self._log.say(f"{who} {what}")

    def _running(self) -> list[MissingRank]:
        return [
            MissingRank(rank=one.rank, host=self._host, state=self._state(one), has_joined=self._has_joined(one))
            for one in self._workers
            if one.running and one.failure is None
        ]

    def _ranks_elsewhere(self) -> list[int]:
        if self._node.node_id != 0:  # to which all complaints go
            return []
        own = {worker.rank for worker in self._workers}
        return [rank for rank in range(self._node.world_size) if rank not in own]

    def _has_joined(self, worker: Worker) -> bool:
        return worker.heard_at is not None or not self._timeouts.runs_script

    def _state(self, worker: Worker) -> str:
        runs_script = self._timeouts.runs_script
        call = "" if worker.step is None else f" is at step {worker.step}"
        call = " has called world.close()" if worker.has_left and runs_script else call
        call = call if self._has_joined(worker) else " has not called stormo.World()"
        line = f", in {worker.line}" if worker.line and runs_script and not worker.has_left else ""
        return f"(pid {worker.pid}){call}: {worker.state()}{line}"

    # --- the end -------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """End the run when the cause of a failure is clear, or when every worker has exited cleanly."""
        if self._exit_code is not None:
            return
        if self._interrupt_deadline is not None:
            if not self._workers.is_running or time.monotonic() >= self._interrupt_deadline:
                self._end_as_stopped("was stopped by Ctrl-C")
            return
        if self._failures:
            is_complete = self._node.num_nodes == 1 and not self._workers.is_running
            found = self._failures.root_cause(self._running, self._ranks_elsewhere(), is_complete=is_complete)
            if found is not None:
                self._end_with(found)
            return
        if not (self._workers.is_running or self._has_left or self._workers.may_write_more):
            self._end_cleanly()

    def _end_cleanly(self) -> None:
        exit_code = combined_exit_code(worker.exit_code or 0 for worker in self._workers)
        if self._may_lack_group:
            count = self._node.world_size
            self._log.say(
                f"no worker called stormo.World(), so that each of the {count} ran alone (a task is for stormo train)"
            )
        if self._control is None:
            self._exit_code = exit_code
        else:
            self._has_left = True
            self._control.leave(exit_code)

    def _end_as_stopped(self, what: str, *, who: str = "", exit_code: int = EXIT_INTERRUPTED) -> None:
        who = who or f"node {self._node.node_id}"
        failure = Failure(kind="stopped", who=who, host=self._host, what=what, exit_code=exit_code)
        self._end_with(FailureEvent(failure=failure, severity=Severity.CAUSE, seen_at=time.monotonic()))

    def _end_with(self, event: FailureEvent) -> None:
        """End every worker of this node, report to the other nodes, and show the cause; the first call counts."""
        if self._exit_code is not None:
            return
        self.failure = failure = event.failure
        self._exit_code = failure.exit_code
        self._workers.kill()
        if failure.kind in ("signal", "exit", "stopped"):
            failure = failure.with_last_lines(self._log.last_lines(failure.rank))
        decided_here = not event.from_other or event.severity is Severity.SECONDARY
        if self._control is not None and decided_here:
            self._control.report(failure)
        # What the failed rank wrote last goes below its traceback; without a better cause than a complaint, all do.
        self._log.show_cause(
            failure if decided_here else replace(failure, details=""),
            and_lines_of=lambda rank: (
                event.severity is Severity.SECONDARY or (rank == failure.rank and failure.kind == "exception")
            ),
        )
        if self._control is not None:
            self._control.drain(_SEND_TIMEOUT_S)
