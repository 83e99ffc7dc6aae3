"""Who one process is in a job: its rank, its node, and where rank 0 is met.

A launcher's file reads a `RankInfo` from its environment; nothing here looks at the environment by itself.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from stormo.errors import SettingError, counted

LAUNCHERS = ("local", "torchrun", "slurm", "mpi", "env", "alone")

# Derived ports stay above the services sites commonly run and below Linux' outgoing range (32768 and up), so that
# neither a daemon nor somebody's outgoing connection sits on one. The span is a prime, see `derived_port`.
_FIRST_DERIVED_PORT = 10_000
_NUM_DERIVED_PORTS = 22_751
DEFAULT_MASTER_PORT = 29_600


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """Who this process is among all processes of the job."""

    launcher: str  # one of LAUNCHERS
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node_id: int
    num_nodes: int
    master_addr: str
    master_port: int
    host: str
    peer: str = ""  # the name of another host of the job, where the launcher tells one

    def __post_init__(self) -> None:
        assert self.launcher in LAUNCHERS, self.launcher
        for index, size, index_name, size_name in (
            (self.rank, self.world_size, "rank", "world size"),
            (self.local_rank, self.local_size, "local rank", "number of ranks on its node"),
            (self.node_id, self.num_nodes, "node id", "number of nodes"),
        ):
            if size < 1:
                raise self._contradiction(f"a {size_name} of {size}", "it must be at least 1")
            if not 0 <= index < size:
                raise self._contradiction(
                    f"{index_name} {index} with a {size_name} of {size}", f"0 <= {index_name} < {size} must hold"
                )
        if self.local_size > self.world_size:
            raise self._contradiction(
                f"{self.local_size} ranks on this node and a world size of {self.world_size}",
                "a node cannot hold more ranks than there are in all",
            )
        if self.num_nodes > self.world_size:
            raise self._contradiction(
                f"{self.num_nodes} nodes and a world size of {self.world_size}", "every node holds at least one rank"
            )
        if self.num_nodes == 1 and self.local_size != self.world_size:
            raise self._contradiction(
                f"one node with {counted(self.local_size, 'rank')} on it and a world size of {self.world_size}",
                "on one node both must be the same",
            )
        if not self.master_addr:
            raise self._contradiction("an empty master address", "the other ranks could not find rank 0")
        check_port(self.master_port, "master port")

    def _contradiction(self, what: str, why: str) -> SettingError:
        return SettingError(
            f"The environment gives rank {self.rank} {what}",
            why,
            f"correct the variables that the launcher ({self.launcher}) sets, or start again without overriding them",
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes."""
        return self.rank == 0

    @property
    def all_on_this_host(self) -> bool:
        """Whether no rank lives on another node, so that loopback reaches all of them."""
        return self.num_nodes == 1


def alone() -> RankInfo:
    """A process that is a whole job by itself."""
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


def check_port(port: int, name: str) -> None:
    """Refuse a number that no TCP port can have, and the ports only root may bind."""
    if not 1024 <= port <= 65535:
        raise SettingError(f"{name} {port} was set", "it must lie within 1024 to 65535", "choose one of those")


def derived_port(*parts: int | str) -> int:
    """A port that every process of a job computes alike from what they share, such as the job id.

    Whole numbers enter linearly (a prime span, distinct weights): neighbouring jobs never meet on one port.
    """
    total = 0
    for position, part in enumerate(parts):
        number = part if isinstance(part, int) else zlib.crc32(part.encode())
        total += number * 101 ** (len(parts) - 1 - position)
    return _FIRST_DERIVED_PORT + total % _NUM_DERIVED_PORTS


def read_int(environ: Mapping[str, str], name: str) -> int:
    """A whole number out of the environment, or the sentence that says what is wrong with it."""
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
