"""Hidden folders beside the checkpoints: those being written, those being removed, and what killed processes left.

The name of a folder being written says which process writes it, so that the next save can tell a dead one's from
a live one's. Nothing with another name is ever touched.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import shutil
from pathlib import Path

from stormo.checkpoint.layout import step_name

# A process on another machine cannot be seen; one that has written nothing for this long is taken for dead.
_SILENT_S = 3600.0

_NAME = re.compile(r"\.step-\d{8,20}\.(?P<machine>[0-9a-f]{8})-(?P<process>\d+-\d+)-[0-9a-f]{8}\.(?P<kind>tmp|old)")


def new_temporary(folder: Path, step: int) -> Path:
    """An empty hidden folder for this process to write into."""
    path = folder / _hidden_name(step_name(step), "tmp")
    path.mkdir()
    return path


def remove(path: Path) -> None:
    """Unpublish a folder by one rename, then delete it; what cannot be deleted now is left to the next save."""
    # Its public name must go first: a folder deleted file by file would look like a damaged checkpoint. For a
    # temporary one, the rename makes a writer that was wrongly taken for dead fail instead of publishing a torso.
    match = re.match(r"\.?(step-\d+)", path.name)
    assert match is not None, path
    hidden = path.with_name(_hidden_name(match[1], "old"))
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def clean(folder: Path, own: Path) -> list[str]:
    """Remove what dead processes left, and half-removed checkpoints; returns a sentence for each that will not go."""
    notices: list[str] = []
    # The file system's clock, not this machine's: the two may differ by minutes on network storage.
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
            notices.append(f"The leftover folder {path} could not be removed ({error.strerror}); it takes up space.")
    return notices


def _hidden_name(stem: str, kind: str) -> str:
    return f".{stem}.{_machine()}-{_process(os.getpid())}-{secrets.token_hex(4)}.{kind}"


def _is_dead(machine: str, process: str, path: Path, now_s: float) -> bool:
    if machine == _machine():
        return _process(int(process.partition("-")[0])) != process
    last_write_s = max(entry.stat(follow_symlinks=False).st_mtime for entry in (path, *path.iterdir()))
    return now_s - last_write_s > _SILENT_S


def _machine() -> str:
    """Names the set of processes that can be seen from here: a host, or one container on it."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{platform.node()} {namespace}".encode()).hexdigest()[:8]


def _process(pid: int) -> str | None:
    """Process id and start time, which together are never used twice while a machine is up; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:  # no /proc: the start time is unknown, the process id alone has to do
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return f"{pid}-0"
    # A zombie has stopped writing; its parent just has not asked how it ended.
    return None if fields[0] == b"Z" else f"{pid}-{int(fields[19])}"
