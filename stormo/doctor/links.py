"""How fast data moves: between the workers of a node, between pairs of nodes, and through all workers at once.

Point to point where a culprit is looked for, in the group that all workers share: no other group is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stormo.doctor.measured import Link
from stormo.doctor.naming import Names

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_FIRST_BYTES, _GROWTH = 64 * 1024, 8
_MOST_BYTES = {"gloo": 32 * 1024 * 1024, "nccl": 256 * 1024 * 1024}
_NUM_SMALL, _NUM_LARGE = 20, 3


class Wire:
    """One worker's view of what its data travels on.

    Args:
        device: of this worker; Gloo moves data of the host.
        budget_s: how long one measurement may take, about.
    """

    def __init__(self, device: torch.device, backend: str, rank: int, budget_s: float) -> None:
        import torch

        self.device = device if backend == "nccl" else torch.device("cpu")
        self._most_bytes = _MOST_BYTES[backend]
        self._rank, self._budget_s = rank, budget_s

    def swap(self, peer: int) -> tuple[float, float]:
        """Seconds for the smallest message, and bytes a second each way, when this worker and a peer swap data."""
        return self.around(sorted((self._rank, peer)))

    def around(self, ranks: list[int]) -> tuple[float, float]:
        """The same where each of these workers sends to the next one and receives from the one before."""
        import torch

        at = ranks.index(self._rank)
        after, before = ranks[(at + 1) % len(ranks)], ranks[at - 1]

        def agree(seconds: float) -> float:
            longest = torch.tensor([seconds], dtype=torch.float64, device=self.device)
            for _ in ranks[1:]:  # passed on until everybody has seen every one
                received = torch.empty_like(longest)
                _shift(longest, after, received, before)
                longest = torch.maximum(longest, received)
            return float(longest)

        return self._climb(lambda sent, received: _shift(sent, after, received, before), agree)

    def all_reduce(self, size: int) -> tuple[float, float]:
        """Seconds for the smallest all-reduce over all workers, and bytes a second that each sends and receives."""
        import torch
        import torch.distributed as dist

        def agree(seconds: float) -> float:
            longest = torch.tensor([seconds], dtype=torch.float64)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            return float(longest)

        latency_s, bytes_per_s = self._climb(lambda sent, _: dist.all_reduce(sent), agree)
        return latency_s, bytes_per_s * 2 * (size - 1) / size

    def _climb(self, step: Callable[[Tensor, Tensor], object], agree: Callable[[float], float]) -> tuple[float, float]:
        """Larger and larger messages until one takes its share of the budget; all that take part climb alike."""
        import torch

        small = torch.zeros(2, 1, device=self.device)
        self._time_s(lambda: step(small[0], small[1]))  # connections are made
        latency_s = min(self._time_s(lambda: step(small[0], small[1])) for _ in range(_NUM_SMALL))
        num_bytes = _FIRST_BYTES
        while True:
            sent, received = torch.zeros(2, num_bytes // 4, device=self.device).unbind()
            taken_s = agree(self._time_s(lambda sent=sent, received=received: step(sent, received)))  # type: ignore[misc]
            if num_bytes * _GROWTH > self._most_bytes or taken_s * _GROWTH * (1 + _NUM_LARGE) > self._budget_s:
                break
            num_bytes *= _GROWTH
        best_s = min(self._time_s(lambda: step(sent, received)) for _ in range(_NUM_LARGE))
        return latency_s, num_bytes / agree(best_s)

    def _time_s(self, call: Callable[[], object]) -> float:
        import torch

        began = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return max(time.perf_counter() - began, 1e-9)


def inside_links(values: Sequence[Any], names: Names) -> list[Link]:
    """The links inside the nodes, from what each worker measured around its node."""
    found = []
    for node, speaker in names.speakers.items():
        if values[speaker.rank] is not None:
            latency_s, rate = values[speaker.rank]
            width = len(names.ranks_on(node))
            found.append(Link(a=node, b=node, width=width, latency_s=latency_s, bytes_per_s=rate))
    return found


def best_of(links: Sequence[Link]) -> list[Link]:
    """Each link once, as the best of its measurements shows it."""
    found: dict[tuple[int, int], Link] = {}
    for link in links:
        known = found.get((link.a, link.b), link)
        latency_s, rate = min(known.latency_s, link.latency_s), max(known.bytes_per_s, link.bytes_per_s)
        found[link.a, link.b] = replace(link, latency_s=latency_s, bytes_per_s=rate)
    return list(found.values())


def round_links(pairs: Sequence[tuple[int, int]], values: Sequence[Any], names: Names) -> list[Link]:
    """The links between pairs of nodes, from what each worker measured with its peer, all of them at once."""
    found = []
    for a, b in pairs:
        swaps = [values[rank] for rank in names.ranks_on(a) if values[rank] is not None]
        latency_s, rate = min(swap[0] for swap in swaps), sum(swap[1] for swap in swaps)
        found.append(Link(a=a, b=b, width=len(swaps), latency_s=latency_s, bytes_per_s=rate))
    return found


def _shift(sent: Tensor, to: int, received: Tensor, source: int) -> None:
    """Send and receive at the same time."""
    import torch.distributed as dist

    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)])
    for work in works:
        work.wait()
