"""The rendezvous of a job: the agents agree on the address of torch's store before any worker starts.

The store lives in memory that the ranks of one node share, or at a port of rank 0. torch's server at a port admits
everybody who can reach it. The memory has no name that another user could open.
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

from stormo.errors import StormoError
from stormo.launch.address import LOOPBACK, bind, cannot_listen, listen, listening_address
from stormo.launch.auth import job_secret
from stormo.launch.client import Client
from stormo.launch.control import ChannelTimeouts, Go, Hello
from stormo.launch.environments.local import STORE_FD, STORE_PORT, Node
from stormo.launch.failure import stop_exit_code
from stormo.launch.rank_info import RankInfo
from stormo.launch.server import Server
from stormo.system.signals import SignalQueue

BACKLOG = 4096
_MEMORY = re.compile(r"/proc/\d{1,10}/fd/\d{1,10}")
_HIGHEST_PORT = 65535


class StoppedError(StormoError):
    """The user ended the job before all nodes had joined."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} before all nodes had joined.")
        self.exit_code = stop_exit_code(number)  # nothing has begun, so nothing is lost


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """What the agents agreed on."""

    control: Client | Server | None  # None on one node
    store_addr: str
    store_port: int | None  # None on one node
    # On one node memory that its ranks share. On several nodes node 0 listens already, so that the port cannot be taken
    # in between.
    store: socket.socket | BinaryIO | None
    script_port: int  # for a script that calls torch.distributed itself

    def variables(self) -> dict[str, str]:
        """What every worker is told."""
        of_store = {} if self.store_port is None else {STORE_PORT: str(self.store_port)}
        return {"MASTER_ADDR": self.store_addr, "MASTER_PORT": str(self.script_port), **of_store}

    def script_has_group(self) -> bool:
        """Whether a script has opened its own process group at the reserved port."""
        try:
            bind(self.store_addr, self.script_port).close()
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
    """Join the agents of the other nodes; the stack closes what is opened."""
    if node.num_nodes == 1:
        return _single_node(node, stack)
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
            "script_port": _reserve(number, 0, stack),
        },
        timeouts=timeouts,
        how_to_start=lambda missing: f"start there: {command_for(command, missing[0])}",
    )
    stack.callback(server.close)
    return _rendezvous(server, _join(server, signals), store)


def _single_node(node: Node, stack: ExitStack) -> Rendezvous:
    """The rendezvous of a single node."""
    return Rendezvous(
        control=None,
        store_addr=LOOPBACK,
        store_port=None,
        store=stack.enter_context(os.fdopen(new_store_memory(), "r+b")),
        script_port=_reserve(LOOPBACK, node.script_port, stack),
    )


def _reserve(number: str, port: int, stack: ExitStack) -> int:
    """Bind a port, so that no other process gets it, without listening, so that torch can."""
    try:
        return int(stack.enter_context(bind(number, port)).getsockname()[1])
    except OSError as error:
        raise cannot_listen(number, port, error) from None


def _join(control: Client | Server, signals: SignalQueue) -> Mapping[str, Any]:
    """Wait until all have joined; a signal ends the wait."""
    with selectors.DefaultSelector() as selector:
        selector.register(signals, selectors.EVENT_READ)
        selector.register(control, selectors.EVENT_READ)
        while True:
            selector.select(0.1)
            for number in signals.read():
                raise StoppedError(number)
            for event in control.poll():
                if isinstance(event, Go):
                    return event.payload


def _rendezvous(control: Client | Server, payload: Mapping[str, Any], store: socket.socket | None) -> Rendezvous:
    address, port, script_port = (payload.get(name) for name in ("store_addr", "store_port", "script_port"))
    if not isinstance(address, str) or not isinstance(port, int) or not isinstance(script_port, int):
        raise StormoError("Node 0 sent no address of the store; install the same release of stormo on every node.")
    return Rendezvous(control=control, store_addr=address, store_port=port, store=store, script_port=script_port)


def command_for(command: Sequence[str], node_id: int) -> str:
    """The command line to type on another node."""
    line = list(command)
    if line[1:4] == ["-P", "-m", "stormo"]:
        line[:4] = ["stormo"]
    for position, word in enumerate(line):
        if word == "--node-id" and position + 1 < len(line):
            line[position + 1] = str(node_id)
            break
        if word.startswith("--node-id="):
            line[position] = f"--node-id={node_id}"
            break
    else:
        line += ["--node-id", str(node_id)]
    return shlex.join(line)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAddress:
    """What a rank needs to open torch's store."""

    memory: int | None = None  # on one node, its descriptor
    listener: int | None = None  # on rank 0 of several nodes, the descriptor of a socket that listens already
    address: str = ""
    port: int = 0

    def described(self) -> dict[str, Any]:
        """What rank 0 sends to the other ranks."""
        if self.memory is not None:
            return {"memory": f"/proc/{os.getpid()}/fd/{self.memory}"}
        return {"address": self.address, "port": self.port}


def rank_0_address(info: RankInfo) -> str:
    """Where rank 0 listens: on its own node as a number, as the name may lead to a loopback address."""
    if info.node_id:
        return info.master_addr
    return listening_address(info.master_addr, all_on_this_host=info.all_on_this_host, peer=info.peer)


def new_store_memory() -> int:
    """The descriptor of memory for the ranks of one node."""
    return os.memfd_create("stormo-store")


def open_store_address(info: RankInfo, number: str) -> StoreAddress:
    """Open the store on rank 0, where another launcher started the ranks; `number` is the address of rank 0."""
    if info.all_on_this_host:
        return StoreAddress(memory=new_store_memory())
    listener = listen(number, 0, backlog=BACKLOG)
    port = int(listener.getsockname()[1])
    return StoreAddress(listener=listener.detach(), address=number, port=port)


def received_store_address(info: RankInfo, described: Mapping[str, Any]) -> StoreAddress:
    """The store as rank 0 described it over the control channel, checked and opened."""
    memory, address, port = (described.get(name) for name in ("memory", "address", "port"))
    if info.all_on_this_host and isinstance(memory, str) and _MEMORY.fullmatch(memory):
        try:
            return StoreAddress(memory=os.open(memory, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise StormoError(
                f"rank {info.rank} cannot open the memory that rank 0 shares with the ranks of this node "
                f"({error.strerror}: {memory}); start all of them in the same container."
            ) from None
    if not info.all_on_this_host and isinstance(address, str) and isinstance(port, int) and 0 < port <= _HIGHEST_PORT:
        return StoreAddress(address=address, port=port)
    raise StormoError("Rank 0 sent no address of the store; install the same release of stormo on every node.")


def inherited_store_address(info: RankInfo, environ: MutableMapping[str, str]) -> StoreAddress:
    """The store that a worker inherits from the agent of its node."""
    given = environ.pop(STORE_FD, None)  # a program that this worker starts is no worker
    descriptor = None if given is None else int(given)
    if descriptor is not None:
        os.set_inheritable(descriptor, False)
    if info.all_on_this_host and descriptor is not None:
        return StoreAddress(memory=descriptor)
    return StoreAddress(listener=descriptor, address=rank_0_address(info), port=info.master_port)
