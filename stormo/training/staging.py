"""`--stage`: copies the data of a task to every node, where the task reads it.

The data is in the option `data_folder`, or in the folder that `fetch` returns. Each rank makes its task again with the
copy as `data_folder`; the settings of the run keep the original.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stormo.config.schema import Command
from stormo.data.staging.node_cache import remove_unused
from stormo.data.staging.nodes import local_folder, stage_on_nodes
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
            f"task {task.name} has no option {_OPTION}, so it cannot read a copy",
            f"give its Options a field {_OPTION}, or call stage() of stormo.World in a loop of your own",
        )
    if getattr(task.options, _OPTION) is None and type(task).fetch is Task.fetch:
        raise SettingError(
            "--stage was set",
            f"task {task.name} reads no folder with these options",
            "set --task.data-folder, or leave --stage out",
        )
    local_folder(command.stage)


@contextlib.contextmanager
def staged_task(
    command: Command, task: Task, fetched: Path | None, world: World, stop: Callable[[], int]
) -> Iterator[tuple[Task, list[str]]]:
    """The task that reads this node's copy, and what to say of it; the last rank to leave removes the copy.

    All ranks enter together. `fetched` is what `fetch` returned in the one process of each node that called it. If
    `stop` gives a signal, all ranks raise `StoppedError`.
    """
    if command.stage is None:
        yield task, []
        return
    source = getattr(task.options, _OPTION) or fetched
    if source is None and world.rank_info.local_rank == 0:
        raise SettingError(
            "--stage was set",
            f"task {task.name} has no data folder and its fetch() returned none",
            "set --task.data-folder, or leave --stage out",
        )
    copy = stage_on_nodes(world, source, local_folder(command.stage), keep=command.keep_staged, stop=stop)
    try:
        options = dataclasses.replace(task.options, **{_OPTION: str(copy.path)})
        yield type(task)(options), [copy.sentence] if copy.sentence else []
    finally:
        copy.lease.release()


@contextlib.contextmanager
def cleaned_up(command: Command) -> Iterator[None]:
    """Remove the staged data that the workers of this node leave, however they end."""
    try:
        yield
    finally:
        if command.stage is not None:
            with contextlib.suppress(SettingError):  # the folder is gone
                remove_unused(local_folder(command.stage))
