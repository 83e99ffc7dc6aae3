"""A run in Python: its result, its history, its model, and how it is resumed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from stormo.api.process import given_settings, refuse_in_worker, run_command
from stormo.commands.trained_run import find_checkpoint
from stormo.config.options import as_flags
from stormo.config.schema import Run as RunSection
from stormo.config.schema import TrainConfig
from stormo.config.toml import read_toml
from stormo.errors import SettingError, require_package
from stormo.tasks.find import TASKS
from stormo.telemetry.events import current_events, read_events
from stormo.telemetry.folder import RunFolder, read_summary
from stormo.telemetry.runs_folder import find_run, overview
from stormo.training.resume import require_own
from stormo.training.settings import read_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

    from stormo.api.keywords import TrainSettings

CELL_FILE = "cell_task.py"  # in the run's folder: the code of a task that notebook cells define


def open_run(name_or_folder: str | Path, *, runs_folder: str | Path = RunSection.runs_folder) -> Run:
    """A run by its name in the folder of all runs, or by its own folder."""
    return Run(find_run(Path(runs_folder), str(name_or_folder)))


class Run:
    """One run, as its folder describes it; `stormo.train` and `stormo.open_run` give it."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = RunFolder(folder.path.resolve())  # a notebook may change its folder

    def __repr__(self) -> str:
        return f"<stormo run {self.name}: {self.state}>"

    @property
    def name(self) -> str:
        """The name of the run."""
        return self._folder.name

    @property
    def folder(self) -> Path:
        """The folder of the run; docs/run-folder.md lists its files."""
        return self._folder.path

    @property
    def state(self) -> str:
        """One of running, done, stopped, diverged, failed, interrupted or unreadable."""
        return overview(self._folder, now_unix_s=time.time()).state

    @property
    def summary(self) -> dict[str, Any]:
        """The result, with the keys of docs/run-folder.md; empty while the run has not ended."""
        return read_summary(self._folder) or {}

    def history(self) -> dict[str, list[Any]]:
        """One list for each figure, with one value for each epoch: pandas.DataFrame(run.history()) is a table."""
        events = current_events(read_events(self._folder.events))
        rows = [_figures(event) for event in events if event["event"] == "epoch_done"]
        names = list(dict.fromkeys(name for row in rows for name in row))
        return {name: [row.get(name) for row in rows] for name in names}

    def plot(self) -> Figure:
        """Losses, and the other validation metrics, over the epochs, as a figure of matplotlib."""
        require_package("matplotlib", "run.plot()", "plot")
        from matplotlib import pyplot

        columns = self.history()
        if not columns:
            raise SettingError(f"a plot of run {self.name} was asked for", "no epoch of it has ended", "train it first")
        losses = [name for name in columns if name in ("train_loss", "validation_loss")]
        no_metrics = (*losses, "validation_time_s")
        others = [name for name in columns if name.startswith("validation_") and name not in no_metrics]
        groups = [group for group in (losses, others) if group]
        figure, plots = pyplot.subplots(1, max(len(groups), 1), squeeze=False, layout="constrained")
        for group, axes in zip(groups, plots[0], strict=True):
            for name in group:
                values = [float("nan") if value is None else value for value in columns[name]]
                axes.plot(columns["epoch"], values, marker="o", label=name.replace("_", " "))
            axes.set_xlabel("epoch")
            axes.legend()
        pyplot.close(figure)  # a notebook would show it twice
        return figure

    def report(self, file: str | Path | None = None) -> Path:
        """Write the HTML page of the run, report.html in its folder or the given file, and return its path."""
        from stormo.report.command import write_page
        from stormo.report.history import read_history
        from stormo.report.page import check_plotly, make_document, make_page

        check_plotly()
        path = self.folder / "report.html" if file is None else Path(file)
        page = make_page(make_document([read_history(self._folder)]))
        write_page(path, page, f"the page was to be {path}", "name another file: run.report(FILE)")
        return path

    def resume(self, **settings: Unpack[TrainSettings]) -> Run:
        """Resume the run, with these settings changed, as `stormo train --resume` does."""
        refuse_in_worker("run.resume()")
        given = given_settings(settings)
        for key in {"run_name", "runs_folder", "resume"} & given.keys():
            raise SettingError(f"{key} was set", f"run {self.name} is resumed in its folder", "leave it out")
        run_command("train", [*self._own_task(), "--resume", str(self.folder), *as_flags(given)])
        return self

    def load_model(self, *, best: bool = False) -> nn.Module:
        """The model with the last weights or those of the best epoch, in evaluation mode, on the CPU."""
        from stormo.training.trained_model import make_trained, read_weights  # imports torch

        _, path = find_checkpoint(str(self.folder), self.folder.parent, is_best=best, step=None)
        config, task_class = read_settings([*self._own_task(), "--config", str(self._folder.config)])
        return make_trained(task_class(config.task_options), read_weights(path)[1], str(path), config.speed.precision)

    def _own_task(self) -> list[str]:
        """The task, where its code is in the run's folder, wherever that is now; somebody else's is refused."""
        named = read_toml(self._folder.config, f"{self._folder.config} is of the run {self.name}").get("task")
        task = named if isinstance(named, str) else TrainConfig.task
        place, _, name = task.partition(":")
        moved = self.folder / CELL_FILE
        task = f"{moved}:{name}" if Path(place).name == CELL_FILE and moved.is_file() else task
        require_own(self._folder, task, is_built_in=task in TASKS)
        return [task]


def _figures(event: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of an epoch; those of the validation have its name in front."""
    kept = {key: value for key, value in event.items() if value is None or isinstance(value, int | float | str)}
    kept.pop("event")
    return kept | {f"validation_{key}": value for key, value in (event.get("validation") or {}).items()}
