"""The agent of one node: starts the node's workers, passes their output and the user's signals on, and ends all of
them within seconds when one fails, naming the cause first.

One thread, one loop. Trains nothing and imports nothing heavy. The workers are the `crew`, what looks like trouble is
the `evidence`.
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
from stormo.launch import local
from stormo.launch.control import Ended, Hello
from stormo.launch.crew import Crew
from stormo.launch.evidence import Evidence
from stormo.launch.failure import Failure, combined_exit_code
from stormo.launch.inbox import SignalInbox
from stormo.launch.meeting import Meeting, StoppedError, meet
from stormo.launch.patience import Patience
from stormo.launch.place import host_name
from stormo.launch.screen import Screen
from stormo.launch.verdict import Sign, Weight
from stormo.launch.worker import Stream, Worker
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
    patience: Patience | None = None,
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
    patience = patience or Patience()
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
        inbox = stack.enter_context(SignalInbox(_SIGNALS))
        timing = replace(patience.timing, join_s=timeout_s)
        screen = Screen(patience.hold_s)
        try:
            meeting = meet(command, node, hello=hello, timing=timing, inbox=inbox, stack=stack)
        except StoppedError as stopped:
            screen.say(str(stopped))
            return stopped.exit_code
        agent = Agent(node, hello.host, meeting, inbox=inbox, screen=screen, timeout_s=timeout_s, patience=patience)
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
        meeting: Meeting,
        *,
        inbox: SignalInbox,
        screen: Screen,
        timeout_s: float,
        patience: Patience,
    ) -> None:
        self._node = node
        self._name = f"node {node.node_id}"
        self._host = host
        self._meeting = meeting
        self._control = meeting.control
        self._inbox = inbox
        self._screen = screen
        self._timeout_s = timeout_s
        self._patience = patience
        self._selector = selectors.DefaultSelector()
        self._crew = Crew(self._selector, screen, patience)
        self._evidence = Evidence(
            node, host, self._crew, self._control, screen=screen, timeout_s=timeout_s, patience=patience
        )
        self._stop_deadline: float | None = None
        self._interrupt_deadline: float | None = None
        # Nobody is told of workers that met on their own; whether they did is seen on node 0 alone.
        self._may_be_apart = patience.is_of_script and node.node_id == 0
        self._left = False  # the other nodes know that this one has ended in order
        self._exit_code: int | None = None  # once known, the loop ends
        self._selector.register(inbox, selectors.EVENT_READ)
        if self._control is not None:
            self._selector.register(self._control, selectors.EVENT_READ)

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start every worker of the node."""
        # In between, a slow file system must not look like a lost node.
        self._crew.start(self._node, command, environ, meeting=self._meeting, between=self._poll_control)
        if self._meeting.store is not None:
            self._meeting.store.close()  # rank 0 holds it now: without rank 0, nobody may seem to listen

    def watch(self) -> int:
        """Watch the workers to their end."""
        while self._exit_code is None:
            self._wait()
            self._look_for_meeting()
            self._evidence.look_for_exits()
            self._evidence.look_for_silence()
            self._look_at_stop_deadline()
            if not self._evidence and not self._crew.is_vanishing:
                self._screen.show_held_lines()  # else the cause of what is about to fail comes first
            self._decide()
        return self._exit_code

    @property
    def passed_on(self) -> set[int]:
        """The signals that the workers were sent."""
        return self._evidence.passed_on

    def close(self) -> None:
        """Leave no process behind, whatever happened, and no line of theirs unshown."""
        self._crew.close()
        self._selector.close()

    # --- one round of the loop -----------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Sleep until something happens, and take it in."""
        hurry = self._evidence or self._screen.holds_lines
        # Signals last: what they mean depends on what the workers have told before.
        ready = self._selector.select(0.05 if hurry else 0.25)
        for key, _ in sorted(ready, key=lambda event: event[0].fileobj is self._inbox):
            if key.fileobj is self._inbox:
                self._take_signals()
            elif isinstance(key.data, Worker):
                self._evidence.hear(key.data)
            elif isinstance(key.data, Stream):
                self._crew.take_output(key.data)
        self._poll_control()

    def _poll_control(self) -> None:
        if self._control is not None:
            for event in self._control.poll():
                self._evidence.take_event(event)
                if isinstance(event, Ended) and self._exit_code is None:
                    self._exit_code = event.exit_code

    def _take_signals(self) -> None:
        for number in self._inbox.read():
            if number == signal.SIGCHLD:
                continue  # every worker is looked at anyway
            if number == signal.SIGINT and number in self._evidence.passed_on:
                self._stop_at_once()
                continue
            if number == signal.SIGINT:
                self._begin_interrupt()
            # A closed terminal means what SIGTERM means: save and stop.
            passed_on = signal.SIGTERM if number == signal.SIGHUP else number
            if passed_on == signal.SIGTERM and self._stop_deadline is None:
                self._stop_deadline = time.monotonic() + self._patience.stop_s
            self._evidence.passed_on.add(passed_on)
            self._crew.send_signal(passed_on)

    def _begin_interrupt(self) -> None:
        if self._patience.interrupted_s is not None:
            self._interrupt_deadline = time.monotonic() + self._patience.interrupted_s
            return
        is_training = any(worker.step is not None for worker in self._crew) or self._patience.is_of_script
        self._screen.say(stopping_text(is_training=is_training))

    def _look_for_meeting(self) -> None:
        if self._may_be_apart:
            has_world = any(worker.heard_at is not None for worker in self._crew)
            self._may_be_apart = not has_world and not self._meeting.script_has_met()

    def _look_at_stop_deadline(self) -> None:
        late = [worker for worker in self._crew if worker.running]
        if self._stop_deadline is None or not late:
            return
        now = time.monotonic()
        # Workers that give signs of life may take their time to save, up to the timeout; a silent one may not.
        patience_s = min(self._patience.silent_warning_s, self._patience.stop_s)
        is_silent = any(now - (worker.heard_at or worker.started_at) > patience_s for worker in late)
        if now < self._stop_deadline or (not is_silent and now < self._stop_deadline + self._timeout_s):
            return
        ranks = ", ".join(str(worker.rank) for worker in late)
        states = "; ".join(f"rank {worker.rank} (pid {worker.pid}): {worker.state()}" for worker in late)
        self._end_with_own(
            who=f"rank{'s' if len(late) > 1 else ''} {ranks}",
            what=f"did not end within {self._patience.stop_s:g} s of SIGTERM and had to be killed ({states})",
            exit_code=EXIT_FAILURE,
        )

    # --- the end -------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """End the run when the cause of a failure is clear, or when every worker has ended in order."""
        if self._exit_code is not None:
            return
        if self._interrupt_deadline is not None:
            if not self._crew.is_running or time.monotonic() >= self._interrupt_deadline:
                self._end_with_own(who=self._name, what="was stopped by Ctrl-C", exit_code=EXIT_INTERRUPTED)
            return
        if self._evidence:
            found = self._evidence.cause()
            if found is not None:
                self._end_with(found)
            return
        if not (self._crew.is_running or self._left or self._crew.may_have_more_to_say):
            self._end_in_order()

    def _end_in_order(self) -> None:
        exit_code = combined_exit_code(worker.exit_code or 0 for worker in self._crew)
        if self._may_be_apart:
            count = self._node.world_size
            self._screen.say(
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
        self._end_with(Sign(failure=failure, weight=Weight.CAUSE, seen_at=time.monotonic()))

    def _end_with(self, sign: Sign) -> None:
        """End every worker of this node, tell the other nodes, and show the cause; the first call counts."""
        if self._exit_code is not None:
            return
        failure = self._evidence.explained(sign)
        self._exit_code = failure.exit_code
        self._crew.kill()
        culprit = next((worker for worker in self._crew if worker.rank == sign.rank), None)
        if culprit is not None and failure.kind in ("signal", "exit", "stopped"):
            failure = failure.with_last_lines(self._screen.last_lines(culprit))
        decided_here = not sign.from_other_node or sign.weight is Weight.SECONDARY
        if self._control is not None and decided_here:
            self._control.report(failure)
        # What the failed rank wrote last goes below its traceback; without a better cause than a complaint, all do.
        self._screen.show_cause(
            failure if decided_here else replace(failure, details=""),
            and_lines_of=lambda worker: (
                sign.weight is Weight.SECONDARY or (worker is culprit and failure.kind == "exception")
            ),
        )
        if self._control is not None:
            self._control.drain(_LAST_WORDS_S)
