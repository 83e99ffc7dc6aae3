"""A training that reads a copy on its node: the same bits, the original in its settings, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stormo.cli import main
from stormo.data.staging import nodes
from stormo.data.staging.node_cache import stage
from stormo.telemetry.text import format_bytes
from tests import forked, programs
from tests.data.staging.task import write_points

ROOT = Path(__file__).parents[3]
TASK = f"{Path(__file__).with_name('task.py')}:InFolder"
SETTINGS = ("--epochs", "2", "--target-accuracy", "1", "--warmup-epochs", "0", "--deterministic", "--batch-size", "52")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the data and a local one, which is empty again after a run."""
    write_points(tmp_path / "data")
    (tmp_path / "local").mkdir()
    return tmp_path


def words(run: str, *more: str) -> list[str]:
    return ["-m", "stormo", "train", TASK, "--run-name", run, *SETTINGS, "--num-gpus", "2", *more]


def train(place: Path, *arguments: str, num_workers: int = 2, **environ: str) -> subprocess.CompletedProcess[str]:
    return programs.run(list(arguments), place, num_workers, PYTHONPATH=str(ROOT), **environ)


def summary(place: Path, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "runs" / run / "summary.json").read_text(encoding="utf-8"))
    return found


def test_a_staged_training_is_the_same_one_and_resumes_from_the_original(place: Path) -> None:
    data = ("--task.data-folder", str(place / "data"))
    plain = train(place, *words("plain", *data))
    assert plain.returncode == 0, plain.stderr
    stopped = train(place, *words("staged", *data, "--stage", "local"), TINY_FAULT="term-job 0 13")
    assert stopped.returncode == 75, stopped.stderr
    where = place / "local" / f"stormo-staged-{os.geteuid()}"
    assert stopped.stdout.count(f"reads {where}/data-") == 2
    size = format_bytes((place / "data" / "points.pt").stat().st_size)
    assert re.search(rf"^Data: staged {size} in .* s \(.*/s\) to {where}/", stopped.stdout, re.MULTILINE)
    assert list((place / "local").iterdir()) == []
    settings = tomllib.loads((place / "runs" / "staged" / "config.toml").read_text(encoding="utf-8"))
    assert settings["task_options"]["data_folder"] == str(place / "data")
    assert not [
        name for section in settings.values() if isinstance(section, dict) for name in section if "stage" in name
    ]
    resumed = train(place, *words("staged", "--resume", "--stage", "--keep-staged"), TMPDIR=str(place / "local"))
    assert resumed.returncode == 0, resumed.stderr
    assert len(list(where.iterdir())) == 1
    assert summary(place, "staged")["weights_sha256"] == summary(place, "plain")["weights_sha256"]


def _stage_and_die(data: str, folder: str) -> None:
    stage(Path(data), Path(folder))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_training_whose_worker_is_killed_leaves_no_copy(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Path] = []

    def start_workers(*_: Any) -> int:
        worker = forked.fork(_stage_and_die, (str(place / "data"), str(place / "local")))
        worker.join()
        left.extend((place / "local").iterdir())
        return 1

    monkeypatch.chdir(place)
    monkeypatch.setattr("stormo.commands.train._start_workers", start_workers)
    assert main(words("run", "--task.data-folder", "data", "--stage", "local")[2:]) == 1
    assert len(left) == 1
    assert list((place / "local").iterdir()) == []


def test_a_job_that_is_stopped_while_it_copies_can_be_resumed(place: Path) -> None:
    done = train(place, *words("run", "--task.data-folder", "data", "--stage", "local"), STAGING_FAULT="term")
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr == "stormo: stopped by SIGTERM while the data was copied; nothing was trained.\n"
    assert sorted(path.name for path in place.iterdir()) == ["data", "local"]
    assert list((place / "local").iterdir()) == []


def test_what_cannot_be_staged_is_refused_before_anything_is_started(place: Path) -> None:
    tiny = str(ROOT / "tests" / "tiny_task.py") + ":Tiny"
    for task, more, sentence in (
        (tiny, ["--stage"], "task tiny has no option data_folder, so it cannot read a copy"),
        (TASK, ["--stage"], "task in-folder reads no folder with these options; set --task.data-folder"),
        (TASK, ["--stage", "nowhere"], "that is no folder that can be written to on this node"),
        (TASK, ["--keep-staged"], "--keep-staged was set, but nothing is staged; set --stage too."),
    ):
        folder = ["--task.data-folder", "data"] if task == TASK and more != ["--stage"] else []
        done = train(place, "-m", "stormo", "train", task, *folder, *more, num_workers=1)
        assert (done.returncode, done.stdout) == (2, "")
        assert sentence in done.stderr
    assert sorted(path.name for path in place.iterdir()) == ["data", "local"]


SCRIPT = """
import sys, stormo
world = stormo.World()
near = world.stage(sys.argv[2] if len(sys.argv) > 2 else "data", "local")
if world.rank == 1:
    print(sorted(path.name for path in near.iterdir()), near.is_relative_to(near.cwd() / "local"))
world.barrier()
if len(sys.argv) > 1:
    raise ValueError("boom")
"""


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_script_reads_a_copy_that_is_gone_afterwards(place: Path, num_nodes: int) -> None:
    (place / "loop.py").write_text(SCRIPT)
    done = programs.run(["loop.py"], place, 2, num_nodes, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert "['points.pt'] True\n" in done.stdout
    assert done.stdout.count("Data: staged ") == 1
    assert ("and the like on 2 nodes, reused on 1 node." in done.stdout) == (num_nodes == 2)
    assert list((place / "local").iterdir()) == []


def test_a_script_that_fails_leaves_no_copy(place: Path) -> None:
    (place / "loop.py").write_text(SCRIPT)
    command = [sys.executable, "loop.py", "boom"]  # as a user starts it, since the end of the process matters
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:12]) == (1, "Data: staged")
    assert "ValueError: boom" in done.stderr
    assert list((place / "local").iterdir()) == []


COPY_FAILS = """
import time
from pathlib import Path

import stormo

world = stormo.World()
try:
    world.stage("missing", "local")
except Exception as error:
    print(type(error).__name__, error, flush=True)
    if world.rank:
        Path("told").touch()
    while not Path("told").exists():  # the end of a rank ends the other
        time.sleep(0.05)
    raise
"""


def test_a_copy_that_fails_on_a_node_is_raised_on_all_its_workers(place: Path) -> None:
    (place / "loop.py").write_text(COPY_FAILS)
    done = train(place, "loop.py")
    assert done.returncode != 0
    assert "missing cannot be read there (No such file or directory); fix that" in done.stderr
    assert "StormoError" in done.stdout  # what the other worker gets: the same sentence
    assert done.stdout.count("missing cannot be read there") == 2
    assert list((place / "local").iterdir()) == []


def test_the_rate_is_that_of_a_node_that_has_copied() -> None:
    copied = {"num_bytes": 2_000_000, "copied_bytes": 2_000_000, "seconds": 1.0}
    reused = {"num_bytes": 2_000_000, "copied_bytes": 0, "seconds": 4.0}
    text, size = nodes.sentence([copied, reused], Path("/tmp/x")), format_bytes(2_000_000)
    assert text.startswith(f"Data: staged {size} in 1.0 s ({size}/s on the slowest)")
    assert text.endswith("reused on 1 node.")
