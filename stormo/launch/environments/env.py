"""Ranks whose launcher sets torch's variables: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

Kubernetes' PyTorchJob does so, and wrappers of many sites. Without LOCAL_RANK there is one rank on each host.
"""

from __future__ import annotations

from collections.abc import Mapping

from stormo.errors import SettingError
from stormo.launch.address import is_loopback_name
from stormo.launch.rank_info import DEFAULT_MASTER_PORT, RankInfo, host_name, read_int, read_master_port


def detect(environ: Mapping[str, str]) -> bool:
    """Whether the variables describe one of several ranks."""
    return "RANK" in environ and environ.get("WORLD_SIZE", "1") != "1"


def rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Who this process is, according to the variables."""
    rank, world_size = read_int(environ, "RANK"), read_int(environ, "WORLD_SIZE")
    address = environ.get("MASTER_ADDR", "")
    if not address:
        raise SettingError(
            f"RANK={rank} and WORLD_SIZE={world_size} are set without MASTER_ADDR",
            "the ranks must know where rank 0 is",
            "set MASTER_ADDR to the name of its host, or unset RANK and WORLD_SIZE to train with one process",
        )
    local_rank, local_size = _on_host(environ, rank, world_size, address)
    if local_size < 1 or world_size % local_size or local_rank != rank % local_size:
        raise SettingError(
            f"RANK={rank} of WORLD_SIZE={world_size} is LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_size}",
            "every host holds equally many ranks, with consecutive numbers",
            "number them so, or start them by torchrun",
        )
    num_nodes = world_size // local_size
    if rank == 0 and num_nodes > 1 and is_loopback_name(address) and "KUBERNETES_SERVICE_HOST" in environ:
        address = host_name()  # PyTorchJob gives its first pod "localhost", which no other pod reaches
    return RankInfo(
        launcher="env",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        node_id=rank // local_size,
        num_nodes=num_nodes,
        master_addr=address,
        master_port=read_master_port(environ, DEFAULT_MASTER_PORT),
        host=host_name(),
    )


def _on_host(environ: Mapping[str, str], rank: int, world_size: int, address: str) -> tuple[int, int]:
    """The number of this rank among those of its host, and how many these are."""
    if "LOCAL_RANK" not in environ:
        return 0, 1
    local_rank = read_int(environ, "LOCAL_RANK")
    if "LOCAL_WORLD_SIZE" in environ:
        return local_rank, read_int(environ, "LOCAL_WORLD_SIZE")
    if local_rank == rank and is_loopback_name(address):
        return local_rank, world_size  # all are here
    raise SettingError(
        f"RANK={rank} and LOCAL_RANK={local_rank} are set without LOCAL_WORLD_SIZE",
        "the number of ranks on a host is unknown",
        "set LOCAL_WORLD_SIZE to that number",
    )
