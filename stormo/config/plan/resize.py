"""A run that goes on with other workers: what becomes of its batch and its rate, always reckoned from its beginning.

`keep` leaves the global batch and the rate as they were; fewer workers take it in more passes, none larger than at the
start, unless batch norm is synchronised. `scale` leaves every worker its share, so that batch and rate follow the
number of workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from stormo.config.layout import Layout
from stormo.config.plan.batch import per_worker
from stormo.config.plan.facts import Facts
from stormo.config.schema import Effective, TrainConfig
from stormo.errors import counted

_POWERS = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}  # of the batch, that the rate follows


@dataclass(frozen=True, kw_only=True, slots=True)
class Resized:
    """The settings for the workers there are now, and the words for what has changed."""

    config: TrainConfig
    batch_text: str | None = None  # instead of what would be said of the batch
    batch_note: str = ""  # besides it
    rate_text: str | None = None


def resize(config: TrainConfig, layout: Layout, facts: Facts) -> Resized:
    """Fit a run that goes on to the workers there are now; a new one is left alone."""
    before, workers = config.resumed, layout.data_size * layout.devices_per_worker
    if before is None or before.num_workers is None:
        return Resized(config=config)
    if config.batch.on_resize == "scale" and workers != before.num_workers:
        return _scaled(config, layout, facts, before, workers)
    is_other = workers != before.num_workers and layout.sharer == "worker"
    note = f"; it began with {counted(before.num_workers, 'worker')}" if is_other else ""
    return Resized(config=_in_passes(config, layout, facts, before), batch_note=note)


def _scaled(config: TrainConfig, layout: Layout, facts: Facts, before: Effective, workers: int) -> Resized:
    assert before.num_workers is not None
    ratio = Fraction(workers, before.num_workers)
    size = max(1, round(before.global_batch_size * ratio))
    rule = config.optimizer.lr_rule
    rate = before.learning_rate * (size / before.global_batch_size) ** _POWERS[rule]
    fraction = config.optimizer.warmup_from
    # Of fewer workers the rate may be below the one that warm-up began with, and it must not fall to its peak.
    start = min(before.warmup_start, rate) if fraction is None else fraction * rate
    now = replace(before, global_batch_size=size, learning_rate=rate, warmup_start=start)
    root = "√" if rule == "sqrt" else ""
    return Resized(
        config=_in_passes(replace(config, resumed=now), layout, facts, now),
        batch_text=f"{size} = {before.global_batch_size} × {ratio}: {counted(workers, layout.sharer)} now, "
        f"{before.num_workers} at the start (--on-resize scale)",
        rate_text=f"{rate:g} as at the start (--lr-rule none)"
        if rule == "none"
        else f"{rate:g} = {before.learning_rate:g} × {root}({size} / {before.global_batch_size}) ({rule})",
    )


def _in_passes(config: TrainConfig, layout: Layout, facts: Facts, now: Effective) -> TrainConfig:
    """The same where no pass of a worker takes more samples than at the start; auto finds passes that fit itself."""
    # A group of workers that take the same samples has room for more of them than one worker.
    if now.batch_per_pass is None or config.batch.batch_size == "auto" or layout.sharer == "group":
        return config
    if config.speed.sync_batch_norm:  # whose statistics are those of all samples of a pass
        return config
    share = math.ceil(min(now.global_batch_size, facts.num_train) / layout.data_size / layout.devices_per_worker)
    passes = max(config.batch.accumulate, math.ceil(share / now.batch_per_pass))
    return replace(config, batch=replace(config.batch, accumulate=passes))


def beginning(config: TrainConfig, layout: Layout, facts: Facts, found: Effective, per_pass: int) -> Effective:
    """What a run is reckoned from when its workers change: how it began, or for a new one what it begins with."""
    before, each = config.resumed, math.ceil(per_pass / layout.devices_per_worker)
    if before is not None and before.num_workers is not None:
        return replace(before, batch_per_pass=before.batch_per_pass or each, data_sha256=facts.data_sha256)
    workers = layout.data_size * layout.devices_per_worker
    return replace(
        found,
        num_workers=workers,
        batch_per_pass=each,
        batch_per_worker=per_worker(config),
        data_sha256=facts.data_sha256,
    )
