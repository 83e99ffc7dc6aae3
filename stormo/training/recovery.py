"""What a run does on divergence: roll back to the last good checkpoint with a lower learning rate, or stop with advice.

All ranks take part; rank 0 reads the run folder and reports.
"""

from __future__ import annotations

import math
from pathlib import Path

from stormo import checkpoint
from stormo.config.plan import Plan
from stormo.config.schema import TrainConfig
from stormo.distributed.world import World
from stormo.errors import pluralize
from stormo.telemetry.record import DivergenceNoticed, Notice
from stormo.telemetry.text import run_reference
from stormo.training.divergence import NUM_HIGH_STEPS, Diverged, Trend, wait_steps
from stormo.training.records import RunRecorder
from stormo.training.state import RunState

# Counters that a rollback does not restore: what was spent stays spent.
_KEPT = ("num_resumes", "samples_trained", "train_time_s", "wait_s", "diverged_rate")
# What happened, by kind of divergence.
_HAPPENED = {
    "loss": "the training loss became {loss}",
    "weights": "the weights hold values that are not finite, although the loss was {loss}",
    "validation": "the validation loss became {loss}",
    "exploded": f"the training loss rose to {{loss}} and was far above its start for {NUM_HIGH_STEPS} steps in a row",
    "lost": "the training loss rose back to {loss} and stays there: most of what was learned is lost",
}


class Recovery:
    """Rolls a diverged run back, or ends it with advice."""

    def __init__(self, config: TrainConfig, plan: Plan, world: World, state: RunState, records: RunRecorder) -> None:
        self._config = config
        self._plan = plan
        self._world = world
        self._state = state
        self._records = records

    def prepare(self) -> None:
        """Save the initial weights, where a rollback may need them."""
        if self._config.stop.on_divergence == "rollback" and not self._state.progress.step:
            self._records.save(None)

    def roll_back(self, diverged: Diverged) -> bool:
        """Go back with a lower learning rate, if that is set and rollbacks are left; False if nothing has changed."""
        stop, progress, world = self._config.stop, self._state.progress, self._world
        # Bad inputs come back whatever the learning rate is.
        is_wanted = stop.on_divergence == "rollback" and not diverged.has_bad_inputs
        if not is_wanted or progress.num_rollbacks >= stop.max_rollbacks:
            return False
        self._records.wait_for_save()  # the checkpoint being written may be the one
        good = self._last_good(diverged) if world.is_main else None
        shared = world.broadcast_object(None if good is None else str(good.resolve()))
        if shared is None:
            return False
        progress.diverged_rate = self._diverged_rate(diverged)
        kept = {name: getattr(progress, name) for name in _KEPT}
        num_rollbacks, rate_factor = progress.num_rollbacks + 1, progress.rate_factor * stop.rollback_factor
        if good is not None:
            self._records.supersede_after(good)
        self._state.restore(world, good or Path(shared), self._config.run.seed)
        for name, value in kept.items():
            setattr(progress, name, value)
        progress.num_rollbacks, progress.rate_factor = num_rollbacks, rate_factor
        self._records.node_recorder.rolled_back(progress.step)
        text = (
            f"{diagnosis(self._plan, diverged)} Going back to step {progress.step} with the learning rate × "
            f"{rate_factor:g} (rollback {num_rollbacks} of {stop.max_rollbacks})."
        )
        self._record(diverged, progress.step, text)
        self._records.save(None)
        self._records.wait_for_save()  # a run killed now must resume with the lower learning rate too
        return True

    def give_up(self, diverged: Diverged) -> None:
        """Report what happened and what to try, with the command that resumes from the last good checkpoint."""
        self._records.wait_for_save()
        if not self._world.is_main:
            return
        progress, good = self._state.progress, self._last_good(diverged)
        num_rollbacks, progress.diverged_rate = progress.num_rollbacks, self._diverged_rate(diverged)
        tried, flag = advice(
            self._config,
            self._plan,
            diverged,
            has_own_optimizer=self._state.strategy.has_own_optimizer,
            diverged_rate=progress.diverged_rate,
            kept_factor=1.0 if good is None else progress.rate_factor,
        )
        sentences = [diagnosis(self._plan, diverged)]
        if num_rollbacks:
            sentences.append(f"{pluralize(num_rollbacks, 'rollback')} did not help.")
        sentences += [f"Try {', '.join(tried)}.", self._resume_sentence(good, flag)]
        self._record(diverged, None, " ".join(sentences))

    def _diverged_rate(self, diverged: Diverged) -> float | None:
        """The lowest learning rate after warm-up with which the run has diverged, where it is the likely cause."""
        progress = self._state.progress
        rates = [] if progress.diverged_rate is None else [progress.diverged_rate]
        if not diverged.has_bad_inputs and diverged.kind != "validation":
            rates.append(self._plan.learning_rate * progress.rate_factor)
        return min(rates, default=None)

    def _resume_sentence(self, good: Path | None, flag: str) -> str:
        folder = self._records.folder
        self._records.supersede_after(good)  # so that a resume takes the good one
        if good is None:
            return "There is no good checkpoint from before: start a new run."
        command = f"stormo train --resume {run_reference(folder.name, str(folder.path))} {flag}".rstrip()
        step = checkpoint.read_manifest(good).step
        self._keep_rollbacks(good)
        return f"The last good checkpoint is that of step {step}; resume from it with: {command}"

    def _keep_rollbacks(self, good: Path) -> None:
        """Write the rollbacks, their factor and the diverged rate into a checkpoint from before them."""
        names = ("num_rollbacks", "rate_factor", "diverged_rate")
        kept = {name: getattr(self._state.progress, name) for name in names}
        state = checkpoint.read_state(good)
        if kept.items() <= state["progress"].items():
            return
        state["progress"].update(kept)
        try:
            checkpoint.replace_state(good, state)
        except checkpoint.CheckpointWriteError as error:  # which must not hide what went wrong before
            self._records.record(Notice(kind="warning", text=str(error)))

    def _last_good(self, diverged: Diverged) -> Path | None:
        """The newest checkpoint with a stable loss, or the newest at all."""
        # The weights after a step give the next step's loss: where that is bad, they are bad.
        last_step = diverged.step - 1 if diverged.has_bad_inputs else diverged.onset_step - 2
        found = [one for one in checkpoint.find(self._records.folder.checkpoints) if one.step <= last_step]
        for one in found:
            progress = checkpoint.read_state(one.path)["progress"]
            if Trend(**progress.get("trend", {})).is_stable(wait_steps(self._plan, progress["epoch"])):
                return one.path
        return found[0].path if found else None

    def _record(self, diverged: Diverged, rolled_back_to_step: int | None, text: str) -> None:
        self._records.record(
            DivergenceNoticed(
                epoch=diverged.epoch,
                step=diverged.step,
                kind=diverged.kind,
                loss=diverged.loss,
                learning_rate=diverged.learning_rate,
                rolled_back_to_step=rolled_back_to_step,
                rate_factor=self._state.progress.rate_factor,
                text=text,
            )
        )


def diagnosis(plan: Plan, diverged: Diverged) -> str:
    """What happened, and its likely cause."""
    happened = _HAPPENED[diverged.kind].format(loss=f"{diverged.loss:.4g}")
    text = f"Diverged at step {diverged.step} (epoch {diverged.epoch}): {happened}"
    if diverged.first_loss is not None and diverged.best_loss is not None:
        what = "that of training" if diverged.kind == "validation" else "it"
        text += f"; {what} began at {diverged.first_loss:.4g} and was {diverged.best_loss:.4g} at its best"
    cause = f"a learning rate that is too high ({diverged.learning_rate:.4g} at that step"
    cause += ")" if plan.warmup_start < plan.learning_rate else ", without warm-up)"
    if diverged.has_bad_inputs:
        cause = "the batch of that step holds inputs that are not finite numbers"
    elif diverged.kind == "validation":
        cause = "validation samples that are not finite numbers, or weights so large that only they overflow"
    elif plan.precision == "fp16" and diverged.kind == "loss":
        cause = f"a number above 65,504, the largest of fp16, or {cause}"
    return f"{text}. Likely cause: {cause}."


def advice(
    config: TrainConfig,
    plan: Plan,
    diverged: Diverged,
    *,
    has_own_optimizer: bool,
    diverged_rate: float | None = None,
    kept_factor: float = 1.0,
) -> tuple[list[str], str]:
    """What to try, and the flag with which the run may resume.

    An own optimizer does not take --base-lr. `diverged_rate` is the lowest learning rate after warm-up that has
    diverged, `kept_factor` what rollbacks leave of the learning rate of a resume.
    """
    clip_norm = config.optimizer.clip_norm
    clip = f"--clip-norm {1 if clip_norm is None else clip_norm / 10:g}"
    if config.workers.staleness:  # servers cannot clip, and stale gradients diverge at lower learning rates
        clip = "--staleness 0"
    if diverged.has_bad_inputs:
        return ["data without such values (torch.isfinite finds them)"], ""
    if diverged.kind == "validation":
        return ["validation data without such values (torch.isfinite finds them)", clip], clip
    half = (diverged_rate or plan.learning_rate) / plan.learning_rate / 2 / kept_factor
    rate = f"--base-lr {config.optimizer.base_lr * half:g}"
    if has_own_optimizer:
        factor = "half" if math.isclose(half, 0.5) else f"{half:g} ×"
        rate = f"{factor} the learning rate in the task's optimizer()"
    tried = [rate, clip] if diverged.kind != "lost" else [rate]
    if plan.precision == "fp16" and diverged.kind == "loss":
        tried.insert(0, "--precision bf16 (or fp32)")
    if diverged.kind in ("exploded", "lost"):
        tried.append("or --on-divergence ignore if the loss is meant to rise")
    return tried, clip if has_own_optimizer else rate
