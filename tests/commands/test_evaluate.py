"""`stormo evaluate`: the metrics of a checkpoint are those of the training, on any number of workers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from stormo.checkpoint import CorruptCheckpointError
from stormo.cli import main
from stormo.errors import EXIT_USAGE
from stormo.telemetry.events import current_events, read_events
from stormo.telemetry.folder import RunFolder
from tests import forked, programs

TASK = str(Path(__file__).parent.with_name("tiny_task.py"))
TRAIN = ["train", TASK, "--device", "cpu", "--epochs", "2", "--batch-size", "64", "--no-tensorboard", "--no-energy"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on two workers: replicas whose running statistics differ, and shards."""
    path = tmp_path_factory.mktemp("evaluated")
    for strategy in ("ddp", "fsdp"):
        words = ["-m", "stormo", *TRAIN, "--run-name", strategy, "--strategy", strategy]
        done = programs.run(words, path, 2)
        assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the folder of the task is put first


def _evaluate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["evaluate", *words, "--device", "cpu", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def _epochs(name: str) -> list[dict[str, Any]]:
    events = current_events(read_events(RunFolder(Path("runs", name)).events))
    return [event["validation"] for event in events if event["event"] == "epoch_done"]


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_one_process_finds_the_metrics_of_the_training_and_writes_nothing(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    found = _evaluate(capsys, name)
    assert found["validation"] == pytest.approx(_epochs(name)[-1], rel=1e-6)
    assert (found["step"], found["num_samples"]) == (16, 301)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_the_number_of_workers_changes_no_bit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "ddp", "--device", "cpu", "--json", "--validation-batch-size", "32"]
    done = programs.run(["-m", "stormo", *words], folder, 3)
    assert done.returncode == 0, done.stderr
    one = _evaluate(capsys, "ddp", "--validation-batch-size", "32")
    assert json.loads(done.stdout) == one  # rank 0 alone prints


def test_the_agent_starts_workers_and_prints_what_one_of_them_says(folder: Path) -> None:
    words = [sys.executable, "-m", "stormo", "evaluate", "fsdp", "--device", "cpu", "--num-gpus", "2"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = forked.run(words, cwd=folder, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    last = _epochs("fsdp")[-1]
    expected = f"Validation Loss = {last['loss']:.3f}, Validation Accuracy = {last['accuracy']:.3f}"
    assert done.stdout == f"Step = 16: Samples = 301, {expected}\n"


def test_the_best_epoch_and_a_folder_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    epochs = _epochs("ddp")
    best = max(range(2), key=lambda number: (epochs[number]["accuracy"], number))
    found = _evaluate(capsys, "ddp", "--checkpoint", "best")
    assert found["step"] == 8 * (best + 1)
    first = "runs/ddp/checkpoints/step-00000008"
    for words in (["ddp", "--checkpoint", first], [first]):
        found = _evaluate(capsys, *words)
        assert (found["checkpoint"], found["step"]) == (first, 8)
        assert found["validation"] == pytest.approx(epochs[0], rel=1e-6)


def test_an_option_of_the_task_changes_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert _evaluate(capsys, "ddp", "--task.num-validation", "40")["num_samples"] == 40
    assert _evaluate(capsys, "--task.num-validation=41", "ddp")["num_samples"] == 41


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], EXIT_USAGE, "was given no run"),
        (["other"], EXIT_USAGE, "run 'other' was asked for"),
        (["ddp", "fsdp"], EXIT_USAGE, "'fsdp' follows the run"),
        (["ddp", "--base-lr", "1"], EXIT_USAGE, "option '--base-lr' was asked for"),
        (["ddp", "--task.depth", "1"], EXIT_USAGE, "option '--task.depth' was asked for"),
        (["ddp", "--checkpoint", "runs/ddp"], EXIT_USAGE, "that folder is no checkpoint"),
        (["ddp", "--task.width", "8"], 2, "has the shape (16,), that of the model (8,); leave out --task options"),
        (["ddp", "--no-task.norm"], 2, "has 1.bias, which the model lacks"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    assert main(["evaluate", *words, "--device", "cpu"]) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_damaged_checkpoint_is_refused_and_a_good_one_offered(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "runs" / "ddp" / "checkpoints" / "step-00000016" / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        assert main(["evaluate", "ddp", "--device", "cpu"]) == CorruptCheckpointError.exit_code
        assert "is that of step 8: runs/ddp/checkpoints/step-00000008." in capsys.readouterr().err
    finally:
        file.write_bytes(data)


@pytest.mark.gpu
def test_a_gpu_finds_the_metrics_of_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--num-gpus", "1", "--epochs", "2", "--run-name", "gpu", "--no-tensorboard", "--no-energy"]
    done = programs.run(["-m", "stormo", "train", TASK, *words], tmp_path)
    assert done.returncode == 0, done.stderr
    done = programs.run(["-m", "stormo", "evaluate", "gpu", "--num-gpus", "1", "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["validation"] == pytest.approx(_epochs("gpu")[-1], rel=1e-3)
