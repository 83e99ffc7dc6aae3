"""How nodes, workers, times and speeds are named in findings across a job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stormo.doctor.finding import Finding
from stormo.doctor.measured import Spot

_MOST_NAMED = 6


class Names:
    """The words for the nodes and workers of a job."""

    def __init__(self, spots: Iterable[Spot]) -> None:
        self.spots = {spot.rank: spot for spot in spots}
        self.speakers = {spot.node: spot for spot in self.spots.values() if spot.speaks}
        self._on_node: dict[int, list[int]] = {}
        for rank, spot in sorted(self.spots.items()):
            self._on_node.setdefault(spot.node, []).append(rank)

    def node(self, node: int, *, address: bool = False) -> str:
        """Node 2 (n3), or with the address that its workers use."""
        spot = self.speakers.get(node)
        if spot is None:
            return f"node {node}"
        return (
            f"node {node} ({spot.host}, {spot.address})" if address and spot.address else f"node {node} ({spot.host})"
        )

    def nodes(self, nodes: Iterable[int]) -> str:
        """Several nodes, of which the first few are named."""
        return _listed([self.node(node) for node in sorted(set(nodes))])

    def rank(self, rank: int) -> str:
        """Rank 3 (n2, local rank 1)."""
        spot = self.spots.get(rank)
        if spot is None:
            return f"rank {rank}"
        local = f", local rank {spot.local_rank}" if len(self._on_node[spot.node]) > 1 else ""
        return f"rank {rank} ({spot.host}{local})"

    def ranks(self, ranks: Sequence[int]) -> str:
        """Several workers; a node all of whose workers are meant is named instead of them."""
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self.spots[rank].node if rank in self.spots else -1, []).append(rank)
        whole = [node for node, members in by_node.items() if node >= 0 and len(members) == len(self._on_node[node])]
        rest = [rank for node, members in by_node.items() if node not in whole for rank in members]
        return _listed([*(self.node(node) for node in sorted(whole)), *(self.rank(rank) for rank in sorted(rest))])

    def ranks_on(self, node: int) -> list[int]:
        """The workers of a node."""
        return self._on_node[node]

    def node_of(self, rank: int) -> int:
        """The node that a worker runs on."""
        return self.spots[rank].node


def sentence(finding: Finding) -> str:
    """A finding in one sentence with its mend."""
    said = f"{finding.where} {finding.text}" if finding.where else finding.text
    return f"{said}; {finding.mend}" if finding.mend else said


def time_text(seconds: float) -> str:
    """A short time in words, such as 35 µs."""
    return (
        f"{seconds * 1e6:.0f} µs"
        if seconds < 1e-3
        else f"{seconds * 1e3:.3g} ms"
        if seconds < 1
        else f"{seconds:.3g} s"
    )


def flops_text(flops_per_s: float) -> str:
    """A speed of arithmetic in words, such as 640 TFLOP/s."""
    return f"{flops_per_s / 1e12:.0f} TFLOP/s" if flops_per_s >= 1e13 else f"{flops_per_s / 1e9:.0f} GFLOP/s"


def _listed(names: Sequence[str]) -> str:
    if len(names) > _MOST_NAMED:
        return f"{', '.join(names[: _MOST_NAMED - 1])} and {len(names) - _MOST_NAMED + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
