"""A failure of one worker becomes that of all: nobody waits for one that has given up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from stormo.checkpoint.layout import CorruptCheckpointError
from stormo.checkpoint.reading import with_offer
from stormo.distributed.store import PeerFailedError
from stormo.distributed.world import World
from stormo.errors import EXIT_FAILURE, SettingError, StormoError


def raise_together(world: World, failure: Exception | None) -> None:
    """Raise on every worker what one of them hands in, in that one's words; all workers call it."""
    # One small exchange where all is well.
    if not world.max(torch.tensor([float(failure is not None)])).item():
        return
    told = None
    if failure is not None:
        told = [str(failure) or type(failure).__name__, getattr(failure, "exit_code", EXIT_FAILURE)]
    gathered = world.gather_json(told)
    first = next(([rank, *one] for rank, one in enumerate(gathered or []) if one is not None), None)
    rank, text, exit_code = world.share_json(first)
    if failure is not None and (rank == world.rank or not isinstance(failure, StormoError)):
        raise failure  # where it happened, with its traceback
    error = PeerFailedError(text)
    error.exit_code = exit_code
    raise error


@contextmanager
def read_together(world: World, path: Path) -> Iterator[None]:
    """Every worker reads a checkpoint in the body: what fails on one is raised by all, a bad file beside a good one."""
    failure: Exception | None = None
    try:
        yield
    except CorruptCheckpointError as error:
        failure = with_offer(error, path)
    except Exception as error:
        failure = error
    raise_together(world, failure)


def require_seen(world: World, folder: Path) -> None:
    """Raise on every worker where one of them does not see a folder; all workers call it."""
    failure = None
    if not folder.is_dir():
        failure = SettingError(
            f"{folder} was to be shared by all workers, each with its part of the model",
            f"rank {world.rank} on host {world.place.host} does not see it",
            "set --runs-folder to a folder that all nodes see",
        )
    raise_together(world, failure)
