"""Batch size and learning rate of a resumed run, always computed from those it started with.

Changed settings: another learning rate keeps the batch; another batch is computed as that of a new run, and the
learning rate with it. Another number of workers: `--on-resize keep` keeps global batch and learning rate, and fewer
workers take more micro-batches, none larger than at the start (unless batch norm is synchronised); `scale` keeps every
worker's share, so that batch and learning rate follow the number of workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from stormo.config.layout import Layout
from stormo.config.plan.batch import per_worker
from stormo.config.plan.learning_rate import choose_learning_rate, warmup_fraction
from stormo.config.plan.steps import Facts
from stormo.config.schema import ResolvedBatch, TrainConfig
from stormo.errors import pluralize

_BATCH = {"batch_size", "global_batch_size"}
_LEARNING_RATE = {"base_lr", "base_batch_size", "lr_rule"}
_WARMUP = {"warmup_epochs", "warmup_from"}
_POWERS = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}  # of the batch size, by which the learning rate scales


def rescale_on_resume(config: TrainConfig, layout: Layout) -> tuple[TrainConfig, str | None]:
    """Recompute batch size and learning rate from changed settings; with a text on the learning rate if it is new."""
    before, changed = config.resumed, {change.key: change for change in config.changed}
    if before is None or not changed:
        return config, None
    becomes_auto = config.batch.batch_size == "auto" and "batch_size" in changed  # the same batch, other micro-batches
    if changed.keys() & (_BATCH - {"batch_size"} if becomes_auto else _BATCH):
        return replace(config, resumed=None), None
    if "accumulate" in changed:
        before = replace(before, micro_batch_size=None)  # micro-batches may be larger than before
    as_new = replace(config, resumed=None)
    if config.batch.batch_size == "auto" and before.batch_per_worker is not None:
        as_new = replace(as_new, batch=replace(config.batch, batch_size=before.batch_per_worker))
    elif becomes_auto:
        as_new = replace(as_new, batch=replace(config.batch, batch_size=changed["batch_size"].before))
    learning_rate, rate_text = before.learning_rate, None
    if changed.keys() & _LEARNING_RATE:
        learning_rate, rate_text = choose_learning_rate(as_new, before.global_batch_size)
    start = before.warmup_start
    if changed.keys() & (_LEARNING_RATE | _WARMUP):
        num_workers = before.num_workers or layout.data_size * layout.devices_per_worker
        start = learning_rate * warmup_fraction(as_new, num_workers, learning_rate)
    now = replace(before, learning_rate=learning_rate, warmup_start=start)
    return replace(config, resumed=now), rate_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Resized:
    """The settings for the present number of workers, and the texts on what changed."""

    config: TrainConfig
    batch_text: str | None = None  # replaces the usual text
    batch_note: str = ""
    rate_text: str | None = None


def resize(config: TrainConfig, layout: Layout, facts: Facts) -> Resized:
    """Adapt a resumed run to the present number of workers."""
    before, workers = config.resumed, layout.data_size * layout.devices_per_worker
    if before is None or before.num_workers is None:
        return Resized(config=config)
    if config.batch.on_resize == "scale" and workers != before.num_workers:
        return _scaled(config, layout, facts, before, workers, before.num_workers)
    is_other = workers != before.num_workers and layout.sharer == "worker"
    note = f"; it began with {pluralize(before.num_workers, 'worker')}" if is_other else ""
    return Resized(config=_limit_micro_batch(config, layout, facts, before), batch_note=note)


def _scaled(
    config: TrainConfig, layout: Layout, facts: Facts, before: ResolvedBatch, workers: int, workers_before: int
) -> Resized:
    ratio = Fraction(workers, workers_before)
    size = max(1, round(before.global_batch_size * ratio))
    rule = config.optimizer.lr_rule
    learning_rate = before.learning_rate * (size / before.global_batch_size) ** _POWERS[rule]
    fraction = config.optimizer.warmup_from
    # With fewer workers the learning rate may be below the one that warm-up began with: warm-up must not fall.
    start = min(before.warmup_start, learning_rate) if fraction is None else fraction * learning_rate
    now = replace(before, global_batch_size=size, learning_rate=learning_rate, warmup_start=start)
    root = "√" if rule == "sqrt" else ""
    return Resized(
        config=_limit_micro_batch(replace(config, resumed=now), layout, facts, now),
        batch_text=f"{size} = {before.global_batch_size} × {ratio}: {pluralize(workers, layout.sharer)} now, "
        f"{workers_before} at the start (--on-resize scale)",
        rate_text=f"{learning_rate:g} as at the start (--lr-rule none)"
        if rule == "none"
        else f"{learning_rate:g} = {before.learning_rate:g} × {root}({size} / {before.global_batch_size}) ({rule})",
    )


def _limit_micro_batch(config: TrainConfig, layout: Layout, facts: Facts, now: ResolvedBatch) -> TrainConfig:
    """The settings with micro-batches no larger than at the start."""
    # Workers of a group share the model, and so have room for more samples than one worker.
    if now.micro_batch_size is None or config.batch.batch_size == "auto" or layout.sharer == "group":
        return config
    if config.speed.sync_batch_norm:  # its statistics are those of a whole micro-batch
        return config
    samples, workers = min(now.global_batch_size, facts.num_train), layout.data_size * layout.devices_per_worker
    needed = math.ceil(math.ceil(samples / workers) / now.micro_batch_size)
    # Every part of a batch needs a sample, so with few samples a micro-batch may be larger than at the start.
    accumulate = max(config.batch.accumulate, min(needed, samples // workers))
    return replace(config, batch=replace(config.batch, accumulate=accumulate))


def initial_batch(
    config: TrainConfig, layout: Layout, facts: Facts, found: ResolvedBatch, micro_batch_size: int
) -> ResolvedBatch:
    """The batch from which later resumes compute theirs: that of the first start."""
    before, each = config.resumed, math.ceil(micro_batch_size / layout.devices_per_worker)
    if before is not None and before.num_workers is not None:
        return replace(before, micro_batch_size=before.micro_batch_size or each, data_sha256=facts.data_sha256)
    return replace(
        found,
        num_workers=layout.data_size * layout.devices_per_worker,
        micro_batch_size=each,
        batch_per_worker=per_worker(config),
        data_sha256=facts.data_sha256,
    )
