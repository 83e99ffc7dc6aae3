"""`--launcher`: what it starts where, and what contradicts it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from stormo.cli import main
from stormo.config.options import flat_settings, to_toml
from stormo.config.schema import Effective
from stormo.launch import hosts
from stormo.training.settings import read_settings

RUN = [sys.executable, "-P", "-m", "stormo"]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM", "OMPI", "PMI", "STORMO_", *hosts._PASSED_ON, *hosts._PASSED_ON_WHOLE)):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_DEBUG", "INFO x")
    monkeypatch.chdir(tmp_path)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main([*arguments, "--print-commands"]) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err.removeprefix("stormo: ").strip()


def test_ssh_starts_the_same_command_on_every_host(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = printed(
        *(capsys, "train", "--launcher", "ssh", "--hosts=n[1-2]", "--num_gpus", "4", "--seed", "7"),
        *("--master-port=20000", "--run-name", "it's"),
    )
    assert [lines[0], lines[2]] == ["# on n1", "# on n2"]
    for node_id, line in enumerate((lines[1], lines[3])):
        folder, _, command = line.partition(" && ")
        assert shlex.split(folder) == ["cd", str(tmp_path)]
        assert shlex.split(command) == [
            *("env", "NCCL_DEBUG=INFO x", *RUN, "train", "--seed", "7", "--run-name", "it's", "--num-gpus", "4"),
            *("--master-addr", "n1", "--master-port", "20000", "--num-nodes", "2", "--node-id", str(node_id)),
        ]


def test_more_variables_go_along_where_the_user_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"STORMO_PASS": "MINE, NONE", "MINE": "1", "OTHER": "2", "CUDA_VISIBLE_DEVICES": "3", "CUDA_HOME": "/c"}
    for name, value in here.items():
        monkeypatch.setenv(name, value)

    def passed_on() -> list[str]:
        words = shlex.split(printed(capsys, "train", "--launcher", "ssh", "--hosts", "n1")[1])
        return words[words.index("env") + 1 : words.index(sys.executable)]

    assert passed_on() == ["CUDA_HOME=/c", "MINE=1", "NCCL_DEBUG=INFO x"]
    monkeypatch.setenv("STORMO_PASS", "CUDA_VISIBLE_DEVICES")
    assert passed_on() == ["CUDA_HOME=/c", "CUDA_VISIBLE_DEVICES=3", "NCCL_DEBUG=INFO x"]


def test_a_script_keeps_its_own_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "my.py").touch()
    arguments = ["run", "my.py", "--launcher", "ssh", "--hosts", "me@n1,n2", "--print-commands", "--", "--hosts", "own"]
    assert main(arguments) == 0
    line = capsys.readouterr().out.splitlines()[3]
    words = shlex.split(line)
    assert words[words.index("run") : words.index("run") + 4] == ["run", "my.py", "--master-addr", "n1"]
    assert words[-5:] == ["--node-id", "1", "--", "--hosts", "own"]


def test_a_file_that_names_the_launcher_does_not_start_it_again_on_the_hosts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "my.toml").write_text('[workers]\nlauncher = "ssh"\nhosts = "n1,n2"\n')
    words = shlex.split(printed(capsys, "train", "--config", "my.toml")[1])
    at = words.index("--launcher")
    assert words[at + 1] == "auto"
    config, _ = read_settings(["--config", "my.toml", "--launcher", "auto"])
    assert main(["train", "--config", "my.toml", "--launcher", "auto", "--dry-run"]) == 0
    known = {"launcher", "hosts", "hostfile", "print_commands"}
    assert not known & set(flat_settings(config))
    text = to_toml(config, Effective(global_batch_size=1, learning_rate=1.0, warmup_start=1.0))
    assert not any(line.startswith(tuple(known)) for line in text.splitlines())


def test_a_dry_run_counts_the_hosts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n1 slots=3\nn2 slots=3\n")
    assert main(["train", "--launcher", "ssh", "--hostfile", "hosts", "--device", "cpu", "--dry-run"]) == 0
    assert "\nworkers        6 = 2 nodes × 3 CPU processes (as set; " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--hosts", "n1"],
            "--hosts was set without --launcher, but it is for ssh; set --launcher ssh.",
        ),
        (
            ["--launcher", "ssh"],
            "--launcher ssh was set, but no host was named; set --hosts node1,node2 or --hostfile FILE.",
        ),
        (
            ["--launcher", "ssh", "--hosts", "n1", "--hostfile", "f"],
            "--hosts and --hostfile were set, but one of them names the hosts; leave one of them out.",
        ),
        (
            ["--launcher", "ssh", "--hosts", "n1,n2", "--num-nodes", "3"],
            "--num-nodes 3 was set, but 2 hosts are named; leave it out.",
        ),
        (
            ["--launcher", "ssh", "--hosts", "localhost,n2"],
            "the first of 2 hosts was named localhost, but the others would look for it on themselves; "
            "name it as they know it, or set --master-addr.",
        ),
        (
            ["--launcher", "ssh", "--hosts", "n1,n2", "--node-id", "1", "--num-nodes", "2"],
            "--node-id 1 was set with --launcher ssh, but every host gets a number of its own; leave it out.",
        ),
        (
            ["--launcher", "ssh", "--hosts", "n1,n2", "--max-restarts", "2"],
            "--max-restarts 2 was set without --run-name, but every node must find the run to go on with; "
            "set the same --run-name on every node.",
        ),
        (
            ["--launcher", "mpi", "--hosts", "n1,n2"],
            "--launcher mpi was set, but stormo no longer has it; type mpirun yourself, whose ranks join by "
            "themselves: mpirun -n 8 stormo train.",
        ),
    ],
)
def test_what_contradicts_a_launcher_is_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, "train", *arguments) == sentence


def test_a_rank_is_not_launched_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert refused(capsys, "train", "--launcher", "ssh", "--hosts", "n1,n2") == (
        "--launcher ssh was set, but mpirun has started this process already; "
        "drop --launcher, or type the command without mpirun."
    )
