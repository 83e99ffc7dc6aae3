"""Workers that step by themselves: how often their weights are averaged, and what that does not go with."""

from __future__ import annotations

from collections.abc import Sequence

from stormo.config.layout import Layout
from stormo.config.plan.every import Every, read_every
from stormo.config.plan.stages import Stage, num_steps
from stormo.config.schema import TrainConfig
from stormo.errors import SettingError, counted

_DEFAULT_STEPS = 16
_OWN = ("average_every", "outer_lr", "outer_momentum")


def check_averaging(config: TrainConfig, layout: Layout) -> None:
    """Refuse what workers that step by themselves cannot have, and what only they have."""
    optimizer = config.optimizer
    if not layout.spec.local_updates:
        for name in sorted({*_OWN} & config.given):
            raise SettingError(
                f"--{name.replace('_', '-')} {getattr(optimizer, name)} was set with strategy {layout.strategy}",
                "it is for workers that step by themselves, and these have the same weights after every step",
                "set --strategy local, or leave it out",
            )
        return
    if optimizer.outer_lr <= 0:
        raise SettingError(
            f"--outer-lr {optimizer.outer_lr:g} was set", "it must be above 0", "set 1, or something like 0.7"
        )
    if not 0 <= optimizer.outer_momentum < 1:
        raise SettingError(
            f"--outer-momentum {optimizer.outer_momentum:g} was set",
            "it must lie in [0, 1)",
            "set something like --outer-momentum 0.9",
        )
    if config.speed.sync_batch_norm:
        raise SettingError(
            "--sync-batch-norm was set with --strategy local",
            "its workers have weights of their own between two averagings, and statistics over all of them fit none",
            "set --no-sync-batch-norm, or --strategy ddp",
        )


def choose_averaging(
    config: TrainConfig, layout: Layout, stages: Sequence[Stage], steps_per_epoch: int
) -> tuple[Every | None, dict[str, str]]:
    """How often weights are averaged, None where they are not, and a line of the explanation."""
    if not layout.spec.local_updates:
        return None, {}
    asked = config.optimizer.average_every
    total = num_steps(stages, config.stop.epochs)
    if asked is None:
        every: Every | None = Every(min(_DEFAULT_STEPS, steps_per_epoch))
    else:
        every = read_every("--average-every", asked, steps_per_epoch, "set one of these")
    if every is None or every.steps > total or (every.epochs or 0) > config.stop.epochs:
        epochs = counted(config.stop.epochs, "epoch")
        raise SettingError(
            f"--average-every {asked} was set",
            f"the run has {epochs} = {counted(total, 'step')}, and its weights would never be averaged",
            f"set --average-every {total} to average once, at the end, or fewer steps",
        )
    return every, {"averaging": _text(config, layout, every, steps_per_epoch)}


def _text(config: TrainConfig, layout: Layout, every: Every, steps_per_epoch: int) -> str:
    optimizer, steps = config.optimizer, every.steps
    arithmetic = "" if every.epochs is None else f" = {every.epochs:g} × {steps_per_epoch}"
    rate = f", {steps_per_epoch / steps:.3g} times an epoch" if steps < steps_per_epoch else ""
    sent = f": 1/{steps} of what ddp sends" if steps > 1 else ": as much as ddp sends"
    if layout.world_size == 1:
        sent = "; with one worker there is nothing to send"
    text = f"the weights of {counted(layout.world_size, 'worker')} every {counted(steps, 'step')}{arithmetic}"
    text += rate + sent
    if (optimizer.outer_lr, optimizer.outer_momentum) != (1, 0):
        text += f"; their mean change is stepped by {optimizer.outer_lr:g}"
        if optimizer.outer_momentum:
            text += f" with Nesterov's momentum of {optimizer.outer_momentum:g}"
    return text
