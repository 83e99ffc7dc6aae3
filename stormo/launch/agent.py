"""The agent of one node: starts its workers, passes output and signals on, ends all within seconds when one fails.

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
from stormo.launch.control import Ended, Hello
from stormo.launch.environments import local
from stormo.launch.failure import Failure, combined_exit_code
from stormo.launch.failure_collector import WorkerFailures
from stormo.launch.output import LogMultiplexer, Stream
from stormo.launch.rank_info import host_name
from stormo.launch.rendezvous import Rendezvous, StoppedError, join_nodes
from stormo.launch.root_cause import FailureEvent, Severity
from stormo.launch.signals import SignalQueue
from stormo.launch.worker_group import AgentTimeouts, Worker, WorkerGroup
from stormo.system.early_signals import stopping_text

_SIGNALS = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_LAST_WORDS_S = 1.0


def run_node(
    command: Sequence[str],
    node: local.Node,
    *,
    digest: str = "",
    options: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    environ: Mapping[str, str] | None = None,
    patience: AgentTimeouts | None = None,
    signals: set[int] | None = None,
) -> int:
    """Run the workers of one node to their end and return the exit code of the whole job.

    Args:
        command: what each worker runs; the environment tells it which rank it is.
        node: which node of the job this is, and how many workers it has.
        digest: stands for everything that must be the same on all nodes.
        options: what the digest is made of, to name a difference.
        timeout_s: for all nodes to come together, and for a worker without a sign of life.
        signals: takes the signals that were passed on to the workers.
    """
    patience = patience or AgentTimeouts()
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
        signal_queue = stack.enter_context(SignalQueue(_SIGNALS))
        timeouts = replace(patience.channel, join_s=timeout_s)
        log = LogMultiplexer(patience.hold_s)
        try:
            rendezvous = join_nodes(command, node, hello=hello, timeouts=timeouts, signals=signal_queue, stack=stack)
        except StoppedError as stopped:
            log.say(str(stopped))
            return stopped.exit_code
        agent = Agent(
            node, hello.host, rendezvous, signals=signal_queue, log=log, timeout_s=timeout_s, timeouts=patience
        )
        stack.callback(agent.close)
        agent.start(command, os.environ if environ is None else environ)
        code = agent.watch()
        if signals is not None:
            signals |= agent.passed_on
        return code


class Agent:
    """The loop around the workers of one node."""

    def __init__(
        self,
        node: local.Node,
        host: str,
        rendezvous: Rendezvous,
        *,
        signals: SignalQueue,
        log: LogMultiplexer,
        timeout_s: float,
        timeouts: AgentTimeouts,
    ) -> None:
        self._node = node
        self._name = f"node {node.node_id}"
        self._host = host
        self._rendezvous = rendezvous
        self._control = rendezvous.control
        self._signals = signals
        self._log = log
        self._timeout_s = timeout_s
        self._timeouts = timeouts
        self._selector = selectors.DefaultSelector()
        self._workers = WorkerGroup(self._selector, log, timeouts)
        self._failures = WorkerFailures(
            node, host, self._workers, self._control, log=log, timeout_s=timeout_s, timeouts=timeouts
        )
        self._stop_deadline: float | None = None
        self._interrupt_deadline: float | None = None
        # Nobody is told of workers that met on their own; whether they did is seen on node 0 alone.
        self._may_be_apart = timeouts.is_of_script and node.node_id == 0
        self._left = False  # the other nodes know that this one has ended in order
        self._exit_code: int | None = None  # once known, the loop ends
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
            self._failures.look_for_exits()
            self._failures.look_for_silence()
            self._look_at_stop_deadline()
            if not self._failures and not self._workers.is_vanishing:
                self._log.show_held_lines()  # else the cause of what is about to fail comes first
            self._decide()
        return self._exit_code

    @property
    def passed_on(self) -> set[int]:
        """The signals that the workers were sent."""
        return self._failures.passed_on

    def close(self) -> None:
        """Leave no process behind, whatever happened, and no line of theirs unshown."""
        self._workers.close()
        self._selector.close()

    # --- one round of the loop -----------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Sleep until something happens, and take it in."""
        hurry = self._failures or self._log.holds_lines
        # Signals last: what they mean depends on what the workers have told before.
        ready = self._selector.select(0.05 if hurry else 0.25)
        for key, _ in sorted(ready, key=lambda event: event[0].fileobj is self._signals):
            if key.fileobj is self._signals:
                self._take_signals()
            elif isinstance(key.data, Worker):
                self._failures.hear(key.data)
            elif isinstance(key.data, Stream):
                self._workers.take_output(key.data)
        self._poll_control()

    def _poll_control(self) -> None:
        if self._control is not None:
            for event in self._control.poll():
                self._failures.take_event(event)
                if isinstance(event, Ended) and self._exit_code is None:
                    self._exit_code = event.exit_code

    def _take_signals(self) -> None:
        for number in self._signals.read():
            if number == signal.SIGCHLD:
                continue  # every worker is looked at anyway
            if number == signal.SIGINT and number in self._failures.passed_on:
                self._stop_at_once()
                continue
            if number == signal.SIGINT:
                self._begin_interrupt()
            # A closed terminal means what SIGTERM means: save and stop.
            passed_on = signal.SIGTERM if number == signal.SIGHUP else number
            if passed_on == signal.SIGTERM and self._stop_deadline is None:
                self._stop_deadline = time.monotonic() + self._timeouts.stop_s
            self._failures.passed_on.add(passed_on)
            self._workers.send_signal(passed_on)

    def _begin_interrupt(self) -> None:
        if self._timeouts.interrupted_s is not None:
            self._interrupt_deadline = time.monotonic() + self._timeouts.interrupted_s
            return
        is_training = any(worker.step is not None for worker in self._workers) or self._timeouts.is_of_script
        self._log.say(stopping_text(is_training=is_training))

    def _look_for_script_group(self) -> None:
        if self._may_be_apart:
            has_world = any(worker.heard_at is not None for worker in self._workers)
            self._may_be_apart = not has_world and not self._rendezvous.script_has_group()

    def _look_at_stop_deadline(self) -> None:
        late = [worker for worker in self._workers if worker.running]
        if self._stop_deadline is None or not late:
            return
        now = time.monotonic()
        # Workers that give signs of life may take their time to save, up to the timeout; a silent one may not.
        silent_s = min(self._timeouts.silent_warning_s, self._timeouts.stop_s)
        is_silent = any(now - (worker.heard_at or worker.started_at) > silent_s for worker in late)
        if now < self._stop_deadline or (not is_silent and now < self._stop_deadline + self._timeout_s):
            return
        ranks = ", ".join(str(worker.rank) for worker in late)
        states = "; ".join(f"rank {worker.rank} (pid {worker.pid}): {worker.state()}" for worker in late)
        self._end_with_own(
            who=f"rank{'s' if len(late) > 1 else ''} {ranks}",
            what=f"did not end within {self._timeouts.stop_s:g} s of SIGTERM and had to be killed ({states})",
            exit_code=EXIT_FAILURE,
        )

    # --- the end -------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """End the run when the cause of a failure is clear, or when every worker has ended in order."""
        if self._exit_code is not None:
            return
        if self._interrupt_deadline is not None:
            if not self._workers.is_running or time.monotonic() >= self._interrupt_deadline:
                self._end_with_own(who=self._name, what="was stopped by Ctrl-C", exit_code=EXIT_INTERRUPTED)
            return
        if self._failures:
            found = self._failures.root_cause()
            if found is not None:
                self._end_with(found)
            return
        if not (self._workers.is_running or self._left or self._workers.may_have_more_to_say):
            self._end_in_order()

    def _end_in_order(self) -> None:
        exit_code = combined_exit_code(worker.exit_code or 0 for worker in self._workers)
        if self._may_be_apart:
            count = self._node.world_size
            self._log.say(
                f"no worker called stormo.World(), so that each of the {count} ran alone (a task is for stormo train)"
            )
        if self._control is None:
            self._exit_code = exit_code
        else:
            self._left = True
            self._control.leave(exit_code)

    def _stop_at_once(self) -> None:
        self._end_with_own(who=self._name, what="was stopped at once by Ctrl-C", exit_code=EXIT_INTERRUPTED)

    def _end_with_own(self, *, who: str, what: str, exit_code: int) -> None:
        failure = Failure(kind="stopped", who=who, host=self._host, what=what, exit_code=exit_code)
        self._end_with(FailureEvent(failure=failure, severity=Severity.CAUSE, seen_at=time.monotonic()))

    def _end_with(self, event: FailureEvent) -> None:
        """End every worker of this node, tell the other nodes, and show the cause; the first call counts."""
        if self._exit_code is not None:
            return
        failure = event.failure
        self._exit_code = failure.exit_code
        self._workers.kill()
        if event.rank is not None and failure.kind in ("signal", "exit", "stopped"):
            failure = failure.with_last_lines(self._log.last_lines(event.rank))
        decided_here = not event.from_other or event.severity is Severity.SECONDARY
        if self._control is not None and decided_here:
            self._control.report(failure)
        # What the failed rank wrote last goes below its traceback; without a better cause than a complaint, all do.
        self._log.show_cause(
            failure if decided_here else replace(failure, details=""),
            and_lines_of=lambda rank: (
                event.severity is Severity.SECONDARY or (rank == event.rank and failure.kind == "exception")
            ),
        )
        if self._control is not None:
            self._control.drain(_LAST_WORDS_S)
