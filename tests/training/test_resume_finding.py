"""Which run a command resumes, and whether its files may be trusted."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stormo.cli import main
from stormo.errors import EXIT_USAGE, SettingError
from stormo.system.files import BadFileError
from stormo.telemetry import runs_folder
from stormo.telemetry.folder import RunFolder, read_summary
from stormo.telemetry.runs_folder import forget_launch, launched_run, note_launch
from stormo.training import resume
from stormo.training.resume import require_few_processes, require_own, run_to_resume

TASK = str(Path(__file__).parents[1] / "tiny_task.py")
SMALL = ["--task.num-train", "64", "--task.num-validation", "16", "--device", "cpu"]
RANK = {
    **{"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": "2"},
    **{"RANK": "7", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def begin(folder: Path, name: str, launch: str) -> RunFolder:
    run = RunFolder(folder / name)
    run.path.mkdir()
    run.config.touch()
    run.environment.write_text(json.dumps({"launches": [launch]}))
    note_launch(folder, launch, name)
    return run


def test_a_rank_of_a_later_round_finds_the_run_and_reads_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        begin(folder, f"other-{number}", f"job {number}")
    flags = {"runs_folder": str(folder)}
    monkeypatch.setattr(runs_folder, "_start_unix_s", lambda run: pytest.fail("it looked through all runs"))
    assert run_to_resume(flags) is None  # the first round
    begin(folder, "older", "job")
    run = begin(folder, "newer", "job")
    assert run_to_resume(flags) == run
    assert run_to_resume({**flags, "run_name": "older"}) == RunFolder(folder / "older")
    assert run_to_resume({**flags, "run_name": "other-1"}) is None
    (run.path / "summary.json").write_text(json.dumps({"stopped_by": "epochs"}))
    assert run_to_resume(flags) is None
    forget_launch(folder, "job")
    assert launched_run(folder, "job") is None


def note_of(folder: Path) -> Path:
    (file,) = (folder / f".launches-{os.geteuid()}").iterdir()
    return file


NO_NOTES = [b"", b"[]", b"\xff", b'{"launch": "job", "run": "../outside"}', b'{"run": "a"}', b" " * 5000]


@pytest.mark.parametrize("content", NO_NOTES)
def test_a_note_that_makes_no_sense_is_none(folder: Path, content: bytes) -> None:
    begin(folder, "a", "job")
    note_of(folder).write_bytes(content)
    assert launched_run(folder, "job") is None


def test_a_note_that_is_a_link_or_a_pipe_is_none(folder: Path) -> None:
    begin(folder, "a", "job")
    note = note_of(folder)
    note.rename(folder / "elsewhere")
    note.symlink_to(folder / "elsewhere")
    assert launched_run(folder, "job") is None
    note.unlink()
    os.mkfifo(note)
    assert launched_run(folder, "job") is None


def test_accounts_that_share_a_folder_of_runs_keep_notes_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(folder, "mine", "job")
    assert stat.S_IMODE(note_of(folder).parent.stat().st_mode) == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert launched_run(folder, "job") is None
    with pytest.raises(BadFileError, match="no folder of yours alone"):  # it is made by the account that the test has
        note_launch(folder, "job", "theirs")
    assert (folder / ".launches-12345").is_dir()


def test_every_verb_works_where_runs_is_a_link_and_no_note_of_the_launch_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scratch").mkdir()
    Path("runs").symlink_to("scratch")
    assert main(["train", TASK, *SMALL, "--run-name", "a", "--epochs", "1"]) == 0
    # The rest of the test is of a torchrun whose note would go through a link that somebody else has made.
    Path("scratch", f".launches-{os.geteuid()}").symlink_to(tmp_path)
    monkeypatch.setattr("stormo.training.records.launch_id", lambda environ: "job")
    assert main(["train", "--resume", "a", "--epochs", "2"]) == 0
    assert "A restart by torchrun would not find this run" in "".join(capfd.readouterr())
    assert (read_summary(RunFolder(Path("scratch/a"))) or {})["stopped_by"] == "epochs"
    for words in (["runs"], ["show", "a"], ["export", "a"]):
        assert main(words) == 0, words


@pytest.mark.parametrize("foreign", ["run", "run/config.toml", "task.py"])
def test_the_task_of_a_run_of_somebody_elses_must_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "task.py").write_text("open('code-was-run', 'w')\n")
    if os.geteuid() == 0:
        os.chown(tmp_path / "task.py", 12345, -1)  # what root owns, everybody may run
    (tmp_path / "run" / "config.toml").write_text('task = "task.py"\n')
    monkeypatch.setattr(resume, "is_own", lambda path: path.resolve() != tmp_path / foreign)
    run = RunFolder(tmp_path / "run")
    with pytest.raises(SettingError, match="belongs to another account"):
        require_own(run, "task.py", is_built_in=False)
    require_own(run, "fashion-mnist", is_built_in=True)
    assert main(["train", "--resume", "run"]) == EXIT_USAGE
    assert not Path("code-was-run").exists()
    monkeypatch.setattr(resume, "is_own", lambda _: True)
    require_own(run, "task.py", is_built_in=False)


@pytest.mark.parametrize("key", ["num_gpus", "loader_workers"])
def test_a_file_alone_does_not_start_thousands_of_processes(key: str) -> None:
    with pytest.raises(SettingError, match=f"{key} = 100000"):
        require_few_processes({key: 100_000}, {})
    require_few_processes({key: 100_000}, {key: 100_000})
    require_few_processes({key: 8}, {})


def test_modules_of_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    for name in ("dataclasses", "tomllib", "rich", "psutil"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('planted')\n")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "stormo", "runs"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_that_may_not_be_read_leaves_the_others_in_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text('{"stopped_by": "epochs", "task": "\\u001b[31mred"}')
    real = Path.is_file

    def is_file(path: Path) -> bool:
        if path.parent.name == "theirs":
            raise PermissionError
        return real(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    assert main(["runs", "--runs-folder", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "mine" in shown
    assert "\x1b" not in shown
