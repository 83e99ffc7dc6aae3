"""What is measured across a job, as plain data that travels between its workers as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """One worker: where it runs and, of the first one on each node, where the node can be reached."""

    rank: int
    node: int
    local_rank: int
    host: str
    address: str = ""
    port: int = 0

    @property
    def speaks(self) -> bool:
        """Whether it stands for its node."""
        return self.local_rank == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One node's attempt to connect to another."""

    node: int
    to: int
    outcome: str  # "ok", or a key of `reach.OUTCOMES`
    detail: str = ""  # what the system said
    connect_s: float = 0.0
    clock_ahead_s: float | None = None  # of the other node's clock
    clock_error_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What one worker found out about its device and its host."""

    rank: int
    name: str  # of the device's model
    kind: str  # "cpu" or "cuda"
    uuid: str = ""
    flops_per_s: float = 0.0
    is_exact: bool = True  # products whose result is known came out right
    digest: str = ""  # of a product of random numbers
    copy_in_bytes_per_s: float = 0.0
    copy_out_bytes_per_s: float = 0.0
    free_bytes: int = 0
    total_bytes: int = 0
    num_cores: int = 0
    num_threads: int = 0
    load_1: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    sees_runs_folder: bool | None = None  # None where it was not asked


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Data sent both ways between two nodes at once, or, where both are the same one, around its workers."""

    a: int
    b: int
    width: int  # workers of each node that took part
    latency_s: float
    bytes_per_s: float  # one way


@dataclass(frozen=True, kw_only=True, slots=True)
class Overall:
    """An all-reduce over all workers."""

    num_ranks: int
    latency_s: float
    bus_bytes_per_s: float  # what each worker sends and receives


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Everything that was measured; what was not reached yet is empty."""

    spots: list[Spot] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    inside: list[Link] = field(default_factory=list)
    between: list[Link] = field(default_factory=list)
    overall: Overall | None = None
    runs_folder: str = ""
    runs_folder_free_bytes: int | None = None
    runs_folder_error: str = ""  # why nothing can be written there
    needs_shared_folder: bool = False  # every worker writes its part of a checkpoint
