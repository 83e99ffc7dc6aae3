"""Opens and locks the folder of a run for one process, and describes torch's environment."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import IO, Any

import torch

from stormo.config.schema import TrainConfig
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.system.files import open_own
from stormo.telemetry.folder import RunFolder
from stormo.telemetry.runs_folder import default_run_name, require_new_run

_NUM_TRIES = 5
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


def open_folder(config: TrainConfig) -> RunFolder:
    """The folder of a resumed run, or a new one with a free name."""
    run = config.run
    parent = Path(run.runs_folder)
    if run.resume is not None and run.run_name is not None:
        path = parent / run.run_name
        if not path.is_dir():
            _make(path)  # the run never began
        return RunFolder(path)
    name = run.run_name or default_run_name(config.task)
    for attempt in range(1, 1000):
        folder = parent / (name if attempt == 1 else f"{name}-{attempt}")
        if folder.is_dir() or not _make(folder):
            if run.run_name is not None:
                require_new_run(parent, name)
                return RunFolder(folder)  # its run was killed before it wrote anything; the lock keeps others out
            continue
        return RunFolder(folder)
    raise AssertionError("a thousand runs in one second")


def _make(folder: Path) -> bool:
    """Make a folder; False where another process was faster."""
    try:
        if not folder.parent.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)  # private: settings, command lines, weights
    except OSError as error:
        if isinstance(error, FileExistsError) and folder.is_dir():
            return False
        raise SettingError(
            f"--runs-folder {folder.parent} was set",
            f"{folder} cannot be made ({error.strerror})",
            "set another folder",
        ) from None
    return True


def lock_folder(folder: RunFolder) -> IO[bytes] | None:
    """Lock the run for this process, until it ends however it ends; None where the file system has no locks."""
    try:
        file = open_own(folder.lock, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        raise SettingError(
            f"{folder.path} was to hold the run",
            f"it cannot be written ({error.strerror})",
            "set another --runs-folder, or ask its owner",
        ) from None
    try:
        _flock(file)
    except BlockingIOError:
        file.close()
        raise SettingError(
            f"run {folder.name} was to be resumed",
            "another process is training it",
            "wait for its end, or stop it first",
        ) from None
    except OSError:
        file.close()
        return None
    return file


def _flock(file: IO[bytes]) -> None:
    for number in range(_NUM_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # `stormo runs` may hold it for a moment, to see whether the run is alive
            if number == _NUM_TRIES - 1:
                raise
            time.sleep(0.05)


def remove_unbegun(folder: RunFolder) -> None:
    """Remove what a new run that failed to start has written; other files stay."""
    shutil.rmtree(folder.nodes, ignore_errors=True)
    shutil.rmtree(folder.tensorboard, ignore_errors=True)
    with contextlib.suppress(OSError):
        for file in (folder.config, folder.environment, folder.events, folder.lock):
            file.unlink(missing_ok=True)
        folder.path.rmdir()


def torch_environment(world: World) -> dict[str, Any]:
    """Versions, threads and devices as torch reports them."""
    versions: dict[str, Any] = {
        "torch": torch.__version__,
        "world_size": world.size,
        "threads": torch.get_num_threads(),
    }
    if world.device.type == "cuda":
        versions |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
            "gpu": torch.cuda.get_device_name(world.device),
        }
    return versions
