"""The command line of every mpirun, and which one is there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from stormo.errors import SettingError
from stormo.launch import mpirun
from stormo.launch.mpirun import Start, command_line

START = Start(
    hosts=("n1", "me@n2"),
    workers_per_host=4,
    command=("python", "-m", "stormo", "train", "--task.text", "a b"),
    variables={"MASTER_ADDR": "n1", "MASTER_PORT": "12345"},
    passed_on=("NCCL_DEBUG", "PYTHONPATH"),
)
COMMAND = "python|-m|stormo|train|--task.text|a b"
GOLDEN = {
    "mpirun (Open MPI) 4.1.4": "--host|n1:4,me@n2:4|-n|8|--map-by|ppr:4:node|--bind-to|none|-x|MASTER_ADDR=n1|"
    f"-x|MASTER_PORT=12345|-x|NCCL_DEBUG|-x|PYTHONPATH|{COMMAND}",
    "HYDRA build details:\n    Version:                                 4.0.2": "-hosts|n1:4,me@n2:4|-n|8|-ppn|4|"
    f"-genv|MASTER_ADDR|n1|-genv|MASTER_PORT|12345|-genvlist|NCCL_DEBUG,PYTHONPATH|{COMMAND}",
    "Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307": "-hosts|n1,me@n2|-genv|I_MPI_PIN|"
    f"off|-n|8|-ppn|4|-genv|MASTER_ADDR|n1|-genv|MASTER_PORT|12345|-genvlist|NCCL_DEBUG,PYTHONPATH|{COMMAND}",
}


def fake(tmp_path: Path, version: str) -> str:
    """A program that says nothing but its version."""
    program = tmp_path / "mpirun"
    program.write_text(f"#!{sys.executable}\nprint({version!r})\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("version", GOLDEN)
def test_every_family_gets_its_own_words(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    program = fake(tmp_path, version)
    words = command_line(START, {"STORMO_MPIRUN": f"{program} --more 'x y'"})
    assert words == [program, "--more", "x y", *GOLDEN[version].split("|")]


def test_open_mpi_keeps_its_rule_for_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    environ = {"STORMO_MPIRUN": fake(tmp_path, "mpirun (Open MPI) 5.0.3")}
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with pytest.raises(SettingError) as caught:
        command_line(START, environ)
    assert str(caught.value) == (
        "--launcher mpi was set by root, but Open MPI starts nothing for root unless it is told to twice; "
        "set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or work as another user."
    )
    words = command_line(START, {**environ, **allowed})
    assert words == command_line(START, environ, is_shown=True), "what is only shown is refused to nobody"
    assert "--host" in words


def test_a_missing_or_unknown_mpirun_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="STORMO_MPIRUN=/none/mpirun was set, but there is no /none/mpirun here"):
        command_line(START, {"STORMO_MPIRUN": "/none/mpirun"})
    with pytest.raises(SettingError, match=r"STORMO_MPIRUN=mpirun 'x was set, but .* \(no closing quotation\); close"):
        command_line(START, {"STORMO_MPIRUN": "mpirun 'x"})
    with pytest.raises(SettingError, match=r"neither Open MPI nor MPICH nor Intel MPI \(.* says 'Other 1.0'\)"):
        command_line(START, {"STORMO_MPIRUN": fake(tmp_path, "Other 1.0\nmore")})
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(SettingError) as caught:
        command_line(START, {})
    assert str(caught.value) == (
        "--launcher mpi was set, but there is no mpirun or mpiexec here; load the module of your MPI, "
        f"name its mpirun by {mpirun.PROGRAM}, or set --launcher ssh."
    )
