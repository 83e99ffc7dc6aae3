"""Who may make, use and remove a copy: two locks of the kernel guard each, so that a killed process never holds one.

`turn` is for whoever makes, checks or removes it; `users` is shared by everybody who reads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stormo.errors import SettingError

KEEP = "keep"  # a file that says that the copy stays
MANIFEST = "manifest.json"  # written last; without it there is no copy
ROOT = "stormo-staged-"  # starts the name of the folder of all copies of a user
REMOVED = ".removed-"  # starts the name of what is being removed
_TURN, _USERS = "turn", "users"
_LOOK_AGAIN_S = 0.05
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Hold:
    """Keeps others from removing a copy; letting go of the last hold removes it, unless it is to be kept."""

    def __init__(self, entry: Path) -> None:
        self._entry = entry
        self._descriptor: int | None = os.open(entry / _USERS, _FLAGS, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def release(self) -> None:
        """Let go; once is enough."""
        # Whoever makes or checks the copy in a long turn of its own holds it too, and is not waited for.
        if self._unlock() and not _is_held(self._entry):
            with turn(self._entry) as is_there:
                if is_there and not (self._entry / KEEP).exists():
                    remove_if_unused(self._entry)

    def give_up(self) -> None:
        """Let go of a copy that could not be made, in one's turn."""
        self._unlock()
        if not (self._entry / MANIFEST).exists():
            remove_if_unused(self._entry)

    def _unlock(self) -> bool:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # for a process that was forked with it too
            os.close(descriptor)
        return descriptor is not None


@contextlib.contextmanager
def turn(
    entry: Path, *, make: bool = False, waits: bool = True, check: Callable[[], None] = lambda: None
) -> Iterator[bool]:
    """Be the only one who makes, checks or removes a copy; False where there is none, or it is another's turn.

    `check` is called while it is another's, which may copy for an hour, and ends the wait by raising.
    """
    descriptor = None
    while descriptor is None:
        if make:
            _make_root(entry.parent)
            with contextlib.suppress(FileNotFoundError):
                entry.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(entry / _TURN, _FLAGS, 0o600)
            while not _is_taken(descriptor, raises=not waits):
                check()
                time.sleep(_LOOK_AGAIN_S)
            if os.fstat(descriptor).st_ino != (entry / _TURN).stat().st_ino:
                raise FileNotFoundError(entry)
        except (FileNotFoundError, NotADirectoryError, BlockingIOError) as error:  # removed while this one waited
            if descriptor is not None:
                os.close(descriptor)
                descriptor = None
            if not make or isinstance(error, NotADirectoryError):
                yield False
                return
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            raise
    try:
        yield True
    finally:
        os.close(descriptor)


def _is_taken(descriptor: int, *, raises: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if raises:
            raise
        return False
    return True


def remove_if_unused(entry: Path) -> None:
    """Remove a copy, in one's turn, where nobody holds it."""
    assert entry.parent.name.startswith(ROOT), f"{entry} is no copy"
    assert is_own_folder(entry), f"{entry} is no folder of this user's"
    descriptor = os.open(entry / _USERS, _FLAGS, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        aside = entry.with_name(f"{REMOVED}{secrets.token_hex(6)}")
        entry.rename(aside)  # at once for all who wait for their turn
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):
        entry.parent.rmdir()  # where it was the last


def _is_held(entry: Path) -> bool:
    try:
        descriptor = os.open(entry / _USERS, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # removed
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_own_folder(path: Path) -> bool:
    """Whether it is a folder of this user's, and no link to one."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _make_root(root: Path) -> None:
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        is_own = is_own_folder(root)
    except OSError as error:
        raise SettingError(
            f"data is to be copied to {root.parent}",
            f"{root} cannot be made there ({error.strerror})",
            "name a folder of the node's own storage with --stage FOLDER",
        ) from None
    if not is_own:
        raise SettingError(
            f"data is to be copied to {root.parent}",
            f"{root} is there and is not a folder of this user",
            "name another folder with --stage FOLDER",
        )
