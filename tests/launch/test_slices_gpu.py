"""Workers on slices of one real GPU, joined by NCCL: needs `stormo doctor --slices 2` or more first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.slice_devices import find_devices
from tests.launch.slurm_environments import tasks_of

pytestmark = [pytest.mark.gpu, pytest.mark.slices(2)]
_ROOT = Path(__file__).parents[2]
_STORMO = [sys.executable, "-m", "stormo"]
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
_SCRIPT = """
import os
import stormo
world = stormo.World()
import torch
total = float(world.sum(torch.ones(1, device=world.device)))
print("on", os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.device_count(), total, flush=True)
"""


def _run(*words: str) -> str:
    environ = {**os.environ, "NCCL_DEBUG": "WARN"}
    done = subprocess.run(words, cwd=_ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False)
    sys.stderr.write(done.stderr)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    "start", [[*_STORMO, "train", "--num-gpus", "2"], [*_TORCHRUN, "-m", "stormo", "train"]], ids=["stormo", "torchrun"]
)
def test_two_slices_train_with_nccl_and_are_named(start: list[str], tmp_path: Path) -> None:
    run = ("--runs-folder", str(tmp_path), "--run-name", "run", "--epochs", "1")
    said = _run(*start, "tests/tiny_task.py:Tiny", "--backend", "nccl", *run)
    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert " MIG " in summary["device"]
    assert "2 slices" in said
    assert any("slices" in reason for reason in summary["energy_reasons"])


@pytest.mark.parametrize("start", [[*_STORMO, "run", "--num-gpus", "2"], _TORCHRUN], ids=["stormo run", "torchrun"])
def test_each_worker_of_a_script_has_a_slice_of_its_own(
    start: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    said = _run(*start, str(script))
    assert (said + capfd.readouterr().err).count("nccl over loopback sockets: workers on one GPU have no direct") == 1
    lines = [line.split("on ")[1].split() for line in said.splitlines() if "on MIG-" in line]
    assert len({line[0] for line in lines}) == 2
    assert [line[1:] for line in lines] == [["1", "2.0"]] * 2


@pytest.mark.slices(4)
@pytest.mark.parametrize("is_bound", [False, True], ids=["all slices", "one slice each"])
def test_tasks_of_slurm_take_one_slice_each(is_bound: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    node = find_devices().take(0, 4)  # as Slurm shows them for --gres=gpu:1g.18gb:4, or with --gpus-per-task=1
    run = ("--backend", "nccl", "--runs-folder", str(tmp_path), "--run-name", "run", "--epochs", "1")
    command = [*_STORMO, "train", "tests/tiny_task.py:Tiny", *run]
    jobs = [
        subprocess.Popen(command, cwd=_ROOT, env={**os.environ, **task, **shown.of_command()})
        for rank, task in enumerate(tasks_of("srun -N1 -n4 --gpus-per-node=4"))
        for shown in [node.take(rank, 1) if is_bound else node]
    ]
    assert [job.wait(240) for job in jobs] == [0] * 4
    assert "4 slices (1g.18gb)" in capfd.readouterr().out
    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert " MIG " in summary["device"]
    assert summary["world_size"] == 4


def test_the_doctor_measures_slices() -> None:
    document = json.loads(_run(*_STORMO, "doctor", "--num-gpus", "2", "--json"))
    assert document["counts"]["error"] == 0
    assert any("MIG" in finding["text"] for finding in document["findings"] if finding["check"] == "devices")


def test_the_slices_are_listed() -> None:
    (gpu, *_) = json.loads(_run(*_STORMO, "doctor", "--slices", "--json"))
    assert gpu["mig_mode"]
    assert len(gpu["slices"]) >= 2
    assert gpu["profiles"]
