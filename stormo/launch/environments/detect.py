"""Which launcher started this process, if any, and whether the flags the user typed agree with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stormo.errors import SettingError, pluralize
from stormo.launch.environments import env, local, mpi, slurm, torchrun
from stormo.launch.rank_info import RankInfo


@dataclass(frozen=True, slots=True)
class Launcher:
    """One launcher: how to detect and read it, and the names of its options."""

    detect: Callable[[Mapping[str, str]], bool]
    rank_info: Callable[[Mapping[str, str]], RankInfo]
    command: str
    worker: str  # what it calls a process that it starts
    set_local_size: str  # the option for the number of processes on a node
    set_num_nodes: str
    names_master: bool = True  # whether it says itself where rank 0 is


_PER_NODE = "{} ranks on each node (Open MPI: --map-by ppr:{}:node; MPICH and Intel MPI: -ppn {})"
# The order matters: an inner launcher leaves the variables of the outer one in place. stormo's own workers and
# torchrun's may live inside an srun step; mpirun inside an allocation starts its daemons through srun; any of them may
# set the variables of the last one beside its own.
LAUNCHERS: Mapping[str, Launcher] = {
    "local": Launcher(local.detect, local.rank_info, "stormo", "worker", "--num-gpus {}", "--num-nodes {}"),
    "torchrun": Launcher(
        torchrun.detect, torchrun.rank_info, "torchrun", "worker", "--nproc-per-node {}", "--nnodes {}"
    ),
    "mpi": Launcher(mpi.detect, mpi.rank_info, "mpirun", "rank", _PER_NODE, "a list of {} hosts", names_master=False),
    "slurm": Launcher(
        slurm.detect, slurm.rank_info, "srun", "task", "--ntasks-per-node {}", "--nodes {}", names_master=False
    ),
    "env": Launcher(env.detect, env.rank_info, "the launcher that set RANK", "rank", "LOCAL_WORLD_SIZE={}", "{} hosts"),
}


def detect(
    environ: Mapping[str, str], *, master_addr: str | None = None, master_port: int | None = None
) -> RankInfo | None:
    """Who this process is, or None where no launcher started it; flags say where rank 0 is if the launcher does not."""
    for launcher in LAUNCHERS.values():
        if not launcher.detect(environ):
            continue
        if launcher.names_master:
            return launcher.rank_info(environ)
        chosen = {"MASTER_ADDR": master_addr, "MASTER_PORT": None if master_port is None else str(master_port)}
        return launcher.rank_info({**environ, **{name: value for name, value in chosen.items() if value is not None}})
    return None


def check_flags(
    info: RankInfo,
    *,
    num_nodes: int | None,
    node_id: int | None,
    num_gpus: int | None,
    master_addr: str | None,
    master_port: int | None,
) -> None:
    """Refuse a flag that contradicts the launcher; None stands for a flag not given."""
    if info.launcher not in LAUNCHERS:
        return
    launcher = LAUNCHERS[info.launcher]
    command = launcher.command
    if num_gpus is not None and num_gpus != info.local_size:
        raise SettingError(
            f"--num-gpus {num_gpus} was set",
            f"{command} started {pluralize(info.local_size, launcher.worker)} on this node",
            f"drop --num-gpus or start {command} with {launcher.set_local_size.replace('{}', str(num_gpus))}",
        )
    if num_nodes is not None and num_nodes != info.num_nodes:
        raise SettingError(
            f"--num-nodes {num_nodes} was set",
            f"{command} started the job on {pluralize(info.num_nodes, 'node')}",
            f"drop --num-nodes or start {command} with {launcher.set_num_nodes.replace('{}', str(num_nodes))}",
        )
    if node_id is not None and node_id != info.node_id:
        raise SettingError(
            f"--node-id {node_id} was set",
            f"{command} made host {info.host} node {info.node_id}",
            f"drop --node-id, since {command} numbers the nodes itself",
        )
    if info.launcher == "local":
        return  # there the flags name the address of the agents, not of the ranks
    for flag, given, actual in (
        ("--master-addr", master_addr, info.master_addr),
        ("--master-port", None if master_port is None else str(master_port), str(info.master_port)),
    ):
        if given is not None and given != actual:
            raise SettingError(
                f"{flag} {given} was set",
                f"{command} says {actual}",
                f"drop {flag} or give it to {command} instead",
            )
