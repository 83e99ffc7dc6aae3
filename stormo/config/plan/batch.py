"""The global batch, its micro-batches and growth, and the samples of batch-norm statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stormo.config.layout import Layout
from stormo.config.plan.steps import Facts, Stage, describe, make_stages, parse_growth
from stormo.config.schema import TrainConfig
from stormo.errors import SettingError, pluralize

_AUTO_PARTS = ", in micro-batches that --batch-size auto finds once the workers hold the model"


@dataclass(frozen=True, slots=True)
class BatchText:
    """The line of the explanation on the global batch."""

    size: str
    parts: str  # its micro-batches
    notes: str = ""

    def __str__(self) -> str:
        return self.size + self.parts + self.notes


def per_worker(config: TrainConfig) -> int:
    """Samples of one worker in a micro-batch; under auto, those from which batch and learning rate are derived."""
    size = config.batch.batch_size
    return config.auto_batch_size if size == "auto" else size


def choose_batch(config: TrainConfig, layout: Layout, facts: Facts) -> tuple[int, BatchText]:
    """The global batch, with its arithmetic."""
    workers, accumulate = layout.data_size * layout.devices_per_worker, config.batch.accumulate
    product = f"{pluralize(workers, layout.sharer)} × {accumulate} accumulation"
    each, is_auto = per_worker(config), config.batch.batch_size == "auto"
    made = each * workers * accumulate
    total = config.resumed.global_batch_size if config.resumed else config.batch.global_batch_size
    if total is None:
        total = made
        size, parts = f"{total}", f" = {each} per {layout.sharer} × {product}"
        if is_auto:
            size += f" ({each} for each of {pluralize(workers, layout.sharer)})"
    else:
        if "batch_size" in config.given and not config.resumed and not is_auto and made != total:
            both = "global_batch_size" in config.given
            raise SettingError(
                f"--global-batch-size {total} and --batch-size {each} were both set"
                if both
                else f"--batch-size {each} was set for a run whose global batch is {total}",
                f"{each} per {layout.sharer} × {product} makes {made}",
                "set only one of them" if both else "set --accumulate, or --global-batch-size to change the batch",
            )
        if total < workers * accumulate:
            raise SettingError(
                f"a global batch of {total} was set",
                f"{product} split it into {pluralize(workers * accumulate, 'part')} of at least one sample",
                f"set --global-batch-size {workers * accumulate} or more",
            )
        low, uneven = divmod(total, workers * accumulate)
        size = f"{total} as {'before' if config.resumed else 'set'}"
        parts = f" = {low}{f' to {low + 1}' if uneven else ''} per {layout.sharer} × {product}"
    if facts.num_validation == 0:
        raise no_validation_samples()
    if facts.num_train < workers:
        raise SettingError(
            f"{workers} workers were asked for",
            f"the training set has {pluralize(facts.num_train, 'sample')}, fewer than one for each",
            f"set --num-gpus for at most {pluralize(facts.num_train, 'worker')}",
        )
    notes = ""
    if total > facts.num_train:
        notes = f"; larger than the {pluralize(facts.num_train, 'training sample')}, so a step takes {facts.num_train}"
    return total, BatchText(size, _AUTO_PARTS if is_auto else parts, notes)


def num_train(config: TrainConfig, facts: Facts) -> int:
    """Samples of an epoch."""
    asked = config.batch.epoch_samples
    if asked is not None and not facts.is_stream:
        raise SettingError(
            f"--epoch-samples {asked} was set",
            f"the training set is an epoch of {pluralize(facts.num_train, 'sample')}",
            "leave it out: it is for streams of unknown length",
        )
    if asked is None and facts.is_stream and not facts.num_train:
        raise SettingError(
            "train_data() gave a stream without a length",
            "an epoch, warm-up and decay need one",
            "set --epoch-samples to the samples of an epoch, or give the stream a __len__",
        )
    return facts.num_train if asked is None else asked


def no_validation_samples() -> SettingError:
    """The error for an empty validation set."""
    return SettingError(
        "a task without validation samples was given",
        "every epoch ends with a validation",
        "let validation_data() return at least one sample",
    )


def choose_stages(config: TrainConfig, layout: Layout, facts: Facts, global_batch_size: int) -> tuple[Stage, ...]:
    """The batch of every epoch; one stage where it does not grow."""
    batch, workers = config.batch, layout.data_size
    first = Stage(1, global_batch_size, batch.accumulate, facts.num_train)
    growth = parse_growth(batch.grow_batch)
    if not growth and batch.max_batch_size is not None:
        raise SettingError(
            f"--max-batch-size {batch.max_batch_size} was set without --grow-batch",
            "it limits the micro-batches of a batch that has grown",
            "set --grow-batch as well, or leave it out",
        )
    per_micro_batch = math.ceil(first.share(workers) / batch.accumulate)
    most = per_micro_batch if batch.max_batch_size is None else batch.max_batch_size * layout.devices_per_worker
    if most < per_micro_batch:
        raise SettingError(
            f"--max-batch-size {batch.max_batch_size} was set",
            f"the first batch has micro-batches of {per_micro_batch} samples a worker",
            f"set --max-batch-size {math.ceil(per_micro_batch / layout.devices_per_worker)} or more, or --accumulate",
        )
    return make_stages(first, growth, workers, most)


def growth_line(config: TrainConfig, layout: Layout, stages: Sequence[Stage]) -> dict[str, str]:
    """A line of the explanation, where the batch grows."""
    return {"batch growth": describe(stages, layout.data_size, config.stop.epochs)} if len(stages) > 1 else {}


def num_ghost_batches(num_samples: int, ghost_batch_size: int) -> int:
    """The fewest ghost batches of at most that size, but none of a single sample."""
    # The second term is smaller for an odd number in ghost batches of 2 only: one sample has no variance.
    return max(1, min(-(-num_samples // ghost_batch_size), num_samples // 2))


def norm_text(config: TrainConfig, layout: Layout, first: Stage) -> str:
    """The samples of batch-norm statistics."""
    size = config.batch.ghost_batch_size
    if size is None:
        is_synchronised = config.speed.sync_batch_norm and layout.data_size > 1
        whose = f"all {pluralize(layout.data_size, layout.sharer)}" if is_synchronised else "each worker's own samples"
        return f"statistics over {whose}" + ", micro-batch by micro-batch" * (layout.mesh.pipeline > 1)
    num_samples = math.ceil(first.share(layout.data_size) / first.accumulate / layout.devices_per_worker)
    count = num_ghost_batches(num_samples, size)
    low, uneven = divmod(num_samples, count)
    text = f"statistics over ghost batches of at most {size} of each worker's own samples"
    if count == 1:
        return f"{text}: one of {low}, the whole micro-batch (plain batch norm)"
    return f"{text}: {count} of {low}{f' or {low + 1}' if uneven else ''} in a micro-batch of {num_samples}"
