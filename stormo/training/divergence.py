"""When a run has diverged: the course of its loss, what counts as lost, and a diagnosis in words.

Pure arithmetic on the losses of whole global batches, which are the same on every worker: all of them judge alike,
at the same step. What reads the losses off the device is `losses`.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from stormo.config.plan import Plan
from stormo.config.plan.stages import stage_of
from stormo.config.schema import TrainConfig

NUM_FIRST_STEPS = 5  # make up the level at which the loss starts
NUM_HIGH_STEPS = 20  # in a row far above the start: no ordinary spike lasts as long
_SMOOTHING_STEPS = 20
_HIGH_FACTOR = 9.0  # above the start by this many times its own size
_FIRST_FACTOR = 100.0  # of the first loss, while there are too few to know how much they change
_MIN_GAIN = 0.1  # of the starting loss; before that there is nothing to lose
_NOISE_FACTOR = 4.0  # a gain must stand out from how much the loss changes from batch to batch
_MIN_ANCHOR_SAMPLES = 8  # the first loss of a smaller batch says little of where the loss starts
_NOT_LEARNING = 0.05  # a loss that has fallen by less than this share has not fallen
_MIN_STEPS_TO_LEARN = 100
_MIN_PATIENCE_STEPS, _MAX_PATIENCE_STEPS = 100, 1000
_GRACE_EPOCHS = 2  # after warm-up, before a loss that has not fallen is spoken of


@dataclass(frozen=True, kw_only=True, slots=True)
class Diverged:
    """A verdict: where the run is lost, and by what sign."""

    kind: str  # a key of `SIGNS`
    epoch: int
    step: int  # the first bad one, or the one at which it was certain
    onset_step: int  # the first of the high losses that led to it; itself where there were none
    position: int  # of that step's batch in the epoch
    loss: float
    first_loss: float | None
    best_loss: float | None  # smoothed
    learning_rate: float
    has_bad_inputs: bool = False  # the batch itself holds values that are not finite


# Settings of which a change may keep a run from diverging where it did.
STEADYING = frozenset(
    (
        *("base_lr", "lr_rule", "clip_norm", "precision", "momentum", "warmup_epochs", "warmup_from", "decay"),
        *("decay_every", "decay_factor", "weight_decay", "batch_size", "global_batch_size", "on_divergence"),
        *("strategy", "mesh", "staleness", "average_every", "outer_lr", "outer_momentum"),
        *("compress", "compress_rank"),
    )
)
# What was seen, by kind.
SIGNS = {
    "loss": "the training loss became {loss}",
    "weights": "the weights hold values that are not finite, although the loss was {loss}",
    "validation": "the validation loss became {loss}",
    "exploded": f"the training loss rose to {{loss}} and was far above its start for {NUM_HIGH_STEPS} steps in a row",
    "lost": "the training loss rose back to {loss} and stays there, so that most of what was learned is lost",
}


def patience_steps(steps_per_epoch: int) -> int:
    """How long a loss may stay near its start again: an epoch, within limits."""
    return min(max(steps_per_epoch, _MIN_PATIENCE_STEPS), _MAX_PATIENCE_STEPS)


def wait_steps(plan: Plan, epoch: int) -> int:
    """How long a checkpoint may wait for a calm loss: an epoch of the batch as it is then, within the patience."""
    return min(stage_of(plan.stages, epoch).steps_per_epoch, patience_steps(plan.steps_per_epoch))


@dataclass(kw_only=True)
class Trend:
    """The course of the training loss so far; plain numbers that a checkpoint carries."""

    first: list[float] = field(default_factory=list)  # losses of the first steps
    start: float = 0.0
    spread: float = 0.0  # of the first losses
    smoothed: float = 0.0
    best: float = 0.0  # lowest smoothed
    noise: float = 0.0  # smoothed distance of a loss from the smoothed one
    num_steps: int = 0
    num_zero: int = 0  # steps before the first loss that is not exactly 0
    num_high: int = 0  # steps in a row far above the start
    num_lost: int = 0  # steps in a row in which half of the gain was lost
    num_uneasy: int = 0  # steps in a row far above the start, or in which a quarter of the gain was lost
    was_warned: bool = False  # that it does not fall

    def see(self, loss: float, *, batch_size: int, patience: int) -> str | None:
        """Take in the loss of the next step; return the kind of a divergence, or None."""
        self.num_steps += 1
        if not math.isfinite(loss):
            self.num_uneasy += 1
            return "loss"
        if loss == 0 and not self.first:
            self.num_zero += 1  # a margin, a mask or a distance from where it starts: it has no scale yet
            self.num_uneasy = 0
            return None
        if len(self.first) < NUM_FIRST_STEPS:
            self.first.append(loss)
            is_high = self._has_anchor(batch_size) and loss > _FIRST_FACTOR * abs(self.first[0])
            self.num_uneasy = self.num_uneasy + 1 if is_high else 0
            if len(self.first) == NUM_FIRST_STEPS:
                self._begin(batch_size)
            return None
        if self.num_zero and self.num_steps <= self.num_zero + patience:
            # From 0 it rises to where it belongs, and how far that is shows only with time.
            self.spread = max(self.spread, abs(loss - self.start))
        scale = max(abs(self.start), self._gain, self.spread)
        if scale > 0 and loss > self.start + _HIGH_FACTOR * scale:
            # Not smoothed in: a single wild batch must leave no trace.
            self.num_high += 1
            self.num_uneasy += 1
            return "exploded" if self.num_high >= NUM_HIGH_STEPS else None
        self.num_high = 0
        self.noise += (abs(loss - self.smoothed) - self.noise) / _SMOOTHING_STEPS
        self.smoothed += (loss - self.smoothed) / _SMOOTHING_STEPS
        self.best = min(self.best, self.smoothed)
        gain, lost = self._gain, self.smoothed - self.best
        has_gained = gain > 0 and gain >= max(_MIN_GAIN * abs(self.start), _NOISE_FACTOR * self.noise)
        self.num_lost = self.num_lost + 1 if has_gained and lost > gain / 2 else 0
        self.num_uneasy = self.num_uneasy + 1 if has_gained and lost > gain / 4 else 0
        return "lost" if self.num_lost >= patience else None

    def _begin(self, batch_size: int) -> None:
        self.start, self.spread = statistics.median(self.first), max(self.first) - min(self.first)
        if self._has_anchor(batch_size):
            # A rate that is absurd has moved all but the first of them already.
            size = abs(self.first[0])
            self.start, self.spread = min(self.start, 3 * size), min(self.spread, 10 * size)
        self.smoothed = self.best = self.start

    def _has_anchor(self, batch_size: int) -> bool:
        return batch_size >= _MIN_ANCHOR_SAMPLES and not self.num_zero

    @property
    def _gain(self) -> float:
        return max(0.0, self.start - self.best)

    def is_calm(self, wait_steps: int) -> bool:
        """Whether a checkpoint of now would be a good one; after so many steps of waiting it is taken for one."""
        return not 0 < self.num_uneasy <= wait_steps

    def num_leading(self, kind: str, wait_steps: int) -> int:
        """How many of the last steps, the newest with them, led to a divergence of this kind."""
        is_usual = kind not in ("exploded", "lost") and self.num_uneasy > wait_steps
        return 1 if is_usual else self.num_uneasy

    @property
    def best_loss(self) -> float | None:
        """The lowest smoothed loss, or the lowest of the first few, which are not smoothed."""
        known = [self.best] if len(self.first) == NUM_FIRST_STEPS else []
        return min(known + self.first, default=None)

    def not_learning(self, epochs_done: int, warmup_epochs: float) -> str | None:
        """A warning, once, where the loss has not fallen although it has had the time."""
        is_early = epochs_done < warmup_epochs + _GRACE_EPOCHS or self.num_steps < _MIN_STEPS_TO_LEARN
        if self.was_warned or is_early:
            return None
        if not self.first:
            self.was_warned = True
            return (
                "the model is not learning: the loss is 0 from the first step on; look whether a mask or a margin of "
                "the task's loss() leaves out every sample"
            )
        # What begins at 0 cannot be asked to fall.
        if self.num_zero or self.best < self.first[0] - _NOT_LEARNING * abs(self.first[0]):
            return None
        self.was_warned = True
        return (
            f"the model is not learning: the training loss began at {self.first[0]:.4g} and is {self.smoothed:.4g} "
            f"after {self.num_steps} steps; try another --base-lr (a tenth, or ten times as much), and look whether "
            "the inputs are scaled and belong to their labels"
        )


def diagnosis(
    config: TrainConfig, plan: Plan, diverged: Diverged, *, has_own_optimizer: bool, rate_factor: float = 1.0
) -> str:
    """What happened, and its likely cause; `rate_factor` is what rollbacks had made of the rate until then."""
    happened = SIGNS[diverged.kind].format(loss=f"{diverged.loss:.4g}")
    text = f"Diverged at step {diverged.step} (epoch {diverged.epoch}): {happened}"
    if diverged.first_loss is not None and diverged.best_loss is not None:
        text += f"; it began at {diverged.first_loss:.4g} and was {diverged.best_loss:.4g} at its best"
    return f"{text}. Likely cause: {_cause(config, plan, diverged, has_own_optimizer, rate_factor)}."


def _cause(config: TrainConfig, plan: Plan, diverged: Diverged, has_own_optimizer: bool, rate_factor: float) -> str:
    if diverged.has_bad_inputs:
        return "the batch of that step holds inputs that are not finite numbers, before the model has seen them"
    if diverged.kind == "validation":
        return "validation samples that are not finite numbers, or weights so large that only they overflow"
    warmup_steps = plan.warmup_steps if plan.warmup_start < plan.learning_rate else 0
    rate = f"a learning rate that is too high ({diverged.learning_rate:.4g} at that step"
    if not warmup_steps:
        rate += ", without warm-up"
    elif diverged.step <= warmup_steps:
        rate += f", in step {diverged.step} of {warmup_steps} of warm-up"
    else:
        rate += f", {diverged.step - warmup_steps} steps after a warm-up of {warmup_steps}"
    ratio = plan.learning_rate / config.optimizer.base_lr
    if ratio > 1 and not config.resumed and not has_own_optimizer:
        rule = config.optimizer.lr_rule
        rate += f"; {ratio:.4g} × --base-lr for the batch of {plan.global_batch_size}, by the {rule} rule"
    if rate_factor != 1:
        rate += f"; × {rate_factor:g} by the rollbacks before"
    rate += ")"
    if plan.precision == "fp16" and diverged.kind == "loss":
        return f"a number above 65,504, the largest of fp16, or {rate}"
    return rate


def remedies(
    config: TrainConfig,
    plan: Plan,
    diverged: Diverged,
    *,
    has_own_optimizer: bool,
    diverged_rate: float | None = None,
    kept_factor: float = 1.0,
) -> tuple[list[str], str]:
    """What to try, each a flag or a few words, and the flag with which the run may go on.

    `diverged_rate` is the lowest rate after warm-up that the run has diverged with, or the plan's; `kept_factor` what
    rollbacks have made of the rate of a run that can go on.
    """
    optimizer = config.optimizer
    clip = f"--clip-norm {1 if optimizer.clip_norm is None else optimizer.clip_norm / 10:g}"
    if config.workers.staleness:  # servers that cannot clip, and old gradients diverge at lower rates
        clip = "--staleness 0"
    if diverged.has_bad_inputs:
        return ["data without such values (torch.isfinite finds them)"], ""
    if diverged.kind == "validation":
        return ["validation data without such values (torch.isfinite finds them)", clip], clip
    tried = [] if plan.precision != "fp16" or diverged.kind != "loss" else ["--precision bf16 (or fp32)"]
    half = (diverged_rate or plan.learning_rate) / plan.learning_rate / 2  # a new run has no factor of rollbacks
    rate = f"--base-lr {optimizer.base_lr * half / kept_factor:g}"
    tried.append(rate + f" ({optimizer.base_lr * half:g} in a new run)" * (kept_factor != 1))
    if has_own_optimizer:
        own = "half the rate" if math.isclose(half / kept_factor, 0.5) else f"{half / kept_factor:g} × the rate"
        own += f" ({half:g} × in a new run)" * (kept_factor != 1)
        tried[-1] = f"{own} in the task's optimizer()"
    if diverged.kind in ("loss", "weights", "exploded"):
        tried.append(clip)
    if plan.learning_rate / optimizer.base_lr > 1 and optimizer.lr_rule == "linear" and not has_own_optimizer:
        tried.append("--lr-rule sqrt")
    if longer := _longer_warmup(config, plan):
        tried.append(f"{longer} in a new run")
    if optimizer.optimizer == "sgd" and not has_own_optimizer:
        tried.append("--optimizer lars in a new run")
    if diverged.kind in ("exploded", "lost"):
        tried.append("or --on-divergence ignore if the loss is meant to rise")
    return tried, clip if has_own_optimizer else rate


def _longer_warmup(config: TrainConfig, plan: Plan) -> str | None:
    """The flags of a longer warm-up, of at most half the run; None where that would not be longer."""
    epochs = config.optimizer.warmup_epochs
    longer = min(2 * epochs or 5, config.stop.epochs / 2)
    if plan.warmup_start >= plan.learning_rate:  # warm-up that starts from the full rate is none
        return f"--warmup-epochs {longer:g} --warmup-from 0.1"
    return f"--warmup-epochs {longer:g}" if longer > epochs else None
