"""Which runs there are, and how one is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from stormo.errors import SettingError
from stormo.telemetry.events import EventFile
from stormo.telemetry.folder import RunFolder
from stormo.telemetry.runs_folder import find_run, list_runs
from tests.telemetry.test_events import started, write_all


def test_runs_are_listed_by_their_first_start_newest_first_and_other_folders_are_left_out(tmp_path: Path) -> None:
    for name, time_unix_s in (("b", 200.0), ("a", 300.0), ("c", 100.0)):
        sink = EventFile(RunFolder(tmp_path / name), clock=lambda time_unix_s=time_unix_s: time_unix_s)  # type: ignore[misc]
        sink.write(started())
        sink.close()
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "file").touch()
    assert [run.name for run in list_runs(tmp_path)] == ["a", "b", "c"]


def test_a_folder_that_does_not_exist_holds_no_runs(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "runs") == []


def test_a_run_is_found_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(tmp_path / "runs" / "heron", started())
    monkeypatch.chdir(tmp_path)
    assert find_run(tmp_path / "runs", "heron").name == "heron"
    assert find_run(tmp_path / "elsewhere", "runs/heron/").name == "heron"
    assert find_run(tmp_path / "elsewhere", str(tmp_path / "runs" / "heron")).name == "heron"


def test_an_unknown_run_is_answered_with_the_closest_name(tmp_path: Path) -> None:
    write_all(tmp_path / "heron", started())
    with pytest.raises(SettingError, match="did you mean heron"):
        find_run(tmp_path, "hero")
    for number in range(6):
        write_all(tmp_path / f"run-{number}", started())
    with pytest.raises(SettingError) as raised:
        find_run(tmp_path, "hero")
    said = str(raised.value)
    assert "none of the 7 runs has that name; did you mean heron? the nearest are: heron, " in said
    assert len(said.partition("are: ")[2].partition(";")[0].split(", ")) == 5


def test_a_run_asked_for_where_there_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="there is no run in"):
        find_run(tmp_path / "runs", "hero")
