"""The measurements themselves: connections in this process, phases over a store, and a small job on four ranks."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from stormo import __version__
from stormo.doctor import command
from stormo.doctor.finding import Finding
from stormo.doctor.measure import ProbeServer, WorkerInfo, measure_device, own_address, require_rendezvous
from stormo.doctor.preflight import HungError, Limits, Phases, Preflight, PreflightError
from stormo.errors import SettingError, StormoError
from stormo.launch import RankInfo, alone
from tests import programs

LOCAL = "127.0.0.1"
TWO_NODES = replace(alone(), launcher="local", world_size=2, num_nodes=2, master_addr=LOCAL)


@pytest.fixture
def server() -> Iterator[ProbeServer]:
    made = ProbeServer(0, LOCAL)
    yield made
    made.close()


def worker(port: int, node: int = 1) -> WorkerInfo:
    return WorkerInfo(rank=node, node=node, local_rank=0, host="other", address=LOCAL, port=port)


def serve(answer: Callable[[socket.socket, int], None]) -> int:
    """A server that answers one connection as it should not."""
    listener = socket.create_server((LOCAL, 0))
    port = int(listener.getsockname()[1])

    def run() -> None:
        with listener:
            connection, _ = listener.accept()
        with connection:
            answer(connection, port)

    threading.Thread(target=run, daemon=True).start()
    return port


def say_nothing(connection: socket.socket, port: int) -> None:
    connection.recv(1)


def greet_as_another(connection: socket.socket, port: int) -> None:
    connection.sendall(b"SSH-2.0\n")


def drop_large_packets(connection: socket.socket, port: int) -> None:
    connection.sendall(json.dumps({"node": 1, "port": port}).encode() + b"\n")
    with connection.makefile("rwb") as lines:
        lines.readline()
        lines.readline()


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [(say_nothing, "silent"), (greet_as_another, "wrong_peer"), (drop_large_packets, "packets")],
)
def test_a_peer_that_does_not_answer_as_a_node(
    server: ProbeServer, answer: Callable[[socket.socket, int], None], outcome: str
) -> None:
    (attempt,) = server.connect_all([worker(serve(answer))], 1.0)
    assert (attempt.node, attempt.to, attempt.outcome) == (0, 1, outcome)


def test_nodes_probe_each_other(server: ProbeServer) -> None:
    other = ProbeServer(1, LOCAL)
    try:
        with socket.create_server((LOCAL, 0)) as closed:
            port = closed.getsockname()[1]
        well, wrong, refused = server.connect_all([worker(other.port), worker(other.port, node=2), worker(port)], 20.0)
    finally:
        other.close()
    assert [one.outcome for one in (well, wrong, refused)] == ["ok", "wrong_peer", "refused"]
    assert refused.detail == "Connection refused"


def test_the_address_of_a_node() -> None:
    assert own_address(alone()) == LOCAL
    assert own_address(TWO_NODES, {}) == LOCAL
    assert own_address(replace(TWO_NODES, master_addr="192.0.2.1"), {"GLOO_SOCKET_IFNAME": "lo"}) == LOCAL
    with pytest.raises(SettingError, match=r"GLOO_SOCKET_IFNAME=eth77 is set, but host .* has no such interface"):
        own_address(TWO_NODES, {"GLOO_SOCKET_IFNAME": "eth77"})


def test_a_rendezvous_that_cannot_be_reached_is_an_error_at_once() -> None:
    with socket.create_server((LOCAL, 0)) as listener:
        port = listener.getsockname()[1]
        rank_info = replace(TWO_NODES, rank=1, node_id=1, host="n1", master_port=port)
        require_rendezvous(rank_info)
    expected = rf"preflight: node 0 cannot be reached at 127.0.0.1:{port} from node 1 \(n1\): Connection refused; open"
    with pytest.raises(StormoError, match=expected):
        require_rendezvous(rank_info)
    require_rendezvous(replace(rank_info, launcher="slurm"))  # rank 0 may only be on its way


def test_rank_0_that_hangs_is_found_by_its_watchdog() -> None:
    import torch.distributed as dist

    from stormo.distributed.store import SignedStore

    found: list[HungError] = []
    hung = threading.Event()

    def on_hang(error: HungError) -> None:
        found.append(error)
        hung.set()

    phases = Phases(SignedStore(dist.HashStore(), "", b""), 0, 1, on_hang)
    phases.run("device", lambda: hung.wait(60.0), 0.1)
    assert [(error.phase, error.missing) for error in found] == [("device", [0])]


def test_unsigned_values_in_the_store_are_refused() -> None:
    import torch.distributed as dist

    from stormo.distributed.store import SignedStore

    store = dist.HashStore()
    phases = Phases(SignedStore(store, "preflight", b"secret"), 0, 2, lambda hung: None)
    store.set("arrival/1", '{"value": 1}')
    store.add("arrival/count", 1)
    with pytest.raises(StormoError, match="no worker of this job has written preflight/arrival/1"):
        phases.run("arrival", lambda: 0, 60.0)


class _RanksStore:
    """The store of the ranks' group, as the pre-preflight of a training is given it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def signed(self, prefix: str, *, own_connection: bool) -> Any:
        import torch.distributed as dist

        from stormo.distributed.store import SignedStore

        shared = dist.PrefixStore(f"{self._name}/{prefix}", dist.distributed_c10d._get_default_store())
        return SignedStore(shared, prefix, b"secret")


def _as_two_nodes(rank_info: RankInfo) -> RankInfo:
    rank = rank_info.rank
    return replace(rank_info, num_nodes=2, node_id=rank // 2, local_rank=rank % 2, local_size=2)


def _preflight(world: Any, name: str, folder: str, limits: Limits) -> Preflight:
    def on_hang(error: PreflightError) -> None:
        raise AssertionError(error)

    store: Any = _RanksStore(name)
    return Preflight(
        _as_two_nodes(world.rank_info),
        store,
        backend="gloo",
        limits=limits,
        runs_folder=Path(folder),
        needs_shared_folder=True,
        on_hang=on_hang,
    )


def _measure(world: Any, folder: str) -> list[tuple[str, str]]:
    import torch

    before = torch.get_rng_state()
    preflight = _preflight(world, "whole", folder, Limits(arrival_s=60.0, one_measurement_s=0.02))
    preflight.connect()
    assert preflight.join(lambda: world) is world
    preflight.measure(world.device)
    assert torch.equal(torch.get_rng_state(), before)
    assert preflight.decide(lambda: "decided") == "decided"
    measured = preflight.measured
    if not world.is_main:
        assert measured.devices == []
        return []
    assert [device.rank for device in measured.devices] == [0, 1, 2, 3]
    assert all(device.is_exact and device.flops_per_s > 0 for device in measured.devices)
    assert {(link.a, link.b, link.width) for link in measured.inside} == {(0, 0, 2), (1, 1, 2)}
    assert [(link.a, link.b, link.width) for link in measured.between] == [(0, 1, 2)]
    assert measured.all_reduce is not None
    assert all(link.bytes_per_s > 0 for link in (*measured.inside, *measured.between))
    return [(finding.check, finding.level) for finding in preflight.findings() if finding.level == "error"]


def _hang(world: Any, folder: str) -> str:
    def part() -> None:
        if world.rank == 2:  # until rank 0 has given up
            store = _RanksStore("hang").signed("preflight", own_connection=True)
            store.get("device/verdict", timedelta(seconds=60))

    preflight = _preflight(world, "hang", folder, Limits(arrival_s=60.0))
    preflight.connect()
    try:
        preflight.gather("device", part, 0.5)
    except StormoError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _fail(world: Any, folder: str) -> str:
    preflight = _preflight(world, "fail", folder, Limits(arrival_s=60.0))
    preflight.connect()
    try:
        preflight.gather("device", lambda: 1 // (world.rank - 3), 60.0)
    except StormoError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_four_workers_as_two_nodes(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert run_ranks(_measure, 4, str(tmp_path / "runs")) == [[], [], [], []]
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_hangs_or_fails_is_named_to_all(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    main, *others = run_ranks(_hang, 4, str(tmp_path))
    cause = "preflight: rank 2 (localhost, local rank 0) did not finish a small computation within 0.5 s; look at that"
    assert main.startswith(f"PreflightError: {cause}")
    assert all(other.startswith(f"PreflightStoppedError: {cause}") for other in others)
    main, *_ = run_ranks(_fail, 4, str(tmp_path))
    assert "rank 3 (localhost, local rank 1) failed in the phase device: ZeroDivisionError: " in main


_HANGING = """
import sys, time
import stormo.doctor.command as command
import stormo.doctor.preflight as preflight
from stormo.doctor.measure import Device

def measure(device, rank, budget_s):
    time.sleep(600.0 if rank == {rank} else 0.0)
    return Device(rank=rank, name="processor", kind="cpu")

preflight.measure_device = measure
command.Limits = lambda **limits: preflight.Limits(**limits | {{"device_s": 0.5}})
command.run_checks = lambda names, limit_s: []
sys.exit(command.check_job([]))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_doctor_ends_all_workers_when_rank_0_or_another_hangs(rank: int, tmp_path: Path) -> None:
    (tmp_path / "doctor.py").write_text(_HANGING.format(rank=rank))
    done = programs.run(["doctor.py"], tmp_path, 2)
    assert done.returncode == 1
    assert done.stderr.startswith("stormo: rank 0 on host ")
    assert f"local rank {rank}) did not finish a small computation within 0.5 s; look at" in done.stderr
    assert f"local rank {rank}): did not finish a small computation" in " ".join(done.stdout.split())
    assert done.stdout.endswith("1 error, 1 ok\n")
    assert list(tmp_path.iterdir()) == [tmp_path / "doctor.py"]


def test_the_doctor_of_a_job_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    done = programs.run(["-m", "stormo", "doctor", "--num-gpus", "2", "--runs-folder", "runs/mine"], tmp_path, 2)
    assert done.stdout.startswith(f"stormo {__version__}: 2 workers on 1 node, gloo; node 0 (")
    assert {"versions", "runs-folder", "devices", "inside", "all-reduce"} <= set(done.stdout.split())
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert f"error runs-folder runs/mine cannot be written by rank 0 ({tmp_path}/runs is no folder)" in said
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"]


@pytest.mark.gpu
def test_a_gpu_is_measured_and_left_as_it_was() -> None:
    import torch

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    before, reserved = torch.cuda.get_rng_state(device), torch.cuda.memory_reserved(device)
    first, second = (measure_device(device, 0, 0.1) for _ in range(2))
    assert first.is_exact
    assert first.flops_per_s > 1e12
    assert first.digest == second.digest
    assert torch.equal(torch.cuda.get_rng_state(device), before)
    assert torch.cuda.memory_reserved(device) <= reserved


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--num-gpus", "2", "--limit-s", "1"], "--limit-s 1 was set, but it must be at least 10"),
        (["--num-nodes", "1:2"], "--num-nodes 1:2 was set, but the doctor checks a fixed number of nodes"),
        (["--num-gpus", "two"], "--num-gpus was set to 'two'"),
    ],
)
def test_bad_flags_for_a_job(arguments: list[str], match: str) -> None:
    with pytest.raises(SettingError, match=match):
        command.check_job(arguments)


def test_workers_of_the_doctor_end_at_once_on_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(command, "run_node", lambda *_, timeouts, **__: seen.append(timeouts.interrupted_s) or 0)
    command.check_job(["--num-gpus", "2", "--device", "cpu"])
    assert 0.0 < seen[0] < 2.0


def test_the_same_finding_on_many_nodes_is_one() -> None:
    def note(where: str) -> Finding:
        return Finding(check="energy", level="note", text="not measured", where=where)

    one, two = command.merged([note("n0"), note("n1"), note("n2"), replace(note("n0"), text="else")])
    assert (one.where, two.where) == ("n0 and 2 more", "n0")


def test_a_driver_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(command, "visible_gpus", lambda: ended.wait(60.0))
    command.gpus_within(0.01)
    assert codes == [1]
    assert " did not answer within 0.01 s; look at the kernel log" in capsys.readouterr().err
