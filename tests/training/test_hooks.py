"""The hooks of a task: when they are called, with what, and where what they log goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stormo.errors import SettingError
from stormo.tasks.check import check_task
from stormo.tasks.task import Context
from stormo.telemetry.events import EventFile, read_events
from stormo.telemetry.folder import RunFolder
from stormo.telemetry.record import EpochDone, ValueLogged
from stormo.training.loop import train
from tests.tiny_task import Tiny
from tests.training.test_loop import prepare


class Watched(Tiny):
    """Keeps what its hooks get."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.seen: list[tuple[Any, ...]] = []
        self.validated: list[torch.Tensor] = []

    def on_train_start(self, context: Context) -> None:
        self.seen.append(("start", context.epoch, context.step))

    def on_step_end(self, context: Context) -> None:
        self.seen.append(("step", context.epoch, context.step))
        context.log("norm", torch.tensor(float(context.step)))
        context.model.eval()  # as one that draws samples

    def on_validation_end(self, context: Context) -> None:
        self.seen.append(("validation", context.epoch, context.step, *sorted(context.metrics)))
        self.validated.append(next(context.model.parameters()).detach().clone())

    def on_epoch_end(self, context: Context) -> None:
        self.seen.append(("epoch", context.epoch, context.step, *sorted(context.metrics)))
        context.log("gap", context.metrics["train_loss"] - context.metrics["loss"])

    def on_train_end(self, context: Context) -> None:
        self.seen.append(("end", context.epoch, context.step, *sorted(context.metrics)))


def test_they_are_called_in_order_and_leave_the_model_in_its_mode(tmp_path: Any) -> None:
    modes: list[bool] = []
    run = prepare(task_class=Watched, on_step=lambda run, step: modes.append(run.parts.strategy.module.training))
    train(run.training)
    task = run.parts.task
    assert isinstance(task, Watched)
    epochs = [
        [
            *(("step", epoch, step) for step in range(3 * epoch - 2, 3 * epoch + 1)),
            ("validation", epoch, 3 * epoch, "accuracy", "loss"),
            ("epoch", epoch, 3 * epoch, "accuracy", "loss", "train_loss"),
        ]
        for epoch in (1, 2)
    ]
    assert task.seen == [("start", 1, 0), *epochs[0], *epochs[1], ("end", 3, 6, "accuracy", "loss")]
    assert modes.count(True) >= 6
    logged = run.of(ValueLogged)
    assert [(one.step, one.value) for one in logged if one.name == "norm"] == [(step, step) for step in range(1, 7)]
    gaps = [one.value for one in logged if one.name == "gap"]
    assert gaps == [done.train_loss - done.validation["loss"] for done in run.of(EpochDone)]
    file = EventFile(RunFolder(tmp_path))
    file.write(logged[0])
    file.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event["event"], event["name"], event["value"], event["step"]) == ("value_logged", "norm", 1.0, 1)


def test_after_a_validation_the_model_still_has_the_averaged_weights() -> None:
    run = prepare({"dropout": 0.0}, task_class=Watched, ema=0.5)
    train(run.training)
    task, average = run.parts.task, run.parts.strategy.average
    assert isinstance(task, Watched)
    assert average is not None
    assert torch.equal(task.validated[-1], average.shards[0][1])
    assert not torch.equal(task.validated[-1], next(run.parts.strategy.module.parameters()))


def test_what_is_logged_has_a_name() -> None:
    run = prepare(task_class=Watched)
    with pytest.raises(SettingError, match=r"^log\(3\) was called, but names are letters, "):
        run.training._log(3, 1.0)  # type: ignore[arg-type]


def test_a_misspelt_hook_is_refused() -> None:
    wrong = type("Wrong", (Tiny,), {"on_epochs_end": lambda self, context: None})
    with pytest.raises(SettingError, match="a task has on_epoch_end, and nothing would use on_epochs_end"):
        check_task(wrong)
