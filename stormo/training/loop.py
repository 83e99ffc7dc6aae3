"""The training loop: for each batch forward and backward, for each step an update, for each epoch a validation."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from stormo.distributed.world import AsyncAllReduce
from stormo.profiling.ranges import range_of
from stormo.training.clock import TrainingClock
from stormo.training.context import RunContext
from stormo.training.divergence import Diverged, LossMonitor, StepInfo, find_bad_inputs, wait_steps


@dataclass(frozen=True, slots=True)
class Outcome:
    """How training ended: `stopped_by` is target, epochs, signal or divergence."""

    stopped_by: str
    signal_number: int = 0
    diverged: Diverged | None = None


def train(run: RunContext) -> Outcome:
    """Train until the target is reached, the epochs are done, a signal comes or the run diverges for good."""
    clock = TrainingClock(run.world, run.loader, run.state.progress, run.state.strategy, run.node_recorder)
    run.profiler_step()
    with run.state.strategy.running():
        run.hook("on_train_start")
        while True:
            outcome = _train_epochs(run, clock)
            if outcome.diverged is None:
                run.hook("on_train_end", run.state.progress.validation)
                return outcome
            diverged = find_bad_inputs(outcome.diverged, run.loader, run.world, is_stream=run.plan.facts.is_stream)
            if not run.roll_back(diverged):
                return replace(outcome, diverged=diverged)


def _train_epochs(run: RunContext, clock: TrainingClock) -> Outcome:
    progress = run.state.progress
    vote, losses = run.open_vote()
    run.state.strategy.module.train()
    while progress.epoch <= run.plan.epochs and not run.has_reached_target:
        run.update_batch_size()
        losses.wait_steps = wait_steps(run.plan, progress.epoch)
        outcome = _train_epoch(run, clock, vote, losses) or _end_epoch(run, clock, losses)
        if outcome is not None:
            return outcome
    return Outcome("target" if run.has_reached_target else "epochs")


def _train_epoch(run: RunContext, clock: TrainingClock, vote: AsyncAllReduce, losses: LossMonitor) -> Outcome | None:
    """Train the rest of an epoch; None once it is done."""
    progress, strategy = run.state.progress, run.state.strategy
    size = run.loader.share.global_batch_size
    run.learning_rate((progress.position - 1) // size * size if progress.position else 0)  # of the step before
    clock.start()
    for batch in run.profile.batches(run.loader.epoch(progress.epoch, progress.position), progress):
        if batch.span.is_first:
            vote.start(run.stop_flag.signal_number, losses.share())
        with range_of("forward+backward"):
            losses.add(strategy.micro_step(batch))
        if not batch.span.is_last:
            continue
        learning_rate = run.learning_rate(progress.position)
        with range_of("optimizer"):
            strategy.step(learning_rate)
            strategy.step_scheduler("step")
        progress.advance(run.loader.samples(batch.span))
        strategy.exchange_weights()
        step = StepInfo(
            epoch=progress.epoch,
            step=progress.step,
            position=batch.span.step_start,
            learning_rate=run.last_learning_rate,
            num_samples=batch.span.step_samples,
        )
        losses.update(step, run.state.add_loss)
        run.hook("on_step_end")
        run.heartbeat(progress.step)
        clock.step_done()
        stop, diverged = vote.outcome(), losses.check(vote.total())
        run.record_step(clock, losses)
        if run.profile.step_done(progress.step):
            clock.pause()
            run.profiler_step()
            clock.start()
        if diverged is None and (stop or run.is_checkpoint_due(losses)):
            stop = max(stop, run.sync_workers(clock, vote))
            diverged = losses.check_all(strategy.weights())
            if diverged is None and (stop or losses.is_stable):
                run.save(None)
                losses.checkpoint_is_due = False
                if stop:
                    return Outcome("signal", stop)
            clock.start()
        if diverged is not None:
            run.sync_workers(clock, vote)
            return Outcome("divergence", diverged=diverged)
    stop = run.sync_workers(clock, vote)
    diverged = losses.check_all(strategy.weights())
    if diverged is not None:
        return Outcome("divergence", diverged=diverged)
    if stop:
        run.save(None)  # a resume validates
        return Outcome("signal", stop)
    return None


def _end_epoch(run: RunContext, clock: TrainingClock, losses: LossMonitor) -> Outcome | None:
    """Validate, record and save; None if training continues."""
    progress, began_s = run.state.progress, time.perf_counter()
    metrics = run.validate()
    if isinstance(metrics, int):
        run.save(None)  # a resume repeats the validation
        return Outcome("signal", metrics)
    if run.config.stop.on_divergence != "ignore" and not math.isfinite(metrics.get("loss", 0.0)):
        last = StepInfo(epoch=progress.epoch, step=progress.step, position=0, learning_rate=run.last_learning_rate)
        return Outcome("divergence", diverged=losses.divergence_at("validation", last, metrics["loss"]))
    done = run.finish_epoch(metrics, clock, time.perf_counter() - began_s)
    run.state.strategy.step_scheduler("epoch", metrics)
    run.hook("on_epoch_end", {**metrics, "train_loss": done.train_loss}, epoch=done.epoch)
    run.save_epoch(losses, done)
    run.warn_if_not_learning()
    return None
