"""The training loop: a batch, a step, a record, a stop. What happens at the end of an epoch is in `epoch_end`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from stormo.config.plan import Plan
from stormo.config.schema import TrainConfig
from stormo.data.batches import tensors_in
from stormo.data.loaders import Loader
from stormo.distributed.world import AsyncAllReduce, World
from stormo.errors import counted
from stormo.launch.signals import StopFlag
from stormo.optim.schedule import Schedule
from stormo.profiling.ranges import range_of
from stormo.profiling.window import ProfileWindow
from stormo.telemetry.record import NodeSampled, Notice, Record, StepDone
from stormo.training.clock import TrainingClock
from stormo.training.divergence import Diverged, LossMonitor, StepInfo, patience_steps, wait_steps
from stormo.training.epoch_end import end_epoch, target_held
from stormo.training.measuring import AnyNodeRecorder
from stormo.training.state import RunState
from stormo.training.validation import Validation

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
    record: Callable[[Record], None]  # does nothing except on rank 0
    save: Callable[[float | None], None]  # publishes a checkpoint; its argument is the metric that ranks it
    sign_of_life: Callable[[int], None]
    keeper: AnyNodeRecorder  # records the node's energy
    profile: ProfileWindow
    recover: Callable[[Diverged], bool] = lambda diverged: False  # goes back to a good checkpoint, where that is set
    shown_sample: Mapping[str, Any] | None = None  # the newest sample of the node that was recorded
    last_learning_rate: float = 0.0

    def learning_rate(self, position: int) -> float:
        """The learning rate of the step that begins at this position of the epoch."""
        progress = self.state.progress
        rate = self.schedule(self.plan.schedule_step(progress.epoch, position)) * progress.rate_factor
        self.last_learning_rate = rate
        return rate


@dataclass(frozen=True, slots=True)
class Outcome:
    """How training ended: `stopped_by` is target, epochs, signal or divergence."""

    stopped_by: str
    signal_number: int = 0
    diverged: Diverged | None = None


def train(run: Training) -> Outcome:
    """Train until the target is held, the epochs are done, a signal comes or the run diverges for good."""
    clock = TrainingClock(run.world, run.loader, run.state.progress, run.state.strategy, run.keeper)
    _advance_profiler(run)
    with run.state.strategy.running():
        while True:
            outcome = _train_epochs(run, clock)
            if outcome.diverged is None:
                return outcome
            diverged = _with_bad_inputs(run, outcome.diverged)
            if not run.recover(diverged):
                return replace(outcome, diverged=diverged)


def _train_epochs(run: Training, clock: TrainingClock) -> Outcome:
    progress = run.state.progress
    vote, losses = _open_vote(run)
    run.state.strategy.module.train()
    while progress.epoch <= run.plan.epochs and not target_held(run):
        _follow_growth(run)
        losses.wait_steps = wait_steps(run.plan, progress.epoch)
        outcome = _train_epoch(run, clock, vote, losses)
        if outcome is not None:
            return outcome
        found = end_epoch(run, clock, losses)
        if isinstance(found, Diverged):
            return Outcome("divergence", diverged=found)
        if found:
            run.save(None)  # validation is repeated after a resume
            return Outcome("signal", found)
    return Outcome("target" if target_held(run) else "epochs")


def _train_epoch(run: Training, clock: TrainingClock, vote: AsyncAllReduce, losses: LossMonitor) -> Outcome | None:
    """Train the rest of an epoch; None once it is done."""
    progress, strategy = run.state.progress, run.state.strategy
    size = run.loader.share.global_batch_size
    run.learning_rate((progress.position - 1) // size * size if progress.position else 0)  # of the step before
    clock.start()
    for batch in run.profile.batches(run.loader.epoch(progress.epoch, progress.position), progress):
        if batch.span.is_first:
            vote.cast(run.flag.signal_number, losses.share())
        with range_of("forward+backward"):
            loss = strategy.micro_step(batch)
        losses.add(loss)
        if not batch.span.is_last:
            continue
        learning_rate = run.learning_rate(progress.position)
        with range_of("optimizer"):
            strategy.step(learning_rate)
        progress.advance(run.loader.samples(batch.span))
        strategy.exchange_weights()
        step = StepInfo(
            epoch=progress.epoch,
            step=progress.step,
            position=batch.span.step_start,
            learning_rate=learning_rate,
            num_samples=batch.span.step_samples,
        )
        losses.update(step, run.state.add_loss)
        run.sign_of_life(progress.step)
        clock.step_done()
        stop, diverged = vote.outcome(), losses.judge(vote.total())
        _record_step(run, clock, losses)
        if run.profile.step_done(progress.step):
            _profiler_step(run, clock)
        if diverged is None and (stop or _is_checkpoint_due(run, losses)):
            stop = max(stop, _sync_workers(run, clock, vote))
            diverged = losses.judge_all(strategy.weights())
            if diverged is None and (stop or losses.is_stable):
                run.save(None)
                losses.owes_checkpoint = False
                if stop:
                    return Outcome("signal", stop)
            clock.start()
        if diverged is not None:
            _sync_workers(run, clock, vote)
            return Outcome("divergence", diverged=diverged)
    stop = _sync_workers(run, clock, vote)
    diverged = losses.judge_all(strategy.weights())
    if diverged is not None:
        return Outcome("divergence", diverged=diverged)
    if stop:
        run.save(None)  # validation follows after a resume
        return Outcome("signal", stop)
    return None


def _open_vote(run: Training) -> tuple[AsyncAllReduce, LossMonitor]:
    """What the ranks agree on in every step, and the losses that travel with it."""
    # A vote is cast when a step begins and read when it ends, so a rank can be one step ahead of others.
    staleness = run.state.strategy.staleness
    lag = max(0, staleness - 1)
    levels = run.world.levels() if staleness != 1 else None  # with them it can be two steps ahead
    if levels is not None:
        lag = max(lag, 1)
    losses = LossMonitor(
        run.world,
        run.state.progress.trend,
        is_on=run.settings.stop.on_divergence != "ignore",
        batch_size=run.plan.global_batch_size,
        patience=patience_steps(run.plan.steps_per_epoch),
        vote_lag=lag,
    )
    return AsyncAllReduce(run.world, lag, levels), losses


def _is_checkpoint_due(run: Training, losses: LossMonitor) -> bool:
    """Whether to save within an epoch; a checkpoint that is due waits for a stable loss."""
    progress = run.state.progress
    if progress.position >= run.loader.num_samples:  # the end of an epoch is validated before it is saved
        return False
    losses.owes_checkpoint |= run.plan.is_checkpoint_due(progress.epoch, progress.step, progress.position)
    return losses.owes_checkpoint and losses.is_stable


def _sync_workers(run: Training, clock: TrainingClock, vote: AsyncAllReduce) -> int:
    """Stop the clock and bring all ranks to the same step; return a signal that was not read yet."""
    clock.pause()
    stop = vote.drain()
    run.state.strategy.synchronize()
    return stop


def _follow_growth(run: Training) -> None:
    """Take the batch size of the epoch that begins, where it has grown."""
    plan, loader = run.plan.at_epoch(run.state.progress.epoch), run.loader
    before = loader.share.global_batch_size
    if plan.global_batch_size != before:
        loader.share = replace(loader.share, global_batch_size=plan.global_batch_size, accumulate=plan.accumulate)
        run.state.strategy.set_accumulation(plan)
        change = "grown" if plan.global_batch_size > before else "gone back"
        text = (
            f"The batch has {change} to {plan.global_batch_size} samples in {counted(plan.accumulate, 'micro-batch')}."
        )
        run.record(Notice(kind="info", text=text))


def _with_bad_inputs(run: Training, diverged: Diverged) -> Diverged:
    """Read the batch without a finite loss again, and say whether its inputs are to blame."""
    if diverged.kind != "loss" or run.plan.facts.is_stream:  # a stream would be read from its beginning
        return diverged
    is_bad = False
    for batch in run.loader.epoch(diverged.epoch, diverged.position):
        floats = [tensor for tensor in tensors_in(batch.data) if tensor.is_floating_point()]
        is_bad = is_bad or not all(bool(tensor.isfinite().all()) for tensor in floats)
        if batch.span.is_last:
            break
    return replace(diverged, has_bad_inputs=bool(run.world.max(torch.tensor([float(is_bad)])).item()))


def _profiler_step(run: Training, clock: TrainingClock) -> None:
    clock.pause()
    _advance_profiler(run)
    clock.start()


def _advance_profiler(run: Training) -> None:
    """Let the profiler prepare or write, which does not count as training, and record what it says."""
    step = run.state.progress.step
    for line in run.profile.tend(step + 1):
        run.record(Notice(kind="info", text=line, after_step=step))


def _record_step(run: Training, clock: TrainingClock, losses: LossMonitor) -> None:
    """Record the progress and the node's newest sample on rank 0, a few times a second."""
    if not (run.world.is_main and losses.has_loss_to_log and clock.since_last_s() > _SECONDS_BETWEEN_RECORDS):
        return
    progress, share = run.state.progress, run.loader.share
    loss = losses.loss_since_last_log()
    samples_per_s, wait_fraction = clock.interval()
    run.record(
        StepDone(
            epoch=progress.epoch,
            step=progress.step,
            step_in_epoch=-(-progress.position // share.global_batch_size),
            steps_in_epoch=-(-run.loader.num_samples // share.global_batch_size),
            global_batch_size=share.global_batch_size,
            samples_seen=progress.samples_seen,
            loss=loss,
            learning_rate=run.last_learning_rate,
            samples_per_s=samples_per_s,
            units_per_s=samples_per_s * run.plan.facts.units_per_sample,
            input_wait_fraction=wait_fraction,
            train_time_s=progress.train_time_s + clock.running_s(),
            noise_scale=meter.read().value if (meter := run.state.strategy.noise_scale) else None,
            unit=run.plan.facts.unit,
            mfu=run.plan.mfu(samples_per_s),
            power_w=run.keeper.power_w,
        )
    )
    sample = run.keeper.latest_sample
    if sample is not None and sample is not run.shown_sample:
        run.shown_sample = sample
        run.record(NodeSampled(sample=sample))
