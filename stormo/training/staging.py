"""`--stage`: copies the data of a task to every node, and lets the task read it there.

The data is that of the option `data_folder`, or the folder that `fetch` returns. Each rank makes its task again with
the copy as `data_folder`; the settings of the run keep the original.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stormo.config.schema import Command
from stormo.data.staging.nodes import local_folder, stage_on_nodes
from stormo.data.staging.shelf import remove_unused
from stormo.errors import SettingError
from stormo.tasks.task import Task

if TYPE_CHECKING:
    from stormo.distributed.world import World

_OPTION = "data_folder"


def check(command: Command, task: Task) -> None:
    """Refuse, before anything starts, a staging that cannot work."""
    if command.stage is None:
        if command.keep_staged:
            raise SettingError("--keep-staged was set", "nothing is staged", "set --stage too")
        return
    if _OPTION not in {field.name for field in dataclasses.fields(task.options)}:
        raise SettingError(
            "--stage was set",
            f"task {task.name} has no option {_OPTION}, so it cannot be told to read a copy",
            f"give its Options a field {_OPTION}, or call stage() of stormo.World in a loop of your own",
        )
    if getattr(task.options, _OPTION) is None and type(task).fetch is Task.fetch:
        raise SettingError(
            "--stage was set",
            f"task {task.name} reads no folder as it is set",
            "set --task.data-folder, or leave --stage out",
        )
    local_folder(command.stage)


@contextlib.contextmanager
def staged_task(
    command: Command, task: Task, fetched: Path | None, world: World, stop: Callable[[], int]
) -> Iterator[tuple[Task, list[str]]]:
    """The task that reads this node's copy, and what to say of it; the last rank to leave removes the copy.

    Args:
        command: says whether and where to stage.
        task: as it is set.
        fetched: what `fetch` returned in the one process of each node that called it.
        world: all ranks, which enter together.
        stop: gives the signal that ends the job, or 0; all ranks raise `StoppedError` then.
    """
    if command.stage is None:
        yield task, []
        return
    source = getattr(task.options, _OPTION) or fetched
    if source is None and world.place.local_rank == 0:
        raise SettingError(
            "--stage was set",
            f"task {task.name} has no data folder and its fetch() returned none",
            "set --task.data-folder, or leave --stage out",
        )
    near = stage_on_nodes(world, source, local_folder(command.stage), keep=command.keep_staged, stop=stop)
    try:
        options = dataclasses.replace(task.options, **{_OPTION: str(near.path)})
        yield type(task)(options), [near.sentence] if near.sentence else []
    finally:
        near.hold.release()


@contextlib.contextmanager
def cleaned_up(command: Command) -> Iterator[None]:
    """For the process that starts the workers of a node: removes what they leave, however they end."""
    try:
        yield
    finally:
        if command.stage is not None:
            with contextlib.suppress(SettingError):  # the folder is gone, and what was in it
                remove_unused(local_folder(command.stage))
