"""The folder of a run is opened for one process, or one sentence says why not."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from stormo.config import options
from stormo.errors import SettingError
from stormo.telemetry.folder import RunFolder
from stormo.training.run_folder import lock_folder, open_folder, remove_unbegun


def _opened(runs_folder: Path, **flags: Any) -> RunFolder:
    return open_folder(options.make_config({"runs_folder": str(runs_folder), **flags}, None))


@pytest.mark.parametrize("flags", [{}, {"run_name": "a"}, {"run_name": "a", "resume": ""}])
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, flags: dict[str, str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match=r"^--runs-folder .*/file was set, but .*/file/.* cannot be made \(Not"):
        _opened(tmp_path / "file", **flags)
    if flags:
        (tmp_path / "a").touch()
        with pytest.raises(SettingError, match=r"/a cannot be made \(File exists\); set another folder\.$"):
            _opened(tmp_path, **flags)


def test_a_run_is_opened_where_it_is_and_a_name_is_never_given_twice(tmp_path: Path) -> None:
    first = _opened(tmp_path, run_name="a")
    assert _opened(tmp_path, run_name="a", resume="").path == first.path
    assert _opened(tmp_path, run_name="a").path == first.path  # nothing was written into it
    first.config.touch()
    assert _opened(tmp_path, run_name="a", resume="").path == first.path
    with pytest.raises(SettingError, match="--resume a"):
        _opened(tmp_path, run_name="a")
    assert _opened(tmp_path, task="t").path != _opened(tmp_path, task="t").path


def test_a_folder_is_one_process_s_and_one_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _opened(tmp_path, run_name="a")
    held = lock_folder(folder)
    assert held is not None
    with pytest.raises(SettingError, match="run a was to be resumed, but another process is training it"):
        lock_folder(folder)
    held.close()

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(SettingError, match=r"/a was to hold the run, but it cannot be written \(Read-only file system"):
        lock_folder(folder)


def test_a_start_that_came_to_nothing_leaves_only_what_others_wrote(tmp_path: Path) -> None:
    for own in ([], ["slurm.json"]):
        folder = _opened(tmp_path, run_name="a")
        held = lock_folder(folder)
        assert held is not None
        folder.nodes.mkdir()
        for file in (folder.config, folder.nodes / "0.jsonl", *(folder.path / name for name in own)):
            file.touch()
        remove_unbegun(folder)
        held.close()
        assert [path.name for path in tmp_path.rglob("*")] == [*(["a"] if own else []), *own]
