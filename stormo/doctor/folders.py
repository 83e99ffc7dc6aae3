"""A folder that a job is to write to and that need not be there yet: what there is of it, and what is in its way."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def existing(folder: Path) -> Path:
    """The folder, or the nearest one around it that is there: what is made later lands on its file system."""
    for one in (folder, *folder.parents):
        with contextlib.suppress(OSError):  # what is around it may be closed to this user
            if one.is_dir():
                return one
    return Path("/")


def obstacle(folder: Path) -> Path | None:
    """What is in the way where a folder is to be made: a file, or a link that leads nowhere."""
    there = existing(folder)
    inner = next((one for one in (folder, *folder.parents) if one.parent == there and one != there), None)
    return inner if inner is not None and os.path.lexists(inner) else None
