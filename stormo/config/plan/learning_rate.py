"""The learning rate that follows from the batch, its schedule and the optimizer."""

from __future__ import annotations

import math

from stormo.config.plan.batch import per_worker
from stormo.config.schema import CYCLE_END, CYCLE_START, DECAY_SHARES, TrainConfig
from stormo.errors import pluralize


def choose_learning_rate(config: TrainConfig, global_batch_size: int) -> tuple[float, str]:
    """The learning rate for the global batch, with its arithmetic."""
    base, rule = config.optimizer.base_lr, config.optimizer.lr_rule
    if config.resumed:
        return config.resumed.learning_rate, f"{config.resumed.learning_rate:g} as before"
    base_batch = config.optimizer.base_batch_size
    root = "√" if rule == "sqrt" else ""
    if base_batch is not None:
        ratio = global_batch_size / base_batch
        scaled = base * (ratio if rule == "linear" else math.sqrt(ratio))
        samples = f"{global_batch_size} samples against {base_batch}"
        return scaled, f"{scaled:g} = {base:g} × {root}{ratio:g} ({rule}: {samples})"
    if config.batch.global_batch_size is not None:
        is_unused = "lr_rule" in config.given and rule != "none"
        note = f"; --lr-rule {rule} has no effect without --base-batch-size" * is_unused
        return base, f"{base:g} as set, for the global batch as set{note}"
    multiple = global_batch_size // per_worker(config)
    if rule == "none" or multiple == 1:
        return base, f"{base:g} as set" + f" for any batch (the batch is {multiple} × one worker's)" * (multiple > 1)
    scaled = base * (float(multiple) if rule == "linear" else math.sqrt(multiple))
    return scaled, f"{scaled:g} = {base:g} × {root}{multiple} ({rule})"


def warmup_fraction(config: TrainConfig, num_workers: int, learning_rate: float) -> float:
    """The fraction of the learning rate that warm-up starts from, for a run that began with so many workers."""
    if config.optimizer.warmup_from is not None:
        return config.optimizer.warmup_from
    if config.optimizer.base_batch_size is not None:
        return min(1.0, config.optimizer.base_lr / learning_rate)
    if config.batch.global_batch_size is not None:
        return 1.0  # the result must not depend on the number of workers
    return 1 / num_workers


def task_learning_rate_text(config: TrainConfig, learning_rate: float, *, is_made: bool) -> str:
    """The learning rates of a task's optimizer, which are scaled as --base-lr would be."""
    base, before = config.optimizer.base_lr, config.resumed
    text = "of the task's optimizer()" + f", or --base-lr {base:g} where it returns None," * (not is_made)
    text += f" × {learning_rate / base:g}"
    if before is not None and before.learning_rate == learning_rate:
        return f"{text} as before"
    return text if learning_rate == base else f"{text} ({config.optimizer.lr_rule})"


def schedule_text(config: TrainConfig, start: float, learning_rate: float, warmup_steps: int, sign: str = "") -> str:
    """Warm-up and decay; `sign` marks factors of learning rates that are not known."""
    optimizer = config.optimizer
    text = ""
    if warmup_steps and start == learning_rate:
        text += "; no warm-up, as it would start from the full learning rate (--warmup-from sets another start)"
    elif warmup_steps:
        epochs = pluralize(f"{optimizer.warmup_epochs:g}", "epoch")
        text += f"; warm-up from {sign}{start:g} over {epochs} = {pluralize(warmup_steps, 'step')}"
        if optimizer.warmup_epochs >= config.stop.epochs:
            text += ", the whole training (--warmup-epochs sets less)"
    share = optimizer.decay_share or DECAY_SHARES.get(optimizer.decay, 0.0)
    stable = f"; then constant to epoch {config.stop.epochs * (1 - share):g}, and "
    decays = {
        "none": "",
        "cosine": f"; then cosine decay to 0 at epoch {config.stop.epochs}",
        "linear": f"; then linear decay to 0 at epoch {config.stop.epochs}",
        "step": f"; then × {optimizer.decay_factor:g} every {pluralize(f'{optimizer.decay_every:g}', 'epoch')}",
        "wsd": f"{stable}linear decay to 0 at epoch {config.stop.epochs}",
        "wsd-sqrt": f"{stable}decay by 1 - √ to 0 at epoch {config.stop.epochs}",
        "one-cycle": f"; one cycle from {sign}{learning_rate * CYCLE_START:g}, at its top after {1 - share:.0%} of the "
        f"steps, to {sign}{learning_rate * CYCLE_END:g} at epoch {config.stop.epochs}",
    }
    return text + decays[optimizer.decay]


def optimizer_text(config: TrainConfig) -> str:
    """The optimizer of the settings."""
    return f"{config.optimizer.optimizer}: {_values(config)}{_more(config)}"


def task_optimizer_text(config: TrainConfig, name: str | None) -> str:
    """The optimizer of a task; without a name it is not known yet whether the task makes one."""
    otherwise = f", or {config.optimizer.optimizer} where its optimizer() returns None ({_values(config)})"
    return f"the task's own{otherwise if name is None else f' {name}'}{_more(config)}"


def _values(config: TrainConfig) -> str:
    values = config.optimizer.specific_options() | {"weight decay": config.optimizer.weight_decay}
    return ", ".join(
        name.replace("_", " ").replace("nesterov", "Nesterov")
        + ("" if value is True else f" {value}" if isinstance(value, str) else f" {value:g}")
        for name, value in values.items()
        if value is not False and value is not None
    )


def _more(config: TrainConfig) -> str:
    norm, ema = config.optimizer.clip_norm, config.optimizer.ema
    text = "" if norm is None else f"; gradient clipped to a norm of {norm:g}"
    average = f"; a moving average of the weights, decay {ema or 0:g}, is validated and exported"
    return text if ema is None else text + average
