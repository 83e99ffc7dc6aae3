"""Ranks started by mpirun or mpiexec: Open MPI, and the Hydra family (MPICH, Intel MPI). No MPI library is needed.

MPI gives a process its rank and local rank, but not the address of rank 0: on several nodes the user sets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from stormo.errors import SettingError, pluralize
from stormo.launch.environments.slurm import is_step
from stormo.launch.rank_info import DEFAULT_MASTER_PORT, RankInfo, derived_port, host_name, read_int, read_master_port


class _Variables(NamedTuple):
    """The names under which one family of MPI says who a process is."""

    rank: str
    size: str
    local_rank: str
    local_size: str


_OPEN_MPI = _Variables(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
# srun's PMI plugins set PMI_RANK too, and one for Cray PALS_RANKID, but not the local size: that task is Slurm's.
_HYDRA = _Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# The mpiexec of HPE Cray systems; it says how many ranks there are only where it serves Cray's PMI.
_PALS = _Variables("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")
# What PALS may leave out, and where else it may be found; the last is the user's.
_LEFT_OUT = {"PMI_SIZE": ("WORLD_SIZE",), "PALS_LOCAL_SIZE": ("PMI_LOCAL_SIZE", "LOCAL_WORLD_SIZE")}

# Set alike on every rank of a job and different between jobs; the first one present gives the port.
_JOB_NAMES = ("PALS_APID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def detect(environ: Mapping[str, str]) -> bool:
    """Whether mpirun started this process as one of several; `mpirun -n 1` is no launch of many."""
    environ = _completed(environ)
    family = _family(environ)
    return family is not None and environ[family.size] != "1"


def rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Who this process is, according to mpirun; MASTER_ADDR and MASTER_PORT are the user's."""
    environ = _completed(environ)
    family = _family(environ)
    assert family is not None, "rank_info() is for environments that detect() accepts"
    rank, world_size = read_int(environ, family.rank), read_int(environ, family.size)
    local_rank, local_size = read_int(environ, family.local_rank), read_int(environ, family.local_size)
    num_nodes, node_id = _node(rank, world_size, local_rank, local_size)
    if family is _PALS and "PALS_NODEID" in environ:
        node_id = read_int(environ, "PALS_NODEID")
    return RankInfo(
        launcher="mpi",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        node_id=node_id,
        num_nodes=num_nodes,
        master_addr=environ.get("MASTER_ADDR") or _only_host(num_nodes),
        master_port=read_master_port(environ, _port(environ)),
        host=host_name(),
    )


def _completed(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variables of PALS with what it leaves out, where the user says it; any others as they are."""
    if _PALS.rank not in environ or is_step(environ) or any(name.startswith("OMPI_COMM_WORLD_") for name in environ):
        return environ
    more = {}
    for name, others in _LEFT_OUT.items():
        more[name] = next((environ[other] for other in (name, *others) if environ.get(other)), "")
        if not more[name]:
            raise SettingError(
                f"mpiexec (PALS) started this process as rank {environ[_PALS.rank]}",
                f"{name}, the number of ranks, is not set",
                f"set {others[-1]} for all ranks, as in mpiexec --env {others[-1]}=8",
            )
    return {**environ, **more}


def _family(environ: Mapping[str, str]) -> _Variables | None:
    families = (_OPEN_MPI, _HYDRA, _PALS)
    return next((family for family in families if all(name in environ for name in family)), None)


def _node(rank: int, world_size: int, local_rank: int, local_size: int) -> tuple[int, int]:
    """Number of nodes and this node's id, computed as MPI does not give them: all nodes must hold equally many."""
    if local_size < 1 or world_size % local_size != 0:
        raise SettingError(
            f"mpirun started {pluralize(world_size, 'rank')} with {local_size} of them on host {host_name()}",
            f"every node must hold equally many and {world_size} is no multiple of {local_size}",
            "start the same number on each node (Open MPI: --map-by ppr:N:node; MPICH and Intel MPI: -ppn N)",
        )
    num_nodes = world_size // local_size
    if rank == (rank // local_size) * local_size + local_rank:  # filled node by node
        return num_nodes, rank // local_size
    if rank == local_rank * num_nodes + rank % num_nodes:  # dealt out in turn
        return num_nodes, rank % num_nodes
    raise SettingError(
        f"mpirun started rank {rank} of {world_size} as number {local_rank} of {local_size} on host {host_name()}",
        "that is neither the order node by node nor the order in turn, so that the node ids are unknown",
        "let mpirun place the ranks node by node (Open MPI: --map-by slot; MPICH and Intel MPI: -ppn N)",
    )


def _only_host(num_nodes: int) -> str:
    if num_nodes == 1:
        return "127.0.0.1"
    raise SettingError(
        f"mpirun started ranks on {num_nodes} nodes and no --master-addr was set",
        "MPI does not give the address of rank 0",
        "set --master-addr (or MASTER_ADDR for all ranks) to the name of the first host",
    )


def _port(environ: Mapping[str, str]) -> int:
    name = next((environ[name] for name in _JOB_NAMES if environ.get(name)), None)
    return DEFAULT_MASTER_PORT if name is None else derived_port(name)
