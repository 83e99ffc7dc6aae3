"""Who one process is in a job: its rank, its node, and the address of rank 0.

Each launcher's file reads a `RankInfo` from its environment.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from stormo.errors import SettingError, pluralize

# Above the services that sites commonly run and below Linux' outgoing range (32768 and up), so that neither uses one.
# The span is a prime, see `derived_port`.
_FIRST_DERIVED_PORT = 10_000
_NUM_DERIVED_PORTS = 22_751
DEFAULT_MASTER_PORT = 29_600


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """Who this process is among all processes of the job."""

    launcher: str  # local, torchrun, slurm, mpi, env, or alone for a single process
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node_id: int
    num_nodes: int
    master_addr: str
    master_port: int
    host: str
    peer: str = ""  # another host of the job, where the launcher names one

    def __post_init__(self) -> None:
        for index, size, index_name, size_name in (
            (self.rank, self.world_size, "rank", "world size"),
            (self.local_rank, self.local_size, "local rank", "number of ranks on its node"),
            (self.node_id, self.num_nodes, "node id", "number of nodes"),
        ):
            if size < 1:
                raise self._contradiction(f"a {size_name} of {size}", "it must be at least 1")
            if not 0 <= index < size:
                raise self._contradiction(
                    f"a {index_name} of {index} with a {size_name} of {size}", f"0 <= {index_name} < {size} must hold"
                )
        if max(self.local_size, self.num_nodes) > self.world_size:
            raise self._contradiction(
                f"{self.num_nodes} nodes, {self.local_size} ranks on this one, and a world size of {self.world_size}",
                "there are at least as many ranks in all",
            )
        if self.num_nodes == 1 and self.local_size != self.world_size:
            raise self._contradiction(
                f"one node with {pluralize(self.local_size, 'rank')} on it and a world size of {self.world_size}",
                "on one node both must be the same",
            )
        if not self.master_addr:
            raise self._contradiction("an empty master address", "the other ranks could not find rank 0")
        if not 1024 <= self.master_port <= 65535:  # no TCP port, or one that only root may bind
            raise SettingError(
                f"master port {self.master_port} was set", "it must lie within 1024 to 65535", "choose one of those"
            )

    def _contradiction(self, what: str, why: str) -> SettingError:
        return SettingError(
            f"The environment of rank {self.rank} has {what}",
            why,
            f"correct the variables that the launcher ({self.launcher}) sets, or start again without overriding them",
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes."""
        return self.rank == 0

    @property
    def all_on_this_host(self) -> bool:
        """Whether all ranks are on this node, so that loopback reaches them."""
        return self.num_nodes == 1


def alone() -> RankInfo:
    """The only process of a job."""
    return RankInfo(
        launcher="alone",
        rank=0,
        world_size=1,
        local_rank=0,
        local_size=1,
        node_id=0,
        num_nodes=1,
        master_addr="127.0.0.1",
        master_port=DEFAULT_MASTER_PORT,
        host=host_name(),
    )


def host_name() -> str:
    """The name of this machine as its administrators know it."""
    return socket.gethostname() or os.uname().nodename


def derived_port(*parts: int | str) -> int:
    """A port that every process of a job computes from what they share, such as the job id.

    Integers enter linearly (a prime span, distinct weights), so that neighbouring jobs never share a port.
    """
    total = 0
    for position, part in enumerate(parts):
        number = part if isinstance(part, int) else zlib.crc32(part.encode())
        total += number * 101 ** (len(parts) - 1 - position)
    return _FIRST_DERIVED_PORT + total % _NUM_DERIVED_PORTS


def read_int(environ: Mapping[str, str], name: str) -> int:
    """An integer from the environment."""
    text = environ.get(name)
    if text is None:
        raise SettingError(
            f"{name} is not set", "the other variables of its launcher are", "start again without unsetting it"
        )
    try:
        return int(text)
    except ValueError:
        raise SettingError(
            f"{name}={text!r} was set", "it must be a whole number", "start again without overriding it"
        ) from None


def read_master_port(environ: Mapping[str, str], default: int) -> int:
    """The port that the user has set, or the default."""
    return read_int(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else default


def read_torch_variables(
    environ: Mapping[str, str], launcher: str, *, node_id: str, num_nodes: str, port: str = "MASTER_PORT"
) -> RankInfo:
    """Who this process is by the variables that torch reads; the launcher has its own names for some."""
    return RankInfo(
        launcher=launcher,
        rank=read_int(environ, "RANK"),
        world_size=read_int(environ, "WORLD_SIZE"),
        local_rank=read_int(environ, "LOCAL_RANK"),
        local_size=read_int(environ, "LOCAL_WORLD_SIZE"),
        node_id=read_int(environ, node_id),
        num_nodes=read_int(environ, num_nodes),
        master_addr=environ.get("MASTER_ADDR", ""),
        master_port=read_int(environ, port),
        host=host_name(),
    )
