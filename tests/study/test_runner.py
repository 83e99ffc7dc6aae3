"""A study from its first run to its answer: the order of runs, the file that keeps them, child processes, failures."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from stormo.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_RESUMABLE, EXIT_USAGE, SettingError, StormoError
from stormo.study import main, runner
from stormo.study.runner import RunFile, StoppedError, error_in_log, run_child
from stormo.study.study import Run, make_runs
from tests.study.made_up import measurement, write_run


def test_each_repeat_holds_every_run_once_in_a_random_order() -> None:
    runs = make_runs([1, 2, 4, 8], [1] * 4, ["strong"], 6, seed=0)
    repeats = [runs[start : start + 4] for start in range(0, 24, 4)]
    for number, repeat in enumerate(repeats, start=1):
        assert {run.repeat for run in repeat} == {number}
        assert sorted(run.workers for run in repeat) == [1, 2, 4, 8]
    assert len({tuple(run.workers for run in repeat) for repeat in repeats}) > 2


def test_order_is_the_same_for_a_seed_and_does_not_depend_on_the_repeats() -> None:
    first = make_runs([1, 2, 4], [1, 1, 2], ["strong", "weak"], 2, seed=5)
    longer = make_runs([1, 2, 4], [1, 1, 2], ["strong", "weak"], 4, seed=5)
    assert longer[: len(first)] == first  # repeats that are added later leave those before as they were
    assert make_runs([1, 2, 4], [1, 1, 2], ["strong", "weak"], 2, seed=6) != first


def test_one_worker_is_one_run_for_both_modes() -> None:
    runs = make_runs([1, 2], [1, 1], ["strong", "weak"], 1, seed=0)
    assert sorted(run.name for run in runs) == ["both-1-workers-1", "strong-2-workers-1", "weak-2-workers-1"]
    assert [run.mode for run in make_runs([1], [1], ["weak"], 1, seed=0)] == ["weak"]


def test_a_line_that_was_cut_short_is_a_run_that_was_not_done(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    one, two, three = (Run(mode="strong", workers=workers) for workers in (1, 2, 4))
    file = RunFile(path)
    file.add(one, "done", measurement(1, 100.0))
    file.add(two, "failed", error="out of memory")
    file.add(three, "done", measurement(4, 300.0))
    path.write_bytes(path.read_bytes()[:-40])
    again = RunFile(path)
    assert again.measurement(one) == measurement(1, 100.0)
    assert (again.measurement(two), again.measurement(three)) == (None, None)
    again.add(three, "done", measurement(4, 310.0))
    assert RunFile(path).measurement(three) == measurement(4, 310.0)


def is_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def sleeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of Python: a program that ignores Ctrl-C, has a child of its own, and never ends."""
    program, pids = tmp_path / "sleeper", tmp_path / "pids"
    program.write_text(f"#!/bin/sh\ntrap '' INT\nsleep 600 &\necho $$ $! > {pids}.new\nmv {pids}.new {pids}\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(runner, "_CHECK_PROGRESS_S", 0.0)
    monkeypatch.setattr(runner, "_WAIT_S", 0.3)
    return pids


def test_an_interrupt_leaves_no_process(tmp_path: Path, sleeper: Path) -> None:
    def interrupt() -> bool:
        if sleeper.exists():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        run_child([], tmp_path / "log", interrupt)
    assert all(is_gone(int(pid)) for pid in sleeper.read_text(encoding="ascii").split())


def test_a_run_that_was_measured_for_long_enough_is_ended(tmp_path: Path, sleeper: Path) -> None:
    assert run_child([], tmp_path / "log", sleeper.exists) == -15
    assert all(is_gone(int(pid)) for pid in sleeper.read_text(encoding="ascii").split())


def test_the_error_of_a_refused_run_is_found(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run_child(["fashion-mnist", "--num-gpus", "none"], log, lambda: False) == EXIT_USAGE
    assert error_in_log(log).startswith("--num-gpus was set to 'none'")


def test_the_last_line_of_a_log_without_an_error_of_stormo(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert error_in_log(log) == "it left no output"
    log.write_text("Traceback\n\nValueError: no\n\n", encoding="utf-8")
    assert error_in_log(log) == "ValueError: no"
    frames = 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n    loss()\n'
    log.write_text(
        f"{frames}KeyError: 1\n\nDuring it:\n\n{frames}ValueError: no\n  or yes\nperhaps\n", encoding="utf-8"
    )
    assert error_in_log(log) == "ValueError: no"
    log.write_text("", encoding="utf-8")
    assert error_in_log(log) == "it printed nothing"


OPTIONS = ["fashion-mnist", "--device", "cpu", "--workers", "1,2,4", "--repeats", "2"]


class FakeTraining:
    """Stands for `stormo train`: writes what a run leaves, at a speed that follows from its workers."""

    def __init__(self, *, fails: dict[str, int] | None = None, stops_at: int | None = None) -> None:
        self.names: list[str] = []
        self._fails = fails or {}
        self._stops_at = stops_at
        self.stop: type[BaseException] = KeyboardInterrupt

    def __call__(self, arguments: Sequence[str], log: Path, is_enough: Callable[[], bool]) -> int:
        flags = dict(pairwise(arguments))
        name, workers = flags["--run-name"], int(flags["--num-gpus"])
        self.names.append(name)
        if len(self.names) == self._stops_at:
            raise self.stop
        code = next((code for start, code in self._fails.items() if name.startswith(start)), 0)
        if code:
            log.write_text("a line\nstormo: 4 workers were asked for, but 2 are here.\nmore\n", encoding="utf-8")
            return code
        folder = Path(flags["--runs-folder"]) / name
        assert not folder.exists()
        write_run(folder, 100.0 * workers / (1 + 0.1 * (workers - 1)) * (1 + 0.01 * int(name[-1])))
        (folder / "checkpoints").mkdir()
        assert not is_enough()
        return 0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # A picture takes a second; test_results.py draws one.
    monkeypatch.setattr("stormo.study.results.draw", lambda path, results: path.write_text("picture"))
    return tmp_path / "out"


def test_a_study_prints_and_writes_everything(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = FakeTraining()
    assert main([*OPTIONS, "--mode", "both", "--output", str(folder)], train) == 0
    assert len(train.names) == len(set(train.names)) == 2 * (1 + 2 * 2)
    out = capsys.readouterr().out
    assert "Strong scaling" in out
    assert "Weak scaling" in out
    assert "  1.82 " in out  # 2 / 1.1
    assert "4 workers train 3.08 times as fast as 1 worker" in out
    assert "Energy was not measured (the runs recorded none)" in out
    assert out.isascii()  # a pipe: bars of plain signs
    rows = list(csv.DictReader((folder / "scale.csv").read_text(encoding="utf-8").splitlines()))
    assert [(row["mode"], row["workers"]) for row in rows[:3]] == [("strong", "1"), ("strong", "2"), ("strong", "4")]
    assert float(rows[1]["speed_up"]) == pytest.approx(2 / 1.1)
    assert rows[1]["j_per_sample"] == ""
    content = json.loads((folder / "scale.json").read_text(encoding="utf-8"))
    assert content["studies"][0]["model"]["serial_share"]["value"] == pytest.approx(0.1, rel=1e-3)
    assert content["failed"] == []
    assert (folder / "scale.png").is_file()
    assert not (folder / "runs" / "both-1-workers-1" / "checkpoints").exists()


def test_one_worker_with_another_strategy_is_noted_in_its_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["fashion-mnist", "--device", "cpu", "--workers", "1,2", "--strategy", "server", "--servers", "2"]
    assert main([*options, "--output", str(folder)], FakeTraining()) == 0
    note = "strategy single, as one worker cannot have --strategy server"
    out = capsys.readouterr().out
    assert out.count(f"1 worker: {note}") == 2  # at the start, and below the table
    rows = list(csv.DictReader((folder / "scale.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["note"] for row in rows] == [note, ""]
    points = json.loads((folder / "scale.json").read_text(encoding="utf-8"))["studies"][0]["points"]
    assert [point["note"] for point in points] == [note, ""]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            "1,2 --strategy server --compress bf16",
            "--compress bf16 was set with strategy server, but it is for replicas",
        ),
        ("1,2 --mesh shard=3", "--mesh shard=3 was set, but that is 3 and there are 2 workers"),
        ("1,2 --strategy hsdp", "--strategy hsdp was set, but it shards within a node"),
        ("2,4 --strategy server --servers 4", "2 workers: --servers 4 was set, but servers are workers too and there "),
        ("1,2 --graph", "--graph was set, but a CUDA graph runs on a GPU and the workers run on CPUs; set --no-graph"),
        ("2,4 --strategy single", "--strategy single was set with 2 workers, but single trains on one"),
        ("1,4 --global-batch-size 3", "4 workers: a global batch of 3 was set, but 4 workers × 1 accumulation split"),
        ("1,2 --mode both --average-every 4000 --strategy local", "weak, 2 workers: --average-every 4000 was set, but"),
    ],
)
def test_settings_that_any_run_would_refuse_are_refused_before_the_first(folder: Path, flags: str, text: str) -> None:
    train = FakeTraining()
    with pytest.raises(StormoError) as refused:
        main(["fashion-mnist", "--device", "cpu", "--output", str(folder), "--workers", *flags.split()], train)
    assert str(refused.value).startswith(text)
    assert (refused.value.exit_code, train.names, folder.exists()) == (EXIT_USAGE, [], False)


def test_a_run_that_is_done_need_not_be_possible_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([*OPTIONS, "--output", str(folder)], FakeTraining(fails={"strong-1": EXIT_FAILURE})) == EXIT_FAILURE
    asked: list[int] = []
    monkeypatch.setattr("stormo.study.runner.resolve", lambda config, layout, facts: asked.append(layout.world_size))
    assert main([*OPTIONS, "--output", str(folder)], FakeTraining()) == 0
    assert asked == [1]  # once for both repeats


def test_a_stopped_study_resumes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped = FakeTraining(stops_at=3)
    assert main([*OPTIONS, "--output", str(folder)], stopped) == EXIT_INTERRUPTED
    assert "resume with the same command" in capsys.readouterr().out
    (folder / "runs" / stopped.names[2]).mkdir(parents=True)  # what the run that was stopped has left
    again = FakeTraining()
    assert main([*OPTIONS, "--output", str(folder)], again) == 0
    assert again.names[0] == stopped.names[2]
    assert sorted(stopped.names[:2] + again.names) == sorted(set(stopped.names + again.names))
    more = FakeTraining()
    assert main([*OPTIONS, "--repeats", "3", "--output", str(folder)], more) == 0
    assert {name[-1] for name in more.names} == {"3"}
    assert len(more.names) == 3


def test_sigterm_ends_it_as_resumable(folder: Path) -> None:
    train = FakeTraining(stops_at=1)
    train.stop = StoppedError
    assert main([*OPTIONS, "--output", str(folder)], train) == EXIT_RESUMABLE


def test_a_failed_run_is_named_and_the_others_continue(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = FakeTraining(fails={"strong-4": EXIT_FAILURE})
    assert main([*OPTIONS, "--output", str(folder)], train) == EXIT_FAILURE
    assert len(train.names) == 6  # each repeat is tried
    out = capsys.readouterr().out
    assert "2 runs failed:" in out
    assert "repeat 1, strong, 4 workers: 4 workers were asked for, but 2 are here. (exit code 1; its output is" in out
    assert "2 workers train 1.82 times as fast" in out
    fixed = FakeTraining()
    assert main([*OPTIONS, "--output", str(folder)], fixed) == 0
    assert sorted(fixed.names) == ["strong-4-workers-1", "strong-4-workers-2"]


def test_where_every_run_fails_there_is_no_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OPTIONS, "--output", str(folder)], FakeTraining(fails={"strong": EXIT_FAILURE})) == EXIT_FAILURE
    assert "6 runs failed" in capsys.readouterr().out
    assert not (folder / "scale.csv").exists()


def test_a_folder_holds_one_study(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OPTIONS, "--output", str(folder)], FakeTraining()) == 0
    capsys.readouterr()
    for flags, text in {
        "--batch-size 64": "global_batch_size = 32, not 64 (--global-batch-size)",
        "--seconds 5": "seconds = 60.0, not 5.0 (--seconds)",
        "--clip-norm 1": "clip_norm = none, not 1.0 (--clip-norm)",
        "--task.width 2": "task.width = 10.0, not 2.0 (--task.width)",
    }.items():
        with pytest.raises(SettingError) as refused:
            main([*OPTIONS, *flags.split(), "--output", str(folder)], FakeTraining())
        assert f"the study there has {text}; set the same options" in str(refused.value)
    assert capsys.readouterr().out == ""  # nothing is promised of what is refused


def test_a_config_file_edited_later_changes_no_runs(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[optimizer]\nbase_lr = 0.1\n[workers]\ntimeout = 60\n")
    options = [*OPTIONS, "--config", str(file), "--output", str(folder)]
    rates: list[str] = []

    def edits(arguments: Sequence[str], log: Path, is_enough: Callable[[], bool]) -> int:
        file.write_text("[optimizer]\nbase_lr = 0.2\n")
        rates.append(f"--base-lr={dict(pairwise(arguments))['--base-lr']}")
        return FakeTraining()(arguments, log, is_enough)

    assert main(options, edits) == 0
    assert rates == ["--base-lr=0.1"] * 6
    with pytest.raises(SettingError, match=r"base_lr = 0.1, not 0.2 \(--base-lr\)"):
        main([*options, "--repeats", "3"], FakeTraining())
    more = FakeTraining()
    assert main([*options, "--repeats", "3", "--base-lr", "0.1"], more) == 0  # the same again, in another way
    assert len(more.names) == 3


def test_files_in_the_folder_are_checked_before_anything_runs(folder: Path) -> None:
    folder.mkdir()
    for text in ("[1, 2]", '{"seed": 0}'):
        (folder / "study.json").write_text(text)
        with pytest.raises(SettingError, match=r"study\.json there was not written by a study"):
            main([*OPTIONS, "--output", str(folder)], FakeTraining())
    file = folder / "file"
    file.touch()
    table = str(Path(__file__).parents[2] / "examples" / "t4_scaling.csv")
    for what in (OPTIONS, ["--from", table]):
        with pytest.raises(SettingError, match="nothing can be written there"):
            main([*what, "--output", str(file)], FakeTraining())


def test_the_same_workers_on_other_nodes_are_another_run(folder: Path) -> None:
    train = FakeTraining()
    options = ["fashion-mnist", "--device", "cpu", "--workers", "2,4", "--master-addr", "h", "--output", str(folder)]
    for num_nodes in ("1", "2"):
        assert main([*options, "--num-nodes", num_nodes], train) == 0
    assert len(set(train.names)) == 4


def test_another_node_runs_only_its_part(folder: Path) -> None:
    options = [*OPTIONS, "--workers", "1,2,4", "--num-nodes", "1,2,2", "--master-addr", "h", "--output", str(folder)]

    def follow(arguments: Sequence[str], log: Path, is_enough: Callable[[], bool]) -> int:
        names.append(arguments[arguments.index("--run-name") + 1])
        assert arguments[arguments.index("--num-gpus") + 1] in ("1", "2")
        assert not is_enough()
        return EXIT_RESUMABLE  # node 0 had enough

    names: list[str] = []
    assert main([*options, "--node-id", "1"], follow) == 0
    assert sorted(names) == [f"strong-{workers}-workers-on-2-nodes-{repeat}" for workers in (2, 4) for repeat in (1, 2)]
    assert not (folder / "scale.csv").exists()


def test_a_table_gives_the_same_without_training(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = str(Path(__file__).parents[2] / "examples" / "t4_scaling.csv")
    assert main(["--from", table, "--mode", "weak", "--output", str(folder)], FakeTraining()) == 0
    assert "3.83" in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {"scale.csv", "scale.json", "scale.png"}
    for wrong in (["--workers", "1,2"], ["--repeats", "2"], ["fashion-mnist"], ["--mode", "both"]):
        with pytest.raises(SettingError):
            main(["--from", table, *wrong])


def test_without_matplotlib_it_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert (
        main(["--from", str(Path(__file__).parents[2] / "examples" / "t4_scaling.csv"), "--output", str(folder)]) == 0
    )
    assert (
        "no scale.png: matplotlib is not installed; get it with: pip install 'stormo[plot]'" in capsys.readouterr().out
    )
    assert (folder / "scale.csv").is_file()
