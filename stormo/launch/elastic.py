"""Workers that torch's elastic agent starts for stormo: the agent's own settings, and reading who a worker is.

The agent itself needs torch and is in `stormo.elastic`. Nodes meet at one address; whoever has it holds the store.
"""

from __future__ import annotations

import errno
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stormo.config import TrainConfig, least_nodes
from stormo.errors import SettingError, StormoError
from stormo.launch import torchrun
from stormo.launch.address import LOOPBACK, address_towards, listen, listening_address, shown
from stormo.launch.place import Place

_DEFAULT_PORT = 29_500  # as the help of --master-port says
_LOOK_AGAIN_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Elastic:
    """One node of a training whose workers are started again, perhaps with other nodes."""

    least: int  # nodes
    most: int
    num_workers: int  # on this node
    restarts: int
    timeout_s: float
    run_folder: Path
    address: str  # where the nodes meet
    port: int  # 0 on one node: any that is free
    own_address: str  # under which the other nodes reach this one

    @property
    def rendezvous_id(self) -> str:
        """What the nodes of one training have in common."""
        return "stormo-" + re.sub(r"[^A-Za-z0-9_.-]", "-", self.run_folder.name)


def becomes_agent(config: TrainConfig, place: Place | None) -> bool:
    """Whether this process starts its node's workers through torch's agent, alone or as a task of srun or mpirun."""
    return config.workers.is_elastic and (place is None or place.launcher in ("slurm", "mpi"))


def elastic_node(config: TrainConfig, num_workers: int, run_folder: Path, outer: Place | None) -> Elastic:
    """This node, as the user describes it; `outer` is what srun or mpirun says of it."""
    workers = config.workers
    most, least = int(workers.num_nodes), least_nodes(workers.num_nodes)
    address, own_address, port = LOOPBACK, LOOPBACK, 0
    if most > 1:
        name = workers.master_addr if "master_addr" in config.given or outer is None else outer.master_addr
        port = workers.master_port or (outer.master_port if outer is not None else _DEFAULT_PORT)
        address = listening_address(name, all_on_this_host=False)
        own_address = address_towards(address) or address
    return Elastic(
        least=least,
        most=most,
        num_workers=num_workers,
        restarts=workers.restarts,
        timeout_s=workers.timeout,
        run_folder=run_folder,
        address=address,
        port=port,
        own_address=own_address,
    )


def check_elastic(config: TrainConfig, outer: Place | None) -> None:
    """Refuse what cannot be said of workers that an agent starts again."""
    workers, run = config.workers, config.run
    is_range = least_nodes(workers.num_nodes) != workers.num_nodes
    asked = f"--num-nodes {workers.num_nodes}" if is_range else f"--max-restarts {workers.restarts}"
    if outer is not None and outer.local_size > 1:
        raise SettingError(
            f"{asked} was set",
            f"{outer.launcher} started {outer.local_size} tasks on this node, and one starts all workers of its node",
            "start one task on each node, and set --num-gpus to the workers of a node",
        )
    if "node_id" in config.given:
        raise SettingError(
            f"--node-id {workers.node_id} was set with {asked}",
            "nodes that may restart number themselves when they meet",
            "leave --node-id out",
        )
    if workers.num_nodes > 1 and "master_addr" not in config.given and outer is None:
        raise SettingError(
            f"{asked} was set without --master-addr",
            "the nodes must know where they meet",
            "set --master-addr to the name or address of a node that stays",
        )
    if workers.num_nodes > 1 and run.run_name is None:
        raise SettingError(
            f"{asked} was set without --run-name",
            "a node that comes later must find the run of the others",
            "set the same --run-name on every node",
        )
    if workers.mesh is not None and is_range:
        raise SettingError(
            f"--mesh {workers.mesh} was set with {asked}",
            "a mesh has a fixed number of workers",
            "set --strategy, whose mesh follows the workers, or a fixed --num-nodes",
        )
    if run.resume and (Path(run.resume) / "manifest.json").is_file():
        raise SettingError(
            f"--resume {run.resume} was set with {asked}",
            "every restart would go back to that one checkpoint",
            "name the run instead of the checkpoint",
        )


def open_meeting_point(node: Elastic) -> socket.socket | None:
    """The listening socket of the meeting point where this node has its address; None where another one does."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in node.address else socket.AF_INET) as probe:
            probe.bind((node.address, 0))
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    if node.most > 1 and _is_listened_on(node.address, node.port):
        return None  # another node on this machine has opened it
    return listen(node.address, node.port)


def wait_for_meeting_point(node: Elastic) -> None:
    """Wait until the node that holds it is there."""
    deadline = time.monotonic() + node.timeout_s
    while not _is_listened_on(node.address, node.port):
        if time.monotonic() > deadline:
            raise nobody_answered(node)
        time.sleep(_LOOK_AGAIN_S)


def nobody_answered(node: Elastic) -> StormoError:
    """What is said where no meeting point can be reached."""
    return StormoError(
        f"nobody answered at {shown(node.address, node.port)} within {node.timeout_s:g} s; "
        "check --master-addr and --master-port, and that the node of that address was started."
    )


def check_same(settings: Mapping[str, str], given: Mapping[str, str], where: str) -> None:
    """Refuse a node that is told something else than the training it comes to."""
    for flag, value in given.items():
        if settings.get(flag, value) != value:
            raise SettingError(
                f"{flag} is {value} on this node",
                f"it is {settings[flag]} in the training that meets at {where}",
                "start the same command on every node, or set another --master-port for another training",
            )


def _is_listened_on(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=2.0).close()
    except OSError:
        return False
    return True


def detect(environ: Mapping[str, str]) -> bool:
    """Whether stormo's elastic agent started this process."""
    return torchrun.AGENT in environ and torchrun.detect(environ)


def place(environ: Mapping[str, str]) -> Place:
    """Who this worker is in this round."""
    return replace(torchrun.place(environ), launcher="elastic")
