"""Which errors only miss another worker: those of Gloo and the store are provoked here, those of NCCL are recorded."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stormo.distributed.store import PeerFailedError
from stormo.distributed.world import World
from stormo.errors import StormoError
from stormo.launch.peer_loss import PeerLoss, peer_loss
from tests.programs import fork, free_port

Ranks = Callable[..., list[Any]]
SOON = timedelta(seconds=0.3)


def _wait_in_vain(world: World) -> PeerLoss | str | None:
    group = dist.new_group(timeout=SOON)
    found = _raised_by_collective(group) if world.rank == 0 else None
    world.barrier()
    return found


def _raised_by_collective(group: dist.ProcessGroup | None) -> PeerLoss | str:
    try:
        for _ in range(3):
            dist.all_reduce(torch.zeros(1), group=group)
    except RuntimeError as error:
        return peer_loss(error) or str(error)
    return "nothing was raised"


def test_gloo_waits_in_vain(run_ranks: Ranks) -> None:
    assert run_ranks(_wait_in_vain, 2)[0] == PeerLoss(waited_s=0.3)


def _be_rank(rank: int, port: int, answer: Connection | None) -> None:
    """Join with another rank and, as the second, end at once; the first answers what it finds."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if answer is None:
        os._exit(0)
    answer.send(_raised_by_collective(dist.group.WORLD))


def test_gloo_finds_a_peer_gone() -> None:
    port, (ours, theirs) = free_port(), Pipe()
    ranks = [fork(_be_rank, (0, port, theirs)), fork(_be_rank, (1, port, None))]
    assert ours.poll(60.0)
    assert ours.recv() == PeerLoss()
    for rank in ranks:
        rank.join()


def _server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SOON)


def test_the_store_waits_in_vain_for_a_key() -> None:
    with pytest.raises(dist.DistStoreError) as caught:
        _server().wait(["never"], SOON)
    assert peer_loss(caught.value) == PeerLoss(waited_s=0.3)


def test_the_store_waits_in_vain_for_workers() -> None:
    with pytest.raises(dist.DistStoreError) as caught:
        dist.TCPStore("127.0.0.1", 0, world_size=2, is_master=True, timeout=timedelta(seconds=1))
    found = peer_loss(caught.value)
    assert found is not None
    assert found.waited_s is not None


def test_the_store_is_gone_with_rank_0() -> None:
    server = _server()
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=SOON)
    del server
    with pytest.raises(dist.DistNetworkError) as caught:
        client.get("anything")
    assert peer_loss(caught.value) == PeerLoss()


def test_nobody_serves_the_store() -> None:
    server = _server()
    port = server.port
    del server
    with pytest.raises(dist.DistNetworkError) as caught:
        dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
    assert peer_loss(caught.value) is not None


def test_a_port_that_is_taken_is_a_cause() -> None:
    server = _server()
    with pytest.raises(dist.DistNetworkError) as caught:
        dist.TCPStore("127.0.0.1", server.port, is_master=True, wait_for_workers=False, timeout=SOON)
    assert "EADDRINUSE" in str(caught.value)
    assert peer_loss(caught.value) is None


_NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, {}, NCCL version 2.26.5\n{}\nLast error:\n{}"
)
_REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
_SYSTEM = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. "
_INTERNAL = "ncclInternalError: Internal check failed."
_USAGE = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."
_UNHANDLED = "unhandled system error (run with NCCL_DEBUG=INFO for details)"
_INVALID = "invalid usage (run with NCCL_DEBUG=WARN for details)"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param(
            _NCCL.format(_INVALID, _USAGE, "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10"),
            None,
            id="duplicate GPU",
        ),
        pytest.param(
            _NCCL.format(_INVALID, _USAGE, "Mismatched NCCL version detected : rank 1 version 22605 rank 0 …"),
            None,
            id="other version",
        ),
        pytest.param(
            _NCCL.format(
                _UNHANDLED, _SYSTEM, "Error while creating shared memory segment /dev/shm/nccl-LeXlEJ (size 9637888)"
            ),
            None,
            id="shared memory is full",
        ),
        pytest.param(f"NCCL error in: x.cpp:290, {_UNHANDLED}, NCCL version 2.21.5", None, id="unhandled system error"),
        pytest.param(
            _NCCL.format(
                _UNHANDLED, _SYSTEM, "socketStartConnect: Connect to 10.0.0.1<40123> failed : Connection refused"
            ),
            PeerLoss(),
            id="connection refused",
        ),
        pytest.param(
            _NCCL.format(
                "remote process exited or there was a network error",
                _REMOTE,
                "socketProgressOpt: Call to recv from 172.16.0.3<33759> failed : Connection reset by peer",
            ),
            PeerLoss(),
            id="remote process exited",
        ),
        pytest.param(
            _NCCL.format("internal error", _INTERNAL, "Net : Connection closed by remote peer node2<50260>"),
            PeerLoss(),
            id="remote peer closed",
        ),
        pytest.param("NCCL communicator was aborted on rank 0. ", PeerLoss(), id="aborted"),
        pytest.param(
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6, OpType=ALLREDUCE, NumelIn=1, "
            "NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
            PeerLoss(waited_s=600.029),
            id="watchdog",
        ),
    ],
)
def test_what_nccl_says(text: str, found: PeerLoss | None) -> None:
    assert peer_loss(dist.DistBackendError(text)) == found


def test_errors_of_the_user_are_causes_whatever_they_say() -> None:
    for text in ("Broken pipe", "there is no error in my code", "Connection reset by peer", "Socket closed"):
        assert peer_loss(RuntimeError(text)) is None
        assert peer_loss(OSError(text)) is None
    assert peer_loss(StormoError("boom")) is None
    assert peer_loss(PeerFailedError("rank 0 failed")) == PeerLoss()
