"""How the agents of a job come together before any worker starts, and agree on where the ranks will meet."""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO

from stormo.errors import EXIT_INTERRUPTED, EXIT_RESUMABLE, StormoError
from stormo.launch.address import LOOPBACK, cannot_listen, listen, listening_address
from stormo.launch.client import Client
from stormo.launch.control import Control, Go, Hello, Timing
from stormo.launch.inbox import SignalInbox
from stormo.launch.local import Node
from stormo.launch.meeting_point import BACKLOG, new_memory
from stormo.launch.secret import job_secret
from stormo.launch.server import Server


class StoppedError(StormoError):
    """The user ended the job while the nodes were still coming together."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} before all nodes had come.")
        # Nothing was begun, so nothing is lost.
        self.exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_RESUMABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """What the agents agreed on."""

    control: Control | None  # None on one node
    store_addr: str
    store_port: int | None  # None on one node
    # On one node memory that its ranks share, which has no name for anybody else to open. On several node 0 listens
    # already, so that nobody can take the port in between.
    store: socket.socket | BinaryIO | None
    script_port: int  # for a script that calls torch.distributed itself

    def script_has_met(self) -> bool:
        """Whether somebody listens on the port that was set aside on this machine."""
        try:
            _hold(self.store_addr, self.script_port).close()
        except OSError:
            return True
        return False


def meet(
    command: Sequence[str], node: Node, *, hello: Hello, timing: Timing, inbox: SignalInbox, stack: ExitStack
) -> Meeting:
    """Come together with the agents of the other nodes; what is opened is closed by the stack."""
    if node.num_nodes == 1:
        return _meet_alone(node, stack)
    assert node.master_addr is not None, "Node has checked this"
    secret = job_secret(os.environ, node.master_port)
    if node.node_id != 0:
        client = Client(node.master_addr, node.master_port, hello, secret=secret, timing=timing)
        stack.callback(client.close)
        return _meeting(client, _join(client, inbox), None)
    number = listening_address(node.master_addr, all_on_this_host=False)
    listener = stack.enter_context(listen(number, node.master_port, backlog=BACKLOG))
    store = stack.enter_context(listen(number, 0, backlog=BACKLOG))
    server = Server(
        listener,
        hello,
        secret=secret,
        payload={
            "store_addr": number,
            "store_port": store.getsockname()[1],
            "script_port": _set_aside(number, 0, stack),
        },
        timing=timing,
        how_to_start=lambda missing: f"start there: {command_for(command, missing[0])}",
    )
    stack.callback(server.close)
    return _meeting(server, _join(server, inbox), store)


def _meet_alone(node: Node, stack: ExitStack) -> Meeting:
    """What one node agrees on with itself."""
    return Meeting(
        control=None,
        store_addr=LOOPBACK,
        store_port=None,
        store=stack.enter_context(os.fdopen(new_memory(), "r+b")),
        script_port=_set_aside(LOOPBACK, node.script_port, stack),
    )


def _set_aside(number: str, port: int, stack: ExitStack) -> int:
    """A port that nobody else is given, being bound, and that torch can still listen on, as nobody does yet."""
    try:
        return int(stack.enter_context(_hold(number, port)).getsockname()[1])
    except OSError as error:
        raise cannot_listen(number, port, error) from None


def _hold(number: str, port: int) -> socket.socket:
    held = socket.socket(socket.AF_INET6 if ":" in number else socket.AF_INET)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((number, port))
    except OSError:
        held.close()
        raise
    return held


def _join(control: Control, inbox: SignalInbox) -> Mapping[str, Any]:
    """Wait until all have come; a signal ends the waiting."""
    with selectors.DefaultSelector() as selector:
        selector.register(inbox, selectors.EVENT_READ)
        selector.register(control, selectors.EVENT_READ)
        while True:
            selector.select(0.1)
            for number in inbox.read():
                if number != signal.SIGCHLD:
                    raise StoppedError(number)
            for event in control.poll():
                if isinstance(event, Go):
                    return event.payload


def _meeting(control: Control, payload: Mapping[str, Any], store: socket.socket | None) -> Meeting:
    address, port, script_port = (payload.get(name) for name in ("store_addr", "store_port", "script_port"))
    if not isinstance(address, str) or not isinstance(port, int) or not isinstance(script_port, int):
        raise StormoError("Node 0 did not say where the ranks meet; install the same release of stormo on every node.")
    return Meeting(control=control, store_addr=address, store_port=port, store=store, script_port=script_port)


def command_for(command: Sequence[str], node_id: int) -> str:
    """The command line to type on another node."""
    words = list(command)
    if words[1:4] == ["-P", "-m", "stormo"]:
        words[:4] = ["stormo"]
    for position, word in enumerate(words):
        if word == "--node-id" and position + 1 < len(words):
            words[position + 1] = str(node_id)
            break
        if word.startswith("--node-id="):
            words[position] = f"--node-id={node_id}"
            break
    else:
        words += ["--node-id", str(node_id)]
    return shlex.join(words)
