"""The folder of a run, and files that are written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stormo.errors import StormoError
from stormo.telemetry.folder import RunFolder, read_summary, write_json


def test_write_json_keeps_the_old_file_and_leaves_no_temporary_one_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": 1}
    assert os.listdir(tmp_path) == ["summary.json"]  # noqa: PTH208


def test_write_json_syncs_the_content_before_it_publishes_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(fd: int) -> None:
        order.append("folder" if Path(os.readlink(f"/proc/self/fd/{fd}")) == tmp_path else "content")  # noqa: PTH115
        real_fsync(fd)

    def replace(source: Path, target: Path) -> Path:
        order.append("rename")
        return real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_json(tmp_path / "summary.json", {"a": 1})
    assert order == ["content", "rename", "folder"]


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_summary_that_is_not_a_json_object_is_an_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content, encoding="utf-8")
    with pytest.raises(StormoError, match=r"summary\.json"):
        read_summary(RunFolder(tmp_path))


def test_checkpoints_are_listed_by_step_without_temporary_folders_and_files(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.checkpoint_folders() == []
    for name in ("step-00000020", "step-100000000", "step-00000003", ".step-00000030.tmp", "step-x"):
        (run.checkpoints / name).mkdir(parents=True)
    (run.checkpoints / "step-00000001").touch()
    names = [path.name for path in run.checkpoint_folders()]
    assert names == ["step-00000003", "step-00000020", "step-100000000"]
