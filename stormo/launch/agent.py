"""The agent of one node: starts the node's workers, passes their output and the user's signals on, and ends all of
them within seconds when one fails, naming the cause first.

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
from dataclasses import dataclass, field, replace

from stormo.early_signals import stopping_text
from stormo.errors import EXIT_FAILURE, EXIT_INTERRUPTED, StormoError
from stormo.launch import local
from stormo.launch.control import Ended, Event, Gone, Hello, RankEnded, Reported, Timing
from stormo.launch.failure import (
    Failure,
    combined_exit_code,
    given_up_after_s,
    of_early_exit,
    of_exit,
    of_signal,
    of_stop,
)
from stormo.launch.inbox import SignalInbox
from stormo.launch.meeting import Meeting, StoppedError, meet
from stormo.launch.place import host_name
from stormo.launch.screen import Screen
from stormo.launch.verdict import Ending, Settling, Sign, Weight, cause, decide_at, is_orderly, weigh
from stormo.launch.worker import Stream, Worker, start_worker

_SIGNALS = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_REAP_S = 5.0  # for the kernel to end what was killed
_READ_REST_S = 0.3  # for the pipes of killed workers to end
_LAST_WORDS_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long the agent waits for what."""

    silent_warning_s: float = 15.0  # without a sign of life from a worker, until a warning
    stop_s: float = 30.0  # for workers to end after SIGTERM
    interrupted_s: float | None = None  # for workers to end after Ctrl-C; None for those that first save their work
    hold_s: float = 0.2  # lines on stderr, so that the cause of a failure comes before its consequences
    leftover_s: float = 1.0  # for pipes to end after their worker has
    # For a worker to speak, or the timeout if that is longer: importing torch from a busy file system is no failure.
    # None for a script, which does other things before.
    first_sign_s: float | None = 60.0
    settling: Settling = field(default_factory=Settling)
    timing: Timing = field(default_factory=Timing)


def run_node(
    command: Sequence[str],
    node: local.Node,
    *,
    digest: str = "",
    options: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    environ: Mapping[str, str] | None = None,
    patience: Patience | None = None,
) -> int:
    """Run the workers of one node to their end and return the exit code of the whole job.

    Args:
        command: what each worker runs; the environment tells it which rank it is.
        node: which node of the job this is, and how many workers it has.
        digest: stands for everything that must be the same on all nodes.
        options: what the digest is made of, to name a difference.
        timeout_s: for all nodes to come together, and for a worker without a sign of life.
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
        return agent.watch()


class Agent:
    """The workers of one node and what is known about them."""

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
        self._workers: list[Worker] = []
        self._signs: list[Sign] = []
        self._endings: list[Ending] = []
        self._forwarded: set[int] = set()
        self._stop_deadline: float | None = None
        self._interrupt_deadline: float | None = None
        # Nobody is told of workers that met on their own; whether they did is seen on node 0 alone.
        self._may_be_apart = patience.first_sign_s is None and node.node_id == 0
        self._left = False  # the other nodes know that this one has ended in order
        self._exit_code: int | None = None  # once known, the loop ends
        self._selector = selectors.DefaultSelector()
        self._selector.register(inbox, selectors.EVENT_READ)
        if self._control is not None:
            self._selector.register(self._control, selectors.EVENT_READ)

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start every worker of the node."""
        for local_rank in range(self._node.num_workers):
            try:
                worker = start_worker(self._node, local_rank, command, environ=environ, meeting=self._meeting)
            except OSError as error:
                raise StormoError(f"The worker command {command[0]} could not be started: {error}.") from error
            self._workers.append(worker)
            self._selector.register(worker.channel, selectors.EVENT_READ, worker)
            for stream in worker.streams:
                self._selector.register(stream, selectors.EVENT_READ, stream)
            self._poll_control()  # a slow file system must not look like a lost node
        if self._meeting.store is not None:
            self._meeting.store.close()  # rank 0 holds it now: without rank 0, nobody may seem to listen

    def watch(self) -> int:
        """Watch the workers to their end."""
        while self._exit_code is None:
            self._wait()
            self._look_for_meeting()
            self._look_for_exits()
            self._look_for_silence()
            self._look_at_stop_deadline()
            self._show_output()
            self._decide()
        return self._exit_code

    def close(self) -> None:
        """Leave no process behind, whatever happened, and no line of theirs unshown."""
        for worker in self._workers:
            worker.kill()
        deadline = time.monotonic() + self._patience.leftover_s
        while time.monotonic() < deadline and any(worker.has_helpers() for worker in self._workers):
            time.sleep(0.02)
        for worker in self._workers:
            worker.kill_group()
        deadline = time.monotonic() + _REAP_S
        for worker in self._workers:
            if not worker.reap(max(0.1, deadline - time.monotonic())):
                self._screen.say(f"rank {worker.rank} (pid {worker.pid}) could not be ended: {worker.state()}")
        self._read_rest()
        for stream in self._streams():
            self._screen.take(stream, stream.finish())
        self._screen.show_held_lines(at_once=True)
        for worker in self._workers:
            worker.close()
        self._selector.close()

    # --- one round of the loop -----------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Sleep until something happens, and take it in."""
        hurry = self._signs or self._screen.holds_lines
        # Signals last: what they mean depends on what the workers have told before.
        ready = self._selector.select(0.05 if hurry else 0.25)
        for key, _ in sorted(ready, key=lambda event: event[0].fileobj is self._inbox):
            if key.fileobj is self._inbox:
                self._take_signals()
            elif isinstance(key.data, Worker):
                self._take_messages(key.data)
            elif isinstance(key.data, Stream):
                self._take_output(key.data)
        self._poll_control()

    def _poll_control(self) -> None:
        if self._control is not None:
            for event in self._control.poll():
                self._take_event(event)

    def _take_signals(self) -> None:
        for number in self._inbox.read():
            if number == signal.SIGCHLD:
                continue  # every worker is looked at anyway
            if number == signal.SIGINT and number in self._forwarded:
                self._stop_at_once()
                continue
            if number == signal.SIGINT:
                self._begin_interrupt()
            # A closed terminal means what SIGTERM means: save and stop.
            passed_on = signal.SIGTERM if number == signal.SIGHUP else number
            if passed_on == signal.SIGTERM and self._stop_deadline is None:
                self._stop_deadline = time.monotonic() + self._patience.stop_s
            self._forwarded.add(passed_on)
            for worker in self._workers:
                worker.send_signal(passed_on)

    def _begin_interrupt(self) -> None:
        if self._patience.interrupted_s is not None:
            self._interrupt_deadline = time.monotonic() + self._patience.interrupted_s
            return
        is_training = any(worker.step is not None for worker in self._workers) or self._patience.first_sign_s is None
        self._screen.say(stopping_text(is_training=is_training))

    def _take_messages(self, worker: Worker) -> None:
        now = time.monotonic()
        for message in worker.channel.receive():
            if worker.silent_since is not None:
                silent_s = now - worker.silent_since
                self._screen.say(f"rank {worker.rank} (pid {worker.pid}) is back after {silent_s:.0f} s")
                worker.silent_since = None
            worker.heard_at = now
            worker.step = step if isinstance(step := message.get("step"), int) else worker.step
            if message.get("event") == "bye":
                worker.said_bye = True
            elif message.get("event") == "failure" and worker.failure is None:
                worker.failure = Failure.from_message(message)
                if worker.failure is not None:
                    self._note(worker.failure, rank=worker.rank)
        if worker.channel.closed:
            self._selector.unregister(worker.channel)
            worker.channel.close()
            worker.channel_closed_at = now

    def _take_output(self, stream: Stream) -> None:
        if not stream.closed:
            self._screen.take(stream, stream.read())
            if stream.closed:
                self._selector.unregister(stream)

    def _take_event(self, event: Event) -> None:
        if isinstance(event, Reported):
            self._note(event.failure, from_other_node=True)
        elif isinstance(event, Gone):
            self._note(Failure(kind="gone", who=f"node {event.member}", host=event.host, what=event.why))
        elif isinstance(event, RankEnded):
            self._endings.append(Ending(rank=event.rank, host=event.host, exit_code=event.exit_code))
        elif isinstance(event, Ended) and self._exit_code is None:
            self._exit_code = event.exit_code

    def _note(
        self,
        failure: Failure,
        *,
        rank: int | None = None,
        weight: Weight = Weight.CAUSE,
        from_other_node: bool = False,
    ) -> None:
        """Keep a sign of trouble; a complaint of this node's goes to node 0, which may know the cause."""
        weight = Weight.SECONDARY if failure.secondary else weight
        self._signs.append(
            Sign(failure=failure, weight=weight, seen_at=time.monotonic(), rank=rank, from_other_node=from_other_node)
        )
        if self._control is not None and failure.secondary and not from_other_node:
            self._control.report(failure)

    def _look_for_meeting(self) -> None:
        if self._may_be_apart:
            has_world = any(worker.heard_at is not None for worker in self._workers)
            self._may_be_apart = not has_world and not self._meeting.script_has_met()

    def _look_for_exits(self) -> None:
        for worker in self._workers:
            if not worker.look() or worker.failure is not None:
                continue
            code = worker.exit_code
            assert code is not None
            if code == 0 and not self._has_finished(worker):
                self._note(of_early_exit(rank=worker.rank, host=self._host), rank=worker.rank)
            elif is_orderly(code):
                self._endings.append(Ending(rank=worker.rank, host=self._host, exit_code=code))
                if self._control is not None:
                    self._control.rank_ended(worker.rank, code)
            elif -code in self._forwarded:
                self._note(of_stop(-code, rank=worker.rank, host=self._host), rank=worker.rank)
            elif code < 0:
                failure = of_signal(-code, rank=worker.rank, host=self._host)
                self._note(failure, rank=worker.rank, weight=weigh(code))
            else:
                self._note(of_exit(code, rank=worker.rank, host=self._host), rank=worker.rank)

    def _has_finished(self, worker: Worker) -> bool:
        """Whether a worker that has ended without an error has also done its work; a script's work is its own."""
        if worker.channel_closed_at is None:
            self._take_messages(worker)  # its last words
        return worker.said_bye or self._patience.first_sign_s is None

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if not worker.running or worker.said_bye or worker.failure is not None:
                continue
            heard_at = worker.started_at if worker.heard_at is None else worker.heard_at
            silent_s, first_sign_s = now - heard_at, self._patience.first_sign_s
            limit_s = self._timeout_s if worker.heard_at is not None else max(self._timeout_s, first_sign_s or 0.0)
            if silent_s <= min(limit_s, self._patience.silent_warning_s):
                continue
            if worker.heard_at is None and self._patience.first_sign_s is None:
                continue
            what = f"has sent no sign of life for {silent_s:.0f} s: {worker.state()}"
            if silent_s > limit_s:
                who = f"rank {worker.rank} (pid {worker.pid})"
                worker.failure = Failure(kind="silent", who=who, host=self._host, what=what)
                self._note(worker.failure, rank=worker.rank)
            elif worker.heard_at is not None and worker.silent_since is None:  # before, it still loads its libraries
                worker.silent_since = heard_at
                self._screen.say(f"rank {worker.rank} (pid {worker.pid}) {what}")

    def _look_at_stop_deadline(self) -> None:
        late = [worker for worker in self._workers if worker.running]
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

    def _show_output(self) -> None:
        """Show the workers' lines, unless something is about to fail whose cause must come first."""
        if not self._signs and not any(self._is_vanishing(worker) for worker in self._workers):
            self._screen.show_held_lines()

    def _is_vanishing(self, worker: Worker) -> bool:
        """Whether a worker has closed its channel without a word, so that its end is about to be seen."""
        if worker.channel_closed_at is None or worker.said_bye or not worker.running:
            return False
        return time.monotonic() - worker.channel_closed_at < self._patience.settling.secondary_s

    # --- the end -------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """End the run when the cause of a failure is clear, or when every worker has ended in order."""
        now = time.monotonic()
        running = any(worker.running for worker in self._workers)
        if self._exit_code is not None:
            return
        if self._interrupt_deadline is not None:
            if not running or now >= self._interrupt_deadline:
                self._end_with_own(who=self._name, what="was stopped by Ctrl-C", exit_code=EXIT_INTERRUPTED)
            return
        if self._signs:
            several_nodes = self._node.num_nodes > 1
            settling = self._patience.settling
            if self._node.node_id == 0:
                # Node 0 decides a little before the others would on their own, so that all name the same cause.
                settling = replace(settling, other_nodes_s=0.8 * settling.other_nodes_s)
            all_seen = not several_nodes and not running
            if all_seen or now >= decide_at(self._signs, settling, several_nodes=several_nodes):
                self._end_with(cause(self._signs, self._endings))
            return
        if running or self._left:
            return
        pipes_open = any(not stream.closed for stream in self._streams())
        if pipes_open and now - max(worker.ended_at for worker in self._workers) < self._patience.leftover_s:
            return
        exit_code = combined_exit_code(worker.exit_code or 0 for worker in self._workers)
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

    def _explained(self, sign: Sign) -> Failure:
        """A wait that was given up, with whom it was for, as far as this node knows."""
        failure = sign.failure
        waited_s = given_up_after_s(failure.what)
        if sign.weight is not Weight.SECONDARY or waited_s is None:
            return failure
        others = [worker for worker in self._workers if worker.running and worker.failure is None]
        steps = {one.rank: "" if one.step is None else f"is at step {one.step} and " for one in others}
        states = [f"rank {one.rank} (pid {one.pid}) {steps[one.rank]}says: {one.state()}" for one in others]
        limit = "--timeout" if self._patience.first_sign_s is not None else "--timeout or World(timeout_s=...)"
        what = f"waited {waited_s:g} s for another worker and gave up"
        hint = f"set a larger {limit} if a step, a save or what comes before the first may take that long"
        return replace(failure, what="; ".join([what, *states, hint]))

    def _end_with(self, sign: Sign) -> None:
        """End every worker of this node, tell the other nodes, and show the cause; the first call counts."""
        if self._exit_code is not None:
            return
        failure = self._explained(sign)
        self._exit_code = failure.exit_code
        for worker in self._workers:
            worker.kill()
        self._read_rest()
        culprit = next((worker for worker in self._workers if worker.rank == sign.rank), None)
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

    def _read_rest(self) -> None:
        """Read what ended workers have left in their pipes; a helper that got away may keep one open."""
        deadline = time.monotonic() + _READ_REST_S
        while time.monotonic() < deadline and any(not stream.closed for stream in self._streams()):
            for key, _ in self._selector.select(0.02):
                if isinstance(key.data, Stream):
                    self._take_output(key.data)

    def _streams(self) -> list[Stream]:
        return [stream for worker in self._workers for stream in worker.streams]
