"""Which run a round of torchrun goes on with, without looking through all runs."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from stormo.system.files import BadFileError
from stormo.telemetry import runs_folder
from stormo.telemetry.folder import RunFolder
from stormo.telemetry.runs_folder import forget_launch, launched_run, note_launch
from stormo.training.resume import run_to_resume

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
