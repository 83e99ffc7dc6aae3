"""torch's elastic agent as stormo starts it: workers are started again after a failure, and nodes may come and go.

The agent and the rendezvous are torch's; here is what ends a training for good, and what the user reads of it all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's sockets warn of every peer that has gone

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _Action,
    _RendezvousContext,
    create_handler,
)

from stormo.early_signals import RESTARTING, hear_warning
from stormo.errors import (
    EXIT_DIVERGED,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_RESUMABLE,
    EXIT_USAGE,
    StormoError,
    counted,
)
from stormo.launch.address import shown
from stormo.launch.elastic import Elastic, check_same, nobody_answered
from stormo.launch.failure import ORDERLY_EXIT_CODES, Failure, of_exit, of_signal
from stormo.launch.local import settle_hashes
from stormo.launch.own_folder import own_folder
from stormo.launch.place import host_name
from stormo.launch.relay import write_all
from stormo.launch.torchrun import AGENT, met_file
from stormo.process import STARTED
from stormo.telemetry.folder import RunFolder

_LAST_CALL_S = 5  # for more nodes to come, once the least number is there
_HEARTBEAT_S, _NUM_HEARTBEATS = 2, 5  # a node without one for their product is lost
_READ_S = 60.0
_SETTINGS = "stormo/settings"  # in the store: what the training was told
_MONITOR_S = 0.1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_FOR_GOOD = {EXIT_USAGE, EXIT_DIVERGED, EXIT_INTERRUPTED}  # how a worker ends that is not to be started again


def run_agent(
    node: Elastic,
    listener: socket.socket | None,
    command: Sequence[str],
    *,
    settings: Mapping[str, str],
    given: Mapping[str, str],
) -> int:
    """Start the workers of this node, again and again as nodes come and go or fail; the exit code of the training."""
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)  # torch's agent reports every end at length; what matters is said here
    settle_hashes(os.environ)
    # torch keeps the address of the first round in nodes that stay, where workers of a later one would wait in vain.
    os.environ |= {AGENT: str(os.getpid()), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in _SIGNALS)
    for number in _SIGNALS:
        signal.signal(number, _raise_signal)
    where = shown(node.address, node.port)
    agent: _Agent | None = None
    try:
        hear_warning()
        store = _store(node, listener)
        _agree(store, node, settings if listener is not None else None, given)
        handler = _rendezvous(node, store)
        with own_folder() as folder, _closed_at_the_end(handler):
            os.environ[RESTARTING] = str(folder / "restarting")
            agent = _Agent(node, handler, command, DefaultLogsSpecs(log_dir=str(folder)))
            result = agent.run()
        return 0 if result is None else agent.exit_code(result)
    except SignalException as stopped:
        if node.most > 1 and stopped.sigval != signal.SIGINT:
            _say("this node leaves the training; where enough others are left, they go on")
        return EXIT_INTERRUPTED if stopped.sigval == signal.SIGINT else _stopped(agent)
    except RendezvousClosedError:
        if agent is None or not agent.num_rounds:
            _say(f"the training that met at {where} has ended; this node was not needed")
            return 0
        _say("another node has ended the training")
        return EXIT_FAILURE
    except RendezvousTimeoutError:
        few = f"fewer than {counted(node.least, 'node')} met at {where} within {node.timeout_s:g} s"
        if agent is None or not agent.num_rounds:
            raise StormoError(f"{few}; start the same command on more nodes, or raise --timeout.") from None
        _say(f"{few}; the same command with --resume goes on from the last checkpoint")
        return EXIT_RESUMABLE
    except RendezvousConnectionError:
        raise StormoError(
            f"the meeting point {where} is gone and with it the node that held it; "
            "start the same command with --resume on all nodes, and --master-addr on one that stays."
        ) from None


def _raise_signal(number: int, frame: FrameType | None) -> None:
    raise SignalException(f"signal {number}", sigval=signal.Signals(number))


def _stopped(agent: _Agent | None) -> int:
    orderly = (0, EXIT_RESUMABLE, -signal.SIGTERM)  # the last: before it was ready to stop in order
    return EXIT_RESUMABLE if agent is None or set(agent.worker_codes()) <= set(orderly) else EXIT_FAILURE


def _say(text: str) -> None:
    sys.stdout.flush()
    write_all(2, f"stormo: {text}\n".encode())


def _store(node: Elastic, listener: socket.socket | None) -> dist.TCPStore:
    """What the nodes meet over; it listens on one address alone."""
    timeout = timedelta(seconds=node.timeout_s)
    try:
        if listener is not None:
            port = listener.getsockname()[1]
            store = dist.TCPStore(
                node.address,
                port,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        else:
            store = dist.TCPStore(node.address, node.port, is_master=False, timeout=timeout)
    except dist.DistError:
        raise nobody_answered(node) from None
    store.set_timeout(timedelta(seconds=_READ_S))
    return store


def _agree(store: dist.TCPStore, node: Elastic, settings: Mapping[str, str] | None, given: Mapping[str, str]) -> None:
    """Tell the settings of the training where this node holds the meeting point; elsewhere see that they are its own.

    The nodes that are there would stop their work to let this one in, and only then find that it was told otherwise.
    """
    if settings is not None:
        store.set(_SETTINGS, json.dumps(dict(settings)))
        return
    try:
        told = json.loads(store.get(_SETTINGS))
    except dist.DistError:
        raise nobody_answered(node) from None
    check_same(told, given, shown(node.address, node.port))


def _rendezvous(node: Elastic, store: dist.TCPStore) -> DynamicRendezvousHandler:
    """Where the nodes meet: torch's rendezvous."""
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=shown(node.address, node.port),
        run_id=node.rendezvous_id,
        min_nodes=node.least,
        max_nodes=node.most,
        local_addr=node.own_address,
        join_timeout=max(1, int(node.timeout_s)),
        last_call_timeout=_LAST_CALL_S,
        keep_alive_interval=_HEARTBEAT_S,
        keep_alive_max_attempt=_NUM_HEARTBEATS,
    )
    return create_handler(store, C10dRendezvousBackend(store, node.rendezvous_id), parameters)


@contextlib.contextmanager
def _closed_at_the_end(handler: DynamicRendezvousHandler) -> Iterator[None]:
    """Close the rendezvous for all nodes; but a node that is stopped only leaves it."""
    try:
        yield
    except SignalException:
        with contextlib.suppress(Exception):  # the others would notice within seconds
            handler._stop_heartbeats()
            handler._op_executor.run(_leave, time.monotonic() + _HEARTBEAT_S)
        raise
    except RendezvousTimeoutError:
        raise
    except BaseException:
        handler.shutdown()
        raise
    handler.shutdown()


def _leave(context: _RendezvousContext, deadline: float) -> _Action:
    """Go out of whatever list of nodes this one is in, or the others would wait for it until its heartbeats are old."""
    lists = {
        _Action.REMOVE_FROM_PARTICIPANTS: context.state.participants,
        _Action.REMOVE_FROM_WAIT_LIST: context.state.wait_list,
        _Action.REMOVE_FROM_REDUNDANCY_LIST: context.state.redundancy_list,
    }
    return next((action for action, nodes in lists.items() if context.node in nodes), _Action.FINISH)


class _Agent(LocalElasticAgent):
    """torch's agent of a node that tells what happens, and does not repeat what would end the same way."""

    def __init__(
        self, node: Elastic, handler: DynamicRendezvousHandler, command: Sequence[str], logs: DefaultLogsSpecs
    ) -> None:
        spec = WorkerSpec(
            role="stormo",
            local_world_size=node.num_workers,
            entrypoint=command[0],
            args=tuple(command[1:]),
            rdzv_handler=handler,
            max_restarts=node.restarts,
            monitor_interval=_MONITOR_S,
            local_addr=node.own_address,
        )
        super().__init__(spec, logs, exit_barrier_timeout=node.timeout_s)
        self._node = node
        self.num_rounds = 0
        self._why = ""
        self._num_signals = 0
        self._last_failure: tuple[set[str], list[Path]] = (set(), [])  # why, and the newest checkpoint then

    def exit_code(self, result: RunResult) -> int:
        """Of this node, from the end of its last workers."""
        if not result.is_failed():
            return 0
        codes = _codes(result)
        return next((code for code in (*sorted(_FOR_GOOD), EXIT_RESUMABLE) if code in codes), EXIT_FAILURE)

    def worker_codes(self) -> list[int]:
        """The exit codes of the workers that were started last."""
        return [handler.proc.returncode for handler in self._handlers()]

    def _handlers(self) -> list[Any]:
        return list(getattr(self._pcontext, "subprocess_handlers", {}).values())

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self.num_rounds:
            self._why = self._why or "a node comes"
            os.environ[STARTED] = str(time.time())  # of this attempt; what was before is in the run's folder
        super()._rendezvous(worker_group)
        Path(os.environ[RESTARTING]).unlink(missing_ok=True)  # all workers of the last round have ended
        self.num_rounds += 1
        if self.num_rounds > 1:
            nodes = counted(worker_group.group_world_size or 1, "node")
            total = counted(worker_group.workers[0].world_size, "worker")
            said = f"{self._why}: going on with {nodes}, {total}" if self._node.most > 1 else f"{self._why}: going on"
            _say(said)
        self._why = ""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            for failure in unnamed(result, getattr(self._pcontext, "error_files", {})):
                write_all(2, failure.text().encode())
            self._judge(_codes(result), _reasons(result))
        return result

    def _judge(self, codes: set[int], reasons: set[str]) -> None:
        """Whether this end uses up a restart, none, or all of them."""
        failure = (reasons, RunFolder(self._node.run_folder).checkpoint_folders()[-1:])
        is_again, self._last_failure = bool(reasons) and failure == self._last_failure, failure
        if codes & _FOR_GOOD or (codes == {EXIT_RESUMABLE} and self._node.most == 1):
            self._remaining_restarts = 0
        elif is_again and self._remaining_restarts:
            _say("it failed as before, and at the same point: a restart does not help")
            self._remaining_restarts = 0
        elif codes == {EXIT_RESUMABLE}:  # all have saved, as one was told to leave: no failure
            self._remaining_restarts += 1
            self._why = "a node leaves"
        elif self._remaining_restarts:
            used = self._node.restarts - self._remaining_restarts + 1
            self._why = f"restart {used} of {self._node.restarts}"
        elif self._node.restarts:
            _say(f"no restart is left of {self._node.restarts}")

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:  # torch's timeouts
        """Let the workers save what they have; Ctrl-C after that ends them at once."""
        self._num_signals += isinstance(sys.exception(), SignalException)
        if self._num_signals:
            for number in set(_SIGNALS) - {signal.SIGINT}:  # a scheduler may send them again and again
                signal.signal(number, signal.SIG_IGN)
        else:  # a node comes, or a worker has failed: no worker need tell of its end
            with contextlib.suppress(OSError):  # a full disk
                Path(os.environ[RESTARTING]).touch()
        if self._num_signals <= 1:
            is_known = death_sig in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
            self._let_end(death_sig if is_known else signal.SIGTERM)
        super()._shutdown(signal.SIGKILL)

    def _let_end(self, number: signal.Signals) -> None:
        """Signal the workers alone: torch would signal the processes that load their data too."""
        processes = [handler.proc for handler in self._handlers()]
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)
        deadline = time.monotonic() + self._node.timeout_s
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def _codes(result: RunResult) -> set[int]:
    return {failure.exitcode for failure in result.failures.values()}


def unnamed(result: RunResult, error_files: Mapping[int, str]) -> list[Failure]:
    """The ends of workers that nobody tells of: not they themselves, nor the others, whom they had not met.

    `error_files`: where each worker of this node leaves its last word; a failure of torch's has none that is not there.
    """
    found = []
    for rank, failure in sorted(result.failures.items()):
        code, last_word = failure.exitcode, error_files.get(failure.local_rank)
        if code in (*ORDERLY_EXIT_CODES, EXIT_USAGE):  # the last has been said in a sentence
            continue
        if last_word is not None and (Path(last_word).is_file() or met_file(last_word).exists()):
            continue
        make = of_signal if code < 0 else of_exit
        found.append((code, make(abs(code), rank=rank, host=host_name())))
    own = -signal.SIGTERM  # by which torch ends the others
    return [failure for code, failure in found if code != own or all(other == own for other, _ in found)]


def _reasons(result: RunResult) -> set[str]:
    """What the workers themselves say of their failure; one that was killed says nothing."""
    return {str(failure.message) for failure in result.failures.values() if Path(failure.error_file).is_file()}
