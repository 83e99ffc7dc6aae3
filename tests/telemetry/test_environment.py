from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import stormo
from stormo.telemetry.environment import collect_environment, mask_secrets
from stormo.telemetry.folder import RunFolder, read_environment, write_json


@pytest.mark.parametrize(
    ("argument", "masked"),
    [
        (["--wandb-token", "abc123"], ["--wandb-token", "***"]),
        (["--api-key=abc123"], ["--api-key=***"]),
        (["HF_TOKEN=abc"], ["HF_TOKEN=***"]),
        (["--auth", "--epochs", "3"], ["--auth", "--epochs", "3"]),
        (["--data", "https://me:pw@host/x"], ["--data", "https://me:***@host/x"]),
        (["--note", "use hf_abcdefghijklmnopqrst"], ["--note", "use ***"]),
        (["--tokenizer", "bpe", "--max-tokens", "5"], ["--tokenizer", "bpe", "--max-tokens", "5"]),
        (["--task", "fashion-mnist", "--lr=0.1"], ["--task", "fashion-mnist", "--lr=0.1"]),
    ],
)
def test_what_looks_like_a_secret_on_the_command_line_is_masked(argument: list[str], masked: list[str]) -> None:
    assert mask_secrets(["stormo", "train", *argument]) == ["stormo", "train", *masked]


def test_the_environment_holds_the_selected_variables_and_masks_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["stormo", "train", "--password", "x"])
    for name, value in {
        "SLURM_JOB_ID": "17",
        "SLURM_JWT": "eyJ",
        "NCCL_DEBUG": "INFO",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "AWS_SECRET_ACCESS_KEY": "x",
    }.items():
        monkeypatch.setenv(name, value)
    environment = collect_environment({"torch": "2.13.0", "nccl": None})
    variables = environment["variables"]
    assert (variables["SLURM_JOB_ID"], variables["SLURM_JWT"]) == ("17", "***")
    assert (variables["NCCL_DEBUG"], variables["CUDA_VISIBLE_DEVICES"]) == ("INFO", "0,1")
    assert "AWS_SECRET_ACCESS_KEY" not in variables
    assert environment["command"] == ["stormo", "train", "--password", "***"]
    assert environment["torch"] == "2.13.0"
    assert environment["num_cpus"] >= 1
    run = RunFolder(tmp_path)
    write_json(run.environment, environment)
    assert read_environment(run) == environment


def test_the_command_is_what_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = ["train", "my task.py", "--run-name", "a b"]
    for program in ("stormo", "/opt/venv/bin/stormo", str(Path(stormo.__file__).parent / "__main__.py")):
        monkeypatch.setattr(sys, "argv", [program, *rest])
        assert collect_environment({})["command"] == ["stormo", *rest]
    monkeypatch.setattr(sys, "argv", ["/home/me/my program.py", *rest])
    assert collect_environment({})["command"] == ["/home/me/my program.py", *rest]


def test_the_git_commit_is_that_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for name in ("GIT_DIR", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    assert collect_environment({})["git_commit"] is None
    assert "not a git repository" in collect_environment({})["git_commit_reason"]
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    (tmp_path / "code.py").write_text("a = 1\n", encoding="utf-8")
    for command in (["init", "-q"], ["add", "code.py"], ["commit", "-q", "--no-verify", "-m", "first"]):
        subprocess.run([*git, *command], check=True, cwd=tmp_path)
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    environment = collect_environment({})
    assert (environment["git_commit"], environment["git_has_changes"]) == (head, False)
    (tmp_path / "code.py").write_text("a = 2\n", encoding="utf-8")
    assert collect_environment({})["git_has_changes"] is True


def test_a_machine_without_git_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert collect_environment({})["git_commit_reason"] == "git is not installed"
