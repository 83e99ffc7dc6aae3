"""Which launcher is recognised, from environments recorded under Slurm 22.05, Open MPI 5, MPICH and torchrun 2.13.

Those of PyTorchJob, PALS and Slurm's plugin for Cray are written after their sources, not recorded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stormo.errors import SettingError
from stormo.launch.environments.detect import check_flags, detect
from stormo.launch.environments.local import Node, environment
from stormo.launch.rank_info import RankInfo, alone, host_name

RECORDED = Path(__file__).parent / "environments"
NO_FLAGS: dict[str, Any] = {
    "num_nodes": None,
    "node_id": None,
    "num_gpus": None,
    "master_addr": None,
    "master_port": None,
}


def detected(environ: dict[str, str], **master: Any) -> RankInfo:
    info = detect(environ, **master)
    assert info is not None
    return info


def recorded(name: str) -> dict[str, str]:
    lines = (RECORDED / f"{name}.txt").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize(
    ("name", "launcher", "numbers"),
    [
        ("torchrun-rank-1-of-2", "torchrun", (1, 2, 1, 2, 0, 1)),
        ("srun-task-2-of-4", "slurm", (2, 4, 0, 2, 1, 2)),
        ("srun-pmi2-task-1-of-2", "slurm", (1, 2, 1, 2, 0, 1)),
        ("openmpi-5-rank-1-of-2", "mpi", (1, 2, 1, 2, 0, 1)),
        ("openmpi-5-in-salloc-rank-1-of-2", "mpi", (1, 2, 1, 2, 0, 1)),
        ("mpich-rank-1-of-2", "mpi", (1, 2, 1, 2, 0, 1)),
        ("mpich-in-salloc-rank-1-of-2", "mpi", (1, 2, 1, 2, 0, 1)),
        ("pytorchjob-worker-0-of-2", "env", (1, 2, 0, 1, 1, 2)),
        ("pals-rank-3-of-4", "mpi", (3, 4, 1, 2, 1, 2)),
        ("srun-cray-task-1-of-2", "slurm", (1, 2, 1, 2, 0, 1)),
    ],
)
def test_a_launched_rank_is_recognised(name: str, launcher: str, numbers: tuple[int, ...]) -> None:
    info = detected(recorded(name))
    assert info.launcher == launcher
    assert (
        info.rank,
        info.world_size,
        info.local_rank,
        info.local_size,
        info.node_id,
        info.num_nodes,
    ) == numbers


@pytest.mark.parametrize(
    "name", ["sbatch-script-body", "salloc-interactive-shell", "salloc-command", "srun-pty-one-task"]
)
def test_a_shell_inside_an_allocation_is_no_launch(name: str) -> None:
    assert detect(recorded(name)) is None


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "n1"},
        {"WORLD_SIZE": "4", "MASTER_ADDR": "n1"},  # left over in a shell
        {"PALS_RANKID": "0", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "1", "PMI_SIZE": "1"},
        {"OMPI_MCA_btl": "tcp", "PMI_RANK": "0", "PMI_SIZE": "4"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "8"},  # the batch script's step
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        {"STORMO_LAUNCHER": ""},
    ],
)
def test_look_alikes_are_no_launch(environ: dict[str, str]) -> None:
    assert detect(environ) is None


BARE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "23456"}


@pytest.mark.parametrize(
    ("more", "numbers"),
    [
        ({}, (0, 1, 1, 4)),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (1, 2, 0, 2)),
        ({"LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}, (1, 4, 0, 1)),
    ],
)
def test_ranks_with_torchs_variables_alone_join(more: dict[str, str], numbers: tuple[int, ...]) -> None:
    info = detected({**BARE, **more})
    assert (info.launcher, info.rank, info.world_size, info.master_port) == ("env", 1, 4, 23456)
    assert (info.local_rank, info.local_size, info.node_id, info.num_nodes) == numbers


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4"}, "RANK=1 and WORLD_SIZE=4 are set without MASTER_ADDR"),
        ({**BARE, "LOCAL_RANK": "1"}, "RANK=1 and LOCAL_RANK=1 are set without LOCAL_WORLD_SIZE"),
        ({**BARE, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "every host holds equally many ranks"),
        ({**BARE, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}, "every host holds equally many ranks"),
        ({**BARE, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"}, "every host holds equally many ranks"),
        ({**BARE, "RANK": "4"}, "0 <= rank < 4 must hold"),
        ({"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}, "set WORLD_SIZE for all ranks"),
        ({"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1", "PMI_SIZE": "2"}, "set LOCAL_WORLD_SIZE for all ranks"),
    ],
)
def test_ranks_that_are_told_half_of_it_are_refused(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingError, match=sentence):
        detect(environ)


def test_the_first_pod_of_a_pytorchjob_listens_where_the_others_come_in() -> None:
    pod = {**recorded("pytorchjob-worker-0-of-2"), "RANK": "0", "MASTER_ADDR": "localhost"}
    info = detected(pod)
    assert info.master_addr == host_name()
    del pod["KUBERNETES_SERVICE_HOST"]
    here = detected(pod)
    assert here.master_addr == "localhost"


def test_pals_leaves_out_what_the_user_can_say() -> None:
    environ = {"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1", "PMI_LOCAL_SIZE": "2", "WORLD_SIZE": "2"}
    info = detected(environ)
    assert (info.launcher, info.rank, info.world_size, info.local_size) == ("mpi", 1, 2, 2)


@pytest.mark.parametrize("outer", ["srun-task-2-of-4", "torchrun-rank-1-of-2", "mpich-in-salloc-rank-1-of-2"])
def test_the_innermost_launcher_wins(outer: str) -> None:
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23456"}
    worker = environment(Node(num_workers=3), 2, environ=recorded(outer), given=given, num_cores=4)
    info = detected(worker)
    assert (info.launcher, info.rank, info.world_size) == ("local", 2, 3)


def test_torchrun_inside_an_srun_step_is_torchrun() -> None:
    info = detected({**recorded("srun-task-2-of-4"), **recorded("torchrun-rank-1-of-2")})
    assert info.launcher == "torchrun"


def test_the_flags_say_where_rank_0_is_only_if_the_launcher_does_not() -> None:
    under_slurm = detected(recorded("srun-task-2-of-4"), master_addr="n1-ib", master_port=20000)
    under_torchrun = detected(recorded("torchrun-rank-1-of-2"), master_addr="n1-ib", master_port=20000)
    assert (under_slurm.master_addr, under_slurm.master_port) == ("n1-ib", 20000)
    assert (under_torchrun.master_addr, under_torchrun.master_port) == ("127.0.0.1", 29511)


@pytest.mark.parametrize(
    ("name", "flag", "value", "instead"),
    [
        ("srun-task-2-of-4", "--num-gpus", 4, "start srun with --ntasks-per-node 4"),
        ("srun-task-2-of-4", "--num-nodes", 1, "start srun with --nodes 1"),
        ("srun-task-2-of-4", "--node-id", 0, "srun numbers the nodes"),
        ("torchrun-rank-1-of-2", "--num-gpus", 8, "start torchrun with --nproc-per-node 8"),
        ("torchrun-rank-1-of-2", "--num-nodes", 2, "start torchrun with --nnodes 2"),
        ("torchrun-rank-1-of-2", "--master-port", 29500, "give it to torchrun"),
        ("openmpi-5-rank-1-of-2", "--num-gpus", 3, "Open MPI: --map-by ppr:3:node; MPICH and Intel MPI: -ppn 3"),
    ],
)
def test_a_flag_that_contradicts_the_launcher_is_refused(name: str, flag: str, value: int, instead: str) -> None:
    flags = {**NO_FLAGS, flag.removeprefix("--").replace("-", "_"): value}
    with pytest.raises(SettingError) as caught:
        check_flags(detected(recorded(name)), **flags)
    assert caught.value.what == f"{flag} {value} was set"
    assert instead in caught.value.instead


@pytest.mark.parametrize("name", ["srun-task-2-of-4", "torchrun-rank-1-of-2", "openmpi-5-rank-1-of-2"])
def test_flags_that_agree_with_the_launcher_pass(name: str) -> None:
    info = detected(recorded(name))
    check_flags(info, **NO_FLAGS)
    check_flags(
        info,
        num_nodes=info.num_nodes,
        node_id=info.node_id,
        num_gpus=info.local_size,
        master_addr=info.master_addr,
        master_port=info.master_port,
    )


def test_the_workers_of_an_agent_see_the_agents_own_flags() -> None:
    info = RankInfo(**{**{name: getattr(alone(), name) for name in RankInfo.__slots__}, "launcher": "local"})
    check_flags(info, num_nodes=1, node_id=0, num_gpus=1, master_addr="n1", master_port=29999)
