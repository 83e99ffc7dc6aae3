"""The copies of data sets on a node: each is made once, leased by all who use it, and removed by the last of them."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stormo.data.staging.copying import Check, File, StoppedError, Tree, copy_files, is_whole, list_tree
from stormo.errors import SettingError, full_disk
from stormo.system.files import MAX_RECORDS_BYTES, BadFileError, Fields, read_object
from stormo.telemetry.text import format_bytes

_CONTENT, _PARTIAL = "content", "partial"
_MANIFEST = Fields({"source": str, "boot": str, "files": list[Any]})
_TELL_BYTES = 1_000_000_000  # from here on a message is printed first


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A whole copy, with a lease on it."""

    path: Path
    entry: Path
    num_bytes: int
    copied_bytes: int  # of these, now
    seconds: float
    lease: Lease


def stage(
    source: Path,
    folder: Path,
    *,
    keep: bool = False,
    tell: Callable[[str], None] = lambda _: None,
    stop: Callable[[], int] = lambda: 0,
) -> Staged:
    """Copy a folder or a file into a folder of this node, unless a whole copy is there.

    Args:
        source: what is copied.
        folder: of this node.
        keep: leave the copy when nobody uses it any more.
        tell: is given a sentence when there is something to wait for.
        stop: gives the signal that ends the job, or 0.
    """

    def check() -> None:
        if number := stop():
            raise StoppedError(number)

    began_s = time.monotonic()
    source = source.expanduser().absolute()
    tree = list_tree(source, check)
    _check_outside(source, folder)
    root = root_of(folder)
    entry = root / f"{source.name or 'root'}-{tree.sha256[:16]}"
    with entry_lock(entry, make=True, check=check):
        lease = Lease(entry)
        try:
            copied_bytes = _complete(tree, entry, tell, check)
            if keep:
                (entry / KEEP).touch()
        except BaseException as error:
            lease.give_up()
            if not isinstance(error, OSError):
                raise
            why = f"that failed ({error.strerror or error})"
            if full_disk(error) is not None:
                why = f"no room was left there after a part of {format_bytes(tree.num_bytes)}"
            instead = "make room, or name a larger folder" if full_disk(error) is not None else "name another folder"
            raise SettingError(f"{source} is to be copied to {folder}", why, f"{instead} with --stage FOLDER") from None
    seconds = time.monotonic() - began_s
    path = _content(entry, tree.root)
    return Staged(
        path=path, entry=entry, num_bytes=tree.num_bytes, copied_bytes=copied_bytes, seconds=seconds, lease=lease
    )


def lease_copy(folder: Path, name: str) -> tuple[Path, Lease]:
    """The copy of this name that another worker of this node has made, and a lease on it; only one of this user."""
    root = root_of(folder)
    entry = root / name
    manifest = None
    if entry.parent == root and entry.name == name and is_own_folder(root) and is_own_folder(entry):
        manifest = _read_manifest(entry)
    if manifest is None:
        raise SettingError(
            f"data was staged to {folder} by the first worker of this node",
            f"there is no copy {name!r} of this user's in {root}",
            "let all workers of a node have the same --stage FOLDER, or the same TMPDIR",
        )
    return _content(entry, Path(manifest["source"])), Lease(entry)


def root_of(folder: Path) -> Path:
    """Where the copies of this user lie in a folder that others may write to as well."""
    return folder.expanduser().absolute() / f"{ROOT}{os.geteuid()}"


def remove_unused(folder: Path, *, of_source: Path | None = None, but: Path | None = None) -> None:
    """Remove the copies without a lease, as killed jobs leave them; not those that are kept.

    Args:
        folder: that of the staging.
        of_source: kept copies of it are outdated, and go too.
        but: the one copy that stays.
    """
    root = root_of(folder)
    if not is_own_folder(root):  # none, or somebody else's
        return
    with contextlib.suppress(OSError):
        for entry in list(root.iterdir()):
            if entry.name.startswith(REMOVED):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry != but and is_own_folder(entry):
                with entry_lock(entry, waits=False) as is_mine:
                    is_outdated = is_mine and (_read_manifest(entry) or {}).get("source") == str(of_source)
                    if is_mine and (is_outdated or not (entry / KEEP).exists()):
                        remove_if_unused(entry)
        root.rmdir()  # where nothing is left


def _complete(tree: Tree, entry: Path, tell: Callable[[str], None], check: Check) -> int:
    """Make the copy whole; how many bytes were copied for that."""
    content = _content(entry, tree.root)
    manifest = _read_manifest(entry)
    partial = entry / _PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    if manifest is None:
        shutil.rmtree(content.parent, ignore_errors=True)
    # After a restart of the machine, what had not been written to its disk is gone, whatever the sizes say.
    elif manifest["boot"] == _boot() and is_whole(content, manifest["files"], check) and _has_names(tree, content):
        return 0
    remove_unused(entry.parent.parent, of_source=tree.root, but=entry)
    _check_room(tree, entry)
    if tree.num_bytes >= _TELL_BYTES:
        tell(f"copying {format_bytes(tree.num_bytes)} of {tree.root} to {content}")
    partial.mkdir()
    content.parent.mkdir(exist_ok=True)
    _make_names(tree, content)
    files = [dataclasses.asdict(file) for file in copy_files(tree, content, partial, check)]
    partial.rmdir()
    written = {"source": str(tree.root), "boot": _boot(), "files": files}
    (entry / f"{MANIFEST}.new").write_text(json.dumps(written), encoding="utf-8")
    (entry / f"{MANIFEST}.new").replace(entry / MANIFEST)
    return tree.num_bytes


def _make_names(tree: Tree, content: Path) -> None:
    if tree.root.is_dir():
        content.mkdir(exist_ok=True)
    for name in tree.folders:
        (content / name).mkdir(exist_ok=True)
    for name, target in tree.links.items():
        (content / name).unlink(missing_ok=True)
        (content / name).symlink_to(target)


def _has_names(tree: Tree, content: Path) -> bool:
    folders = all((content / name).is_dir() for name in tree.folders)
    return folders and all((content / name).is_symlink() for name in tree.links)


def _content(entry: Path, source: Path) -> Path:
    """The copy under the name of the source, as endings of files mean something."""
    return entry / _CONTENT / (source.name or "root")


def _read_manifest(entry: Path) -> dict[str, Any] | None:
    """What a copy holds; None where there is none that is whole, as after a loss of power."""
    try:
        manifest = read_object(entry / MANIFEST, _MANIFEST, max_bytes=MAX_RECORDS_BYTES)
        files = [File(**file) for file in manifest["files"]]
    except (BadFileError, FileNotFoundError, KeyError, TypeError):  # TypeError: of another release
        return None
    return {"source": str(manifest.get("source")), "boot": manifest.get("boot"), "files": files}


def _boot() -> str:
    """Changes when the machine is started again, after which what it had not yet written to disk is gone."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return secrets.token_hex(8)  # not known: then every copy counts as old


def _check_outside(source: Path, folder: Path) -> None:
    inner, outer = folder.expanduser().resolve(), source.resolve()
    if outer == inner or outer in inner.parents:
        raise SettingError(
            f"{source} is to be copied to {folder}", "that lies inside it", "name a folder of the node's own storage"
        )


def _check_room(tree: Tree, entry: Path) -> None:
    status = os.statvfs(entry)
    free, needed = status.f_bavail * status.f_frsize, tree.num_bytes
    if needed > free:
        raise SettingError(
            f"{tree.root} is to be copied to {entry.parent.parent}",
            f"it needs {format_bytes(needed)} and there {'is' if free == 1 else 'are'} {format_bytes(free)} free",
            "name a larger folder with --stage FOLDER, or leave staging out",
        )


KEEP = "keep"  # a file that says that the copy stays
MANIFEST = "manifest.json"  # written last; without it there is no copy
ROOT = "stormo-staged-"  # starts the name of the folder of all copies of a user
REMOVED = ".removed-"  # starts the name of what is being removed
_LOCK, _USERS = "turn", "users"
_LOOK_AGAIN_S = 0.05
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Lease:
    """Keeps others from removing a copy; the release of the last lease removes it, unless it is to be kept."""

    def __init__(self, entry: Path) -> None:
        self._entry = entry
        self._descriptor: int | None = os.open(entry / _USERS, _FLAGS, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def release(self) -> None:
        """Release it; a second call does nothing."""
        # Whoever holds the lock to make or check the copy has a lease too, and is not waited for.
        if self._unlock() and not _is_leased(self._entry):
            with entry_lock(self._entry) as is_there:
                if is_there and not (self._entry / KEEP).exists():
                    remove_if_unused(self._entry)

    def give_up(self) -> None:
        """Release a copy that could not be made; the caller holds its lock."""
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
def entry_lock(
    entry: Path, *, make: bool = False, waits: bool = True, check: Callable[[], None] = lambda: None
) -> Iterator[bool]:
    """Locks a copy to make, check or remove it; False where there is none, or another process has the lock.

    `check` is called while another has it, which may copy for an hour, and ends the wait by raising.
    """
    descriptor = None
    while descriptor is None:
        if make:
            _make_root(entry.parent)
            with contextlib.suppress(FileNotFoundError):
                entry.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(entry / _LOCK, _FLAGS, 0o600)
            while not _is_taken(descriptor, raises=not waits):
                check()
                time.sleep(_LOOK_AGAIN_S)
            if os.fstat(descriptor).st_ino != (entry / _LOCK).stat().st_ino:
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
    """Remove a copy that nobody has a lease on; the caller holds its lock."""
    assert entry.parent.name.startswith(ROOT), f"{entry} is no copy"
    assert is_own_folder(entry), f"{entry} is no folder of this user's"
    descriptor = os.open(entry / _USERS, _FLAGS, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        aside = entry.with_name(f"{REMOVED}{secrets.token_hex(6)}")
        entry.rename(aside)  # at once for all who wait for the lock
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):
        entry.parent.rmdir()  # where it was the last


def _is_leased(entry: Path) -> bool:
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
