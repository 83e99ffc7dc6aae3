"""A published checkpoint is whole, whatever happens while it or another one is written."""

from __future__ import annotations

import errno
import math
import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stormo.checkpoint import (
    CheckpointWriteError,
    RetentionPolicy,
    Snapshot,
    find,
    load,
    newest_good,
    read_manifest,
    retention,
    save,
    writer,
)
from stormo.checkpoint.format import Saved
from stormo.errors import SettingError
from tests import programs

Make = Callable[[int], Snapshot]
Same = Callable[[Snapshot, Snapshot], None]
SCRIPT = Path(__file__).with_name("killed_saves.py")


def store(folder: Path, snapshot: Snapshot, step: int, **settings: Any) -> Saved:
    return save(folder, snapshot, RetentionPolicy(**{"step": step, "identity": "run", "keep_last": 2, **settings}))


def steps(folder: Path) -> list[int]:
    return [found.step for found in find(folder)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_kills_leave_a_whole_newest_checkpoint_and_lose_nothing_that_was_promised(tmp_path: Path) -> None:
    done = programs.run([str(SCRIPT), str(tmp_path)], SCRIPT.parent)
    assert done.returncode == 0, done.stderr
    num_kills, num_kills_of_shards = map(int, done.stdout.split())
    assert num_kills > 25  # two saves of five files each, with their renames and removals
    assert num_kills_of_shards > 18  # six files and two rank manifests, with their renames and removals


def test_the_folder_is_made_and_holds_the_documented_files(tmp_path: Path, make_snapshot: Make) -> None:
    folder = tmp_path / "run" / "checkpoints"
    saved = store(folder, make_snapshot(123), 123)
    assert saved.path == folder / "step-00000123"
    assert set(names(saved.path)) == {
        "model.safetensors", "optimizer.safetensors", "ranks.safetensors", "state.json", "manifest.json",
    }  # fmt: skip
    manifest = read_manifest(saved.path)
    assert (manifest.step, manifest.identity, manifest.metric) == (123, "run", None)
    assert manifest.weights_sha256 == saved.weights_sha256
    assert saved.notices == ()


def test_the_folder_is_as_readable_as_the_user_wants_new_folders_to_be(tmp_path: Path, make_snapshot: Make) -> None:
    before = os.umask(0o027)
    try:
        path = store(tmp_path, make_snapshot(1), 1).path
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o750
    assert (path / "model.safetensors").stat().st_mode & 0o777 == 0o640


def test_everything_is_synced_before_it_is_published(
    tmp_path: Path, make_snapshot: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    real_sync, real_rename = os.fsync, Path.rename

    def sync(fd: int) -> None:
        log.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        real_sync(fd)

    def rename(self: Path, target: Path) -> Path:
        log.append("rename")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    folder = tmp_path / "new"
    store(folder, make_snapshot(1), 1)
    assert log[0] == tmp_path.name  # the new folder's own name
    assert sorted(log[1:6]) == [
        "manifest.json", "model.safetensors", "optimizer.safetensors", "ranks.safetensors", "state.json",
    ]  # fmt: skip
    assert log[5] == "manifest.json"
    assert log[6].startswith(".step-00000001.")
    assert log[7:] == ["rename", "new"]


# --- one step twice ---


def test_the_same_step_again_replaces_what_was_there(tmp_path: Path, make_snapshot: Make, assert_same: Same) -> None:
    for seed in (1, 2, 3):
        saved = store(tmp_path, make_snapshot(seed), 7)
        assert saved.path == tmp_path / "step-00000007"
        assert names(tmp_path) == ["step-00000007"]
        assert_same(load(saved.path), make_snapshot(seed))


def test_the_same_step_is_always_published_while_it_is_replaced(
    tmp_path: Path, make_snapshot: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path, make_snapshot(1), 7)
    seen: list[bool] = []
    real_rename = Path.rename

    def rename(self: Path, target: Path) -> Path:
        result = real_rename(self, target)
        good, problems = newest_good(tmp_path)
        seen.append(good is not None and good.step == 7 and not problems)
        return result

    monkeypatch.setattr(Path, "rename", rename)
    store(tmp_path, make_snapshot(2), 7)
    assert seen == [True, True, True]


def test_the_same_weights_keep_their_metric_when_saved_again_without(tmp_path: Path, make_snapshot: Make) -> None:
    store(tmp_path, make_snapshot(1), 7, metric=0.9)
    assert read_manifest(store(tmp_path, make_snapshot(1), 7).path).metric == 0.9
    assert read_manifest(store(tmp_path, make_snapshot(2), 7).path).metric is None


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(
    tmp_path: Path, make_snapshot: Make, assert_same: Same
) -> None:
    path = store(tmp_path, make_snapshot(1), 7, metric=0.9).path
    (path / "manifest.json").write_text("{")
    assert_same(load(store(tmp_path, make_snapshot(1), 7).path), make_snapshot(1))


def test_an_old_version_that_cannot_be_removed_loses_to_the_new_one(
    tmp_path: Path, make_snapshot: Make, assert_same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path, make_snapshot(1), 7)

    def fail(_: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        for module in (retention, writer):
            patch.setattr(module, "remove", fail)
        saved = store(tmp_path, make_snapshot(2), 7)
    assert saved.path == tmp_path / "step-00000007.1"
    assert "step-00000007 could not be removed (Operation not permitted)" in saved.notices[0]
    assert_same(load(find(tmp_path)[0].path), make_snapshot(2))
    # The next save, of another step, removes the old version; the same step takes its plain name back.
    store(tmp_path, make_snapshot(8), 8)
    assert names(tmp_path) == ["step-00000007.1", "step-00000008"]
    store(tmp_path, make_snapshot(3), 7)
    assert names(tmp_path) == ["step-00000007", "step-00000008"]


# --- rotation ---


def test_the_last_ones_are_kept(tmp_path: Path, make_snapshot: Make) -> None:
    for step in range(1, 6):
        store(tmp_path, make_snapshot(step), step, keep_last=3)
    assert steps(tmp_path) == [5, 4, 3]
    assert hidden(tmp_path) == []


def test_the_best_ones_are_kept_beside_the_last(tmp_path: Path, make_snapshot: Make) -> None:
    for step, metric in enumerate([0.1, 0.8, 0.9, 0.2, None, 0.5], start=1):
        store(tmp_path, make_snapshot(step), step, keep_last=1, keep_best=2, metric=metric)
    assert steps(tmp_path) == [6, 3, 2]


def test_of_equally_good_ones_the_later_is_kept(tmp_path: Path, make_snapshot: Make) -> None:
    for step, metric in enumerate([0.5, 0.5, 0.1], start=1):
        store(tmp_path, make_snapshot(step), step, keep_last=1, keep_best=1, metric=metric)
    assert steps(tmp_path) == [3, 2]


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_never_the_best(tmp_path: Path, make_snapshot: Make, metric: float) -> None:
    for step, value in enumerate([0.5, metric, 0.1], start=1):
        saved = store(tmp_path, make_snapshot(step), step, keep_last=1, keep_best=1, metric=value)
    assert steps(tmp_path) == [3, 1]
    assert read_manifest(saved.path).metric == 0.1


def test_later_steps_and_other_runs_are_not_superseded(tmp_path: Path, make_snapshot: Make) -> None:
    store(tmp_path, make_snapshot(1), 1, identity="another run")
    for step in (2, 10, 3, 4):
        saved = store(tmp_path, make_snapshot(step), step, keep_last=1)
    # 10 removed 2; after going back, 3 and 4 leave 10 alone and 4 removes 3.
    assert steps(tmp_path) == [10, 4, 1]
    assert saved.notices == ()


def test_a_damaged_checkpoint_does_not_count_as_kept_and_is_left_for_a_look(
    tmp_path: Path, make_snapshot: Make
) -> None:
    for step in (1, 2):
        store(tmp_path, make_snapshot(step), step)
    (tmp_path / "step-00000002" / "model.safetensors").write_bytes(b"")
    store(tmp_path, make_snapshot(3), 3)
    assert steps(tmp_path) == [3, 2, 1]
    store(tmp_path, make_snapshot(4), 4)
    assert steps(tmp_path) == [4, 3, 2]


def test_nothing_is_removed_before_the_new_one_is_published(
    tmp_path: Path, make_snapshot: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path, make_snapshot(1), 1, keep_last=1)
    real_remove = retention.remove

    def remove(path: Path) -> None:
        assert steps(tmp_path) == [2, 1]
        assert path.name == "step-00000001"
        real_remove(path)

    monkeypatch.setattr(retention, "remove", remove)
    store(tmp_path, make_snapshot(2), 2, keep_last=1)
    assert steps(tmp_path) == [2]


def test_what_rotation_cannot_remove_is_reported_and_the_save_stands(
    tmp_path: Path, make_snapshot: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path, make_snapshot(1), 1, keep_last=1)

    def fail(_: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(retention, "remove", fail)
    saved = store(tmp_path, make_snapshot(2), 2, keep_last=1)
    assert "step-00000001 could not be removed (Operation not permitted)" in saved.notices[0]
    assert steps(tmp_path) == [2, 1]


# --- what cannot be written ---


def failed(folder: Path, snapshot: Snapshot, step: int) -> str:
    with pytest.raises(CheckpointWriteError) as caught:
        store(folder, snapshot, step)
    message = str(caught.value)
    assert str(folder) in message
    assert re.search(r"needs [\d,]+ bytes, [\d,]+ bytes were free there when it failed", message), message
    return message


def test_a_file_size_limit_leaves_nothing_half_written(tmp_path: Path, make_snapshot: Make) -> None:
    store(tmp_path, make_snapshot(1), 1)
    big = Snapshot(model={"w": torch.zeros(100_000)}, optimizer={}, ranks={}, state={})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        assert "File too large" in failed(tmp_path, big, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step-00000001"]


def test_what_is_free_is_counted_before_a_failed_attempt_is_cleaned_away(
    tmp_path: Path, make_snapshot: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=7 if names(folder) else 10**9)  # nothing published: what is there is the attempt

    monkeypatch.setattr(writer, "sync_folder", full)
    monkeypatch.setattr("shutil.disk_usage", usage)
    assert " bytes, 7 bytes were free there when it failed; " in failed(tmp_path, make_snapshot(1), 1)
    assert names(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a small file system needs the right to mount one; the file size limit test covers the same path")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.system
def test_a_full_disk_leaves_the_older_checkpoint_and_its_space(
    small_disk: Path, make_snapshot: Make, assert_same: Same
) -> None:
    folder = small_disk / "checkpoints"
    store(folder, make_snapshot(1), 1)
    big = Snapshot(model={"w": torch.zeros(300_000)}, optimizer={}, ranks={}, state={})
    message = failed(folder, big, 2)
    assert "No space left on device" in message
    needed, free = (int(text.replace(",", "")) for text in re.findall(r"([\d,]+) bytes", message))
    assert needed > 1_200_000
    assert free < 100_000  # counted before the failed attempt gives its space back
    assert names(folder) == ["step-00000001"]
    assert_same(load(find(folder)[0].path), make_snapshot(1))
    store(folder, make_snapshot(3), 3)
    assert steps(folder) == [3, 1]


@pytest.mark.system
def test_a_read_only_disk_is_reported(small_disk: Path, make_snapshot: Make) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert "Read-only file system" in failed(small_disk / "checkpoints", make_snapshot(1), 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_folder_without_permission_is_reported(tmp_path: Path, make_snapshot: Make) -> None:
    tmp_path.chmod(0o500)
    try:
        assert "Permission denied" in failed(tmp_path, make_snapshot(1), 1)
    finally:
        tmp_path.chmod(0o700)


def test_a_file_in_the_place_of_the_folder_is_reported(tmp_path: Path, make_snapshot: Make) -> None:
    (tmp_path / "checkpoints").write_text("")
    assert "File exists" in failed(tmp_path / "checkpoints", make_snapshot(1), 1)


def test_a_failing_disk_at_any_sync_keeps_what_is_published_whole(
    tmp_path: Path, make_snapshot: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_sync = os.fsync
    for failing in range(1, 8):
        folder = tmp_path / str(failing)
        store(folder, make_snapshot(1), 1, keep_last=1)
        calls = 0

        def sync(fd: int, failing: int = failing) -> None:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise OSError(errno.EIO, "Input/output error")
            real_sync(fd)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", sync)
            assert "Input/output error" in failed(folder, make_snapshot(2), 2)
        # The last sync is that of the new name: the checkpoint is visible, but its predecessor is still kept.
        assert steps(folder) == ([2, 1] if failing == 7 else [1])
        assert newest_good(folder)[1] == ()
        assert hidden(folder) == []


def test_an_interrupt_while_writing_leaves_nothing(
    tmp_path: Path, make_snapshot: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store(tmp_path, make_snapshot(1), 1)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {1: 2}}, r"state\['a'\] has the key 1"),
        ({"a": [0, torch.zeros(1)]}, r"state\['a'\]\[1\] is a Tensor"),
        ({"a": {1, 2}}, r"state\['a'\] is a set"),
        ({"a": b"x"}, r"state\['a'\] is a bytes"),
    ],
)
def test_a_state_that_json_would_change_is_refused_before_writing(
    tmp_path: Path, state: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        store(tmp_path / "new", Snapshot(model={}, optimizer={}, ranks={}, state=state), 1)
    assert not (tmp_path / "new").exists()


def test_numbers_of_a_diverged_run_can_be_stored(tmp_path: Path) -> None:
    state = {"loss": math.nan, "best": -math.inf, "large": 2**80, "small": 5e-324, "pair": (1, 2)}
    loaded = load(store(tmp_path, Snapshot(model={}, optimizer={}, ranks={}, state=state), 1).path).state
    assert math.isnan(loaded.pop("loss"))
    assert loaded == {"best": -math.inf, "large": 2**80, "small": 5e-324, "pair": [1, 2]}


def test_keeping_no_checkpoint_is_refused(tmp_path: Path, make_snapshot: Make) -> None:
    with pytest.raises(SettingError, match="keep_last is 0"):
        store(tmp_path, make_snapshot(1), 1, keep_last=0)
    assert names(tmp_path) == []
