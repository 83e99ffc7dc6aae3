"""A folder for temporary files that is locked while its process lives, so that the next one can tell what a killed one
has left, and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_NAME, _NEW = "stormo-agent-", "stormo-new-agent-"  # the second until it is locked


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A folder that is gone afterwards or, where this process is killed, when this user's next one starts."""
    _remove_left(Path(tempfile.gettempdir()))
    new = Path(tempfile.mkdtemp(prefix=_NEW))
    descriptor = os.open(new, os.O_RDONLY | os.O_CLOEXEC)
    folder = new.with_name(new.name.replace(_NEW, _NAME))
    try:
        with contextlib.suppress(OSError):  # a file system without such locks, where none is ever taken for left
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        new.rename(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_left(place: Path) -> None:
    """Remove the folders of this user whose process is gone; the kernel has let go of its lock."""
    for folder in place.glob(f"{_NAME}*"):
        with contextlib.suppress(OSError):  # not a folder, another user's, or locked
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
