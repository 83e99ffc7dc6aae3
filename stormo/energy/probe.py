"""What can be measured: sources of energy, and the contract of a probe that reads some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One thing whose energy is read: a GPU, a CPU package, its memory."""

    id: str  # of one device on one machine
    kind: str  # "gpu", "cpu", "dram"
    name: str
    method: str  # "counter": the device counts joules; "power": watts, integrated here
    resolution_j: float  # the smallest step of its figure
    interval_s: float  # how old its figure may be
    wraps_at_j: float | None = None  # a counter begins again at zero here; None: never

    def as_json(self) -> dict[str, Any]:
        """What a node's file says of it."""
        return {key: value for key, value in asdict(self).items() if key != "wraps_at_j"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """A kind of source that cannot be read, and why; never replaced by a guess."""

    kind: str
    reason: str

    def as_json(self) -> dict[str, str]:
        """What a node's file says of it."""
        return {"kind": self.kind, "reason": self.reason}


class Probe(Protocol):
    """Reads some sources; knows nothing of time, wrap-arounds or integration, which are the meter's."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """What it reads; the same for its whole life."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of its figures must know: whose energy is in them besides the job's."""

    def read(self) -> Mapping[str, float]:
        """By source id: the counter in joules, or the power in watts; one that fails now is left out."""

    def close(self) -> None:
        """Let go of what it holds."""
