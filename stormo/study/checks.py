"""Whether `stormo train` would take every run of a study, asked before the first one is trained."""

from __future__ import annotations

from stormo.config.plan import Facts, resolve
from stormo.errors import EXIT_USAGE, SettingError, StormoError, counted
from stormo.study.cells import Cell
from stormo.study.settings import Study
from stormo.study.study import runs_to_do
from stormo.tasks.check import check_task
from stormo.training.settings import checked, read_settings


class RefusedRunError(StormoError):
    """What some runs of a study would be refused with, and which."""

    exit_code = EXIT_USAGE


def check_runs(study: Study) -> None:
    """Refuse a study of which `stormo train` would refuse a run that is not done yet, in its words."""
    alike = {(cell.mode, cell.workers, cell.num_nodes): cell for cell in runs_to_do(study)}  # whatever the repeat
    facts: Facts | None = None
    refused: dict[Cell, SettingError] = {}
    for cell in alike.values():
        try:
            config, task_class = read_settings(study.arguments(cell))
            check_task(task_class)
            layout, task = checked(config, task_class)
            if not task.needs_data_for_facts():
                facts = facts or task.facts()
                resolve(config, layout, facts)
        except SettingError as error:
            refused[cell] = error
    if not refused:
        return
    as_told = [cell for cell in alike.values() if cell.workers > 1 or not study.lone_note]
    if len({str(error) for error in refused.values()}) == 1 and refused.keys() >= {*as_told}:
        raise next(iter(refused.values()))
    fewest = min(refused, key=lambda cell: cell.workers)
    raise RefusedRunError(f"{_words(study, fewest)}: {refused[fewest]}")


def _words(study: Study, cell: Cell) -> str:
    mode = f"{cell.mode}, " if len(study.modes) > 1 and cell.mode != "both" else ""
    nodes = f" on {counted(cell.num_nodes, 'node')}" if cell.num_nodes > 1 else ""
    return f"{mode}{counted(cell.workers, 'worker')}{nodes}"
