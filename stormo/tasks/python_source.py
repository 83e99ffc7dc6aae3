"""A corpus that every machine has: the source files of Python's own standard library, split once and for all.

Whether a file is for training or for validation follows from its path alone, so it never moves from one part to the
other. This file imports no torch: the sizes of the corpus are asked for before any worker starts.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from stormo.errors import SettingError, pluralize

_ONE_IN = 20  # files of which one is for validation
# What is not the same on every machine with this release of Python: packages that were installed, tests and graphical
# programs (which many distributions leave out or pack apart), and what was written when this very Python was built.
_OTHER_FOLDERS = {
    *("site-packages", "dist-packages", "__pycache__", "lib-dynload", "test", "tests", "idle_test"),
    *("idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip"),
}
_OTHER_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
_BUILD_FOLDER = "config-"  # config-3.12-x86_64-linux-gnu


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The bytes of all files of a folder, in two parts."""

    train: bytes
    validation: bytes
    num_files: int
    origin: str  # in words

    @property
    def sha256(self) -> str:
        """Digest of both parts; two machines with the same one train on the same bytes."""
        digest = hashlib.sha256(self.train)
        digest.update(len(self.train).to_bytes(8, "little"))
        digest.update(self.validation)
        return digest.hexdigest()


def read_corpus(folder: Path | None = None) -> Corpus:
    """The standard library's sources, or every *.py and *.txt file of a folder."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    if folder is not None and not folder.is_dir():
        raise SettingError(f"--task.data-folder {folder} was set", "there is no such folder", "check the path")
    names = _library_files(root) if folder is None else _files(root, (".py", ".txt"), {"__pycache__"})
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for name in names:
        try:
            parts[is_validation(name)].append((root / name).read_bytes())
        except OSError as error:
            raise SettingError(
                f"the text of {root} is trained on",
                f"{name} cannot be read ({error.strerror})",
                "fix that file, or set --task.data-folder to another folder",
            ) from None
    train, validation = b"".join(parts[False]), b"".join(parts[True])
    if folder is None and not (train and validation):
        raise SettingError(
            "the sources of Python's standard library are trained on",
            f"there are none in {root} (*.py, {pluralize(len(names), 'file')} found): this Python was installed "
            "without them",
            "set --task.data-folder to any folder of *.py or *.txt files",
        )
    if not (train and validation):
        raise SettingError(
            f"--task.data-folder {root} was set",
            f"its *.py and *.txt files ({len(names)}) make {pluralize(len(train), 'byte')} for training and "
            f"{len(validation)} for validation (a digest of its path sends about one file in {_ONE_IN} there)",
            "set a folder with more files, or cut the large ones into smaller ones",
        )
    origin = f"Python {platform.python_version()}'s standard library" if folder is None else str(root)
    return Corpus(train=train, validation=validation, num_files=len(names), origin=origin)


def is_validation(name: str) -> bool:
    """Whether a file is for validation, by its path relative to the corpus, written with slashes."""
    return int.from_bytes(hashlib.sha256(f"validation/{name}".encode()).digest()[:8], "big") % _ONE_IN == 0


def _library_files(root: Path) -> list[str]:
    found = _files(root, (".py",), _OTHER_FOLDERS)
    return [name for name in found if not name.startswith((*_OTHER_FILES, _BUILD_FOLDER))]


def _files(root: Path, endings: tuple[str, ...], other_folders: set[str]) -> list[str]:
    """Paths relative to the root, with slashes, in the order of their letters."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in other_folders]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(endings)]
    return sorted(found)
