"""The end of an epoch: validation, the target, its record and its checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from stormo.distributed.world import AsyncAllReduce
from stormo.energy.node_recorder import steady_unix_s
from stormo.profiling.ranges import range_of
from stormo.telemetry.record import EpochDone, Notice, ValidationProgress
from stormo.training.clock import TrainingClock
from stormo.training.divergence import Diverged, LossMonitor, StepInfo

if TYPE_CHECKING:
    from stormo.training.loop import Training


def target_held(run: Training) -> bool:
    """Whether enough epochs in a row have reached the target; every rank has the same metrics, to the last bit."""
    return run.state.progress.target_streak >= run.settings.stop.patience


def end_epoch(run: Training, clock: TrainingClock, losses: LossMonitor) -> int | Diverged:
    """Validate, record and save; return the signal that cut the validation short, a divergence, or 0."""
    progress, plan = run.state.progress, run.plan
    began = time.perf_counter()
    run.keeper.enter("validation", progress.step)
    with range_of("validation"):
        metrics = _validate(run)
    run.keeper.enter("idle", progress.step)
    if isinstance(metrics, int):
        return metrics
    if run.settings.stop.on_divergence != "ignore" and not math.isfinite(metrics.get("loss", 0.0)):
        last = StepInfo(epoch=progress.epoch, step=progress.step, position=0, learning_rate=run.last_learning_rate)
        return losses.verdict("validation", last, metrics["loss"])
    loss_sum, num_items = run.world.sum(torch.stack([run.state.loss_sum, run.state.num_items])).tolist()
    samples_per_s = run.loader.num_samples / max(progress.epoch_time_s, 1e-9)
    progress.validation = metrics
    progress.peak_memory_bytes, progress.peak_reserved_memory_bytes = clock.peak_memory_bytes()
    _update_target(run, metrics)
    figures = clock.end_of_epoch()
    done = EpochDone(
        epoch=progress.epoch,
        step=progress.step,
        samples_seen=progress.samples_seen,
        epoch_time_s=progress.epoch_time_s,
        cumulative_time_s=progress.train_time_s,
        validation_time_s=time.perf_counter() - began,
        samples_per_s=samples_per_s,
        units_per_s=samples_per_s * plan.facts.units_per_sample,
        train_loss=loss_sum / num_items if num_items else math.nan,
        learning_rate=run.last_learning_rate,
        input_wait_fraction=clock.wait_fraction(),
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
    if target_held(run):
        run.record(Notice(kind="stop", text=f"Early stopping after epoch {done.epoch}"))
    _save_epoch(run, losses, done)
    warning = progress.trend.not_learning(progress.epochs_done, run.settings.optimizer.warmup_epochs)
    if warning is not None:
        run.record(Notice(kind="warning", text=warning))
    return 0


def _validate(run: Training) -> dict[str, float] | int:
    """The metrics over the whole validation set, or the signal that was agreed on meanwhile."""
    strategy, validation, vote = run.state.strategy, run.validation, AsyncAllReduce(run.world)
    strategy.average_buffers()
    with strategy.swap_in_mean_weights():
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


def _update_target(run: Training, metrics: Mapping[str, float]) -> None:
    """Count the epochs in a row that reach the target, and remember the best one."""
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


def _rank(metrics: Mapping[str, float]) -> float | None:
    """What ranks an epoch among others: its accuracy or, without one, how low its loss is."""
    return metrics["accuracy"] if "accuracy" in metrics else -metrics["loss"] if "loss" in metrics else None


def _save_epoch(run: Training, losses: LossMonitor, done: EpochDone) -> None:
    """Save the last epoch, the best one, and one whose checkpoint is due, once the loss is stable."""
    progress, plan = run.state.progress, run.plan
    is_end = progress.epoch > plan.epochs or target_held(run)
    is_best = plan.checkpoint_steps is not None and progress.best_validation is progress.validation
    losses.owes_checkpoint |= plan.is_checkpoint_due(done.epoch, progress.step, run.loader.num_samples)
    pays = losses.owes_checkpoint and losses.is_stable
    if is_end or is_best or pays:  # the best one is saved although its loss may not be stable, which it records
        run.save(_rank(done.validation))
    losses.owes_checkpoint &= not pays
