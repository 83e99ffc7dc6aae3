"""Which run a round of torchrun goes on with, without looking through all runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stormo.resuming.finding import run_to_resume
from stormo.telemetry import finding
from stormo.telemetry.finding import forget_launch, launched_run, note_launch
from stormo.telemetry.folder import RunFolder

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
    monkeypatch.setattr(finding, "_start_unix_s", lambda run: pytest.fail("it looked through all runs"))
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


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"launch": "job", "run": "../outside"}', b'{"run": "a"}'])
def test_a_note_that_makes_no_sense_is_none(folder: Path, content: bytes) -> None:
    begin(folder, "a", "job")
    (file,) = (folder / ".launches").iterdir()
    file.write_bytes(content)
    assert launched_run(folder, "job") is None
