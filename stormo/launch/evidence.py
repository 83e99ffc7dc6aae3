"""What one node has seen that may end the job: reports, exits, silence, and what other nodes tell.

`verdict` says which of it is the cause, and when to stop waiting for a better one.
"""

from __future__ import annotations

import time
from dataclasses import replace

from stormo.launch import local
from stormo.launch.control import Control, Event, Gone, RankEnded, Reported
from stormo.launch.crew import Crew
from stormo.launch.failure import Failure, of_early_exit, of_exit, of_exit_before_world, of_signal, of_stop
from stormo.launch.patience import Patience
from stormo.launch.screen import Screen
from stormo.launch.verdict import Ending, Sign, Weight, cause, decide_at, is_orderly, weigh
from stormo.launch.waiting import Absent, named_after_wait
from stormo.launch.worker import Worker


class Evidence:
    """The signs of trouble of one node, collected from its workers and from the other nodes."""

    def __init__(
        self,
        node: local.Node,
        host: str,
        crew: Crew,
        control: Control | None,
        *,
        screen: Screen,
        timeout_s: float,
        patience: Patience,
    ) -> None:
        self.passed_on: set[int] = set()  # signals that the workers were sent
        self._node = node
        self._host = host
        self._crew = crew
        self._control = control
        self._screen = screen
        self._timeout_s = timeout_s
        self._patience = patience
        self._signs: list[Sign] = []
        self._endings: list[Ending] = []

    def __bool__(self) -> bool:
        return bool(self._signs)

    def take_event(self, event: Event) -> None:
        """Note what another node tells."""
        if isinstance(event, Reported):
            self._note(event.failure, from_other_node=True)
        elif isinstance(event, Gone):
            self._note(Failure(kind="gone", who=f"node {event.member}", host=event.host, what=event.why))
        elif isinstance(event, RankEnded):
            self._endings.append(Ending(rank=event.rank, host=event.host, exit_code=event.exit_code))

    def hear(self, worker: Worker) -> None:
        """Hear what a worker tells, and note a failure."""
        failure = self._crew.take_messages(worker)
        if failure is not None:
            self._note(failure, rank=worker.rank)

    def look_for_exits(self) -> None:
        """Note every worker that has just ended, unless it has told why."""
        for worker in self._crew:
            if not worker.look():
                continue
            if worker.channel_closed_at is None:
                self.hear(worker)  # its last words
            if worker.failure is None:
                self._judge_exit(worker)
        if self._patience.is_of_script and not self.passed_on:
            self._look_for_one_that_never_joined()

    def _judge_exit(self, worker: Worker) -> None:
        code = worker.exit_code
        assert code is not None
        if code == 0 and not worker.said_bye and not self._patience.is_of_script:
            self._note(of_early_exit(rank=worker.rank, host=self._host), rank=worker.rank)
        elif is_orderly(code):
            self._endings.append(Ending(rank=worker.rank, host=self._host, exit_code=code))
            if self._control is not None:
                self._control.rank_ended(worker.rank, code)
        elif -code in self.passed_on:
            self._note(of_stop(-code, rank=worker.rank, host=self._host), rank=worker.rank)
        elif code < 0:
            self._note(of_signal(-code, rank=worker.rank, host=self._host), rank=worker.rank, weight=weigh(code))
        else:
            failure = of_exit(code, rank=worker.rank, host=self._host, is_of_script=self._patience.is_of_script)
            self._note(failure, rank=worker.rank)

    def _look_for_one_that_never_joined(self) -> None:
        """Note a worker that has ended in order without stormo.World(), where another one is inside of it or behind.

        Nobody gets through it without all; a line that is still open may be in use by a process that it has started.
        """
        waiting = next((one.rank for one in self._crew if one.running and one.heard_at is not None), None)
        for worker in self._crew:
            code, is_silent = worker.exit_code, worker.heard_at is None and worker.channel_closed_at is not None
            if waiting is None or code is None or not is_silent or worker.failure is not None or not is_orderly(code):
                continue
            worker.failure = of_exit_before_world(code, rank=worker.rank, host=self._host, waiting=waiting)
            self._note(worker.failure, rank=worker.rank)

    def look_for_silence(self) -> None:
        """Warn of a worker without a sign of life, and note one that is silent beyond the timeout."""
        now = time.monotonic()
        for worker in self._crew:
            if not worker.running or worker.said_bye or worker.failure is not None:
                continue
            heard_at = worker.started_at if worker.heard_at is None else worker.heard_at
            silent_s, first_sign_s = now - heard_at, self._patience.first_sign_s
            limit_s = self._timeout_s if worker.heard_at is not None else max(self._timeout_s, first_sign_s or 0.0)
            if silent_s <= min(limit_s, self._patience.silent_warning_s):
                continue
            if worker.heard_at is None and self._patience.is_of_script:
                continue
            what = f"has sent no sign of life for {silent_s:.0f} s: {worker.state()}"
            if silent_s > limit_s:
                who = f"rank {worker.rank} (pid {worker.pid})"
                worker.failure = Failure(kind="silent", who=who, host=self._host, what=what)
                self._note(worker.failure, rank=worker.rank)
            elif worker.heard_at is not None and worker.silent_since is None:  # before, it still loads its libraries
                worker.silent_since = heard_at
                self._screen.say(f"rank {worker.rank} (pid {worker.pid}) {what}")

    def cause(self) -> Sign | None:
        """What ends the job, once no better explanation is waited for."""
        several_nodes = self._node.num_nodes > 1
        settling = self._patience.settling
        if self._node.node_id == 0:
            # Node 0 decides a little before the others would on their own, so that all name the same cause.
            settling = replace(settling, other_nodes_s=0.8 * settling.other_nodes_s)
        all_seen = not several_nodes and not self._crew.is_running
        if all_seen or time.monotonic() >= decide_at(self._signs, settling, several_nodes=several_nodes):
            return cause(self._signs, self._endings)
        return None

    def explained(self, sign: Sign) -> Failure:
        """The failure to show: a wait that was given up with whom it was for, as far as this node knows."""
        complaints = [one.failure for one in self._signs if one.weight is Weight.SECONDARY]
        losses = [one.loss for one in complaints]
        if sign.weight is not Weight.SECONDARY or all(one is None or one.waited_s is None for one in losses):
            return sign.failure
        others = [worker for worker in self._crew if worker.running and worker.failure is None]
        absent = [Absent(rank=one.rank, state=self._state(one), has_joined=self._has_joined(one)) for one in others]
        heard = {one.rank for one in complaints} | {worker.rank for worker in self._crew}
        knows_all = self._node.node_id == 0  # to which all complaints go
        elsewhere = [rank for rank in range(self._node.world_size) if knows_all and rank not in heard]
        limit = "--timeout or World(timeout_s=...)" if self._patience.is_of_script else "--timeout"
        causes = [one.as_cause() for one in complaints]
        return named_after_wait(causes, absent, elsewhere=elsewhere, host=self._host, limit=limit)

    def _has_joined(self, worker: Worker) -> bool:
        return worker.heard_at is not None or not self._patience.is_of_script

    def _state(self, worker: Worker) -> str:
        step = "" if worker.step is None else f"is at step {worker.step} and "
        call = "has called world.close() and " if worker.said_bye and self._patience.is_of_script else step
        call = call if self._has_joined(worker) else "has not called stormo.World() and "
        line = f", in {worker.line}" if worker.line and self._patience.is_of_script and not worker.said_bye else ""
        return f"(pid {worker.pid}) {call}says: {worker.state()}{line}"

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
