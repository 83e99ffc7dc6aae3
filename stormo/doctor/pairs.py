"""Which nodes try one another: all with all in a small job, a bounded number of partners for each in a large one."""

from __future__ import annotations

import math
from collections.abc import Iterable

_ALL_WITH_ALL = 32  # nodes; above, each has partners at distances 1, 2, 4, ... in the ring of all nodes


def partners(node: int, num_nodes: int) -> list[int]:
    """The nodes that a node connects to: all others, or about log2 of them; always node 0, whose clock is the job's."""
    if num_nodes <= _ALL_WITH_ALL:
        return [other for other in range(num_nodes) if other != node]
    steps = [1 << power for power in range(math.ceil(math.log2(num_nodes)))]
    return sorted({(node + step) % num_nodes for step in steps} | {0} - {node})


def disjoint(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The same pairs in rounds in which no node has two partners."""
    found: list[list[tuple[int, int]]] = []
    for pair in pairs:
        free = next((turn for turn in found if not any(set(pair) & set(other) for other in turn)), None)
        if free is None:
            found.append([pair])
        else:
            free.append(pair)
    return found


def rounds(num_nodes: int, most: int | None = None) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs, as of a tournament: no pair comes twice, and all come unless that is more than `most`.

    With an odd number of nodes one of them rests in each round.
    """
    seats = num_nodes + num_nodes % 2  # an empty seat gives whoever would meet it a rest
    turns = list(range(seats - 1))
    if most is not None and len(turns) > most:  # all rounds of thousands of nodes would be millions of pairs
        turns = [index * len(turns) // most for index in range(most)]
    found = []
    for turn in turns:
        # Seat 0 stays, the others move on by one: everybody meets everybody.
        ring = [0, *(1 + (index + turn) % (seats - 1) for index in range(seats - 1))]
        pairs = [(ring[index], ring[seats - 1 - index]) for index in range(seats // 2)]
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < num_nodes])
    return found
