"""Collectives in real ranks: what every worker gets, and what the others get of one that fails."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from stormo.distributed.store import PeerFailedError, PeerMissingError, is_secondary
from stormo.distributed.world import AsyncAllReduce, World
from stormo.errors import SettingError, StormoError
from stormo.launch import alone
from tests.distributed.test_status_table import set_nodes
from tests.tiny_task import listening_addresses

Ranks = Callable[..., list[Any]]

_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool,
)  # fmt: skip


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def _collectives(world: World) -> dict[str, Any]:
    own = torch.tensor([float(world.rank + 1), -1.0])
    world.barrier()
    results: dict[str, Any] = {
        "sum": world.sum(own.clone()).tolist(),
        "max": world.max(own.clone()).tolist(),
        "broadcast": world.broadcast(own.clone()).tolist(),
    }
    in_place = own.clone()
    assert world.sum(in_place) is in_place
    return results


@pytest.mark.parametrize("size", [1, 3])
def test_sum_max_and_broadcast_work_in_place_on_every_rank(run_ranks: Ranks, size: int) -> None:
    expected = {"sum": [size * (size + 1) / 2, -float(size)], "max": [float(size), -1.0], "broadcast": [1.0, -1.0]}
    assert run_ranks(_collectives, size) == [expected] * size


_VALUE = {"a": [1, 2.5, None, True], "b": "× ü", "c": {}, "nan": float("nan")}


def _broadcast_json(world: World) -> list[Any]:
    return [world.broadcast_object(value if world.is_main else "of another") for value in (_VALUE, None, "", 0)]


@pytest.mark.parametrize("size", [1, 3])
def test_rank_0_broadcasts_json(run_ranks: Ranks, size: int) -> None:
    for received in run_ranks(_broadcast_json, size):
        assert math.isnan(received[0].pop("nan"))
        assert received == [{key: value for key, value in _VALUE.items() if key != "nan"}, None, "", 0]


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for dtype in _DTYPES:
        raw = torch.randint(0, 256, (24 * torch.empty(0, dtype=dtype).element_size(),), generator=generator)
        values = raw.to(torch.uint8) if dtype != torch.bool else raw.remainder(2).to(torch.uint8)
        made[str(dtype)] = values.view(dtype).view(2, 3, 4)
    made["strided"] = torch.arange(12.0).view(3, 4).t()
    made["scalar"] = torch.tensor(3.5)
    made["empty"] = torch.empty(0, 5)
    return made


def _many_tensors(world: World) -> tuple[int, bool]:
    messages, broadcast = list[int](), world.broadcast
    world.broadcast = lambda tensor: (messages.append(tensor.nbytes), broadcast(tensor))[1]  # type: ignore[method-assign]
    tensors = {str(number): torch.full((number % 3,), number, dtype=torch.int16) for number in range(1000)}
    shared = world.broadcast_tensors(tensors if world.is_main else None)
    return len(messages), all(torch.equal(shared[name], tensor) for name, tensor in tensors.items())


def test_small_tensors_are_coalesced(run_ranks: Ranks) -> None:
    assert run_ranks(_many_tensors, 2) == [(3, True)] * 2  # the first two tell their names


def _scatter(world: World) -> bytes:
    return world.scatter_bytes((lambda rank: bytes([rank]) * (rank % 2 * 5)) if world.is_main else None)


@pytest.mark.parametrize("size", [1, 3])
def test_rank_0_scatters_bytes(run_ranks: Ranks, size: int) -> None:
    assert run_ranks(_scatter, size) == [b"", b"\1" * 5, b""][:size]


def _broadcast_tensors(world: World) -> dict[str, tuple[str, list[int], bytes]]:
    shared = world.broadcast_tensors(_tensors() if world.is_main else None)
    assert world.broadcast_tensors({} if world.is_main else None) == {}
    return {name: (str(t.dtype), list(t.shape), _bits(t)) for name, t in shared.items()}


@pytest.mark.parametrize("size", [1, 3])
def test_tensors_of_every_kind_arrive_bit_by_bit(run_ranks: Ranks, size: int) -> None:
    expected = {name: (str(t.dtype), list(t.shape), _bits(t)) for name, t in _tensors().items()}
    assert run_ranks(_broadcast_tensors, size) == [expected] * size


def _gather(world: World) -> tuple[Any, Any]:
    return world.gather_bytes(bytes([world.rank]) * (1 + 5 * world.rank)), world.gather_objects({"rank": world.rank})


@pytest.mark.parametrize("size", [1, 3])
def test_bytes_of_unequal_lengths_are_gathered_on_rank_0(run_ranks: Ranks, size: int) -> None:
    first, *others = run_ranks(_gather, size)
    assert first[0] == [bytes([rank]) * (1 + 5 * rank) for rank in range(size)]
    assert first[1] == [{"rank": rank} for rank in range(size)]
    assert others == [(None, None)] * (size - 1)


def _gather_nothing(world: World) -> Any:
    return world.gather_bytes(b"" if world.rank else b"main"), world.gather_bytes(b"")


@pytest.mark.parametrize(
    "size",
    [1, 2],
)
def test_a_worker_may_have_no_bytes_to_give(run_ranks: Ranks, size: int) -> None:
    first, *_ = run_ranks(_gather_nothing, size)
    assert first == ([b"main"] + [b""] * (size - 1), [b""] * size)


# --- once per node ----------------------------------------------------------------------------------------------------


def _fetch(world: World) -> list[str]:
    """Each rank notes in the store what it does; the fetcher must be done before the others go on."""
    log = []
    for turn in range(2):
        with world.once_per_node() as is_fetcher:
            log.append("fetched" if is_fetcher else "waited")
            if is_fetcher and world.size > 1:
                assert world._store is not None
                world._store.set(f"done/{turn}", "yes")
            elif world.size > 1:
                assert world._store is not None
                assert world._store.check([f"done/{turn}"])
    return log


@pytest.mark.parametrize("size", [1, 3])
def test_one_worker_of_a_node_fetches_while_the_others_wait(run_ranks: Ranks, size: int) -> None:
    first, *others = run_ranks(_fetch, size)
    assert first == ["fetched", "fetched"]
    assert others == [["waited", "waited"]] * (size - 1)


def _caught(world: World, failing: int, failure: Exception) -> tuple[str, str, int | None, bool]:
    """What a worker gets of a failure in the block of one."""
    try:
        with world.once_per_node():
            if world.rank == failing:
                raise failure
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "exit_code", None), is_secondary(error)
    return "", "", None, False


def _failing_fetch(world: World) -> tuple[str, str, int | None, bool]:
    return _caught(world, 0, OSError("the disk is full"))


def test_a_failed_fetch_is_raised_by_all(run_ranks: Ranks) -> None:
    first, *others = run_ranks(_failing_fetch, 3)
    assert first == ("OSError", "the disk is full", None, False)
    told = ("PeerFailedError", "rank 0 failed while this one waited: OSError: the disk is full", 1, True)
    assert others == [told, told]


def _failing_in_turns(world: World) -> tuple[str, str, int | None, bool]:
    """The ranks are on two nodes in turns, as `srun --distribution=cyclic` places them; the second node fails."""
    set_nodes(world, [0, 1, 0, 1])
    return _caught(world, 1, OSError("the disk is full"))


def test_the_worker_that_failed_is_named_wherever_it_is(run_ranks: Ranks) -> None:
    nothing, told = ("", "", None, False), "rank 1 failed while this one waited: OSError: the disk is full"
    own = ("OSError", "the disk is full", None, False)
    assert run_ranks(_failing_in_turns, 4) == [nothing, own, nothing, ("PeerFailedError", told, 1, True)]


def _setting_error_of_one(world: World) -> tuple[str, str, int | None, bool]:
    return _caught(world, 0, SettingError("a", "b", "c"))


def test_an_error_made_for_users_reaches_the_node_as_itself(run_ranks: Ranks) -> None:
    first, *others = run_ranks(_setting_error_of_one, 3)
    assert first == ("SettingError", "a, but b; c.", 2, False)
    assert others == [("StormoError", "a, but b; c.", 2, False)] * 2


def _loss_of_one(world: World) -> tuple[str, str, int | None, bool]:
    return _caught(world, 0, PeerFailedError("another has gone."))


def test_an_error_about_another_worker_is_no_cause_anywhere(run_ranks: Ranks) -> None:
    first, *others = run_ranks(_loss_of_one, 3)
    assert first == ("PeerFailedError", "another has gone.", 1, True)
    told = "rank 0 failed while this one waited: PeerFailedError: another has gone."
    assert others == [("PeerFailedError", told, 1, True)] * 2


def _fetch_after_failure(world: World) -> str:
    for is_last in (False, True):
        try:
            with world.once_per_node() as is_fetcher:
                if is_fetcher and not is_last:
                    raise ValueError("first attempt")
        except (ValueError, PeerFailedError):
            assert not is_last
            continue
    return "done"


def test_a_fetch_after_a_failed_one_works(run_ranks: Ranks) -> None:
    assert run_ranks(_fetch_after_failure, 2) == ["done", "done"]


# --- on the main worker alone -----------------------------------------------------------------------------------------


def _on_main(world: World) -> list[Any]:
    """A collective would give up after --timeout, which work on the main worker may exceed."""
    told: list[Any] = [world.from_rank_0(lambda: [world.rank, "built"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", lambda *_, **__: pytest.fail("a collective"))
        patch.setattr(dist, "all_reduce", lambda *_, **__: pytest.fail("a collective"))
        told.append(world.on_rank_0(lambda: f"rank {world.rank}"))
        for failure in (SettingError("a", "b", "c"), OSError("the disk is full")):
            with pytest.raises((StormoError, OSError)) as caught:
                world.on_rank_0(lambda failure=failure: _raise(failure))
            exit_code = getattr(caught.value, "exit_code", None)
            told.append([type(caught.value).__name__, str(caught.value), exit_code, is_secondary(caught.value)])
    return told


def _raise(failure: Exception) -> None:
    raise failure


def test_work_on_rank_0_needs_no_collective_and_all_raise_its_failure(
    run_ranks: Ranks,
) -> None:
    first, *others = run_ranks(_on_main, 3)
    failed = ["OSError", "the disk is full", None, False]
    assert first == [[0, "built"], "rank 0", ["SettingError", "a, but b; c.", 2, False], failed]
    missed = ["PeerFailedError", "rank 0 failed while this one waited: OSError: the disk is full", 1, True]
    assert others == [[[0, "built"], None, ["StormoError", "a, but b; c.", 2, False], missed]] * 2


# --- the vote ---------------------------------------------------------------------------------------------------------


def _vote(world: World, lag: int) -> list[int]:
    vote = AsyncAllReduce(world, lag)
    for number in (0, 7, 3)[: lag + 1]:
        vote.start(number * world.is_main)
    assert vote.drain() == (7 if lag else 0)  # what was cast is heard, and heard once
    assert vote.drain() == 0
    outcomes = []
    for step in range(6):
        # Only the last rank sees a signal, at step 3; and work is done between the cast and the outcome.
        vote.start(15 if step == 3 and world.rank == world.size - 1 else 10 if step == 4 and world.is_main else 0)
        world.sum(torch.ones(3))
        outcomes.append(vote.outcome())
        assert vote.outcome() == outcomes[-1]  # reading again changes nothing
    return outcomes


@pytest.mark.parametrize(("size", "lag"), [(1, 0), (3, 0), (4, 1), (6, 2)])
def test_all_workers_agree_on_a_signal_at_the_same_step(run_ranks: Ranks, size: int, lag: int) -> None:
    assert run_ranks(_vote, size, lag) == [[0] * lag + [0, 0, 0, 15, 10, 0][: 6 - lag]] * size


def _totals(world: World, num_nodes: int) -> list[float]:
    set_nodes(world, [rank % num_nodes for rank in range(world.size)])
    vote, totals = AsyncAllReduce(world, 1), list[float]()
    for step in range(6):
        if world.rank == step % world.size:
            time.sleep(0.02)  # others are ahead
        vote.start(0, 10.0**step * (1 + world.rank))
        totals.append(vote.total())
    return [*totals, vote.drain()]


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_a_sum_of_all_workers_is_read_one_step_later(run_ranks: Ranks, num_nodes: int) -> None:
    assert run_ranks(_totals, 4, num_nodes) == [[0.0, 10.0, 100.0, 1000.0, 10_000.0, 100_000.0, 0]] * 4


def _not_finite(world: World) -> list[float]:
    vote, totals = AsyncAllReduce(world), list[float]()
    for shares in ((math.inf, 1.0), (math.inf, -math.inf), (math.nan, 1.0), (1e308, 1e308)):
        vote.start(0, shares[world.rank])
        totals.append(vote.total())
    return totals


def test_a_sum_may_be_infinite_or_no_number(run_ranks: Ranks) -> None:
    for totals in run_ranks(_not_finite, 2):
        assert [str(total) for total in totals] == ["inf", "nan", "nan", "inf"]


# --- the group --------------------------------------------------------------------------------------------------------


def test_one_worker_needs_no_process_group() -> None:
    world = World(alone(), torch.device("cpu"))
    assert (world.size, world.rank, world.is_main) == (1, 0, True)
    assert not dist.is_initialized()
    assert float(world.sum(torch.tensor(2.0))) == 2.0
    with world.once_per_node() as is_fetcher:
        assert is_fetcher
    world.barrier()
    world.close()
    assert not dist.is_initialized()


def _group(world: World) -> tuple[bool, bool]:
    is_open = dist.is_initialized()
    world.close()
    world.close()  # harmless when repeated
    return is_open, dist.is_initialized()


def test_several_workers_have_a_group_until_they_close_it(run_ranks: Ranks) -> None:
    assert run_ranks(_group, 2) == [(True, False)] * 2


def _listeners(world: World) -> list[str]:
    world.barrier()  # every connection is open now
    return listening_addresses()


def test_nothing_listens_beyond_this_host(run_ranks: Ranks) -> None:
    addresses = run_ranks(_listeners, 3)
    assert addresses[0], "rank 0 serves the store, so it must listen somewhere"
    loopback = {"0100007F", "00000000000000000000000001000000"}
    for rank, found in enumerate(addresses):
        assert set(found) <= loopback, f"rank {rank} listens on {found}"


def _differing(world: World, names: list[str]) -> str:
    world.require_same({"precision": "bf16", "steps": 7})
    try:
        world.require_same({"precision": names[world.rank], "steps": 7})
    except SettingError as error:
        return str(error)
    return ""


def test_different_values_are_named_on_all_workers(run_ranks: Ranks) -> None:
    sentences = run_ranks(_differing, 3, ["bf16", "bf16", "fp16"])
    assert (
        sentences
        == [
            "the precision is bf16 on rank 0, but it is fp16 on rank 2; "
            "set it, or give every node the same devices and settings."
        ]
        * 3
    )


def _mesh(world: World) -> tuple[int, int, int]:
    return world.data.rank, world.data.size, world.mesh.replicate


def test_the_workers_are_a_mesh_of_one_axis(run_ranks: Ranks) -> None:
    assert run_ranks(_mesh, 2) == [(0, 2, 2), (1, 2, 2)]
    assert run_ranks(_mesh, 1) == [(0, 1, 1)]


@pytest.mark.parametrize(
    ("set_by_user", "dump_wait"),
    [({}, "1500"), ({"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "7"}, "7"), ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, None)],
)
def test_the_watchdog_of_nccl_gives_up_soon_unless_the_user_wants_its_dump(
    monkeypatch: pytest.MonkeyPatch, set_by_user: dict[str, str], dump_wait: str | None
) -> None:
    environ = dict(set_by_user)
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    World(alone(), torch.device("cpu"), backend="nccl", needs_group=True)
    assert environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC") == dump_wait
    assert environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == set_by_user.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


class _Busy:
    """An event of a device that is done at the third look, or never."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks <= 0


def _waited(world: World) -> str:
    world.wait_for_event(cast(Any, _Busy(3)))
    world.timeout = timedelta(seconds=0.02)
    if world.size == 1:
        world.wait_for_event(cast(Any, _Busy(400)))  # for which nobody but its own device is to blame
        return ""
    with pytest.raises(PeerMissingError) as missing:
        world.wait_for_event(cast(Any, _Busy(math.inf)))
    assert missing.value.peer_loss.waited_s == 0.02
    assert is_secondary(missing.value)
    return str(missing.value)


def test_a_device_that_waits_for_another_worker_has_a_time_limit(run_ranks: Ranks) -> None:
    assert run_ranks(_waited, 2) == ["the device waited 0.02 s"] * 2
    assert run_ranks(_waited, 1) == [""]
