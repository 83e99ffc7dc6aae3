"""Which checkpoints are kept, how one is removed, and the temporary folders beside them.

A temporary folder is hidden, and its name says which process writes it, so that the next save removes the folders of
dead processes. Nothing with another name is ever touched.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from stormo.checkpoint.format import CorruptCheckpointError, Manifest, Saved, step_name
from stormo.checkpoint.reader import Reader, published, read_manifest
from stormo.errors import SettingError
from stormo.system.process import pid_namespace, process_stat

# A process on another machine cannot be seen; if it has written nothing for this long, it counts as dead.
_SILENT_S = 3600.0

_NAME = re.compile(r"\.step-\d{8,20}\.(?P<machine>[0-9a-f]{8})-(?P<process>\d+-\d+)-[0-9a-f]{8}\.(?P<kind>tmp|old)")


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Step, run and metric of a checkpoint, and which ones are kept after it.

    Kept are the newest `keep_last` up to this step, the `keep_best` with the highest metric, and `keep_steps`. A
    checkpoint of the same step is replaced. A metric that is not finite counts as none.
    """

    step: int
    identity: str
    keep_last: int
    keep_best: int = 0
    metric: float | None = None
    keep_steps: Collection[int] = ()

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise SettingError(
                f"keep_last is {self.keep_last}",
                "the newest checkpoint is the one to resume from",
                "set it to 1 or more",
            )


def rotate(path: Path, saved: Manifest, policy: RetentionPolicy, notices: list[str]) -> Saved:
    """Remove the checkpoints that the one just published supersedes; a notice names what cannot be removed."""
    _remove_superseded(path.parent, saved, policy, notices)
    return Saved(path=path, weights_sha256=saved.weights_sha256, notices=tuple(notices))


def _remove_superseded(folder: Path, saved: Manifest, policy: RetentionPolicy, notices: list[str]) -> None:
    good: list[tuple[Path, Manifest]] = []
    surplus: list[Path] = []
    try:
        steps = published(folder)
    except OSError as error:
        notices.append(f"Old checkpoints were not removed: {folder} cannot be listed ({error.strerror}).")
        return
    for step, revisions in steps.items():
        # Later steps are from before a resume from an earlier checkpoint: not superseded.
        if step > saved.step:
            continue
        try:
            manifest = read_manifest(revisions[0])
        except CorruptCheckpointError:
            continue  # damaged, or of another format: it does not count as kept, and a person may want to look
        if manifest.identity == saved.identity:
            good.append((revisions[0], manifest))
            surplus.extend(revisions[1:])
    if not good or good[0][1] != saved or not _has_index(good[0][0]):
        notices.append(f"Old checkpoints were not removed: that of step {saved.step} does not read back as written.")
        return
    ranked = [(m.metric, m.step, path) for path, m in good if m.metric is not None]
    ranked.sort(reverse=True)  # of equals, the later one
    kept = {path for path, _ in good[: policy.keep_last]} | {path for _, _, path in ranked[: policy.keep_best]}
    kept |= {path for path, m in good if m.step in policy.keep_steps}
    for path in [*(path for path, _ in good if path not in kept), *surplus]:
        try:
            remove(path)
        except OSError as error:
            notices.append(f"The old checkpoint {path} could not be removed ({error.strerror}); it takes up space.")


def _has_index(path: Path) -> bool:
    """Whether the index of a checkpoint, if it has one, can be read."""
    try:
        with Reader(path) as reader:
            return isinstance(reader.index, dict)
    except CorruptCheckpointError:
        return False


def remove(path: Path) -> None:
    """Unpublish a folder by one rename, then delete it; the next save deletes what cannot be deleted now."""
    # The public name goes first: a folder deleted file by file would look like a damaged checkpoint. For a temporary
    # folder, the rename makes a writer that only seemed dead fail, instead of publishing an incomplete checkpoint.
    match = re.match(r"\.?(step-\d+)", path.name)
    assert match is not None, path
    hidden = path.with_name(_hidden_name(match[1], "old"))
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def new_temp_dir(folder: Path, step: int) -> Path:
    """An empty hidden folder for this process to write into."""
    path = folder / _hidden_name(step_name(step), "tmp")
    path.mkdir()
    return path


def remove_stale_temp_dirs(folder: Path, own: Path) -> list[str]:
    """Remove folders of dead processes and half-removed checkpoints; returns a notice for each that stays."""
    notices: list[str] = []
    # The file system's clock, not this machine's: on network storage the two may differ by minutes.
    now_s = own.stat().st_mtime
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for name in names:
        match = _NAME.fullmatch(name)
        path = folder / name
        if match is None or path == own:
            continue
        try:
            if match["kind"] == "old":
                shutil.rmtree(path)
            elif _is_dead(match["machine"], match["process"], path, now_s):
                remove(path)
        except FileNotFoundError:
            continue  # another process is cleaning too
        except OSError as error:
            notices.append(f"The stale folder {path} could not be removed ({error.strerror}); it takes up space.")
    return notices


def _hidden_name(stem: str, kind: str) -> str:
    return f".{stem}.{_machine()}-{_process(os.getpid())}-{secrets.token_hex(4)}.{kind}"


def _is_dead(machine: str, process: str, path: Path, now_s: float) -> bool:
    if machine == _machine():
        return _process(int(process.partition("-")[0])) != process
    last_write_s = max(entry.stat(follow_symlinks=False).st_mtime for entry in (path, *path.iterdir()))
    return now_s - last_write_s > _SILENT_S


def _machine() -> str:
    return hashlib.sha256(pid_namespace().encode()).hexdigest()[:8]


def _process(pid: int) -> str | None:
    """Process id and start time, a pair never used twice while a machine is up; None if it cannot write any more."""
    fields = process_stat(pid)
    return f"{pid}-{fields[19]}" if fields and fields[0] != "Z" else None  # Z: a zombie
