"""What there is to copy: the files, folders and links of a data set, with sizes and times.

A link that stays inside the data set is copied as a link. One that leads out of it is copied as what it leads to, since
the copy is to be read without the file system it came from.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stormo.errors import SettingError


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """One file, by its path inside the data set; that of a data set of one file is empty."""

    name: str
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A data set as it was when it was listed."""

    root: Path
    files: list[File] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)  # path inside the data set → what the link says

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def sha256(self) -> str:
        """Stands for the place, the names, the sizes and the times, not for the content."""
        digest = hashlib.sha256(os.fsencode(self.root.resolve()))
        for entry in self._entries():
            digest.update(b"\0\0" + os.fsencode(entry))
        return digest.hexdigest()

    def _entries(self) -> Iterator[str]:
        yield from (f"file\0{file.name}\0{file.num_bytes}\0{file.mtime_ns}" for file in self.files)
        yield from (f"folder\0{name}" for name in self.folders)
        yield from (f"link\0{name}\0{target}" for name, target in self.links.items())


def list_tree(source: Path, check: Callable[[], None] = lambda: None) -> Tree:
    """List a folder with all that is in it, or a single file; `check` is called for each, and ends it by raising."""
    tree = Tree(root=source)
    try:
        status = source.stat()
    except OSError as error:
        raise unreadable(source, source, error) from None
    if stat.S_ISDIR(status.st_mode):
        _list_folder(tree, source, "", {(status.st_dev, status.st_ino)}, check)
    else:
        _add(tree, source, "", status)
    return tree


def _list_folder(
    tree: Tree, folder: Path, inside: str, around: set[tuple[int, int]], check: Callable[[], None]
) -> None:
    try:
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda entry: os.fsencode(entry.name))
        for entry in entries:
            check()
            name = f"{inside}{entry.name}"
            if entry.is_symlink() and (target := _link_inside(tree.root, Path(entry.path))) is not None:
                tree.links[name] = target
                continue
            status = entry.stat()
            if not stat.S_ISDIR(status.st_mode):
                _add(tree, Path(entry.path), name, status)
                continue
            key = status.st_dev, status.st_ino
            if key in around:
                raise SettingError(
                    f"{tree.root} is to be copied to this node",
                    f"the link {entry.path} leads to a folder that it lies in",
                    "remove that link, or name a folder without it",
                )
            tree.folders.append(name)
            _list_folder(tree, Path(entry.path), f"{name}/", around | {key}, check)
    except OSError as error:
        raise unreadable(tree.root, Path(error.filename or folder), error) from None


def _link_inside(root: Path, link: Path) -> str | None:
    """What a link says that leads to something inside the data set, or nowhere; None for one that leads out of it."""
    target, top = os.readlink(link), os.path.realpath(root)  # noqa: PTH115 - as it is, a Path would tidy it
    real = os.path.realpath(link)
    if not os.path.lexists(real):
        return target
    here = os.path.realpath(link.parent)
    is_inside = all(path == top or path.startswith(f"{top.rstrip('/')}/") for path in (real, here))
    return os.path.relpath(real, here) if is_inside else None


def _add(tree: Tree, path: Path, name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SettingError(
            f"{tree.root} is to be copied to this node",
            f"{path} is neither a file nor a folder",
            "remove it, or name a folder without it",
        )
    tree.files.append(File(name=name, num_bytes=status.st_size, mtime_ns=status.st_mtime_ns))


def unreadable(root: Path, path: Path, error: OSError) -> SettingError:
    """What to say where something of a data set cannot be read."""
    return SettingError(
        f"{root} is to be copied to this node",
        f"{path} cannot be read there ({error.strerror or error})",
        "mend that, or leave staging out",
    )
