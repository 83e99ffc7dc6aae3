"""What counts as a divergence, when all workers know of it, and what is done then."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stormo import checkpoint
from stormo.config.plan.checks import check_numbers
from stormo.distributed.world import AsyncAllReduce, World
from stormo.energy.node_recorder import NoNodeRecorder
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.optim.schedule import make_schedule
from stormo.system.process import SetupTimer
from stormo.telemetry.console import PlainConsole, TerminalConsole
from stormo.telemetry.events import EventFile, current_events, read_events
from stormo.telemetry.folder import RunFolder
from stormo.telemetry.record import CheckpointSaved, DivergenceNoticed, EpochDone, Notice, Record, RunStarted, Sink
from stormo.telemetry.tensorboard import TensorBoardFile
from stormo.training import context, divergence, loop
from stormo.training.context import RunContext
from stormo.training.divergence import (
    NUM_HIGH_STEPS,
    Diverged,
    LossMonitor,
    StepInfo,
    Trend,
    patience_steps,
    wait_steps,
)
from stormo.training.loop import Outcome, train
from stormo.training.records import RunRecorder
from stormo.training.recovery import Recovery, advice, diagnosis
from stormo.training.state import Progress
from stormo.training.summary import make_summary
from tests.parallel.test_cuda_graph import Images, build_on_gpu
from tests.tiny_run import Parts, assert_same_bits, build, whole_state
from tests.tiny_task import Tiny
from tests.training.test_loop import context_of, prepare

Ranks = Callable[..., list[Any]]
NAN, INF = float("nan"), float("inf")


# --- the course of a loss ---------------------------------------------------------------------------------------------


def first_verdict(losses: Iterable[float], *, batch_size: int = 256, patience: int = 200) -> tuple[int, str] | None:
    """The step, from 1, and the kind of the first divergence."""
    trend = Trend()
    for step, loss in enumerate(losses, start=1):
        if kind := trend.update(loss, batch_size=batch_size, patience=patience):
            return step, kind
    return None


def falling(start: float, end: float, *, num_steps: int, noise: float, seed: int = 0) -> list[float]:
    """A loss that falls exponentially, with noise in proportion to itself."""
    draw = random.Random(seed)
    tau = num_steps / 6
    return [
        (end + (start - end) * math.exp(-step / tau)) * math.exp(noise * draw.gauss(0, 1)) for step in range(num_steps)
    ]


def with_spikes(losses: list[float], *, every: int, factor: float, length: int = 1) -> list[float]:
    """Every so often a few steps have a much higher loss."""
    return [loss * factor if step % every >= every - length else loss for step, loss in enumerate(losses)]


def chi_squared(level: float, *, num_steps: int, seed: int) -> list[float]:
    """Squared errors of single samples around a level that falls to a tenth: as rough as a loss can be."""
    draw = random.Random(seed)
    return [level * (0.1 + 0.9 * math.exp(-step / 300)) * draw.gauss(0, 1) ** 2 for step in range(num_steps)]


HEALTHY = {
    "a language model": falling(10.8, 3.0, num_steps=3000, noise=0.03),
    "a language model with spikes": with_spikes(
        falling(5.5, 2.0, num_steps=3000, noise=0.05), every=150, factor=3, length=8
    ),
    "a regression down to its noise": falling(1.0, 1e-6, num_steps=3000, noise=0.5),
    "the same with spikes of a thousand": with_spikes(
        falling(1.0, 1e-6, num_steps=3000, noise=0.5), every=100, factor=1000, length=5
    ),
    "single samples beyond all measure": with_spikes(
        falling(1.0, 0.1, num_steps=2000, noise=0.2), every=50, factor=1e20
    ),
    "a rough beginning": [2.3, 8.0, 20.0, 12.0, 6.0, *falling(3.0, 0.3, num_steps=1000, noise=0.1)],
    "a very rough beginning": [2.3, 9.0, 90.0, 70.0, 60.0, 30.0, 15.0, *falling(5.0, 0.3, num_steps=1000, noise=0.1)],
    "below zero": [loss - 20.0 for loss in falling(25.0, 1.0, num_steps=2000, noise=0.05)],
    "around zero": [random.Random(step).gauss(0, 0.05) for step in range(2000)],
    "at its noise from the start": [1e-6 * random.Random(step).lognormvariate(0, 1) for step in range(3000)],
    "nothing to learn": [0.693 + 0.01 * random.Random(step).gauss(0, 1) for step in range(3000)],
    "a restart of the learning rate": [
        *falling(2.3, 0.1, num_steps=1000, noise=0.1),
        *falling(0.8, 0.08, num_steps=1000, noise=0.1),
    ],
    "a hinge that begins at zero": [*([0.0] * 30), *(abs(random.Random(step).gauss(0, 1)) for step in range(2000))],
    "a mask that often leaves nothing": [max(0.0, random.Random(step).gauss(-1, 1)) for step in range(2000)],
    "a distance from where it starts": [3.0 * (1 - math.exp(-((step / 60) ** 3))) for step in range(2000)],
    "nothing but zeros": [0.0] * 2000,
    "overfitting and a new stage": [*falling(2.3, 0.01, num_steps=900, noise=0.2), *([0.9] * 2000)],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_ordinary_training_raises_no_alarm(name: str) -> None:
    assert first_verdict(HEALTHY[name]) is None


@pytest.mark.parametrize("seed", range(8))
def test_batches_of_one_sample_raise_no_alarm_wherever_they_begin(seed: int) -> None:
    assert first_verdict(chi_squared(1.0, num_steps=3000, seed=seed), batch_size=1) is None


@pytest.mark.parametrize(("bad", "step"), [(NAN, 1), (INF, 3), (-INF, 6), (NAN, 500)])
def test_a_loss_that_is_not_finite_counts_at_once(bad: float, step: int) -> None:
    losses = falling(2.3, 0.3, num_steps=600, noise=0.1)
    losses[step - 1] = bad
    assert first_verdict(losses) == (step, "loss")


def test_a_blow_up_counts_when_it_lasts() -> None:
    good = falling(2.3, 0.3, num_steps=400, noise=0.1)
    high = [40.0 * 1.1**step for step in range(60)]
    assert first_verdict([*good, *high]) == (400 + NUM_HIGH_STEPS, "exploded")
    assert first_verdict([*good, *high[: NUM_HIGH_STEPS - 1], *good]) is None


def test_a_loss_that_begins_at_zero_gets_its_scale_from_what_follows_and_then_counts() -> None:
    rising = [3.0 * (1 - math.exp(-((step / 60) ** 3))) for step in range(400)]
    assert rising[0] == 0.0
    assert first_verdict([*rising, *[1e3] * 40]) == (400 + NUM_HIGH_STEPS, "exploded")
    assert first_verdict([0.0, 0.0, 1.0, NAN]) == (4, "loss")


@pytest.mark.parametrize("level", [1e3, 1e5, 1e12])
def test_an_absurd_learning_rate_counts_although_it_left_only_the_first_loss_as_it_was(level: float) -> None:
    losses = itertools.chain([2.3, level / 100, level / 10], itertools.repeat(level, 100))
    assert first_verdict(losses) == (5 + NUM_HIGH_STEPS, "exploded")


@pytest.mark.parametrize(
    ("start", "best", "chance"), [(2.35, 0.4, 2.303), (2.6, 0.3, 2.303), (10.8, 3.0, 7.2), (-10.0, -30.0, -10.0)]
)
def test_a_loss_that_falls_back_to_chance_and_stays_there_is_lost(start: float, best: float, chance: float) -> None:
    good = [best + (start - best) * math.exp(-step / 100) for step in range(600)]
    found = first_verdict([*good, 8 * abs(start), *[chance] * 400], patience=200)
    assert found is not None
    step, kind = found
    assert kind == "lost"
    assert 800 < step < 850  # the patience, and what the smoothing takes
    assert first_verdict([*good, *[chance] * 150, *good[300:]], patience=200) is None


def test_patience_is_an_epoch_within_limits() -> None:
    assert [patience_steps(steps) for steps in (3, 100, 469, 50_000)] == [100, 100, 469, 1000]


@pytest.mark.parametrize(
    ("num_train", "epoch", "expected"),
    [(64, 1, 4), (64, 2, 2), (1600, 1, 100), (1600, 3, 50), (160_000, 1, 1000), (160_000, 2, 1000)],
)
def test_a_checkpoint_waits_for_an_epoch_of_the_batch_as_it_is_then(num_train: int, epoch: int, expected: int) -> None:
    parts = _settings({"num_train": num_train}, grow_batch="1:2x")
    assert wait_steps(parts.plan, epoch) == expected


def test_a_loss_that_rises_is_not_stable_until_it_has_lasted() -> None:
    trend = Trend()

    def see(*losses: float) -> bool:
        for loss in losses:
            assert trend.update(loss, batch_size=256, patience=200) is None
        return trend.is_stable(200)

    assert see(*falling(2.3, 0.3, num_steps=400, noise=0.05))
    assert not see(500.0)  # a spike: it takes one good step to be stable again
    assert see(0.3)
    assert not see(*[0.95] * 60)  # more than a quarter of the gain is lost, less than half
    assert see(*[0.95] * 200)  # it stays there: that is how it is now


def test_what_led_to_a_divergence_is_counted() -> None:
    def num_leading(*losses: float, patience: int = 100) -> int:
        trend, kind = Trend(), None
        for loss in losses:
            assert kind is None
            kind = trend.update(loss, batch_size=256, patience=patience)
        assert kind is not None
        return trend.num_leading(kind, patience)

    good = falling(2.3, 0.3, num_steps=400, noise=0.05)
    assert num_leading(NAN) == num_leading(1.0, 2.0, NAN) == num_leading(*good, NAN) == 1
    assert num_leading(1.0, 1e6, 1e9, INF) == num_leading(*good, 1e6, 1e9, INF) == 3
    assert num_leading(*good, *[1e6] * NUM_HIGH_STEPS) == NUM_HIGH_STEPS
    assert num_leading(*good, *[0.95] * 200, NAN, patience=50) == 1  # what has lasted so long has not led to it


@pytest.mark.parametrize(("end", "is_warned"), [(2.30, True), (2.26, True), (2.1, False)])
def test_a_loss_that_never_fell_is_warned_of_once_and_not_before_its_time(end: float, is_warned: bool) -> None:
    trend = Trend()
    for loss in [2.35, 80.0, 300.0, 90.0, 9.0, *[end] * 200]:
        assert trend.update(loss, batch_size=256, patience=100) is None
    assert trend.not_learning(6, 5.0) is None
    warning = trend.not_learning(7, 5.0)
    assert (warning is not None) is is_warned
    if warning is not None:
        assert warning.startswith(
            f"the model is not learning: the training loss began at 2.35 and is {end:.4g} after 20"
        )
    assert trend.not_learning(8, 5.0) is None
    assert Trend().not_learning(9, 0.0) is None


@pytest.mark.parametrize("later", [0.0, 0.5])
def test_a_loss_of_zero_is_warned_of_as_such_and_one_that_begins_there_need_not_fall(later: float) -> None:
    trend = Trend()
    for loss in [*[0.0] * 50, *[later] * 100]:
        assert trend.update(loss, batch_size=256, patience=100) is None
    warning = trend.not_learning(9, 5.0)
    assert (warning is not None) is (later == 0.0)
    if warning is not None:
        assert warning.startswith("the model is not learning: the loss is 0 from the first step on; ")
    assert trend.not_learning(10, 5.0) is None


def test_progress_carries_the_trend_and_what_was_not_saved_keeps_its_default() -> None:
    progress = Progress(rate_factor=0.25, num_rollbacks=2)
    for loss in falling(2.3, 0.3, num_steps=50, noise=0.1):
        progress.trend.update(loss, batch_size=9, patience=100)
    again = Progress()
    again.load_state_dict(asdict(progress))
    assert again == progress
    now = asdict(Progress(step=7, samples_seen=70, samples_trained=90))
    new = ("trend", "rate_factor", "stable_steps")
    again = Progress()
    again.load_state_dict({name: value for name, value in now.items() if name not in new})
    assert again == Progress(step=7, samples_seen=70, samples_trained=90)


# --- the losses of all workers ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def lagging(num_steps: int) -> Iterator[None]:
    """Losses are read so many steps late in this process, as they are on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(divergence._LAG_STEPS, "cpu", num_steps)
        yield


def _watched(
    world: World, lag: int, vote_lag: int, bad_rank: int, bad_step: int
) -> tuple[int, str, float, int, list[float]]:
    """A step counted until it is stopped, whose loss is not finite on one rank alone."""
    trend, vote = Trend(), AsyncAllReduce(world, vote_lag)
    with lagging(lag):
        watch = LossMonitor(world, trend, is_on=True, batch_size=64, patience=100, vote_lag=vote_lag)
    for step in range(1, 20):
        vote.start(0, watch.share())
        is_bad = world.rank == bad_rank and step == bad_step
        watch.add(torch.tensor(NAN if is_bad else 0.25 * (world.rank + 1) * step))
        watch.add(torch.tensor(0.5))
        watch.update(StepInfo(epoch=1, step=step, position=10 * step, learning_rate=0.1))
        assert vote.outcome() == 0
        if diverged := watch.check(vote.total()):
            return step, diverged.kind, diverged.loss, diverged.step, trend.first
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize(
    ("size", "lag", "vote_lag", "bad_step"),
    [(1, 1, 0, 4), (2, 1, 0, 4), (3, 1, 0, 4), (1, 4, 0, 9), (2, 4, 0, 6), (2, 1, 3, 6), (2, 4, 2, 6)],
)
def test_all_workers_learn_of_one_worker_s_loss_at_the_same_step(
    run_ranks: Ranks, size: int, lag: int, vote_lag: int, bad_step: int
) -> None:
    heard = [sum(0.25 * (rank + 1) * step + 0.5 for rank in range(size)) for step in range(1, bad_step)]
    for noticed_at, kind, loss, step, first in run_ranks(_watched, size, lag, vote_lag, size - 1, bad_step):
        assert (noticed_at, kind, step) == (bad_step + lag + vote_lag, "loss", bad_step)
        assert math.isnan(loss)
        assert first == pytest.approx(heard[:5])  # the losses of whole batches, in order


def _settled(world: World, lag: int, vote_lag: int, breaks_weights: bool) -> tuple[str | None, int, list[float]]:
    trend, model = Trend(), nn.Linear(2, 2)
    trained = [model.weight]  # the bias is a constant of the task, such as a mask
    model.bias.requires_grad_(False).fill_(-INF)
    with lagging(lag):
        watch = LossMonitor(world, trend, is_on=True, batch_size=64, patience=100, vote_lag=vote_lag)
    assert watch.check_all(trained) is None
    for step in range(1, lag + vote_lag + 1):
        watch.share()  # with votes that nobody reads
        watch.add(torch.tensor(float(step)))
        watch.update(StepInfo(epoch=1, step=step, position=0, learning_rate=0.1))
    if breaks_weights and world.rank == 0:
        with torch.no_grad():
            model.weight[0, 0] = NAN
    diverged = watch.check_all(trained)
    return diverged.kind if diverged else None, diverged.step if diverged else 0, trend.first


@pytest.mark.parametrize(("lag", "vote_lag"), [(1, 0), (4, 0), (1, 3)])
@pytest.mark.parametrize("breaks_weights", [False, True])
def test_before_a_checkpoint_every_loss_is_known_and_the_weights_are_checked(
    run_ranks: Ranks, lag: int, vote_lag: int, breaks_weights: bool
) -> None:
    steps = lag + vote_lag
    found = ("weights", steps) if breaks_weights else (None, 0)
    assert run_ranks(_settled, 2, lag, vote_lag, breaks_weights) == [(*found, [2.0, 4.0, 6.0, 8.0][:steps])] * 2


def test_what_is_ignored_is_reported_and_not_checked() -> None:
    trend = Trend()
    watch = LossMonitor(World(alone(), torch.device("cpu")), trend, is_on=False, batch_size=64, patience=100)
    watch.add(torch.tensor(NAN))
    watch.update(StepInfo(epoch=1, step=1, position=0, learning_rate=0.1))
    assert math.isnan(watch.share())
    assert (watch.check(NAN), watch.check_all([torch.zeros(1)]), watch.is_stable) == (None, None, True)
    assert math.isnan(watch.loss_since_last_log())
    assert not watch.has_loss_to_log
    assert trend == Trend()


# --- the loop ---------------------------------------------------------------------------------------------------------


def breaking_at(call: int, value: float = NAN, lasts: float = INF) -> type[Tiny]:
    """The tiny task, whose loss is another from one call on; the sanity check is not among the calls."""

    class Breaking(Tiny):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            loss = super().loss(model, batch)
            return loss * 0 + value if call <= self.num_calls < call + lasts else loss

    return Breaking


@pytest.mark.parametrize("lag", [1, 4])
@pytest.mark.parametrize(
    ("bad_step", "noticed_at", "saved"),
    [(1, 1, []), (2, 2, [1]), (3, 3, [1, 2]), (4, 4, [1, 2, 3]), (6, 6, [1, 2, 3, 4, 5])],
)
def test_no_checkpoint_is_published_after_a_loss_that_is_not_finite(
    bad_step: int, noticed_at: int, saved: list[int], lag: int
) -> None:
    run = prepare(task_class=breaking_at(bad_step), checkpoint_every="1")
    with lagging(lag):
        outcome = train(run.training)
    assert outcome.stopped_by == "divergence"
    assert outcome.diverged is not None
    assert (outcome.diverged.kind, outcome.diverged.step) == ("loss", bad_step)
    assert not outcome.diverged.has_bad_inputs
    assert run.parts.state.progress.step == noticed_at  # before a save nothing is left unknown
    assert [step for step, *_ in run.saves] == saved


@pytest.mark.parametrize(
    ("lag", "every", "noticed_at"),
    [(1, "0", 5), (4, "0", 8), (4, "7", 7)],  # the last with four losses still unknown when a checkpoint is due
)
def test_without_a_checkpoint_to_wait_for_it_is_known_a_fixed_number_of_steps_later(
    lag: int, every: str, noticed_at: int
) -> None:
    run = prepare({"num_train": 160}, task_class=breaking_at(4), checkpoint_every=every)
    with lagging(lag):
        outcome = train(run.training)
    assert outcome.diverged is not None
    assert (outcome.diverged.step, run.parts.state.progress.step, run.saves) == (4, noticed_at, [])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_no_step_waits_for_the_device_to_know_its_loss(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaking(Images):
        num_steps = 0

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return super().loss(model, batch) * (NAN if self.num_steps == 3 else 1.0)

    parts = build_on_gpu(Breaking, {"num_train": 320}, epochs=1, checkpoint_every="0", graph=False, precision=precision)
    parts.strategy.warm_up(parts.loader)
    epoch = parts.loader.epoch
    num_batches = 0

    def watched(*where: int) -> Iterator[Any]:
        nonlocal num_batches
        for batch in epoch(*where):
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield batch
            finally:
                torch.cuda.set_sync_debug_mode("default")
            num_batches += 1
        raise AssertionError("nothing was noticed")

    monkeypatch.setattr(parts.loader, "epoch", watched)
    monkeypatch.setattr(loop, "find_bad_inputs", lambda diverged, *_, **__: diverged)  # it would wait for the batch
    monkeypatch.setattr(context, "_SECONDS_BETWEEN_RECORDS", INF)  # a record waits, a few times a second
    training = context_of(parts, heartbeat=lambda step: setattr(parts.task, "num_steps", step))
    outcome = train(training)
    assert outcome.diverged is not None
    assert (outcome.diverged.kind, outcome.diverged.step) == ("loss", 4)
    assert (parts.state.progress.step, num_batches) == (8, 7)


def test_a_signal_does_not_save_what_has_diverged() -> None:
    def on_step(run: Any, step: int) -> None:
        run.flag.signal_number = 15

    run = prepare(task_class=breaking_at(2), checkpoint_every="0", on_step=on_step)
    assert train(run.training).stopped_by == "divergence"
    assert run.saves == []


def test_a_validation_loss_that_is_not_finite_ends_the_run_before_it_becomes_the_best() -> None:
    class Scripted(Tiny):
        def metrics(self, model: nn.Module, batch: Any) -> Any:
            return {"accuracy": torch.tensor(30.0), "loss": torch.tensor(INF)}

    run = prepare(task_class=Scripted, validation_batch_size=30)
    outcome = train(run.training)
    assert outcome.diverged is not None
    assert (outcome.diverged.kind, outcome.diverged.step, outcome.diverged.epoch) == ("validation", 3, 1)
    assert (run.saves, run.of(EpochDone), run.parts.state.progress.best_validation) == ([], [], None)


def test_on_divergence_ignore_trains_and_saves_as_usual() -> None:
    run = prepare(task_class=breaking_at(2), checkpoint_every="1ep", on_divergence="ignore")
    assert train(run.training) == Outcome("epochs")
    assert [step for step, *_ in run.saves] == [3, 6]


class BadRow(Tiny):
    """The point in row 20 of the data is not a number; batch norm keeps the others finite."""

    def train_data(self) -> Any:
        data: Any = super().train_data()
        data.tensors[0][20] = NAN
        return data


def test_a_batch_with_inputs_that_are_not_finite_is_found() -> None:
    run = prepare(task_class=BadRow)
    outcome = train(run.training)
    assert outcome.diverged is not None
    order = run.parts.loader._order.tolist()
    assert outcome.diverged.has_bad_inputs
    assert outcome.diverged.step == 1 + order.index(20) // 16


def test_checkpoints_wait_while_the_loss_is_not_stable_and_come_as_soon_as_it_is() -> None:
    spike = breaking_at(9, value=1e6, lasts=2)
    run = prepare({"num_train": 320}, task_class=spike, checkpoint_every="5", epochs=1)
    assert train(run.training) == Outcome("epochs")
    assert [step for step, *_ in run.saves] == [5, 12, 15, 20]  # not 10 with the spike, nor 11 before its loss is known


def unstable_from(call: int) -> type[Tiny]:
    """The tiny task, whose loss falls to a tenth and is half of its start again from one call on, for good."""

    class Unstable(Tiny):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            loss = super().loss(model, batch)
            num = self.num_calls
            return loss * 0 + (10.0 if num <= 5 else 1.0 if num < call else 5.0)

    return Unstable


def test_checkpoints_wait_for_an_epoch_at_most_although_a_loss_that_is_lost_takes_longer() -> None:
    run = prepare({"num_train": 64}, task_class=unstable_from(69), checkpoint_every="1ep", epochs=40)
    assert train(run.training).diverged is None
    saved = [step for step, *_ in run.saves]
    assert saved[:20] == [4 * epoch for epoch in range(1, 21)]
    # The smoothed loss has lost a quarter of its fall in step 86, and four steps later that is how it is.
    assert saved[20:23] == [84, 91, 92]
    assert saved[-1] == 160


def test_the_best_epoch_is_saved_as_it_is_also_while_the_loss_is_not_stable() -> None:
    accuracies = iter([*[0.1] * 20, 0.1, 0.9, *[0.1] * 8])

    class Scripted(unstable_from(69)):  # type: ignore[misc]
        def metrics(self, model: nn.Module, batch: Any) -> Any:
            return {"accuracy": torch.tensor(next(accuracies) * len(batch[0])), "loss": torch.tensor(1.0)}

    stable: dict[int, bool] = {}

    def on_save(run: Any) -> None:
        progress = run.parts.state.progress
        stable[progress.step] = progress.trend.is_stable(4)

    flags: dict[str, Any] = {"checkpoint_every": "99ep", "epochs": 30, "validation_batch_size": 30}
    run = prepare({"num_train": 64}, task_class=Scripted, on_save=on_save, **flags)
    assert train(run.training).diverged is None
    assert [metric for *_, metric in run.saves] == pytest.approx([0.1, 0.9, 0.1])
    assert stable == {4: True, 88: False, 120: True}  # a rollback skips what was not stable


def test_a_run_that_does_not_learn_is_warned_of() -> None:
    flags: dict[str, Any] = {"warmup_epochs": 0.0, "epochs": 45, "base_lr": 1e-12, "checkpoint_every": "0"}
    run = prepare({"dropout": 0.0}, **flags)
    assert train(run.training) == Outcome("epochs")
    (warning,) = run.of(Notice)
    assert warning.kind == "warning"
    assert warning.text.startswith("the model is not learning: ")


# --- rollback ---------------------------------------------------------------------------------------------------------


class Recovering(Tiny):
    """Its loss is lost in one step as long as the rate is above 0.06, whoever asks and however often."""

    bad_step: int
    rate: Callable[[], float]
    num_steps: Callable[[], int]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        return loss * NAN if self.num_steps() == self.bad_step - 1 and self.rate() > 0.06 else loss


def assemble(world: World, folder: str, task_class: type[Tiny], **flags: Any) -> tuple[Parts, RunContext, Any]:
    """A run with its folder, as a worker puts it together; 40 samples in batches of 16 (16, 16, 8)."""
    flags = {"global_batch_size": 16, "target_accuracy": 1.1, "validation_batch_size": 10, "precision": "fp64", **flags}
    flags = {"runs_folder": folder, "epochs": 3, "checkpoint_every": "2", "tensorboard": False, **flags}
    options = {
        "num_train": flags.pop("num_train", 40),
        "num_validation": 30,
        "dropout": 0.3,
        "jitter": True,
        "noisy": flags.pop("noisy", False),
    }
    bad_step = flags.pop("bad_step", 6)
    parts = build(world, options, task_class=task_class, **flags)
    progress, schedule = parts.state.progress, make_schedule(parts.config, parts.plan, 1.0)
    if isinstance(parts.task, Recovering):
        parts.task.bad_step = bad_step
        parts.task.num_steps = lambda: progress.step
        parts.task.rate = lambda: schedule(progress.step) * progress.rate_factor
    parts.strategy.warm_up(parts.loader)
    recorder = RunRecorder(parts.config, parts.plan, world, parts.state, SetupTimer(), NoNodeRecorder())
    recorder.restore()
    recorder.start()
    recovery = Recovery(parts.config, parts.plan, world, parts.state, recorder)
    recovery.prepare()
    records: list[Any] = []
    tell = recorder.record

    def record(one: Any) -> None:
        records.append(one)
        tell(one)

    recorder.record = record  # type: ignore[assignment, method-assign]
    training = context_of(
        parts,
        schedule=schedule,
        record=record,
        save=lambda metric: recorder.save(metric),  # noqa: PLW0108 - a test may replace it
        node_recorder=recorder.node_recorder,
        roll_back=recovery.roll_back,
    )
    return parts, training, (recorder, recovery, records)


def _comparable(parts: Parts) -> dict[str, Any]:
    """Everything that two runs which are one have in common: all but times and how often they were resumed."""
    progress = asdict(parts.state.progress)
    times = ["train_time_s", "epoch_time_s", "wait_s", "wall_time_s", "peak_memory_bytes", "num_resumes"]
    times += ["samples_trained"]  # in those times
    counted = {name: repr(value) for name, value in progress.items() if name not in times}
    return {**whole_state(parts), **counted}


def _rolled_back(world: World, folder: str, flags: dict[str, Any]) -> tuple[Any, Any, list[Any], dict[str, Any]]:
    """A run that rolls back once, and one that was resumed by hand from the same checkpoint with the lower rate."""
    flags = dict(flags)
    with lagging(flags.pop("lag", 1)):
        return _rolled_back_and_by_hand(world, folder, flags)


def _rolled_back_and_by_hand(
    world: World, folder: str, flags: dict[str, Any]
) -> tuple[Any, Any, list[Any], dict[str, Any]]:
    parts, training, (recorder, _, records) = assemble(
        world, folder, Recovering, run_name="rolled", on_divergence="rollback", base_lr=0.1, **flags
    )
    assert train(training) == Outcome("epochs")
    summary = make_summary(parts.config, parts.plan, parts.state, recorder.run_folder, "epochs")
    recorder.end("epochs")
    rolled = _comparable(parts)
    parts.loader.close()

    by_hand, training, (recorder, recovery, _) = assemble(world, folder, Recovering, run_name="hand", **flags)
    diverged = train(training).diverged
    assert diverged is not None
    recovery.give_up(diverged)
    recorder.end("divergence")
    by_hand.loader.close()
    by_hand, training, (recorder, *_) = assemble(
        world, folder, Recovering, run_name="hand", resume="hand", base_lr=0.05, **flags
    )
    assert train(training) == Outcome("epochs")
    recorder.end("epochs")
    by_hand.loader.close()
    return rolled, _comparable(by_hand), records, summary


@pytest.mark.parametrize(
    ("size", "flags", "bad_step", "back_to", "num_lost", "steps"),
    [
        (1, {}, 6, 4, 24, 9),
        (2, {"optimizer": "adamw", "warmup_epochs": 1.0, "warmup_from": 0.0}, 6, 4, 24, 9),
        (1, {"noisy": True}, 6, 4, 24, 9),
        (2, {"accumulate": 2}, 6, 4, 24, 9),
        (2, {"strategy": "local", "average_every": "3", "outer_momentum": 0.5}, 6, 4, 24, 9),
        # Thirteen steps an epoch, and the loss of step 6 is heard of in step 8, where a checkpoint is due.
        (2, {"strategy": "local", "average_every": "2", "num_train": 200, "checkpoint_every": "4"}, 6, 4, 64, 39),
        # The losses of steps 5 to 8 are read together before a checkpoint.
        (1, {"lag": 4, "num_train": 200, "checkpoint_every": "4"}, 6, 4, 64, 39),
        # Three steps of 16, then two of 32 an epoch: the first of the larger batch is lost, and step 3 is to blame.
        (1, {"grow_batch": "1:2x", "noisy": True}, 4, 2, 40, 7),
    ],
    ids=[
        "one worker",
        "two workers",
        "streamed",
        "accumulation",
        "local updates",
        "known late",
        "read late",
        "over a border of growth",
    ],
)
def test_a_rollback_is_a_resume_with_a_lower_learning_rate_to_the_last_bit(
    run_ranks: Ranks,
    tmp_path: Path,
    size: int,
    flags: dict[str, Any],
    bad_step: int,
    back_to: int,
    num_lost: int,
    steps: int,
) -> None:
    flags = flags | {"bad_step": bad_step}
    for rank, (rolled, by_hand, records, summary) in enumerate(run_ranks(_rolled_back, size, str(tmp_path), flags)):
        expected = {"num_rollbacks": ("1", "0"), "rate_factor": ("0.5", "1.0")}
        for name, values in expected.items():
            assert (rolled.pop(name), by_hand.pop(name)) == values
        assert_same_bits(rolled, by_hand)
        assert (summary["num_rollbacks"], summary["num_resumes"], summary["steps"]) == (1, 0, steps)
        # The time of what was lost counts, and so do its samples.
        assert summary["samples_trained"] == summary["samples_seen"] + num_lost
        assert summary["samples_per_s"] * summary["train_time_s"] == pytest.approx(summary["samples_trained"])
        if rank == 0:
            (noticed,) = [record for record in records if isinstance(record, DivergenceNoticed)]
            assert (noticed.step, noticed.rolled_back_to_step, noticed.rate_factor) == (bad_step, back_to, 0.5)
            end = f"Going back to step {back_to} with the learning rate × 0.5 (rollback 1 of 3)."
            assert noticed.text.endswith(end)
            said = [record.text for record in records if isinstance(record, Notice) and "The batch has" in record.text]
            assert [text.split()[3] for text in said] == ["grown", "gone", "grown"] * ("grow_batch" in flags)


def _rolls_back(world: World, folder: str) -> tuple[list[str], list[str], int]:
    """What a rollback reads of three checkpoints, of which the newest two were saved while the loss was not stable."""
    parts, _, (recorder, recovery, _) = assemble(
        world, folder, Tiny, run_name="back", on_divergence="rollback", keep_checkpoints=9
    )
    progress = parts.state.progress
    for step, num_uneasy in ((3, 0), (6, 1), (9, 2)):
        progress.step, progress.trend.num_uneasy = step, num_uneasy
        recorder.save(None)
    states, wholes = list[str](), list[str]()

    def noted(read: Callable[[Path], Any], into: list[str]) -> Callable[[Path], Any]:
        def reads(path: Path) -> Any:
            into.append(path.name)
            return read(path)

        return reads

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "read_state", noted(checkpoint.read_state, states))
        patch.setattr(checkpoint, "load", noted(checkpoint.load, wholes))
        assert recovery.roll_back(_lost(step=12, onset_step=12))
    recorder.end("epochs")
    return states, wholes, progress.step


def test_to_roll_back_one_checkpoint_is_loaded_and_of_the_others_only_the_state_is_read(
    run_ranks: Ranks, tmp_path: Path
) -> None:
    ((states, wholes, step),) = run_ranks(_rolls_back, 1, str(tmp_path))
    assert states == ["step-00000009", "step-00000006", "step-00000003"]
    assert (wholes, step) == (["step-00000003"], 3)


def _stays_unstable(world: World, folder: str) -> tuple[list[int], list[int]]:
    """The checkpoints on disk after many of a loss that is not stable, and after a stable one."""
    parts, _, (recorder, *_) = assemble(world, folder, Tiny, run_name="uneasy", keep_checkpoints=2)
    progress, found = parts.state.progress, []
    for step, num_uneasy in (*((step, 0) for step in range(1, 5)), *((step, step - 4) for step in range(5, 12))):
        progress.step, progress.trend.num_uneasy = step, num_uneasy
        recorder.save(None)
    for step in (11, 12):
        if step == 12:
            progress.step, progress.trend.num_uneasy = step, 0
            recorder.save(None)
        found.append([one.step for one in checkpoint.find(recorder.folder.checkpoints)])
    recorder.end("epochs")
    return found[0], found[1]


def test_the_last_two_stable_checkpoints_stay_whatever_comes_between_them(run_ranks: Ranks, tmp_path: Path) -> None:
    assert run_ranks(_stays_unstable, 1, str(tmp_path)) == [([11, 10, 4, 3], [12, 11, 4])]


def _slowly_lost(world: World, folder: str) -> tuple[list[int], int]:
    """The checkpoints on disk, and the one gone back to, of a loss that falls and then rises a little every step."""
    parts, _, (recorder, recovery, _) = assemble(
        world, folder, Tiny, run_name="slow", on_divergence="rollback", keep_checkpoints=1
    )
    progress, kind = parts.state.progress, None
    while kind is None:
        i = progress.step = progress.step + 1
        loss = 1.4 - 0.7 * min(i / 200, 1) + 2 * max(0.0, (i - 200) / 400)
        kind = progress.trend.update(loss, batch_size=32, patience=100)
        if not i % 20 and progress.trend.is_stable(2):
            recorder.save(None)
    found = [one.step for one in checkpoint.find(recorder.folder.checkpoints)]
    onset_step = progress.step + 1 - progress.trend.num_leading(kind, 2)
    assert recovery.roll_back(_lost(kind=kind, step=progress.step, onset_step=onset_step))
    recorder.end("epochs")
    return found, progress.step


def test_a_loss_that_is_lost_slowly_leaves_a_stable_checkpoint_and_the_beginning(
    run_ranks: Ranks, tmp_path: Path
) -> None:
    assert run_ranks(_slowly_lost, 1, str(tmp_path)) == [([380, 240, 220, 0], 240)]


def _back_and_back(world: World, folder: str) -> tuple[list[int], bool, list[float]]:
    """Where rollbacks in a row go to when every checkpoint is to blame, and what is left of the factor."""
    flags: dict[str, Any] = {"run_name": "back", "on_divergence": "rollback", "max_rollbacks": 3}
    parts, _, (recorder, recovery, records) = assemble(world, folder, Tiny, **flags)
    progress, steps = parts.state.progress, []
    for step in (10, 20, 30):
        progress.step = step
        recorder.save(None)
    for step in (40, 31, 21):
        assert recovery.roll_back(_lost(step=step, onset_step=step))
        steps.append(progress.step)
    for step in (10, 20, 30, 40):
        progress.step = step
        recorder.save(None)
    can_go_on = recovery.roll_back(_lost(step=12, onset_step=12))
    recovery.give_up(_lost(step=3, onset_step=3))
    said = [record.text for record in records if isinstance(record, DivergenceNoticed)]
    recorder.end("divergence", diverged_at_step=3)
    # The learning rates 0.1 to 0.0125 have failed; a resume keeps × 0.125, also of a higher one.
    assert " Try --base-lr 0.05, --clip-norm 1. " in said[-1]
    parts, _, (recorder, recovery, records) = assemble(world, folder, Tiny, resume="back", base_lr=0.8, **flags)
    resumed = parts.state.progress
    found = [resumed.step, resumed.num_rollbacks, resumed.rate_factor]
    recovery.give_up(_lost(step=3, onset_step=3))
    assert " Try --base-lr 0.05, --clip-norm 1. " in records[-1].text
    recovery.give_up(_lost(step=1, onset_step=1))  # before which there is no checkpoint
    assert " Try --base-lr 0.00625, " in records[-1].text
    recorder.end("epochs")
    return steps, can_go_on, found


def test_rollbacks_in_a_row_roll_back_to_the_beginning_at_last(run_ranks: Ranks, tmp_path: Path) -> None:
    assert run_ranks(_back_and_back, 1, str(tmp_path)) == [([30, 20, 0], False, [0, 3, 0.125])]


def _nothing_good(world: World, folder: str) -> tuple[str, list[str]]:
    """The end of a run without a good checkpoint, and what a resume says of it."""
    _, _, (recorder, recovery, records) = assemble(world, folder, Tiny, run_name="none")
    recovery.give_up(_lost(step=2, onset_step=2))
    recorder.end("divergence", diverged_at_step=2)
    _, _, (recorder, *_) = assemble(world, folder, Tiny, run_name="none", resume="none")
    recorder.end("epochs")
    events = read_events(Path(folder) / "none" / "events.jsonl")
    return records[0].text, [event["text"] for event in events if event["event"] == "notice"]


def test_the_end_and_the_resume_of_a_run_without_a_good_checkpoint_agree(run_ranks: Ranks, tmp_path: Path) -> None:
    ((end, said),) = run_ranks(_nothing_good, 1, str(tmp_path))
    assert end.endswith(" There is no good checkpoint from before: start a new run.")
    (said_of_it,) = [text for text in said if text.startswith("none ")]
    assert said_of_it.startswith("none diverged at step 2 and has no good checkpoint: it starts from the beginning")


class KilledError(Exception):
    """Stands for the end of a process."""


def _killed(world: World, folder: str, where: str) -> tuple[Any, Any]:
    """A run that rolls back and is killed there, and resumes; and one that is not killed."""
    flags: dict[str, Any] = {"on_divergence": "rollback", "base_lr": 0.1}
    parts, training, (recorder, *_) = assemble(world, folder, Recovering, run_name="whole", **flags)
    train(training)
    recorder.end("epochs")
    whole = _comparable(parts)

    parts, training, (recorder, *_) = assemble(world, folder, Recovering, run_name="killed", **flags)
    num_saves = 0

    def save(metric: float | None) -> None:
        nonlocal num_saves
        num_saves += 1
        if where == "before its save" and parts.state.progress.num_rollbacks:
            raise KilledError
        type(recorder).save(recorder, metric)
        if where == "after its save" and parts.state.progress.num_rollbacks:
            raise KilledError

    recorder.save = save
    with pytest.raises(KilledError):
        train(training)
    recorder.end("error")
    parts, training, (recorder, *_) = assemble(world, folder, Recovering, run_name="killed", resume="killed", **flags)
    assert parts.state.progress.rate_factor == (1.0 if where == "before its save" else 0.5)
    train(training)
    recorder.end("epochs")
    return whole, _comparable(parts)


@pytest.mark.parametrize("where", ["before its save", "after its save"])
def test_a_run_that_is_killed_in_a_rollback_resumes_as_one_that_was_not(
    run_ranks: Ranks, tmp_path: Path, where: str
) -> None:
    ((whole, resumed),) = run_ranks(_killed, 1, str(tmp_path), where)
    assert_same_bits(whole, resumed)


def _never_recovers(world: World, folder: str) -> tuple[list[Any], list[int], tuple[int, int, float]]:
    flags: dict[str, Any] = {"rollback_factor": 0.1, "max_rollbacks": 2, "keep_checkpoints": 9}
    _, training, (recorder, recovery, records) = assemble(
        world, folder, breaking_at(7), run_name="lost", on_divergence="rollback", **flags
    )
    outcome = train(training)
    assert outcome.diverged is not None
    recovery.give_up(outcome.diverged)
    recorder.end("divergence", diverged_at_step=outcome.diverged.step)
    steps = [found.step for found in checkpoint.find(Path(folder) / "lost" / "checkpoints")]
    resumed, _, (recorder, *_) = assemble(world, folder, Tiny, run_name="lost", resume="lost")
    progress = resumed.state.progress
    recorder.end("epochs")
    return records, steps, (progress.step, progress.num_rollbacks, progress.rate_factor)


def test_rollbacks_go_further_back_where_the_weights_are_to_blame_and_come_to_an_end(
    run_ranks: Ranks, tmp_path: Path
) -> None:
    ((records, steps, resumed),) = run_ranks(_never_recovers, 1, str(tmp_path))
    noticed = [record for record in records if isinstance(record, DivergenceNoticed)]
    # Two calls of the loss are the sanity check's: the fifth step is the first bad one, and every call from then on.
    # Checkpoints were saved at steps 0, 2, 3 and 4, and one is no good whose very next loss is not finite.
    assert [(record.step, record.rolled_back_to_step) for record in noticed] == [(5, 3), (4, 2), (3, None)]
    assert [record.rate_factor for record in noticed] == pytest.approx([0.1, 0.01, 0.01])
    assert "2 rollbacks did not help. Try " in noticed[-1].text
    assert "The last good checkpoint is that of step 0; resume from it with: stormo train --resume " in noticed[-1].text
    assert steps == [0]
    assert resumed == pytest.approx(
        (0, 2, 0.01)
    )  # that checkpoint is older than both rollbacks: they stay all the same
    summary = records[-1].summary
    assert (summary["num_rollbacks"], summary["stopped_by"], summary["diverged_at_step"]) == (2, "divergence", 3)


def test_a_record_of_a_rollback_takes_every_sink_back(tmp_path: Path) -> None:
    started = RunStarted(
        run_name="a", run_folder="a", task="t", world_size=1, global_batch_size=8, epochs=2, steps_per_epoch=9
    )
    noticed = DivergenceNoticed(
        epoch=1,
        step=7,
        kind="loss",
        loss=NAN,
        learning_rate=0.1,
        rolled_back_to_step=4,
        rate_factor=0.5,
        text="Diverged at step 7.",
    )
    saved = [CheckpointSaved(epoch=1, step=step, path="p", weights_sha256="", save_time_s=0.1) for step in (4, 6, 4, 5)]
    plain, live = io.StringIO(), io.StringIO()
    board = TensorBoardFile(tmp_path / "board")
    files = EventFile(RunFolder(tmp_path))
    records: list[Record] = [started, *saved[:2], noticed, *saved[2:]]
    sinks: list[Sink] = [
        board,
        files,
        PlainConsole(plain),
        TerminalConsole(live, environ={"COLUMNS": "80"}, clock=lambda: 0.0),
    ]
    for sink in sinks:
        for record in records:
            sink.write(record)
        sink.close()
    events = current_events(read_events(tmp_path / "events.jsonl"))
    assert [event["event"] for event in events] == [
        "run_started",
        "checkpoint_saved",
        "divergence_noticed",
        "checkpoint_saved",
        "checkpoint_saved",
    ]
    assert events[2]["loss"] is None  # JSON knows no such number
    assert plain.getvalue() == f"run folder: {started.run_folder}\nDiverged at step 7.\n"
    assert "Diverged at step 7." in live.getvalue()
    first, second = sorted((tmp_path / "board").iterdir())
    # A session that starts at step 5: TensorBoard discards what the file before has of it and of later steps.
    assert (first.name[-2:], second.name[-2:]) == (".0", ".1")
    assert b"\x10\x05" in second.read_bytes()


# --- words and settings -----------------------------------------------------------------------------------------------


def _lost(**changes: Any) -> Diverged:
    lost = Diverged(
        kind="loss",
        epoch=2,
        step=12,
        onset_step=12,
        position=0,
        loss=NAN,
        first_loss=2.3,
        best_loss=1.5,
        learning_rate=0.4,
    )
    return replace(lost, **changes)


def _settings(task_options: dict[str, Any] | None = None, **flags: Any) -> Parts:
    flags = {"global_batch_size": 16, **flags}
    return build(World(alone(), torch.device("cpu")), {"num_train": 160, **(task_options or {})}, **flags)


@pytest.mark.parametrize(
    ("flags", "lost", "cause", "tried"),
    [
        (
            {},
            _lost(),
            "Diverged at step 12 (epoch 2): the training loss became nan; it began at 2.3 and was 1.5 at its best. "
            "Likely cause: a learning rate that is too high (0.4 at that step, without warm-up).",
            ["--base-lr 0.05", "--clip-norm 1"],
        ),
        (
            {},
            _lost(kind="exploded", loss=1e7),
            "a learning rate that is too high (0.4 at that step, without warm-up).",
            ["--base-lr 0.05", "--clip-norm 1", "or --on-divergence ignore if the loss is meant to rise"],
        ),
        (
            {"warmup_epochs": 1.0, "warmup_from": 0.0, "optimizer": "adamw", "clip_norm": 5.0, "precision": "fp16"},
            _lost(),
            "a number above 65,504, the largest of fp16, or a learning rate that is too high (0.4 at that step).",
            ["--precision bf16 (or fp32)", "--base-lr 0.05", "--clip-norm 0.5"],
        ),
        (
            {},
            _lost(has_bad_inputs=True),
            "the batch of that step holds inputs that are not finite numbers",
            ["data without such values (torch.isfinite finds them)"],
        ),
        (
            {},
            _lost(kind="validation", loss=INF),
            "the validation loss became inf; that of training began at 2.3 and was 1.5 at its best.",
            ["validation data without such values (torch.isfinite finds them)", "--clip-norm 1"],
        ),
    ],
)
def test_the_diagnosis_names_cause_and_flags(
    flags: dict[str, Any], lost: Diverged, cause: str, tried: list[str]
) -> None:
    parts = _settings(**flags)
    assert cause in diagnosis(parts.plan, lost)
    assert advice(parts.config, parts.plan, lost, has_own_optimizer=False)[0] == tried


def test_rollbacks_that_did_not_help_are_in_the_advice() -> None:
    parts = _settings()
    rate = parts.plan.learning_rate / 4  # the lowest that diverged; a resume keeps the factor of the rollbacks
    for kept_factor, flag in ((0.25, "--base-lr 0.05"), (1.0, "--base-lr 0.0125")):
        found = advice(
            parts.config, parts.plan, _lost(), has_own_optimizer=False, diverged_rate=rate, kept_factor=kept_factor
        )
        assert found == ([flag, "--clip-norm 1"], flag)


def test_advice_fits_an_own_optimizer_and_stale_servers() -> None:
    parts = _settings()
    tried, flag = advice(parts.config, parts.plan, _lost(), has_own_optimizer=True)
    assert tried == ["half the learning rate in the task's optimizer()", "--clip-norm 1"]
    assert flag == "--clip-norm 1"
    config = replace(parts.config, workers=replace(parts.config.workers, strategy="server", staleness=2))
    tried, _ = advice(config, parts.plan, _lost(), has_own_optimizer=False)
    assert tried == ["--base-lr 0.05", "--staleness 0"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"rollback_factor": 1.0}, "--rollback-factor 1 was set, but a rollback lowers the learning rate by it"),
        ({"rollback_factor": 0.0}, "--rollback-factor 0 was set"),
        ({"max_rollbacks": 0}, "--max-rollbacks 0 was set"),
        (
            {"rollback_factor": 0.5},
            "--rollback-factor 0.5 was set, but it needs --on-divergence rollback",
        ),
        ({"max_rollbacks": 3, "on_divergence": "ignore"}, "--max-rollbacks 3 was set, but it needs"),
    ],
)
def test_settings_that_cannot_hold_are_refused(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingError, match=sentence):
        _settings(**flags)


def test_a_run_that_went_back_may_go_on_without_rollbacks() -> None:
    parts = _settings(on_divergence="rollback", rollback_factor=0.25)
    config = replace(parts.config, stop=replace(parts.config.stop, on_divergence="stop"), given=frozenset())
    check_numbers(config)  # what the run inherits is not what the user gives now
