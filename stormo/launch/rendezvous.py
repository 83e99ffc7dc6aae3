"""Where the ranks of a job meet, and how the agents agree on it before any worker starts.

The ranks meet in torch's store: in memory that those of one node share, or at a port of rank 0. torch's own server at a
port lets everybody in who can reach it. The memory has no name that another user could open.
"""

from __future__ import annotations

import os
import re
import selectors
import shlex
import signal
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO

from stormo.errors import EXIT_INTERRUPTED, EXIT_RESUMABLE, StormoError
from stormo.launch.address import LOOPBACK, cannot_listen, family_of, listen, listening_address
from stormo.launch.auth import job_secret
from stormo.launch.client import Client
from stormo.launch.control import ChannelTimeouts, Control, Go, Hello
from stormo.launch.environments.local import STORE_FD, Node
from stormo.launch.rank_info import RankInfo
from stormo.launch.server import Server
from stormo.launch.signals import SignalQueue

BACKLOG = 4096
_MEMORY = re.compile(r"/proc/\d{1,10}/fd/\d{1,10}")
_HIGHEST_PORT = 65535


class StoppedError(StormoError):
    """The user ended the job while the nodes were still coming together."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} before all nodes had come.")
        # Nothing was begun, so nothing is lost.
        self.exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_RESUMABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """What the agents agreed on."""

    control: Control | None  # None on one node
    store_addr: str
    store_port: int | None  # None on one node
    # On one node memory that its ranks share, which has no name for anybody else to open. On several node 0 listens
    # already, so that nobody can take the port in between.
    store: socket.socket | BinaryIO | None
    script_port: int  # for a script that calls torch.distributed itself

    def script_has_group(self) -> bool:
        """Whether somebody listens on the port that was set aside for a script's own process group."""
        try:
            _hold(self.store_addr, self.script_port).close()
        except OSError:
            return True
        return False


def join_nodes(
    command: Sequence[str],
    node: Node,
    *,
    hello: Hello,
    timeouts: ChannelTimeouts,
    signals: SignalQueue,
    stack: ExitStack,
) -> Rendezvous:
    """Meet the agents of the other nodes; the stack closes what is opened."""
    if node.num_nodes == 1:
        return _rendezvous_alone(node, stack)
    assert node.master_addr is not None, "Node has checked this"
    secret = job_secret(os.environ, node.master_port)
    if node.node_id != 0:
        client = Client(node.master_addr, node.master_port, hello, secret=secret, timeouts=timeouts)
        stack.callback(client.close)
        return _rendezvous(client, _join(client, signals), None)
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
        timeouts=timeouts,
        how_to_start=lambda missing: f"start there: {command_for(command, missing[0])}",
    )
    stack.callback(server.close)
    return _rendezvous(server, _join(server, signals), store)


def _rendezvous_alone(node: Node, stack: ExitStack) -> Rendezvous:
    """The rendezvous of one node."""
    return Rendezvous(
        control=None,
        store_addr=LOOPBACK,
        store_port=None,
        store=stack.enter_context(os.fdopen(new_store_memory(), "r+b")),
        script_port=_set_aside(LOOPBACK, node.script_port, stack),
    )


def _set_aside(number: str, port: int, stack: ExitStack) -> int:
    """Bind a port, so that nobody else is given it, without listening, so that torch can."""
    try:
        return int(stack.enter_context(_hold(number, port)).getsockname()[1])
    except OSError as error:
        raise cannot_listen(number, port, error) from None


def _hold(number: str, port: int) -> socket.socket:
    held = socket.socket(family_of(number))
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((number, port))
    except OSError:
        held.close()
        raise
    return held


def _join(control: Control, signals: SignalQueue) -> Mapping[str, Any]:
    """Wait until all have come; a signal ends the waiting."""
    with selectors.DefaultSelector() as selector:
        selector.register(signals, selectors.EVENT_READ)
        selector.register(control, selectors.EVENT_READ)
        while True:
            selector.select(0.1)
            for number in signals.read():
                if number != signal.SIGCHLD:
                    raise StoppedError(number)
            for event in control.poll():
                if isinstance(event, Go):
                    return event.payload


def _rendezvous(control: Control, payload: Mapping[str, Any], store: socket.socket | None) -> Rendezvous:
    address, port, script_port = (payload.get(name) for name in ("store_addr", "store_port", "script_port"))
    if not isinstance(address, str) or not isinstance(port, int) or not isinstance(script_port, int):
        raise StormoError("Node 0 did not say where the ranks meet; install the same release of stormo on every node.")
    return Rendezvous(control=control, store_addr=address, store_port=port, store=store, script_port=script_port)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAddress:
    """Where torch's store is: what a rank needs to open it."""

    memory: int | None = None  # on one node, its descriptor
    listener: int | None = None  # on rank 0 of several nodes, the descriptor of a socket that listens already
    address: str = ""
    port: int = 0

    def described(self) -> dict[str, Any]:
        """What rank 0 tells the other ranks."""
        if self.memory is not None:
            return {"memory": f"/proc/{os.getpid()}/fd/{self.memory}"}
        return {"address": self.address, "port": self.port}


def rank_0_address(place: RankInfo) -> str:
    """Where rank 0 listens: by number on its own node, where its name may lead to a loopback address."""
    if place.node_id:
        return place.master_addr
    return listening_address(place.master_addr, all_on_this_host=place.all_on_this_host, peer=place.peer)


def new_store_memory() -> int:
    """The descriptor of memory for the ranks of one node."""
    return os.memfd_create("stormo-store")


def open_store_address(place: RankInfo, number: str) -> StoreAddress:
    """Open a new one on rank 0, where a foreign launcher started the ranks; `number` is the address of rank 0."""
    if place.all_on_this_host:
        return StoreAddress(memory=new_store_memory())
    listener = listen(number, 0, backlog=BACKLOG)
    port = int(listener.getsockname()[1])
    return StoreAddress(listener=listener.detach(), address=number, port=port)


def received_store_address(place: RankInfo, described: Mapping[str, Any]) -> StoreAddress:
    """What rank 0 said over the control channel, checked, as it is opened here."""
    memory, address, port = (described.get(name) for name in ("memory", "address", "port"))
    if place.all_on_this_host and isinstance(memory, str) and _MEMORY.fullmatch(memory):
        try:
            return StoreAddress(memory=os.open(memory, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise StormoError(
                f"rank {place.rank} cannot open the memory that rank 0 shares with the ranks of this node "
                f"({error.strerror}: {memory}); start all of them in the same container."
            ) from None
    if not place.all_on_this_host and isinstance(address, str) and isinstance(port, int) and 0 < port <= _HIGHEST_PORT:
        return StoreAddress(address=address, port=port)
    raise StormoError("Rank 0 did not say where the ranks meet; install the same release of stormo on every node.")


def inherited_store_address(place: RankInfo, environ: MutableMapping[str, str]) -> StoreAddress:
    """What the agent of this node has left in the environment of a worker."""
    given = environ.pop(STORE_FD, None)  # a program that this worker starts is no worker
    descriptor = None if given is None else int(given)
    if descriptor is not None:
        os.set_inheritable(descriptor, False)
    if place.all_on_this_host and descriptor is not None:
        return StoreAddress(memory=descriptor)
    return StoreAddress(listener=descriptor, address=rank_0_address(place), port=place.master_port)
