"""Gradient noise and the noise scale: what was set, in words, and whether it can be measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stormo.config.layout import Layout
from stormo.config.plan.stages import Stage
from stormo.config.schema import TrainConfig
from stormo.errors import SettingError

_MAX_VARIANCE = 1e6
_DDP = "--strategy ddp"


def largest_step(stages: Sequence[Stage]) -> int:
    """The most samples of one step."""
    return max(min(stage.global_batch_size, stage.num_train) for stage in stages)


def check_noise(config: TrainConfig, stages: Sequence[Stage]) -> None:
    """Refuse noise that the batch has of its own, and a decay of noise that is not added."""
    small, largest = config.optimizer.gradient_noise_batch, largest_step(stages)
    if small is not None and largest <= small:
        raise SettingError(
            f"--gradient-noise-batch {small} was set",
            f"the global batch of {largest} is no larger and so has that noise of its own",
            f"set --gradient-noise-batch below {largest}, or leave it out",
        )
    added = config.optimizer.gradient_noise
    if added is not None and added > _MAX_VARIANCE:
        raise SettingError(
            f"--gradient-noise {added:g} was set",
            f"it is a variance, and gradients beside noise of more than {_MAX_VARIANCE:g} are lost in it",
            "set something like --gradient-noise 0.01",
        )
    if "gradient_noise_decay" in config.given and config.optimizer.gradient_noise is None:
        raise SettingError(
            f"--gradient-noise-decay {config.optimizer.gradient_noise_decay:g} was set without --gradient-noise",
            "there is no noise that it could let fade",
            "set --gradient-noise too, or leave it out",
        )


def noise_lines(config: TrainConfig, stages: Sequence[Stage]) -> list[tuple[str, str]]:
    """A line of the explanation, where noise was asked for."""
    optimizer, texts = config.optimizer, list[str]()
    small = optimizer.gradient_noise_batch
    if small is not None:
        largest = largest_step(stages)
        sigma = f"σ = {math.sqrt(largest / small - 1):.3g} = √({largest} / {small} - 1)"
        texts.append(f"each sample's gradient × N(1, σ²), {sigma}" + " in the largest batch" * (len(stages) > 1))
    if optimizer.gradient_noise is not None:
        eta, gamma = optimizer.gradient_noise, optimizer.gradient_noise_decay
        after = " after clipping" * (optimizer.clip_norm is not None)
        texts.append(f"the gradient + N(0, {eta:g} / (1 + step)^{gamma:g}){after}")
    return [("gradient noise", "; ".join(texts))] if texts else []


def choose_noise_scale(
    config: TrainConfig, layout: Layout, stages: Sequence[Stage], *, is_found: bool = False
) -> tuple[bool, str]:
    """Whether it is measured, and why; `is_found` once --batch-size auto has cut the batch into passes."""
    reached = [stage for stage in stages if stage.first_epoch <= config.stop.epochs]
    asked, most_passes = config.optimizer.noise_scale, max(stage.accumulate for stage in reached)
    if asked is False:
        return False, "as set"
    if obstacle := _noise_obstacle(config, layout):
        said, reason, instead = obstacle
        if asked:
            raise SettingError(f"--noise-scale was set{said}", reason, f"set {instead}, or leave it out")
        return False, reason
    if layout.world_size > 1:
        return True, f"the gradients of {layout.world_size} workers are compared with their mean"
    if most_passes > 1:
        first = next(stage for stage in reached if stage.accumulate > 1)
        since = f", from epoch {first.first_epoch} on" if first.first_epoch > 1 else ""
        return True, f"the first of {first.accumulate} passes is compared with the whole step{since}"
    reason = "one worker takes a batch in one pass, and the gradients of two sizes of batch are compared"
    if asked and (is_found or config.batch.batch_size != "auto"):
        raise SettingError("--noise-scale was set", reason, "set --accumulate 2, or train with several workers")
    return False, reason


def _noise_obstacle(config: TrainConfig, layout: Layout) -> tuple[str, str, str] | None:
    """With what it cannot be measured, why, and what to set instead."""
    if layout.spec.no_noise_scale:
        said = "" if layout.is_sharded else f" with --strategy {layout.strategy}"
        return said, layout.spec.no_noise_scale, _DDP
    if config.workers.compress == "powersgd" and layout.world_size > 1:
        reason = "what travels of the gradients is not their mean, against which each would be held"
        return " with --compress powersgd", reason, "--compress bf16"
    return None
