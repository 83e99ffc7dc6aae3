"""The learning rate that follows from the batch, and its schedule in words."""

from __future__ import annotations

import math

from stormo.config.plan.batch import per_worker
from stormo.config.schema import TrainConfig
from stormo.errors import SettingError, counted


def choose_rate(config: TrainConfig, global_batch_size: int) -> tuple[float, str]:
    """The learning rate for the global batch, with its arithmetic."""
    base, rule = config.optimizer.base_lr, config.optimizer.lr_rule
    if config.resumed:
        return config.resumed.learning_rate, f"{config.resumed.learning_rate:g} as before"
    declared = config.optimizer.base_batch_size
    if declared is not None:
        return _declared_rate(base, rule, global_batch_size, declared)
    if config.batch.global_batch_size is not None:
        idle = "lr_rule" in config.given and rule != "none"
        note = f"; --lr-rule {rule} has no effect without --base-batch-size" * idle
        return base, f"{base:g} as set, for the global batch as set{note}"
    ratio = global_batch_size // per_worker(config)
    if rule == "none" or ratio == 1:
        return base, f"{base:g} as set" + (f" for any batch (the batch is {ratio} × one worker's)" * (ratio > 1))
    factor = float(ratio) if rule == "linear" else math.sqrt(ratio)
    factor_text = f"{ratio}" if rule == "linear" else f"√{ratio}"
    return base * factor, f"{base * factor:g} = {base:g} × {factor_text} ({rule})"


def _declared_rate(base: float, rule: str, global_batch_size: int, declared: int) -> tuple[float, str]:
    if rule == "none":
        raise SettingError(
            f"--base-batch-size {declared} was set with --lr-rule none",
            "without a rule the rate is the same for any batch",
            "leave one of them out",
        )
    ratio = global_batch_size / declared
    factor = ratio if rule == "linear" else math.sqrt(ratio)
    root = "√" if rule == "sqrt" else ""
    text = f"{base * factor:g} = {base:g} × {root}{ratio:g} ({rule}: {global_batch_size} samples against {declared})"
    return base * factor, text


def warmup_fraction(config: TrainConfig, num_workers: int, learning_rate: float) -> float:
    """The fraction of the rate that warm-up starts from, for a run that began with so many workers."""
    if config.optimizer.warmup_from is not None:
        return config.optimizer.warmup_from
    if config.optimizer.base_batch_size is not None:
        return min(1.0, config.optimizer.base_lr / learning_rate)  # from the rate of the declared batch
    if config.batch.global_batch_size is not None:
        return 1.0  # the workers did not make the batch, and must not make a difference
    return 1 / num_workers


def own_rate_text(config: TrainConfig, learning_rate: float, *, is_made: bool) -> str:
    """The learning rates of a task's own optimizer, which are multiplied by what --base-lr would be."""
    base, before = config.optimizer.base_lr, config.resumed
    text = "of the task's optimizer()" + f", or --base-lr {base:g} where it returns None," * (not is_made)
    text += f" × {learning_rate / base:g}"
    if before is not None and before.learning_rate == learning_rate:
        return f"{text} as before"
    return text if learning_rate == base else f"{text} ({config.optimizer.lr_rule})"


def schedule_text(config: TrainConfig, start: float, learning_rate: float, warmup_steps: int, sign: str = "") -> str:
    """Warm-up and decay, in words; the sign is for factors of rates that are not known."""
    optimizer = config.optimizer
    text = ""
    if warmup_steps and start == learning_rate:
        text += "; no warm-up, as it would start from the full rate (--warmup-from sets another start)"
    elif warmup_steps:
        epochs = counted(f"{optimizer.warmup_epochs:g}", "epoch")
        text += f"; warm-up from {sign}{start:g} over {epochs} = {counted(warmup_steps, 'step')}"
    falls = {
        "none": "",
        "cosine": f"; then down a cosine to 0 at epoch {config.stop.epochs}",
        "linear": f"; then down a line to 0 at epoch {config.stop.epochs}",
        "step": f"; then × {optimizer.decay_factor:g} every {counted(f'{optimizer.decay_every:g}', 'epoch')}",
    }
    return text + falls[optimizer.decay]
