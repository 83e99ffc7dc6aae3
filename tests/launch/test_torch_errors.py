"""What the texts of torch's errors mean. Those of torch, Gloo and the store are provoked here.

Those of NCCL and CUDA cannot be had without a GPU: their texts are quoted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.command import free_port
from stormo.distributed.store import PeerFailedError
from stormo.distributed.world import World
from stormo.errors import StormoError
from stormo.launch.torch_errors import (
    PeerLoss,
    first_line,
    is_file_store_timeout,
    is_native_trace,
    is_out_of_memory,
    is_single_value_per_channel,
    peer_loss,
    task_mistake,
    unreduced_parameters,
    watchdog_error,
    without_frames,
)
from tests.forked import fork

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


def test_a_store_in_a_file_times_out(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        dist.FileStore(str(tmp_path / "store"), 1).wait(["never"], SOON)
    assert is_file_store_timeout(caught.value)
    assert peer_loss(caught.value) == PeerLoss()


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
    assert peer_loss(dist.DistNetworkError("Connection reset by peer\nException raised from")) == PeerLoss()


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
            PeerLoss(waited_s=600.0, at="allreduce of 1 elements, number 6 of NCCL"),
            id="watchdog",
        ),
    ],
)
def test_what_nccl_says(text: str, found: PeerLoss | None) -> None:
    assert peer_loss(dist.DistBackendError(text)) == found


def test_the_first_line_has_the_reason_of_nccl_and_no_place_in_its_source() -> None:
    reason = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10"
    shown = f"NCCL error: {_INVALID}, NCCL version 2.26.5: {reason}"
    assert first_line(_NCCL.format(_INVALID, _USAGE, reason)) == shown
    assert first_line("no such file\nLast error:\nnone") == "no such file"
    assert first_line("") == ""


def test_the_error_for_which_the_watchdog_ends_a_rank_is_found() -> None:
    work = "Collective WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) raised "
    for said in (f"{work}the following async exception: ", "watchdog thread terminated with exception: "):
        trace = f"[rank0]:[E1118 20:13:01.5 ProcessGroupNCCL.cpp:2057] {said}{_NCCL.format(_INVALID, _USAGE, 'why')}"
        assert watchdog_error(trace) == f"NCCL error: {_INVALID}, NCCL version 2.26.5: why"
    assert watchdog_error("watchdog thread terminated with exception: CUDA error: out of memory") is None


_TRACE = """[rank2]:[E810 03:05:11.149121725 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank 2] Process
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog thread terminated with exception: NCCL error
Exception raised from checkForNCCLErrorsInternal at /pytorch/ProcessGroupNCCL.cpp:2363 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x57 (0x14fc4da49897 in /x/libc10.so)
frame #11: <unknown function> + 0x94ac3 (0x7697b9204ac3 in /lib/x86_64-linux-gnu/libc.so.6)
"""


def test_traces_of_native_code_are_known_and_their_frames_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_SHOW_CPP_STACKTRACES", raising=False)
    lines = _TRACE.splitlines(keepends=True)
    assert all(is_native_trace(line.encode()) for line in lines)
    assert not is_native_trace(b"ValueError: a frame is missing\n")
    assert without_frames(_TRACE + "last\n") == "".join(lines[:3]) + "last\n"
    named = "".join(f"[rank 2] {line}" for line in lines)
    assert without_frames(named) == "".join(f"[rank 2] {line}" for line in lines[:3])
    monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", "1")
    assert without_frames(_TRACE) == _TRACE


def test_errors_of_the_user_are_causes_whatever_they_say() -> None:
    for text in ("Broken pipe", "there is no error in my code", "Connection reset by peer", "Socket closed"):
        assert peer_loss(RuntimeError(text)) is None
        assert peer_loss(OSError(text)) is None
    assert peer_loss(StormoError("boom")) is None
    assert peer_loss(PeerFailedError("rank 0 failed")) == PeerLoss()


def test_memory_that_the_host_refuses() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.int8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_cuda_says_of_memory(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory
    assert is_out_of_memory(error, in_doubt=True) is is_memory


@pytest.mark.parametrize(
    "text",
    [
        "GET was unable to find an engine to execute this computation",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    ],
)
def test_what_cudnn_says_without_workspace_may_mean_memory(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(RuntimeError(text), in_doubt=True)


def test_batch_norm_of_one_value() -> None:
    with pytest.raises(ValueError, match="1 value") as caught:
        nn.BatchNorm1d(2)(torch.zeros(1, 2))
    assert is_single_value_per_channel(caught.value)
    assert not is_single_value_per_channel(ValueError("boom"))


class _TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x)
        return out


class _SparseWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.embedding(rows, self.weight, sparse=True)


def _ddp_errors(world: World) -> list[Any]:
    found: list[Any] = []
    model = nn.parallel.DistributedDataParallel(_TwoLayers())
    try:
        for _ in range(2):
            model(torch.ones(1, 1)).sum().backward()
    except RuntimeError as error:
        found.append(unreduced_parameters(error))
    try:
        model.first  # noqa: B018
    except AttributeError as error:
        found.append(task_mistake(error))
    sparse = nn.parallel.DistributedDataParallel(_SparseWeight())
    try:
        sparse(torch.tensor([1])).sum().backward()
    except RuntimeError as error:
        found.append(task_mistake(error))
    return found


def test_what_ddp_says_of_a_task(run_ranks: Ranks) -> None:
    assert run_ranks(_ddp_errors, 2) == [[[2, 3], "wrapper", "sparse"]] * 2
    assert unreduced_parameters(RuntimeError("boom")) is None


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: nn.Linear(1, 1)(torch.ones(1, 1, dtype=torch.float64)),
        lambda: nn.LayerNorm(1)(torch.ones(1, 1, dtype=torch.float64)),
        lambda: nn.Conv2d(1, 1, 1)(torch.ones(1, 1, 1, 1, dtype=torch.float64)),
        lambda: torch.bmm(torch.ones(1, 1, 1), torch.ones(1, 1, 1, dtype=torch.float64)),
        lambda: F.cross_entropy(torch.ones(1, 2), torch.zeros(1, dtype=torch.int32)),
        lambda: F.binary_cross_entropy(torch.ones(1, requires_grad=True), torch.ones(1, dtype=torch.double)).backward(),
    ],
)
def test_tensors_of_several_types(mistake: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError) as caught:
        mistake()
    assert task_mistake(caught.value) == "dtype", str(caught.value)
    assert task_mistake(RuntimeError("boom")) is None


@pytest.mark.parametrize(
    ("layer", "num_sides"), [(nn.Conv1d(2, 2, 1), 1), (nn.Conv2d(2, 2, 1), 2), (nn.Linear(2, 2), 0)]
)
def test_numbers_of_other_types_are_known_as_such(layer: nn.Module, num_sides: int) -> None:
    with pytest.raises(RuntimeError) as raised:
        layer.double()(torch.ones(2, 2, *[1] * num_sides))
    assert task_mistake(raised.value) == "dtype"


def test_a_batch_on_another_device_is_no_question_of_types() -> None:
    text = "Input type (torch.{}FloatTensor) and weight type (torch.{}FloatTensor) should be the same"
    for here, there in (("", "cuda."), ("cuda.", "")):
        assert task_mistake(RuntimeError(text.format(here, there))) is None
    half = "Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) should be the same"
    assert task_mistake(RuntimeError(half)) == "dtype"
