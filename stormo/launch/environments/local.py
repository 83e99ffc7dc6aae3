"""stormo's own launcher, both halves: the environment its agent gives to a worker, and reading it inside one.

Next to the STORMO_* variables a worker gets those that torchrun would set, for libraries that look for them.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from stormo.errors import SettingError
from stormo.launch import slices
from stormo.launch.rank_info import DEFAULT_MASTER_PORT, RankInfo, read_torch_variables
from stormo.system.hardware import Gpu

CHANNEL_FD = "STORMO_CHANNEL_FD"  # one end of a socket pair to the agent of the node
# Of torch's store. On one node, for every rank: shared memory. On several, for rank 0: a socket that listens at
# STORE_PORT; MASTER_PORT is left to a script that opens torch's store itself.
STORE_FD = "STORMO_STORE_FD"
STORE_PORT = "STORMO_STORE_PORT"
_TRACKER = "ignore:resource_tracker"  # how its warning begins


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One node of a job that stormo itself starts, by settings that `resolve_layout` has checked."""

    num_workers: int
    num_nodes: int = 1
    node_id: int = 0
    master_addr: str | None = None
    master_port: int = DEFAULT_MASTER_PORT
    slices: tuple[Gpu, ...] = ()  # of GPUs, of which each worker takes one
    shares_a_gpu: bool = False  # or slices of one
    script_port: int = 0  # on one node, for a script that calls torch.distributed itself; 0 for any free port

    def __post_init__(self) -> None:
        if self.num_nodes > 1 and not self.master_addr:
            raise SettingError(
                f"--num-nodes {self.num_nodes} was set without --master-addr",
                "the nodes must know where node 0 is",
                "set --master-addr to the name or address of node 0 on every node",
            )

    @property
    def world_size(self) -> int:
        """Workers on all nodes together; every node starts equally many."""
        return self.num_nodes * self.num_workers

    def rank(self, local_rank: int) -> int:
        """The rank of a worker of this node."""
        return self.node_id * self.num_workers + local_rank


def environment(
    node: Node,
    local_rank: int,
    *,
    environ: Mapping[str, str],
    given: Mapping[str, str],
    num_cores: int,
) -> dict[str, str]:
    """The environment of one worker: the agent's own, who the worker is, and what it is given to meet the others."""
    variables = dict(environ)
    for name in (STORE_FD, STORE_PORT):
        variables.pop(name, None)
    variables |= {
        "RANK": str(node.rank(local_rank)),
        "WORLD_SIZE": str(node.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(node.num_workers),
        "GROUP_RANK": str(node.node_id),
        "NODE_RANK": str(node.node_id),
        "STORMO_LAUNCHER": "local",
        "STORMO_NUM_NODES": str(node.num_nodes),
        **given,
    }
    if node.num_nodes == 1:
        # Nothing of a job on one machine should listen where other machines can reach it.
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
        variables.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if node.slices:
        slices.bind(variables, node.slices, local_rank)
    if node.shares_a_gpu:
        slices.join_by_sockets(variables, local_rank=local_rank, all_on_this_host=node.num_nodes == 1)
    if node.rank(local_rank) != 0:
        # Their output goes through a pipe; what a rank printed before it was killed should not die with it.
        variables.setdefault("PYTHONUNBUFFERED", "1")
    fix_hash_seed(variables)
    silence_resource_tracker(variables)
    # Every worker would otherwise start as many threads as there are cores.
    variables.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // node.num_workers)))
    return variables


def fix_hash_seed(environ: MutableMapping[str, str]) -> None:
    """Fix the hash seed, unless the user did: sets of strings then have the same order in all workers and starts."""
    if not environ.get("PYTHONHASHSEED"):  # empty means any, too
        environ["PYTHONHASHSEED"] = "0"


def silence_resource_tracker(environ: MutableMapping[str, str]) -> None:
    """Let multiprocessing's tracker remove, without a warning, what a killed worker and its loaders have shared."""
    known = environ.get("PYTHONWARNINGS", "")
    if _TRACKER not in known:
        environ["PYTHONWARNINGS"] = f"{known},{_TRACKER}" if known else _TRACKER


def detect(environ: Mapping[str, str]) -> bool:
    """Whether this process is a worker of stormo's own launcher."""
    return environ.get("STORMO_LAUNCHER") == "local"


def rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Who this worker is."""
    port = STORE_PORT if STORE_PORT in environ else "MASTER_PORT"
    return read_torch_variables(environ, "local", node_id="NODE_RANK", num_nodes="STORMO_NUM_NODES", port=port)
