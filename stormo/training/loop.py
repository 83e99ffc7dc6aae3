"""The training loop: one batch after the next, whatever the strategy, the device and the number of workers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from stormo.config.plan import Plan
from stormo.config.schema import TrainConfig
from stormo.data.batches import tensors_in
from stormo.data.loaders import Loader
from stormo.distributed.world import Vote, World
from stormo.energy.keeper import steady_unix_s
from stormo.errors import counted
from stormo.launch.signals import StopFlag
from stormo.optim.schedule import Schedule
from stormo.profiling.ranges import range_of
from stormo.profiling.window import ProfileWindow
from stormo.telemetry.record import EpochDone, NodeSampled, Notice, Record, StepDone, ValidationProgress
from stormo.training.divergence import Diverged, patience_steps, wait_steps
from stormo.training.losses import LossWatch, Moment
from stormo.training.measuring import AnyKeeper
from stormo.training.metrics import Validation
from stormo.training.state import RunState
from stormo.training.stopwatch import Stopwatch

_SECONDS_BETWEEN_RECORDS = 0.25


@dataclass(kw_only=True)
class Training:
    """The parts of a run that the loop brings together."""

    world: World
    plan: Plan
    settings: TrainConfig
    state: RunState
    loader: Loader
    validation: Validation
    schedule: Schedule
    flag: StopFlag
    record: Callable[[Record], None]  # does nothing except on the main worker
    save: Callable[[float | None], None]  # publishes a checkpoint; its argument is the metric that ranks it
    sign_of_life: Callable[[int], None]
    keeper: AnyKeeper  # of the node's account
    profile: ProfileWindow
    recover: Callable[[Diverged], bool] = lambda diverged: False  # goes back to a good state, where that is asked for
    shown_sample: Mapping[str, Any] | None = None  # the newest state of the node that has been recorded

    def learning_rate(self, position: int) -> float:
        """Of the step that begins at this position of the epoch."""
        progress = self.state.progress
        return self.schedule(self.plan.schedule_step(progress.epoch, position)) * progress.rate_factor


@dataclass(frozen=True, slots=True)
class Outcome:
    """How training ended: `stopped_by` is target, epochs, signal or divergence."""

    stopped_by: str
    signal_number: int = 0
    diverged: Diverged | None = None


def train(run: Training) -> Outcome:
    """Train until the target is held, the epochs are done, a signal comes or the loss is lost for good."""
    watch = Stopwatch(run.world, run.loader, run.state.progress, run.state.strategy, run.keeper)
    _tell_profile(run)
    with run.state.strategy.running():
        while True:
            outcome = _train(run, watch)
            if outcome.diverged is None:
                return outcome
            outcome = replace(outcome, diverged=_inspected(run, outcome.diverged))
            assert outcome.diverged is not None
            if not run.recover(outcome.diverged):
                return outcome


def _train(run: Training, watch: Stopwatch) -> Outcome:
    progress, strategy, plan = run.state.progress, run.state.strategy, run.plan
    vote, losses = _open_vote(run)
    strategy.module.train()
    while progress.epoch <= plan.epochs and not _target_held(run):
        _follow_growth(run)
        losses.wait_steps = wait_steps(plan, progress.epoch)
        size = run.loader.share.global_batch_size
        learning_rate = run.learning_rate((progress.position - 1) // size * size if progress.position else 0)
        watch.start()
        for batch in run.profile.batches(run.loader.epoch(progress.epoch, progress.position), progress):
            if batch.span.is_first:
                vote.cast(run.flag.signal_number, losses.share())
            with range_of("forward+backward"):
                loss = strategy.forward_backward(batch)
            losses.add(loss)
            if not batch.span.is_last:
                continue
            learning_rate = run.learning_rate(progress.position)
            with range_of("optimizer"):
                strategy.step(learning_rate)
            progress.advance(run.loader.samples(batch.span))
            strategy.exchange_weights()
            losses.note(
                Moment(
                    epoch=progress.epoch,
                    step=progress.step,
                    position=batch.span.step_start,
                    learning_rate=learning_rate,
                    num_samples=batch.span.step_samples,
                ),
                run.state.add_loss,
            )
            run.sign_of_life(progress.step)
            watch.note_step()
            stop, diverged = vote.outcome(), losses.hear(vote.total())
            if run.world.is_main and losses.has_news and watch.since_last_s() > _SECONDS_BETWEEN_RECORDS:
                run.record(_step_record(run, watch, losses.tell(), learning_rate))
                _show_node(run)
            if run.profile.step_done(progress.step):
                _tend_profile(run, watch)
            # At its end an epoch is validated before it is saved.
            is_within = progress.position < run.loader.num_samples
            losses.owes_checkpoint |= is_within and plan.is_checkpoint_due(
                progress.epoch, progress.step, progress.position
            )
            if diverged is None and (stop or (is_within and losses.owes_checkpoint and losses.is_calm)):
                stop = max(stop, _come_together(run, watch, vote))
                diverged = losses.settle(strategy.weights())
                if diverged is None and (stop or losses.is_calm):
                    run.save(None)
                    losses.owes_checkpoint = False
                    if stop:
                        return Outcome("signal", stop)
                watch.start()
            if diverged is not None:
                _come_together(run, watch, vote)
                return Outcome("divergence", diverged=diverged)
        stop = _come_together(run, watch, vote)
        found = losses.settle(strategy.weights()) or stop
        found = found or _finish_epoch(run, watch, Vote(run.world), losses, learning_rate)
        if isinstance(found, Diverged):
            return Outcome("divergence", diverged=found)
        if found:
            run.save(None)  # the signal came before or during validation, which is done anew after a resume
            return Outcome("signal", found)
    return Outcome("target" if _target_held(run) else "epochs")


def _open_vote(run: Training) -> tuple[Vote, LossWatch]:
    """What the workers agree on in every step, and the losses that travel with it."""
    # Cast when a step begins and read when it ends, a vote alone lets a worker be one step ahead.
    staleness = run.state.strategy.staleness
    lag = max(0, staleness - 1)
    levels = run.world.levels() if staleness != 1 else None  # which lets it be two steps ahead
    if levels is not None:
        lag = max(lag, 1)
    losses = LossWatch(
        run.world,
        run.state.progress.trend,
        is_on=run.settings.stop.on_divergence != "ignore",
        batch_size=run.plan.global_batch_size,
        patience=patience_steps(run.plan.steps_per_epoch),
        vote_lag=lag,
    )
    return Vote(run.world, lag, levels), losses


def _come_together(run: Training, watch: Stopwatch, vote: Vote) -> int:
    """Stop the clock, and have all workers at the same step before what they do together; return a signal not read."""
    watch.pause()
    stop = vote.drain()
    run.state.strategy.settle()
    return stop


def _follow_growth(run: Training) -> None:
    """Take the batch of the epoch that begins, where it has grown."""
    plan, loader = run.plan.at_epoch(run.state.progress.epoch), run.loader
    before = loader.share.global_batch_size
    if plan.global_batch_size != before:
        loader.share = replace(loader.share, global_batch_size=plan.global_batch_size, accumulate=plan.accumulate)
        run.state.strategy.cut_as(plan)
        change = "grown" if plan.global_batch_size > before else "gone back"
        text = f"The batch has {change} to {plan.global_batch_size} samples in {counted(plan.accumulate, 'pass')}."
        run.record(Notice(kind="info", text=text))


def _target_held(run: Training) -> bool:
    # Every worker has the same metrics, to the last bit, so every worker decides alike.
    return run.state.progress.target_streak >= run.settings.stop.patience


def _inspected(run: Training, diverged: Diverged) -> Diverged:
    """Look at the batch that has given no finite loss, of which every worker reads its share again."""
    if diverged.kind != "loss" or run.plan.facts.is_stream:  # a stream would be read from its beginning
        return diverged
    is_bad = False
    for batch in run.loader.epoch(diverged.epoch, diverged.position):
        floats = [tensor for tensor in tensors_in(batch.data) if tensor.is_floating_point()]
        is_bad = is_bad or not all(bool(tensor.isfinite().all()) for tensor in floats)
        if batch.span.is_last:
            break
    return replace(diverged, has_bad_inputs=bool(run.world.max(torch.tensor([float(is_bad)])).item()))


def _finish_epoch(
    run: Training, watch: Stopwatch, vote: Vote, losses: LossWatch, learning_rate: float
) -> int | Diverged:
    """Validate, record and save at the end of an epoch; return the signal that cut the validation short, or 0."""
    progress, plan = run.state.progress, run.plan
    began = time.perf_counter()
    run.keeper.enter("validation", progress.step)
    with range_of("validation"):
        metrics = _validate(run, vote)
    run.keeper.enter("idle", progress.step)
    if isinstance(metrics, int):
        return metrics
    if run.settings.stop.on_divergence != "ignore" and not math.isfinite(metrics.get("loss", 0.0)):
        last = Moment(epoch=progress.epoch, step=progress.step, position=0, learning_rate=learning_rate)
        return losses.verdict("validation", last, metrics["loss"])
    loss_sum, num_items = run.world.sum(torch.stack([run.state.loss_sum, run.state.num_items])).tolist()
    train_loss = loss_sum / num_items if num_items else math.nan
    samples_per_s = run.loader.num_samples / max(progress.epoch_time_s, 1e-9)
    progress.validation = metrics
    progress.peak_memory_bytes, progress.peak_reserved_memory_bytes = watch.peak_memory_bytes()
    _count_target(run, metrics)
    figures = watch.end_of_epoch()
    done = EpochDone(
        epoch=progress.epoch,
        step=progress.step,
        samples_seen=progress.samples_seen,
        epoch_time_s=progress.epoch_time_s,
        cumulative_time_s=progress.train_time_s,
        validation_time_s=time.perf_counter() - began,
        samples_per_s=samples_per_s,
        units_per_s=samples_per_s * plan.facts.units_per_sample,
        train_loss=train_loss,
        learning_rate=learning_rate,
        input_wait_fraction=watch.wait_fraction(),
        peak_memory_bytes=progress.peak_memory_bytes,
        peak_reserved_memory_bytes=progress.peak_reserved_memory_bytes,
        validation=metrics,
        unit=plan.facts.unit,
        mfu=plan.mfu(samples_per_s),
        energy_j=figures.energy_j,
        power_w=figures.power_w,
        workers=figures.workers,
    )
    progress.epoch += 1
    progress.epochs_done += 1
    progress.position, progress.epoch_time_s = 0, 0.0
    run.state.loss_sum.zero_()
    run.state.num_items.zero_()
    run.record(done)
    if _target_held(run):
        run.record(Notice(kind="stop", text=f"Early stopping after epoch {done.epoch}"))
    is_end = progress.epoch > plan.epochs or _target_held(run)
    is_due = plan.is_checkpoint_due(done.epoch, progress.step, run.loader.num_samples)
    is_best = plan.checkpoint_steps is not None and progress.best_validation is progress.validation
    losses.owes_checkpoint |= is_due
    pays = losses.owes_checkpoint and losses.is_calm
    if is_end or is_best or pays:  # the best is saved as it is; that its loss was not calm is written in it
        run.save(_rank(metrics))
    losses.owes_checkpoint &= not pays
    warning = progress.trend.not_learning(progress.epochs_done, run.settings.optimizer.warmup_epochs)
    if warning is not None:
        run.record(Notice(kind="warning", text=warning))
    return 0


def _rank(metrics: Mapping[str, float]) -> float | None:
    """What ranks an epoch among others: its accuracy or, where there is none, how low its loss is."""
    return metrics["accuracy"] if "accuracy" in metrics else -metrics["loss"] if "loss" in metrics else None


def _count_target(run: Training, metrics: Mapping[str, float]) -> None:
    progress, stop = run.state.progress, run.settings.stop
    reached = False
    if stop.target_accuracy is not None:
        reached = metrics.get("accuracy", -math.inf) >= stop.target_accuracy
    if stop.target_loss is not None:
        reached = reached or metrics.get("loss", math.inf) <= stop.target_loss
    progress.target_streak = progress.target_streak + 1 if reached else 0
    if progress.target_streak >= stop.patience and progress.time_to_target_s is None:
        progress.time_to_target_s, progress.target_unix_s = progress.train_time_s, steady_unix_s()
    rank, best = _rank(metrics), _rank(progress.best_validation or {})
    if progress.best_validation is None or (rank is not None and (best is None or math.isnan(best) or rank > best)):
        progress.best_validation = progress.validation


def _validate(run: Training, vote: Vote) -> dict[str, float] | int:
    """The metrics over the whole validation set, or the signal that was agreed on meanwhile."""
    strategy, validation = run.state.strategy, run.validation
    strategy.average_buffers()
    with strategy.averaged():
        for turn, metrics in enumerate(validation.run(strategy.validated, strategy.autocast), start=1):
            if metrics is not None:
                return metrics
            vote.cast(run.flag.signal_number)
            run.record(ValidationProgress(epoch=run.state.progress.epoch, done=turn, total=validation.num_rounds))
            run.sign_of_life(run.state.progress.step)
            stop = vote.outcome()
            if stop:
                return stop
    raise AssertionError("validation ended without metrics")


def _tend_profile(run: Training, watch: Stopwatch) -> None:
    watch.pause()
    _tell_profile(run)
    watch.start()


def _tell_profile(run: Training) -> None:
    """Let the profiler get ready or write, which is no training, and tell what it says."""
    step = run.state.progress.step
    for line in run.profile.tend(step + 1):
        run.record(Notice(kind="info", text=line, after_step=step))


def _show_node(run: Training) -> None:
    """Hand on the newest sample of the main worker's node, once."""
    sample = run.keeper.latest_sample
    if sample is not None and sample is not run.shown_sample:
        run.shown_sample = sample
        run.record(NodeSampled(sample=sample))


def _step_record(run: Training, watch: Stopwatch, loss: float, learning_rate: float) -> StepDone:
    progress = run.state.progress
    samples_per_s, wait_fraction = watch.interval()
    return StepDone(
        epoch=progress.epoch,
        step=progress.step,
        step_in_epoch=-(-progress.position // run.loader.share.global_batch_size),
        steps_in_epoch=-(-run.loader.num_samples // run.loader.share.global_batch_size),
        global_batch_size=run.loader.share.global_batch_size,
        samples_seen=progress.samples_seen,
        loss=loss,
        learning_rate=learning_rate,
        samples_per_s=samples_per_s,
        units_per_s=samples_per_s * run.plan.facts.units_per_sample,
        input_wait_fraction=wait_fraction,
        train_time_s=progress.train_time_s + watch.running_s(),
        noise_scale=meter.read().value if (meter := run.state.strategy.noise_scale) else None,
        unit=run.plan.facts.unit,
        mfu=run.plan.mfu(samples_per_s),
        power_w=run.keeper.power_w,
    )
