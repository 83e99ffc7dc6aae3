"""Numbers from every worker to every worker, in memory of the node and between nodes; and who has left them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from stormo.distributed import status_table
from stormo.distributed.status_table import SharedMemoryTable, StatusTable, new_table_file, path_of
from stormo.distributed.world import World
from stormo.launch.torch_errors import PeerLoss, peer_loss
from tests import forked

Ranks = Callable[..., list[Any]]
_NUM_ROUNDS = 12
# Which node each rank is on.
_LAYOUTS = {"one node": [0, 0, 0, 0], "in turns": [0, 1, 0, 1], "unequal": [0, 0, 0, 1], "one each": [0, 1, 2, 3]}


def set_nodes(world: World, nodes: list[int]) -> None:
    """Pretend that the workers are on these nodes."""
    mine = [rank for rank, node in enumerate(nodes) if node == nodes[world.rank]]
    world.rank_info = dataclasses.replace(
        world.rank_info,
        node_id=nodes[world.rank],
        num_nodes=len(set(nodes)),
        local_rank=mine.index(world.rank),
        local_size=len(mine),
    )


def _values(rank: int, number: int) -> list[int]:
    return [2**32 - 1 - rank, -(2**63) + rank, number]


def _rounds(world: World, nodes: list[int], may_share: bool, lag: int) -> dict[str, Any]:
    set_nodes(world, nodes)
    names: list[str] = []
    with mock.patch.object(
        status_table, "new_table_file", side_effect=lambda: _noted(names) if may_share else _no_shared()
    ):
        table = world.status_table(lag)
    tables = []
    for number in range(_NUM_ROUNDS):
        if lag and world.rank == number % world.size:
            time.sleep(0.01)  # the others are ahead
        table.post(tuple(_values(world.rank, number)))
        if world.rank == number % world.size and not lag:
            while not table.is_complete():  # looked at again and again, instead of waited for
                pass
        if number >= lag:
            tables.append(table.read().tolist())
    while table.num_unread:
        tables.append(table.read().tolist())
    return {"tables": tables, "is_shared": table._shared is not None, "left": [n for n in names if path_of(n).exists()]}


def _noted(names: list[str]) -> str:
    names.append(new_table_file())
    return names[-1]


def _no_shared() -> str:
    raise OSError("no memory is shared here")


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize(
    ("layout", "may_share"),
    [("one node", True), ("in turns", True), ("unequal", True), ("one each", True), ("in turns", False)],
)
def test_every_worker_reads_the_numbers_of_all(run_ranks: Ranks, layout: str, may_share: bool, lag: int) -> None:
    nodes = _LAYOUTS[layout]
    expected = [[_values(rank, number) for rank in range(4)] for number in range(_NUM_ROUNDS)]
    for rank, found in enumerate(run_ranks(_rounds, 4, nodes, may_share, lag)):
        assert found["tables"] == expected
        assert found["is_shared"] is (may_share and nodes.count(nodes[rank]) > 1)
        assert found["left"] == []


def _leave(world: World, leaver: int, says_first: bool) -> Any:
    """What the others get after one has left, before it has said its numbers or after."""
    table = world.status_table()
    if world.rank != leaver or says_first:
        table.post((world.rank, 0, 0))
    if world.rank == leaver:
        if says_first:
            table.read()
        table.close()
        world.barrier()
        return None
    heard: Any
    try:
        heard = table.read().tolist()
    except dist.DistError as error:
        heard = peer_loss(error)
    world.barrier()
    return heard


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_worker_that_leaves_is_noticed_at_once(run_ranks: Ranks, leaver: int) -> None:
    for heard in [one for one in run_ranks(_leave, 3, leaver, False) if one is not None]:
        assert heard == PeerLoss()
    for heard in [one for one in run_ranks(_leave, 3, leaver, True) if one is not None]:
        assert heard == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]


def _wait(world: World) -> PeerLoss | None:
    world.timeout = timedelta(seconds=0.3)
    table = world.status_table()
    if world.rank == 0:
        table.post((0, 0, 0))
        with pytest.raises(dist.DistError) as caught:
            table.read()
        found = peer_loss(caught.value)
    else:
        found = None
    world.barrier()
    return found


def test_a_missing_worker_is_a_timeout(run_ranks: Ranks) -> None:
    assert run_ranks(_wait, 2)[0] == PeerLoss(waited_s=0.3)


_HOLD = """
import sys
from stormo.distributed.status_table import SharedMemoryTable
shared = SharedMemoryTable(sys.argv[1], 1, 2, 2)
shared.write(1, (5, 6, 7))
print("ready", flush=True)
sys.stdin.read()
"""


def test_shared_memory_notices_a_kill_and_a_torn_row() -> None:
    name = new_table_file()
    try:
        shared = SharedMemoryTable(name, 0, 2, 2)
        command = [sys.executable, "-c", _HOLD, name]
        with forked.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            assert not shared.has_left(1)
            assert shared.row(1, 1) == (5, 6, 7)
            assert shared.rows(1) is None  # this one has said nothing
            assert shared.row(3, 1) is None  # of a round that shares its place
            other.kill()
        assert shared.has_left(1)
        assert shared.row(1, 1) == (5, 6, 7)
        shared._memory[shared._at(1, 1) + 9] ^= 1
        assert shared.row(1, 1) is None
        shared.write_table(4, bytes(range(48)))
        assert shared.table(4) == bytes(range(48))
        assert shared.table(3) is None
        shared._memory[shared._end - 1] ^= 1
        assert shared.table(4) is None
        shared.close()
    finally:
        path_of(name).unlink()


def test_only_the_first_worker_of_a_node_sends(run_ranks: Ranks) -> None:
    assert run_ranks(_senders, 4, [0, 0, 1, 1]) == [1, 0, 1, 0]


def _senders(world: World, nodes: list[int]) -> int:
    set_nodes(world, nodes)
    table = StatusTable(world)
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as sent:
        table.post((0, 0, 0))
        table.read()
    table.close()
    return sent.call_count
