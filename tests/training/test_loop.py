"""A whole small training in one process: the real loop, model and data, with a fake record, save and signal."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from stormo.distributed.world import World
from stormo.energy.node_recorder import NoNodeRecorder
from stormo.launch import alone
from stormo.optim.schedule import make_schedule
from stormo.profiling.window import ProfileWindow
from stormo.system.signals import StopFlag
from stormo.tasks.task import Task
from stormo.telemetry.record import EpochDone, Notice, Record, StepDone, ValidationProgress
from stormo.training import context
from stormo.training.clock import TrainingClock
from stormo.training.context import RunContext
from stormo.training.loop import Outcome, train
from stormo.training.validation import Validation
from tests.energy.test_node_recorder import Desk
from tests.tiny_run import Parts, build
from tests.tiny_task import Tiny

Ranks = Callable[..., list[Any]]


@dataclass
class Run:
    """A training with notes of everything it tells."""

    parts: Parts
    training: RunContext
    flag: StopFlag = field(default_factory=StopFlag)
    records: list[Record] = field(default_factory=list)
    saves: list[tuple[int, int, int, float | None]] = field(default_factory=list)  # step, epoch, position, metric
    signs: list[int] = field(default_factory=list)

    def of(self, kind: type[Any]) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]


def prepare(
    task_options: dict[str, Any] | None = None,
    *,
    task_class: type[Task] = Tiny,
    world: World | None = None,
    on_save: Callable[[Run], None] = lambda run: None,
    on_record: Callable[[Run, Record], None] = lambda run, record: None,
    on_step: Callable[[Run, int], None] = lambda run, step: None,
    **flags: Any,
) -> Run:
    """A run of 40 samples in batches of 16 (16, 16, 8) for two epochs, validated on 30 samples in batches of 10."""
    flags = {"global_batch_size": 16, "epochs": 2, "target_accuracy": 1.1, "validation_batch_size": 10, **flags}
    options = {"num_train": 40, "num_validation": 30, **(task_options or {})}
    parts = build(world or World(alone(), torch.device("cpu")), options, task_class=task_class, **flags)
    run: Run

    def record(one: Record) -> None:
        run.records.append(one)
        on_record(run, one)

    def save(metric: float | None) -> None:
        progress = parts.state.progress
        run.saves.append((progress.step, progress.epoch, progress.position, metric))
        on_save(run)

    def heartbeat(step: int) -> None:
        run.signs.append(step)
        on_step(run, step)

    training = context_of(parts, record=record, save=save, heartbeat=heartbeat)
    run = Run(parts=parts, training=training, flag=training.stop_flag)
    return run


def context_of(parts: Parts, **changes: Any) -> RunContext:
    """What the loop works with: nothing is recorded or saved, unless it is given here."""
    batch_size = parts.config.speed.validation_batch_size
    given: dict[str, Any] = {
        "validation": Validation(parts.task, parts.task.validation_data(), batch_size, parts.world),
        "schedule": make_schedule(parts.config, parts.plan),
        "stop_flag": StopFlag(),
        "record": lambda record: None,
        "save": lambda metric: None,
        "heartbeat": lambda step: None,
        "node_recorder": NoNodeRecorder(),
        "profile": ProfileWindow(None, parts.world, None),
        **changes,
    }
    return RunContext(
        world=parts.world, plan=parts.plan, config=parts.config, state=parts.state, loader=parts.loader, **given
    )


class Recording(Tiny):
    """Keeps the loss and the number of samples of every micro-batch."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.losses: list[tuple[float, int]] = []

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        self.losses.append((float(loss.detach()), len(batch[0])))
        return loss


def losses_of(run: Run) -> list[tuple[float, int]]:
    task = run.parts.task
    assert isinstance(task, Recording)
    return task.losses


def mean(micro_batches: list[tuple[float, int]]) -> float:
    return sum(loss * count for loss, count in micro_batches) / sum(count for _, count in micro_batches)


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.parts.strategy.module.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


# --- a run to its end -------------------------------------------------------------------------------------------------


def test_all_epochs_are_trained_recorded_and_saved() -> None:
    run = prepare(checkpoint_every="1ep")
    assert train(run.training) == Outcome("epochs")
    progress = run.parts.state.progress
    assert (progress.step, progress.samples_seen, progress.epochs_done, progress.epoch) == (6, 80, 2, 3)
    first, second = run.of(EpochDone)
    assert (first.epoch, first.step, first.samples_seen) == (1, 3, 40)
    assert (second.epoch, second.step, second.samples_seen) == (2, 6, 80)
    assert second.cumulative_time_s == pytest.approx(first.epoch_time_s + second.epoch_time_s)
    assert second.cumulative_time_s == progress.train_time_s
    assert first.samples_per_s == first.units_per_s == pytest.approx(40 / first.epoch_time_s)
    assert first.train_loss > 0
    assert 0 <= first.input_wait_fraction <= 1
    assert (first.peak_memory_bytes or 0) > 2**20
    assert first.peak_reserved_memory_bytes is None  # of a GPU
    assert first.validation == {"accuracy": first.validation["accuracy"], "loss": first.validation["loss"]}
    assert progress.validation == second.validation
    assert run.saves == [(3, 2, 0, first.validation["accuracy"]), (6, 3, 0, second.validation["accuracy"])]
    assert run.of(Notice) == []
    # Training and validation both show that this worker lives.
    assert [step for step in run.signs if step] == run.signs
    assert run.signs == [1, 2, 3, 3, 3, 4, 5, 6, 6, 6]
    shown = [(record.epoch, record.done, record.total) for record in run.of(ValidationProgress)]
    assert shown == [(1, 1, 3), (1, 2, 3), (2, 1, 3), (2, 2, 3)]


def test_the_loss_of_an_epoch_is_the_mean_over_its_samples_although_the_last_batch_is_short() -> None:
    run = prepare(task_class=Recording, epochs=1)
    train(run.training)
    assert [count for _, count in losses_of(run)] == [16, 16, 8]
    assert run.of(EpochDone)[0].train_loss == pytest.approx(mean(losses_of(run)))


def test_every_step_has_the_learning_rate_of_its_schedule() -> None:
    rates: list[float] = []
    run = prepare(warmup_epochs=1.0, warmup_from=0.0, decay="linear")
    optimizer = run.parts.strategy.optimizer
    optimizer.register_step_pre_hook(lambda one, args, kwargs: rates.append(one.param_groups[0]["lr"]))
    train(run.training)
    assert rates == pytest.approx([0.0, 0.1 / 3, 0.2 / 3, 0.1, 0.2 / 3, 0.1 / 3])
    assert [record.learning_rate for record in run.of(EpochDone)] == pytest.approx([0.2 / 3, 0.1 / 3])


def test_step_records_tell_position_loss_and_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_SECONDS_BETWEEN_RECORDS", -1.0)
    run = prepare(task_class=Recording, accumulate=2)
    train(run.training)
    records = run.of(StepDone)
    assert [(record.epoch, record.step, record.step_in_epoch, record.samples_seen) for record in records] == [
        (1, 2, 2, 32),
        (1, 3, 3, 40),
        (2, 4, 1, 56),
        (2, 5, 2, 72),
        (2, 6, 3, 80),
    ]
    assert all(record.learning_rate == 0.1 for record in records)
    micro_batches = losses_of(run)
    steps = [micro_batches[start : start + 2] for start in range(0, len(micro_batches), 2)]
    # Each of the step before: the sum over the workers comes with the vote of the next one.
    assert [record.loss for record in records] == pytest.approx([mean(step) for step in steps[:-1]])
    assert [record.train_loss for record in run.of(EpochDone)] == pytest.approx(
        [mean(micro_batches[:6]), mean(micro_batches[6:])]
    )
    assert all(record.samples_per_s > 0 and 0 <= record.input_wait_fraction <= 1 for record in records)
    times = [record.train_time_s for record in records]
    assert times == sorted(times)


def test_short_epochs_have_a_record_of_all_their_steps_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    class Timed(Recording):
        def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
            nonlocal now_s
            now_s += 0.0625  # 0.1875 an epoch, and a record takes more than 0.25
            return super().loss(model, batch)

        def metrics(self, model: torch.nn.Module, batch: Any) -> Any:
            nonlocal now_s
            now_s += 100.0
            return super().metrics(model, batch)

    monkeypatch.setattr("stormo.training.clock.time.perf_counter", lambda: now_s)
    run = prepare(task_class=Timed, epochs=5, checkpoint_every="2")
    train(run.training)
    monkeypatch.undo()
    records, micro_batches = run.of(StepDone), losses_of(run)
    assert [record.step for record in records] == [5, 10, 15]
    assert [record.train_time_s for record in records] == [0.3125, 0.625, 0.9375]
    seen = [0, *(record.samples_seen for record in records)]
    assert [record.samples_per_s for record in records] == [(b - a) / 0.3125 for a, b in itertools.pairwise(seen)]
    logged = [micro_batches[:4], micro_batches[4:9], micro_batches[9:14]]
    assert [record.loss for record in records] == pytest.approx([mean(steps) for steps in logged])


def test_the_first_record_after_a_resume_has_nothing_of_the_steps_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(context, "_SECONDS_BETWEEN_RECORDS", -1.0)

    def on_step(run: Run, step: int) -> None:
        run.flag.signal_number = signal.SIGTERM if step == 1 else 0

    run = prepare(task_class=Recording, on_step=on_step)
    assert train(run.training).stopped_by == "signal"
    assert 0 < run.parts.state.progress.position < 40
    run.flag.signal_number = 0
    train(run.training)
    first, _, *losses, _ = [mean([one]) for one in losses_of(run)]
    assert [record.loss for record in run.of(StepDone)] == pytest.approx([first, *losses])


class Steady(Tiny):
    """Some classes count, in a mean that is weighed by them; without batch norm and dropout."""

    def __init__(self, options: Any) -> None:
        super().__init__(replace(options, norm=False, dropout=0.0))

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        x, y = batch
        return cross_entropy(model(x), y, ignore_index=0), (y != 0).sum()


class SteadyMean(Steady):
    """The mean over samples."""

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        x, y = batch
        return cross_entropy(model(x), y)


class SteadySum(SteadyMean):
    """The sum over samples, which is recorded as their mean."""

    loss_reduction = "sum"

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        x, y = batch
        return cross_entropy(model(x), y, reduction="sum")


def _recorded_losses(world: World, task: type[Task], flags: dict[str, Any]) -> tuple[list[float], list[float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "_SECONDS_BETWEEN_RECORDS", -1.0)
        run = prepare(world=world, task_class=task, precision="fp64", base_lr=0.001, **flags)
        train(run.training)
    return [record.loss for record in run.of(StepDone)], [record.train_loss for record in run.of(EpochDone)]


@pytest.mark.parametrize("task", [Steady, SteadyMean, SteadySum])
def test_the_losses_that_are_reported_are_those_of_all_workers(run_ranks: Ranks, task: type[Task]) -> None:
    (expected,) = run_ranks(_recorded_losses, 1, task, {})
    for size, flags in ((3, {}), (2, {"accumulate": 2, "on_divergence": "ignore"})):
        steps, epochs = run_ranks(_recorded_losses, size, task, flags)[0]  # whose rank 0 has a few of the samples
        assert steps == pytest.approx(expected[0], rel=1e-12)
        assert epochs == pytest.approx(expected[1], rel=1e-12)


def test_the_loss_of_an_epoch_is_a_mean_over_items_and_continues_over_a_stop() -> None:
    """The mean of the steps' losses is another one where their items differ."""

    def on_step(run: Run, step: int) -> None:
        run.flag.signal_number = signal.SIGTERM if step == 1 else 0

    whole, stopped = prepare(task_class=Steady, epochs=1), prepare(task_class=Steady, epochs=1, on_step=on_step)
    train(whole.training)
    assert train(stopped.training).stopped_by == "signal"
    stopped.flag.signal_number = 0
    train(stopped.training)
    assert stopped.of(EpochDone)[0].train_loss == whole.of(EpochDone)[0].train_loss
    labels = whole.parts.task.datasets()[0].tensors[1]  # type: ignore[attr-defined]
    assert float(whole.parts.state.num_items) == 0  # of the next epoch
    assert 0 < int((labels != 0).sum()) < len(labels)


@pytest.mark.parametrize(
    ("every", "saved_steps"),
    [("0", [6]), ("2", [2, 3, 4, 6]), ("1ep", [3, 6]), ("2ep", [3, 6]), ("4", [3, 4, 6])],  # epoch 1 is the best
)
def test_checkpoints_come_when_they_are_due_or_the_best_and_at_the_end(every: str, saved_steps: list[int]) -> None:
    run = prepare(checkpoint_every=every)
    train(run.training)
    assert [step for step, *_ in run.saves] == saved_steps
    for step, epoch, position, metric in run.saves:
        is_end_of_epoch = step % 3 == 0
        assert (metric is not None) is is_end_of_epoch  # only a validated state can be the best
        assert (epoch, position) == (step // 3 + 1, 0 if is_end_of_epoch else 16 * (step % 3))


def test_saving_does_not_change_the_run() -> None:
    often = prepare(checkpoint_every="1")
    train(often.training)
    seldom = prepare(checkpoint_every="0")
    train(seldom.training)
    assert same(weights(often), weights(seldom))


def test_saving_and_validation_are_not_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def spend(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    class Timed(Tiny):
        def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
            spend(1.0)
            return super().loss(model, batch)

        def metrics(self, model: torch.nn.Module, batch: Any) -> Any:
            spend(100.0)
            return super().metrics(model, batch)

    monkeypatch.setattr("stormo.training.clock.time.perf_counter", lambda: now_s)
    run = prepare(task_class=Timed, checkpoint_every="1", on_save=lambda run: spend(1000.0))
    train(run.training)
    monkeypatch.undo()
    first, second = run.of(EpochDone)
    assert (first.epoch_time_s, second.epoch_time_s, second.cumulative_time_s) == (3.0, 3.0, 6.0)
    assert first.validation_time_s == 300.0


# --- early stopping ---------------------------------------------------------------------------------------------------


def test_training_stops_once_the_target_was_held_for_its_patience() -> None:
    run = prepare(epochs=9, target_accuracy=0.0, patience=2)
    assert train(run.training) == Outcome("target")
    progress = run.parts.state.progress
    assert (progress.epochs_done, progress.target_streak) == (2, 2)
    assert progress.time_to_target_s == progress.train_time_s
    assert run.of(Notice) == [Notice(kind="stop", text="Early stopping after epoch 2")]
    assert isinstance(run.records[-1], Notice)
    assert run.saves[-1][0] == 6


def test_an_epoch_below_the_target_starts_the_count_anew() -> None:
    accuracies = iter([0.9, 0.5, 0.9, 0.9, 0.9])

    class Scripted(Tiny):
        def metrics(self, model: torch.nn.Module, batch: Any) -> Any:
            return {"accuracy": torch.tensor(next(accuracies) * len(batch[0])), "loss": torch.tensor(1.0)}

    run = prepare(task_class=Scripted, epochs=9, target_accuracy=0.8, patience=2, validation_batch_size=30)
    assert train(run.training) == Outcome("target")
    progress = run.parts.state.progress
    assert progress.epochs_done == 4
    assert [notice.text for notice in run.of(Notice)] == ["Early stopping after epoch 4"]
    assert progress.best_validation is not None
    assert progress.best_validation["accuracy"] == pytest.approx(0.9)


def test_a_target_that_is_reached_exactly_counts() -> None:
    class Scripted(Tiny):
        def metrics(self, model: torch.nn.Module, batch: Any) -> Any:
            return {"accuracy": torch.tensor(15), "loss": torch.tensor(1.0)}  # of 30 samples

    run = prepare(task_class=Scripted, epochs=9, target_accuracy=0.5, patience=1, validation_batch_size=30)
    train(run.training)
    assert run.parts.state.progress.epochs_done == 1


def test_a_task_without_accuracy_trains_all_epochs_and_is_ranked_by_its_loss() -> None:
    class LossOnly(Tiny):
        metrics = Task.metrics

    run = prepare(task_class=LossOnly, target_accuracy=0.0, checkpoint_every="1ep")
    assert train(run.training) == Outcome("epochs")
    assert [metric for *_, metric in run.saves] == [-record.validation["loss"] for record in run.of(EpochDone)]


def _scripted(losses: list[float], accuracies: list[float] | None = None) -> type[Task]:
    """A task whose validation gives one loss after the other."""
    ahead = iter(zip(losses, accuracies or [0.0] * len(losses), strict=True))

    class Scripted(Tiny):
        def metrics(self, model: torch.nn.Module, batch: Any) -> Any:
            loss, accuracy = next(ahead)
            sums = {"loss": torch.tensor(loss, dtype=torch.float64) * 30}
            return sums | ({"accuracy": torch.tensor(accuracy * 30)} if accuracies else {})

    return Scripted


def test_a_target_for_the_loss_stops_once_it_was_held_for_its_patience() -> None:
    task = _scripted([3.0, 2.0, 2.5, 2.0, 1.5, 1.0])
    run = prepare(task_class=task, epochs=6, target_loss=2.0, patience=2, validation_batch_size=30)
    assert train(run.training) == Outcome("target")
    progress = run.parts.state.progress
    assert (progress.epochs_done, progress.target_streak) == (5, 2)
    assert progress.time_to_target_s == progress.train_time_s
    assert [notice.text for notice in run.of(Notice)] == ["Early stopping after epoch 5"]


def test_either_target_may_stop_and_none_is_reached_by_no_number() -> None:
    nan = float("nan")
    flags: dict[str, Any] = {"epochs": 3, "patience": 1, "validation_batch_size": 30, "target_loss": 0.5}
    by_accuracy = prepare(task_class=_scripted([9.0] * 3, [0.1, 0.9, 0.9]), target_accuracy=0.8, **flags)
    assert train(by_accuracy.training) == Outcome("target")
    assert by_accuracy.parts.state.progress.epochs_done == 2
    by_loss = prepare(task_class=_scripted([9.0, 9.0, 0.5], [0.1] * 3), target_accuracy=0.8, **flags)
    assert train(by_loss.training) == Outcome("target")
    assert by_loss.parts.state.progress.epochs_done == 3
    never = prepare(task_class=_scripted([nan] * 3), target_accuracy=0.0, on_divergence="ignore", **flags)
    assert train(never.training) == Outcome("epochs")


def test_without_accuracy_the_epoch_of_the_lowest_loss_is_the_best_and_saved() -> None:
    task = _scripted([float("nan"), 3.0, 1.0, 2.0])
    run = prepare(task_class=task, epochs=4, checkpoint_every="99ep", validation_batch_size=30, on_divergence="ignore")
    train(run.training)
    best = run.parts.state.progress.best_validation
    assert best == {"loss": 1.0}
    assert [step for step, *_ in run.saves] == [3, 6, 9, 12]  # three that were the best so far, and the end


def test_speed_is_reported_in_the_units_of_the_task() -> None:
    class Words(Tiny):
        def facts(self) -> Any:
            return replace(super().facts(), unit="words", units_per_sample=7)

    run = prepare(task_class=Words, epochs=1)
    train(run.training)
    (done,) = run.of(EpochDone)
    assert (done.unit, done.units_per_s, done.mfu) == ("words", 7 * done.samples_per_s, None)


def test_a_task_may_name_its_metrics_as_it_likes() -> None:
    class Own(Tiny):
        def metrics(self, model: torch.nn.Module, batch: Any) -> Any:
            return {"error": torch.tensor(1.0)}

    run = prepare(task_class=Own)
    assert train(run.training) == Outcome("epochs")


def test_a_run_that_is_over_is_not_trained_further() -> None:
    run = prepare()
    train(run.training)
    before, num_records = weights(run), len(run.records)
    assert train(run.training) == Outcome("epochs")
    assert same(before, weights(run))
    assert len(run.records) == num_records


# --- signals ----------------------------------------------------------------------------------------------------------


def _whole() -> dict[str, torch.Tensor]:
    run = prepare()
    train(run.training)
    return weights(run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("at_step", [1, 2, 3, 4])
def test_a_signal_in_training_ends_it_after_the_next_step_saved_and_resumable(
    number: signal.Signals, at_step: int
) -> None:
    def on_step(run: Run, step: int) -> None:
        if run.signs.count(at_step) == 1 and step == at_step:
            run.flag.signal_number = number

    run = prepare(on_step=on_step)
    outcome = train(run.training)
    assert outcome == Outcome("signal", number)
    progress = run.parts.state.progress
    assert run.saves[-1] == (progress.step, progress.epoch, progress.position, None)
    # The vote is cast at the start of a step: the flag of step 3 is first seen in the validation after it.
    assert progress.step == {1: 2, 2: 3, 3: 3, 4: 5}[at_step]
    run.flag.signal_number = 0
    assert train(run.training) == Outcome("epochs")  # the state in memory is what a resume puts back
    assert same(weights(run), _whole())
    assert [record.epoch for record in run.of(EpochDone)] == [1, 2]


def test_a_signal_in_validation_cuts_it_short_and_it_is_done_anew() -> None:
    def on_record(run: Run, record: Record) -> None:
        if isinstance(record, ValidationProgress) and record.done == 1 and not run.saves:
            run.flag.signal_number = signal.SIGTERM

    run = prepare(on_record=on_record, checkpoint_every="0")
    assert train(run.training) == Outcome("signal", signal.SIGTERM)
    assert run.of(EpochDone) == []
    assert run.saves == [(3, 1, 40, None)]
    assert run.parts.strategy.module.training
    run.flag.signal_number = 0
    assert train(run.training) == Outcome("epochs")
    assert [(record.epoch, record.step) for record in run.of(EpochDone)] == [(1, 3), (2, 6)]
    assert same(weights(run), _whole())


def _whole_and_cut() -> tuple[EpochDone, EpochDone]:
    """The first epoch of a run, and of one whose first validation was cut short."""

    def interrupt(run: Run, record: Record) -> None:
        if isinstance(record, ValidationProgress) and not run.saves:
            run.flag.signal_number = signal.SIGTERM

    whole = prepare(decay="linear")
    train(whole.training)
    cut = prepare(decay="linear", on_record=interrupt)
    assert train(cut.training).stopped_by == "signal"
    cut.flag.signal_number = 0
    train(cut.training)
    return whole.of(EpochDone)[0], cut.of(EpochDone)[0]


def test_an_epoch_whose_validation_was_done_anew_reports_what_it_would_have_reported() -> None:
    whole, cut = _whole_and_cut()
    assert (whole.train_loss, whole.validation) == (cut.train_loss, cut.validation)


def test_an_epoch_whose_validation_was_done_anew_has_the_learning_rate_of_its_last_step() -> None:
    whole, cut = _whole_and_cut()
    assert whole.learning_rate == cut.learning_rate


def test_a_signal_while_a_checkpoint_is_saved_is_acted_on_after_the_next_step() -> None:
    def on_save(run: Run) -> None:
        if len(run.saves) == 1:
            run.flag.signal_number = signal.SIGUSR1

    run = prepare(on_save=on_save, checkpoint_every="1")
    assert train(run.training) == Outcome("signal", signal.SIGUSR1)
    assert [step for step, *_ in run.saves] == [1, 2]


def test_a_signal_during_the_last_save_changes_nothing_any_more() -> None:
    def on_save(run: Run) -> None:
        run.flag.signal_number = signal.SIGTERM

    run = prepare(on_save=on_save, checkpoint_every="0")
    assert train(run.training) == Outcome("epochs")


# --- the stopwatch ----------------------------------------------------------------------------------------------------


def test_an_interval_counts_what_came_since_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("stormo.training.clock.time.perf_counter", lambda: now_s)
    parts = build(World(alone(), torch.device("cpu")))
    progress = parts.state.progress
    watch = TrainingClock(parts.world, parts.loader, progress, parts.strategy, NoNodeRecorder())
    watch.start()
    now_s, parts.loader.wait_s = 2.0, 0.5
    assert watch.since_last_s() == 2.0
    progress.samples_trained = 100
    assert watch.interval() == (50.0, 0.25)
    now_s, progress.samples_trained = 4.0, 300
    assert watch.interval() == (100.0, 0.0)
    now_s, progress.samples_trained, parts.loader.wait_s = 5.0, 400, 0.75
    assert watch.running_s() == 5.0
    watch.pause()
    now_s = 1000.0
    assert watch.running_s() == 0.0
    assert (progress.train_time_s, progress.wait_s) == (5.0, 0.75)
    assert watch.wait_fraction() == 0.15
    watch.start()
    now_s, progress.samples_trained = 1001.0, 500
    assert watch.since_last_s() == 2.0  # the pause is left out, the second before it is not
    assert watch.interval() == (100.0, 0.125)


def test_energy_of_epochs_too_short_for_the_counters_is_reported_together() -> None:
    desk = Desk()
    parts = build(World(alone(), torch.device("cpu")))
    watch = TrainingClock(parts.world, parts.loader, parts.state.progress, parts.strategy, desk.recorder)
    energies = []
    for _ in range(5):
        watch.start()
        desk.after(1.5, 300.0)
        watch.pause()
        figures = watch.end_of_epoch()
        energies.append((figures["energy_j"], figures["power_w"]))
    # Two boundaries of 200 W × 0.1 s are more than 5 % of 300 J and of 600 J, and not of 900 J.
    assert energies == [(None, None), (None, None), (900.0, 200.0), (None, None), (None, None)]
    assert [worker["rank"] for worker in figures["workers"]] == [0]
