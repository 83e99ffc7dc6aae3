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
from stormo.telemetry.runs_folder import make_run_folder, new_run_folder

_NUM_TRIES = 5
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


def open_folder(config: TrainConfig) -> RunFolder:
    """The folder of a resumed run, or a new one with a free name."""
    run = config.run
    parent = Path(run.runs_folder)
    if run.resume is not None and run.run_name is not None:
        path = parent / run.run_name
        if not path.is_dir():
            make_run_folder(path)  # the run never began
        return RunFolder(path)
    return new_run_folder(parent, run.run_name, config.task)


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
