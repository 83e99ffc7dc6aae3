"""`--max-restarts`: which ends of an attempt are followed by another, and what is refused before the first."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stormo.cli import main
from stormo.config import options
from stormo.errors import SettingError
from stormo.launch.control import JoinError
from stormo.launch.environments import torchrun
from stormo.launch.nodes import check_restarts, run_with_restarts
from stormo.launch.rank_info import RankInfo
from stormo.telemetry.runs_folder import note_launch

TASK = str(Path(__file__).parents[1] / "tiny_task.py")
RUN = Path("runs/a")
WORKER = {
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29511",
}


def attempts(*ends: int | Exception) -> tuple[list[int], Callable[[int], int]]:
    """The numbers of the attempts that were made, and what makes them: each ends as listed."""
    made: list[int] = []
    left = list(ends)

    def attempt(number: int) -> int:
        made.append(number)
        end = left.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    return made, attempt


@pytest.mark.parametrize(
    ("ends", "signals", "numbers"),
    [
        pytest.param([1, 1, 0], set(), [0, 1, 2], id="failures"),
        pytest.param([1, 1, 1], set(), [0, 1, 2], id="no restart is left"),
        pytest.param([2], set(), [0], id="a setting"),
        pytest.param([65], set(), [0], id="divergence"),
        pytest.param([75], set(), [0], id="told to save and stop"),
        pytest.param([130], set(), [0], id="Ctrl-C"),
        pytest.param([1], {15}, [0], id="failed to stop in order"),
        pytest.param([0], set(), [0], id="done"),
    ],
)
def test_which_ends_are_followed_by_another_attempt(ends: list[int], signals: set[int], numbers: list[int]) -> None:
    made, attempt = attempts(*ends)
    assert run_with_restarts(attempt, restarts=2, signals=signals, join_s=0.0) == ends[-1]
    assert made == numbers


def test_a_node_that_is_back_before_the_others_tries_again_to_join_them() -> None:
    made, attempt = attempts(1, JoinError("node 0 ends"), 0)
    assert run_with_restarts(attempt, restarts=1, signals=(), join_s=60.0) == 0
    assert made == [0, 1, 1]
    _, attempt = attempts(JoinError("node 1 did not come"))
    with pytest.raises(JoinError):  # of the first attempt: nobody has started it
        run_with_restarts(attempt, restarts=1, signals=(), join_s=60.0)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--max-restarts", "-1"], "--max-restarts -1 was set, but it must be at least 0; set --max-restarts 0 or"),
        (
            ["--max-restarts", "1", "--num-nodes", "2", "--master-addr", "127.0.0.1"],
            "--max-restarts 1 was set without --run-name, but every node must find the run to resume; set the same",
        ),
        (["--num-nodes", "1:4"], "--num-nodes 1:4 was set, but stormo starts a fixed number of nodes; let torchrun"),
    ],
)
def test_what_cannot_hold_is_said_in_one_sentence_and_nothing_is_left(
    flags: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", TASK, "--device", "cpu", "--num-gpus", "1", *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"stormo: {sentence}")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_no_place_to_restart_from(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    config = options.make_config({"max_restarts": 1, "resume": str(tmp_path)}, None)
    with pytest.raises(SettingError, match="every restart would go back to that one checkpoint; name the run"):
        check_restarts(config, None)


def test_a_launcher_that_starts_nobody_again_takes_no_restarts() -> None:
    task = RankInfo(
        launcher="slurm",
        rank=1,
        world_size=2,
        local_rank=0,
        local_size=1,
        node_id=1,
        num_nodes=2,
        master_addr="127.0.0.1",
        master_port=12345,
        host="b",
    )
    with pytest.raises(SettingError, match="--max-restarts 1 was set, but srun started the workers"):
        check_restarts(options.make_config({"max_restarts": 1}, None), task)
    check_restarts(options.make_config({}, None), task)


def test_torchrun_and_not_stormo_counts_the_restarts_of_its_workers() -> None:
    torchrun.check_restarts(WORKER, 3)
    with pytest.raises(SettingError, match="--max-restarts 1 was set, but torchrun starts the workers, with"):
        torchrun.check_restarts(WORKER, 1)


def test_rounds_of_one_torchrun_know_one_another() -> None:
    assert torchrun.launch_id(WORKER) == "job"
    assert torchrun.launch_id({}) is None
    nameless = torchrun.launch_id({**WORKER, "TORCHELASTIC_RUN_ID": "none"})
    assert nameless is not None
    assert f" {os.getppid()} " in nameless  # this very agent


def test_a_run_that_diverged_is_not_started_again_by_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    RUN.mkdir(parents=True)
    (RUN / "config.toml").touch()
    (RUN / "environment.json").write_text(json.dumps({"launches": ["job"]}))
    (RUN / "summary.json").write_text(json.dumps({"stopped_by": "divergence"}))
    note_launch(RUN.parent, "job", RUN.name)
    for name, value in WORKER.items():
        monkeypatch.setenv(name, value)
    assert main(["train", TASK, "--device", "cpu"]) == 65
    assert capsys.readouterr().err == "stormo: run a has diverged, and would again if torchrun restarted it.\n"
