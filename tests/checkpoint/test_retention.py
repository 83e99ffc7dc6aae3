"""Only what dead processes left behind is removed, and only under our own names."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stormo.checkpoint import CheckpointWriteError, RetentionPolicy, Snapshot, find, save, writer
from stormo.checkpoint import retention as module
from stormo.checkpoint.retention import new_temp_dir, remove, remove_stale_temp_dirs

Make = Callable[[int], Snapshot]


def abandoned(folder: Path, machine: str, process: str, kind: str = "tmp") -> Path:
    path = folder / f".step-00000001.{machine}-{process}-0123abcd.{kind}"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"half")
    return path


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    for entry in (*path.iterdir(), path):
        os.utime(entry, (then, then))


def test_a_dead_process_is_cleaned_up_after_and_a_live_one_is_not(tmp_path: Path) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        process = module._process(sleeper.pid)
        assert process is not None
        theirs = abandoned(tmp_path, module._machine(), process)
        age(theirs, 1e6)  # a process that can be seen alive may take as long as it likes
        own = new_temp_dir(tmp_path, 2)
        assert remove_stale_temp_dirs(tmp_path, own) == []
        assert theirs.exists()
        sleeper.send_signal(signal.SIGKILL)
        while module._process(sleeper.pid) is not None:  # a zombie counts as dead: nobody has waited for it here
            time.sleep(0.01)
        assert remove_stale_temp_dirs(tmp_path, own) == []
        assert listed(tmp_path) == [own.name]
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_process_id_used_again_does_not_protect_a_dead_ones_folder(tmp_path: Path) -> None:
    pid, _, start = str(module._process(os.getpid())).partition("-")
    old = abandoned(tmp_path, module._machine(), f"{pid}-{int(start) - 1}")
    remove_stale_temp_dirs(tmp_path, new_temp_dir(tmp_path, 2))
    assert not old.exists()


@pytest.mark.parametrize(("age_s", "remains"), [(10.0, True), (3000.0, True), (4000.0, False)])
def test_on_another_machine_an_hour_without_writing_means_dead(tmp_path: Path, age_s: float, remains: bool) -> None:
    path = abandoned(tmp_path, "00000000", "1-1")
    age(path, age_s)
    remove_stale_temp_dirs(tmp_path, new_temp_dir(tmp_path, 2))
    assert path.exists() is remains


def test_a_file_written_lately_keeps_the_folder_of_another_machine(tmp_path: Path) -> None:
    path = abandoned(tmp_path, "00000000", "1-1")
    age(path, 1e6)
    os.utime(path / "model.safetensors")
    remove_stale_temp_dirs(tmp_path, new_temp_dir(tmp_path, 2))
    assert path.exists()


def test_half_removed_checkpoints_are_finished_off(tmp_path: Path) -> None:
    abandoned(tmp_path, "00000000", "1-1", kind="old")
    own = new_temp_dir(tmp_path, 2)
    remove_stale_temp_dirs(tmp_path, own)
    assert listed(tmp_path) == [own.name]


def test_nothing_with_another_name_is_touched(tmp_path: Path) -> None:
    names = [
        ".step-00000001.tmp", ".step-00000001.0000000g-1-1-0123abcd.tmp", ".step-00000001.00000000-1-1-0123abcd.tmp2",
        "x.step-00000001.00000000-1-1-0123abcd.tmp", "tmp", ".git", "notes",
    ]  # fmt: skip
    for name in names:
        (tmp_path / name).mkdir()
        age(tmp_path / name, 1e6)
    link = tmp_path / ".step-00000001.00000000-1-1-0123abcd.old"
    link.symlink_to(tmp_path / "notes")
    own = new_temp_dir(tmp_path, 2)
    assert remove_stale_temp_dirs(tmp_path, own) == []
    assert set(listed(tmp_path)) == {*names, link.name, own.name}


def test_the_next_save_cleans_and_publishes(tmp_path: Path, make_snapshot: Make) -> None:
    abandoned(tmp_path, module._machine(), "4194304-1")
    save(tmp_path, make_snapshot(1), RetentionPolicy(step=1, identity="", keep_last=1))
    assert listed(tmp_path) == ["step-00000001"]


def test_what_cannot_be_cleaned_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = abandoned(tmp_path, "00000000", "1-1", kind="old")

    def fail(_: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(shutil, "rmtree", fail)
    assert remove_stale_temp_dirs(tmp_path, new_temp_dir(tmp_path, 2)) == [
        f"The stale folder {path} could not be removed (Operation not permitted); it takes up space."
    ]


def test_many_cleaners_at_once_do_not_trip_over_each_other(tmp_path: Path) -> None:
    for number in range(200):
        path = tmp_path / f".step-00000001.{module._machine()}-4194304-1-{number:08x}.tmp"
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    own = new_temp_dir(tmp_path, 2)
    notices: list[str] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            notices.extend(remove_stale_temp_dirs(tmp_path, own))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert notices == []
    remove_stale_temp_dirs(tmp_path, own)
    assert listed(tmp_path) == [own.name]


def test_a_writer_whose_folder_was_taken_away_fails_and_publishes_nothing(
    tmp_path: Path, make_snapshot: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_publish = writer._rename

    def taken_away(temporary: Path, *rest: object) -> Path:
        remove(temporary)
        return real_publish(temporary, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "_rename", taken_away)
    with pytest.raises(CheckpointWriteError, match="No such file"):
        save(tmp_path, make_snapshot(1), RetentionPolicy(step=1, identity="", keep_last=1))
    assert find(tmp_path) == []
    assert listed(tmp_path) == []
