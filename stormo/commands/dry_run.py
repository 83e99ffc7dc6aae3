"""What `stormo train --dry-run` shows: every effective value; learning rate and batch of every step as a curve."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from stormo.config.plan import Plan, with_layers, with_task_optimizer
from stormo.config.schema import TrainConfig
from stormo.errors import SettingError, pluralize, require_package
from stormo.optim.schedule import make_schedule
from stormo.tasks.check import has_several_optimizers
from stormo.tasks.task import Task
from stormo.telemetry.text import encodable

_COLUMNS, _ROWS = 72, 10
_MAX_POINTS = 20_000  # of a drawing; a table has every step
_BLOCKS = " ▁▂▃▄▅▆▇█"
_OWN = ", times the learning rate of the task's own optimizer over --base-lr"
_KINDS = (".png", ".svg", ".csv")


@dataclass(frozen=True, slots=True)
class Point:
    """One planned optimizer step."""

    step: int
    epoch: float  # how many are done when it begins
    learning_rate: float
    global_batch_size: int


def show(config: TrainConfig, plan: Plan, task: Task, out: TextIO) -> None:
    """Print the plan and, if asked, the curve."""
    has_own = type(task).optimizer is not Task.optimizer or has_several_optimizers(type(task))
    facts, shown = plan.facts, with_task_optimizer(config, plan) if has_own else plan
    shown = with_layers(
        config,
        shown,
        has_convolutions=facts.has_convolutions,
        has_batch_norms=facts.has_batch_norms,
        loss_reduction=task.loss_reduction,
    )
    for line in shown.lines():
        print(line, file=out)
    asked = config.command.plot_schedule
    if asked is None:
        return
    points = list(planned_steps(config, plan, max_points=None if asked.endswith(".csv") else _MAX_POINTS))
    if asked:
        try:
            _write(Path(asked), points)
        except OSError as error:
            raise SettingError(
                f"--plot-schedule {asked} was set", f"it cannot be written ({error.strerror})", "name another file"
            ) from None
        print(f"\n{pluralize(plan.total_steps, 'step')} drawn in {asked}{_OWN * has_own}", file=out)
        return
    plain = encodable(_BLOCKS, out) != _BLOCKS
    values = {"learning rate": [point.learning_rate for point in points]}
    if len(plan.stages) > 1:
        values["global batch"] = [float(point.global_batch_size) for point in points]
    for name, curve in values.items():
        print(f"\n{name}{_OWN * has_own}", file=out)
        for line in draw(curve, [point.epoch for point in points], plan.epochs, plain=plain):
            print(line, file=out)


def check(config: TrainConfig) -> None:
    """Refuse a drawing that cannot be made, before anything starts."""
    asked = config.command.plot_schedule
    if asked is None:
        return
    if not config.command.dry_run:
        raise SettingError(
            "--plot-schedule was set without --dry-run", "training does not draw it", "set --dry-run too"
        )
    path = Path(asked)
    if asked and path.suffix not in _KINDS:
        raise SettingError(
            f"--plot-schedule {asked} was set",
            f"its ending is none of {', '.join(_KINDS)}",
            "name a file with one of them, or none to see the curve here",
        )
    if path.suffix in (".png", ".svg"):
        require_package("matplotlib", f"--plot-schedule {asked}", "plot")
    if asked and not path.parent.is_dir():
        raise SettingError(f"--plot-schedule {asked} was set", f"there is no folder {path.parent}", "name another one")


def planned_steps(config: TrainConfig, plan: Plan, max_points: int | None = None) -> Iterator[Point]:
    """Every step in order, or about `max_points` of them, evenly spaced."""
    schedule = make_schedule(config, plan)
    stride = 1 if max_points is None else max(1, plan.total_steps // max_points)
    for step in range(0, plan.total_steps, stride):
        stage = next(stage for stage in reversed(plan.stages) if stage.first_step <= step)
        epochs, steps = divmod(step - stage.first_step, stage.steps_per_epoch)
        epoch, position = stage.first_epoch + epochs, steps * stage.global_batch_size
        done = epoch - 1 + position / plan.facts.num_train
        yield Point(step, done, schedule(plan.schedule_step(epoch, position)), stage.global_batch_size)


def draw(values: Sequence[float], at: Sequence[float], end: float, *, plain: bool = False) -> list[str]:
    """A curve as text, from 0 to its peak: the values at positions from 0 to `end`, averaged in columns."""
    peak = max(values)
    columns: list[list[float]] = [[] for _ in range(_COLUMNS)]
    for value, position in zip(values, at, strict=True):
        columns[min(_COLUMNS - 1, int(position / end * _COLUMNS))].append(value)
    heights, last = [], 0.0
    for column in columns:
        last = sum(column) / len(column) if column else last  # there may be fewer steps than columns
        heights.append(last / peak * _ROWS if peak else 0.0)
    label, line = len(f"{peak:g}"), "|" if plain else "│"
    lines = []
    for row in range(_ROWS - 1, -1, -1):
        name = f"{peak:g}" if row == _ROWS - 1 else "0" if row == 0 else ""
        cells = (min(max(height - row, 0.0), 1.0) for height in heights)
        bars = "".join("#" if plain and cell >= 0.5 else " " if plain else _BLOCKS[round(8 * cell)] for cell in cells)
        lines.append(f"{name:>{label}} {line}{bars}".rstrip())
    axis = f"{'':{label}} epoch 0"
    return [*lines, f"{axis}{end:>{label + 2 + _COLUMNS - len(axis)}g}"]


def _write(path: Path, points: Sequence[Point]) -> None:
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["step", "epoch", "learning_rate", "global_batch_size"])
            writer.writerows((p.step, f"{p.epoch:.6g}", repr(p.learning_rate), p.global_batch_size) for p in points)
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    rate = figure.add_subplot()
    epochs = [point.epoch for point in points]
    rate.plot(epochs, [point.learning_rate for point in points], color="C0")
    rate.set(xlabel="epoch", ylabel="learning rate", ylim=(0, None))
    if len({point.global_batch_size for point in points}) > 1:
        batch = rate.twinx()
        batch.step(epochs, [point.global_batch_size for point in points], color="C1", where="post", linestyle="--")
        batch.set(ylabel="global batch (dashed)", ylim=(0, None))
    figure.savefig(path)
