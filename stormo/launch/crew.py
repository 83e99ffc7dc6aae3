"""All workers of one node as processes: started, read from, sent signals, and ended with all they have started."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from stormo.errors import StormoError
from stormo.launch import local
from stormo.launch.failure import Failure, printable
from stormo.launch.meeting import Meeting
from stormo.launch.patience import Patience
from stormo.launch.screen import Screen
from stormo.launch.worker import Stream, Worker, start_worker

_REAP_S = 5.0  # for the kernel to end what was killed
_READ_REST_S = 0.3  # for the pipes of killed workers to end


class Crew:
    """The workers of one node; what they write goes to the screen."""

    def __init__(self, selector: selectors.BaseSelector, screen: Screen, patience: Patience) -> None:
        self._selector = selector
        self._screen = screen
        self._patience = patience
        self._workers: list[Worker] = []

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def start(
        self,
        node: local.Node,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        meeting: Meeting,
        between: Callable[[], None],
    ) -> None:
        """Start every worker of the node; `between` is called after each, as a slow file system takes its time."""
        for local_rank in range(node.num_workers):
            try:
                worker = start_worker(node, local_rank, command, environ=environ, meeting=meeting)
            except OSError as error:
                raise StormoError(f"The worker command {command[0]} could not be started: {error}.") from error
            self._workers.append(worker)
            self._selector.register(worker.channel, selectors.EVENT_READ, worker)
            for stream in worker.streams:
                self._selector.register(stream, selectors.EVENT_READ, stream)
            between()

    @property
    def is_running(self) -> bool:
        """Whether any worker runs."""
        return any(worker.running for worker in self._workers)

    @property
    def may_have_more_to_say(self) -> bool:
        """Whether all workers have ended a moment ago, and a pipe of theirs has not."""
        if all(stream.closed for stream in self._streams()):
            return False
        return time.monotonic() - max(worker.ended_at for worker in self._workers) < self._patience.leftover_s

    @property
    def is_vanishing(self) -> bool:
        """Whether a worker has closed its channel without a word, so that its end is about to be seen."""
        now, within_s = time.monotonic(), self._patience.settling.secondary_s
        return any(
            worker.running and not worker.said_bye and now - worker.channel_closed_at < within_s
            for worker in self._workers
            if worker.channel_closed_at is not None
        )

    def take_messages(self, worker: Worker) -> Failure | None:
        """Hear what a worker tells of itself; the failure that it reports, once."""
        now, reported = time.monotonic(), None
        for message in worker.channel.receive():
            if worker.silent_since is not None:
                silent_s = now - worker.silent_since
                self._screen.say(f"rank {worker.rank} (pid {worker.pid}) is back after {silent_s:.0f} s")
                worker.silent_since = None
            worker.heard_at = now
            worker.step = step if isinstance(step := message.get("step"), int) else worker.step
            worker.line = printable(line, 200) if isinstance(line := message.get("line"), str) else worker.line
            if message.get("event") == "bye":
                worker.said_bye = True
            elif message.get("event") == "failure" and worker.failure is None:
                worker.failure = reported = Failure.from_message(message)
        if worker.channel.closed:
            self._selector.unregister(worker.channel)
            worker.channel.close()
            worker.channel_closed_at = now
        return reported

    def take_output(self, stream: Stream) -> None:
        """Read the lines that a worker has written."""
        if not stream.closed:
            self._screen.take(stream, stream.read())
            if stream.closed:
                self._selector.unregister(stream)

    def send_signal(self, number: int) -> None:
        """Pass a signal on to every worker."""
        for worker in self._workers:
            worker.send_signal(number)

    def kill(self) -> None:
        """End every worker, and read what they have left in their pipes."""
        for worker in self._workers:
            worker.kill()
        self._read_rest()

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

    def _read_rest(self) -> None:
        """Read what ended workers have left in their pipes; a helper that got away may keep one open."""
        deadline = time.monotonic() + _READ_REST_S
        while time.monotonic() < deadline and any(not stream.closed for stream in self._streams()):
            for key, _ in self._selector.select(0.02):
                if isinstance(key.data, Stream):
                    self.take_output(key.data)

    def _streams(self) -> list[Stream]:
        return [stream for worker in self._workers for stream in worker.streams]
