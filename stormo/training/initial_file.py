"""Looks at what `--init-from` names, without torch: a dry run does so too."""

from __future__ import annotations

import os
from pathlib import Path

import safetensors

from stormo.errors import SettingError

HINT = "name a safetensors file, a state dict of torch, or the folder of a run"
_LONGEST_NAME = 255  # bytes of a file's name


def initial_folders(source: str, runs_folder: str) -> tuple[Path, Path]:
    """Where a run or a checkpoint of that name may be."""
    return Path(source), Path(runs_folder) / source


def check_initial(source: str, runs_folder: str) -> None:
    """Refuse what is no file that can be read, and no run with a checkpoint."""
    said, path = f"--init-from {source} was set", Path(source)
    if not source or max(len(os.fsencode(part)) for part in path.parts or ("",)) > _LONGEST_NAME:
        raise SettingError(said, "there is no file or run of such a name", HINT)
    for folder in initial_folders(source, runs_folder):
        if (folder / "manifest.json").is_file() or any((*folder.glob("step-*"), *folder.glob("checkpoints/step-*"))):
            return
    if not path.is_file():
        what = "it has no checkpoint" if path.is_dir() else "there is no such file or run"
        raise SettingError(said, what, HINT)
    try:
        path.open("rb").close()
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, framework="np"):
                pass  # the header was read
    except (OSError, safetensors.SafetensorError) as error:
        raise SettingError(said, f"it cannot be read ({getattr(error, 'strerror', error)})", HINT) from error
