"""What the training loop works with: the parts of a run, and what it does with them beside the steps themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stormo.config.plan import Plan
from stormo.config.schema import TrainConfig
from stormo.data.loaders import Loader
from stormo.distributed.world import AsyncAllReduce, World
from stormo.energy.node_recorder import NodeRecorder, steady_unix_s
from stormo.errors import pluralize
from stormo.optim.schedule import Schedule
from stormo.profiling.ranges import range_of
from stormo.profiling.window import ProfileWindow
from stormo.system.signals import StopFlag
from stormo.tasks.task import Context, Task
from stormo.telemetry.folder import RunFolder
from stormo.telemetry.media import log_value
from stormo.telemetry.record import EpochDone, NodeSampled, Notice, Record, StepDone, ValidationProgress
from stormo.training.clock import TrainingClock
from stormo.training.divergence import Diverged, LossMonitor, patience_steps
from stormo.training.state import RunState
from stormo.training.validation import Validation, metrics_or_signal

_SECONDS_BETWEEN_RECORDS = 0.25


@dataclass(kw_only=True)
class RunContext:
    """The parts of a run that the loop brings together."""

    world: World
    plan: Plan
    config: TrainConfig
    state: RunState
    loader: Loader
    validation: Validation
    schedule: Schedule
    stop_flag: StopFlag
    record: Callable[[Record], None]  # does nothing except on rank 0
    save: Callable[[float | None], None]  # publishes a checkpoint; its argument is the metric that ranks it
    heartbeat: Callable[[int], None]
    node_recorder: NodeRecorder
    profile: ProfileWindow
    run_folder: Path = Path()  # where pictures that are logged go
    roll_back: Callable[[Diverged], bool] = lambda diverged: False  # to a good checkpoint, where that is set
    last_learning_rate: float = 0.0
    _recorded_sample: Mapping[str, Any] | None = None  # the newest sample of the node that was recorded

    def learning_rate(self, position: int) -> float:
        """The learning rate of the step that begins at this position of the epoch."""
        progress = self.state.progress
        rate = self.schedule(self.plan.schedule_step(progress.epoch, position)) * progress.rate_factor
        self.last_learning_rate = rate * self.state.strategy.scheduler_factor
        return rate

    @property
    def has_reached_target(self) -> bool:
        """Whether enough epochs in a row reached the target; every rank has the same metrics, to the last bit."""
        return self.state.progress.target_streak >= self.config.stop.patience

    def open_vote(self) -> tuple[AsyncAllReduce, LossMonitor]:
        """What the ranks agree on in every step, and the losses that travel with it."""
        # A vote is cast when a step begins and read when it ends, so a rank can be one step ahead of others. On GPUs it
        # is read a step later: the host, which is ahead of its GPU, need not wait for the slowest host. With several
        # nodes one more step is left for the messages between them.
        lag = max(0, self.state.strategy.staleness - 1)
        if self.world.size > 1 and not self.state.strategy.staleness:
            lag = int(self.world.device.type == "cuda") + int(self.world.rank_info.num_nodes > 1)
        losses = LossMonitor(
            self.world,
            self.state.progress.trend,
            is_on=self.config.stop.on_divergence != "ignore",
            batch_size=self.plan.global_batch_size,
            patience=patience_steps(self.plan.steps_per_epoch),
            vote_lag=lag,
        )
        return AsyncAllReduce(self.world, lag), losses

    def sync_workers(self, clock: TrainingClock, vote: AsyncAllReduce) -> int:
        """Stop the clock and bring all ranks to the same step; return a signal that was not read yet."""
        clock.pause()
        stop = vote.drain()
        self.state.strategy.synchronize()
        return stop

    def update_batch_size(self) -> None:
        """Take the batch size of the epoch that begins, where it grows."""
        plan, loader = self.plan.at_epoch(self.state.progress.epoch), self.loader
        before = loader.share.global_batch_size
        if plan.global_batch_size == before:
            return
        loader.share = replace(loader.share, global_batch_size=plan.global_batch_size, accumulate=plan.accumulate)
        self.state.strategy.set_accumulation(plan)
        change = "grown" if plan.global_batch_size > before else "gone back"
        micro_batches = pluralize(plan.accumulate, "micro-batch")
        text = f"The batch has {change} to {plan.global_batch_size} samples in {micro_batches}."
        self.record(Notice(kind="info", text=text))

    def is_checkpoint_due(self, losses: LossMonitor) -> bool:
        """Whether to save within an epoch; a checkpoint that is due waits for a stable loss."""
        progress = self.state.progress
        if progress.position >= self.loader.num_samples:  # the end of an epoch is validated before it is saved
            return False
        losses.checkpoint_is_due |= self.plan.is_checkpoint_due(progress.epoch, progress.step, progress.position)
        return losses.checkpoint_is_due and losses.is_stable

    def profiler_step(self) -> None:
        """Let the profiler prepare or write, outside of the training time, and record what it says."""
        step = self.state.progress.step
        for line in self.profile.before_step(step + 1):
            self.record(Notice(kind="info", text=line, after_step=step))

    def record_step(self, clock: TrainingClock, losses: LossMonitor) -> None:
        """Record the progress and the node's newest sample on rank 0, a few times a second."""
        if not (self.world.is_main and losses.has_loss_to_log and clock.since_last_s() > _SECONDS_BETWEEN_RECORDS):
            return
        progress, share = self.state.progress, self.loader.share
        loss = losses.loss_since_last_log()
        samples_per_s, wait_fraction = clock.interval()
        self.record(
            StepDone(
                epoch=progress.epoch,
                step=progress.step,
                step_in_epoch=-(-progress.position // share.global_batch_size),
                steps_in_epoch=-(-self.loader.num_samples // share.global_batch_size),
                global_batch_size=share.global_batch_size,
                samples_seen=progress.samples_seen,
                loss=loss,
                learning_rate=self.last_learning_rate,
                samples_per_s=samples_per_s,
                units_per_s=samples_per_s * self.plan.facts.units_per_sample,
                input_wait_fraction=wait_fraction,
                train_time_s=progress.train_time_s + clock.running_s(),
                noise_scale=meter.read().value if (meter := self.state.strategy.noise_scale) else None,
                unit=self.plan.facts.unit,
                mfu=self.plan.mfu(samples_per_s),
                power_w=self.node_recorder.power_w,
            )
        )
        sample = self.node_recorder.latest_sample
        if sample is not None and sample is not self._recorded_sample:
            self._recorded_sample = sample
            self.record(NodeSampled(sample=sample))

    def validate(self) -> dict[str, float] | int:
        """The metrics over the whole validation set, or the signal that the ranks agreed on meanwhile."""
        strategy, progress = self.state.strategy, self.state.progress

        def on_round(number: int) -> None:
            self.record(ValidationProgress(epoch=progress.epoch, done=number, total=self.validation.num_rounds))
            self.heartbeat(progress.step)

        self.node_recorder.enter("validation", progress.step)
        with range_of("validation"):
            strategy.average_buffers()
            with strategy.averaged_weights(), strategy.swap_in_mean_weights(), self._averaged():
                rounds = self.validation.run(strategy.validated, strategy.autocast)
                found = metrics_or_signal(rounds, self.world, self.stop_flag, on_round)
                if not isinstance(found, int):
                    self.hook("on_validation_end", found)
        self.node_recorder.enter("idle", progress.step)
        return found

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Inside it, the model has the moving average of the weights, if that is set. All ranks enter it."""
        strategy = self.state.strategy
        if strategy.average is None:
            yield
            return
        with strategy.average.swapped_in():
            strategy.average_buffers()
            yield

    def hook(self, name: str, metrics: Mapping[str, float] | None = None, *, epoch: int | None = None) -> None:
        """Call a hook of the task, if it has it. All ranks call it."""
        strategy, progress = self.state.strategy, self.state.progress
        if getattr(type(strategy.task), name) is getattr(Task, name):
            return
        model, epoch = strategy.validated, progress.epoch if epoch is None else epoch
        was_training = model.training
        context = Context(epoch=epoch, step=progress.step, metrics=metrics or {}, model=model, log=self._log)
        getattr(strategy.task, name)(context)
        if model.training != was_training:
            model.train(was_training)

    def _log(self, name: str, value: Any) -> None:
        if self.world.is_main:
            self.record(log_value(RunFolder(self.run_folder), name, value, self.state.progress.step))

    def finish_epoch(self, metrics: dict[str, float], clock: TrainingClock, validation_time_s: float) -> EpochDone:
        """Count the epoch, and record it with its figures. All ranks call it."""
        progress, state, facts = self.state.progress, self.state, self.plan.facts
        loss_sum, num_items = self.world.sum(torch.stack([state.loss_sum, state.num_items])).tolist()
        samples_per_s = self.loader.num_samples / max(progress.epoch_time_s, 1e-9)
        progress.validation = metrics
        progress.peak_memory_bytes, progress.peak_reserved_memory_bytes = clock.peak_memory_bytes()
        self._update_target(metrics)
        figures = clock.end_of_epoch()
        done = EpochDone(
            epoch=progress.epoch,
            step=progress.step,
            samples_seen=progress.samples_seen,
            epoch_time_s=progress.epoch_time_s,
            cumulative_time_s=progress.train_time_s,
            validation_time_s=validation_time_s,
            samples_per_s=samples_per_s,
            units_per_s=samples_per_s * facts.units_per_sample,
            train_loss=loss_sum / num_items if num_items else math.nan,
            learning_rate=self.last_learning_rate,
            input_wait_fraction=clock.wait_fraction(),
            peak_memory_bytes=progress.peak_memory_bytes,
            peak_reserved_memory_bytes=progress.peak_reserved_memory_bytes,
            validation=metrics,
            unit=facts.unit,
            mfu=self.plan.mfu(samples_per_s),
            **figures,
        )
        progress.epoch += 1
        progress.epochs_done += 1
        progress.position, progress.epoch_time_s = 0, 0.0
        state.loss_sum.zero_()
        state.num_items.zero_()
        self.record(done)
        if self.has_reached_target:
            self.record(Notice(kind="stop", text=f"Early stopping after epoch {done.epoch}"))
        return done

    def _update_target(self, metrics: Mapping[str, float]) -> None:
        """Count the epochs in a row that reach the target, and remember the best one."""
        progress, stop = self.state.progress, self.config.stop
        reached = False
        if stop.target_accuracy is not None:
            reached = metrics.get("accuracy", -math.inf) >= stop.target_accuracy
        if stop.target_loss is not None:
            reached = reached or metrics.get("loss", math.inf) <= stop.target_loss
        progress.target_streak = progress.target_streak + 1 if reached else 0
        if progress.target_streak >= stop.patience and progress.time_to_target_s is None:
            progress.time_to_target_s, progress.target_unix_s = progress.train_time_s, steady_unix_s()
        score, best = _score(metrics), _score(progress.best_validation or {})
        is_better = score is not None and (best is None or math.isnan(best) or score > best)
        if progress.best_validation is None or is_better:
            progress.best_validation = progress.validation

    def save_epoch(self, losses: LossMonitor, done: EpochDone) -> None:
        """Save the last epoch, the best one, and one whose checkpoint is due, once the loss is stable."""
        progress, plan = self.state.progress, self.plan
        is_end = progress.epoch > plan.epochs or self.has_reached_target
        is_best = plan.checkpoints is not None and progress.best_validation is progress.validation
        losses.checkpoint_is_due |= plan.is_checkpoint_due(done.epoch, progress.step, self.loader.num_samples)
        is_due = losses.checkpoint_is_due and losses.is_stable
        if is_end or is_best or is_due:  # the best epoch is saved even while the loss is not stable
            self.save(_score(done.validation))
        losses.checkpoint_is_due &= not is_due

    def warn_if_not_learning(self) -> None:
        """Warn once if the loss has not fallen although it had the time."""
        progress = self.state.progress
        warning = progress.trend.not_learning(progress.epochs_done, self.config.optimizer.warmup_epochs)
        if warning is not None:
            self.record(Notice(kind="warning", text=warning))


def _score(metrics: Mapping[str, float]) -> float | None:
    """What ranks an epoch among others: its accuracy or, without one, its negative loss."""
    return metrics["accuracy"] if "accuracy" in metrics else -metrics["loss"] if "loss" in metrics else None
