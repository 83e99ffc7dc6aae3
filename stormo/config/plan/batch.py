"""The global batch, its cut into passes, its growth, and over which samples batch norm takes its statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stormo.config.layout import Layout
from stormo.config.plan.facts import Facts
from stormo.config.plan.stages import Stage, describe, make_stages, read_growth
from stormo.config.schema import TrainConfig
from stormo.errors import SettingError, counted

SEARCHED = ", in passes that --batch-size auto finds once the workers hold the model"


def per_worker(config: TrainConfig) -> int:
    """Samples of one worker in one pass, as set; under auto, those on which batch and rate rest."""
    size = config.batch.batch_size
    return config.auto_batch_size if size == "auto" else size


def choose_batch(config: TrainConfig, layout: Layout, facts: Facts) -> tuple[int, str]:
    """The global batch, with its arithmetic."""
    workers, accumulate = layout.data_size * layout.devices_per_worker, config.batch.accumulate
    sharer = layout.sharer
    product = f"{counted(workers, sharer)} × {accumulate} accumulation"
    each, is_auto = per_worker(config), config.batch.batch_size == "auto"
    total = config.resumed.global_batch_size if config.resumed else config.batch.global_batch_size
    if total is None:
        total = each * workers * accumulate
        text = f"{total} = {each} per {sharer} × {product}"
        if is_auto:
            text = f"{total} ({each} for each of {counted(workers, sharer)})" + SEARCHED
    else:
        is_set = "batch_size" in config.given and not config.resumed and not is_auto
        if is_set and each * workers * accumulate != total and "global_batch_size" not in config.given:
            raise SettingError(
                f"--batch-size {each} was set for a run whose global batch is {total}",
                f"{each} per {sharer} × {product} makes {each * workers * accumulate}",
                "set --accumulate to cut that batch otherwise, or --global-batch-size to change it",
            )
        if is_set and each * workers * accumulate != total:
            raise SettingError(
                f"--global-batch-size {total} and --batch-size {each} were both set",
                f"{each} per {sharer} × {product} makes {each * workers * accumulate}",
                "set only one of them",
            )
        if total < workers * accumulate:
            raise SettingError(
                f"a global batch of {total} was set",
                f"{product} cut it into {counted(workers * accumulate, 'part')} of at least one sample",
                f"set --global-batch-size {workers * accumulate} or more",
            )
        low, uneven = divmod(total, workers * accumulate)
        origin = "before" if config.resumed else "set"
        text = f"{total} as {origin} = {low}{f' to {low + 1}' if uneven else ''} per {sharer} × {product}"
        if is_auto:
            text = f"{total} as {origin}" + SEARCHED
    if facts.num_validation == 0:
        raise no_validation_samples()
    if facts.num_train < workers:
        raise SettingError(
            f"{workers} workers were asked for",
            f"the training set has {counted(facts.num_train, 'sample')}, fewer than one for each",
            f"set --num-gpus for at most {counted(facts.num_train, 'worker')}",
        )
    if total > facts.num_train:
        text += f"; larger than the {counted(facts.num_train, 'training sample')}, so a step takes {facts.num_train}"
    return total, text


def num_train(config: TrainConfig, facts: Facts) -> int:
    """Samples of an epoch: the training set's, or for a stream what the user says."""
    asked = config.batch.epoch_samples
    if asked is not None and not facts.is_stream:
        raise SettingError(
            f"--epoch-samples {asked} was set",
            f"the training set is an epoch of {counted(facts.num_train, 'sample')}",
            "leave it out: it is for streams whose length is not known",
        )
    if asked is None and facts.is_stream and not facts.num_train:
        raise SettingError(
            "train_data() gave a stream that does not tell its length",
            "the steps of an epoch, warm-up and decay are counted in it",
            "set --epoch-samples to the samples that make an epoch, or give the stream a __len__",
        )
    return facts.num_train if asked is None else asked


def no_validation_samples() -> SettingError:
    """The answer to a validation set that is empty."""
    return SettingError(
        "a task without validation samples was given",
        "every epoch ends with a validation",
        "let validation_data() return at least one sample",
    )


def choose_stages(config: TrainConfig, layout: Layout, facts: Facts, global_batch_size: int) -> tuple[Stage, ...]:
    """The batch of every epoch; one stage where it does not grow."""
    batch, workers = config.batch, layout.data_size
    first = Stage(1, global_batch_size, batch.accumulate, facts.num_train)
    growth = read_growth(batch.grow_batch)
    if growth and batch.max_batch_size is not None and batch.batch_size == "auto":
        raise SettingError(
            f"--max-batch-size {batch.max_batch_size} was set with --batch-size auto",
            "auto finds what a worker takes in one pass, and a batch that has grown is cut into more of these",
            "leave it out, or set --batch-size to a number",
        )
    if not growth and batch.max_batch_size is not None:
        raise SettingError(
            f"--max-batch-size {batch.max_batch_size} was set without --grow-batch",
            "it is what a worker takes in one pass of a batch that has grown",
            "set --grow-batch as well, or leave it out",
        )
    per_pass = math.ceil(first.share(workers) / batch.accumulate)
    most = per_pass if batch.max_batch_size is None else batch.max_batch_size * layout.devices_per_worker
    if most < per_pass:
        raise SettingError(
            f"--max-batch-size {batch.max_batch_size} was set",
            f"the batch that training begins with takes {per_pass} samples of a worker in one pass",
            f"set --max-batch-size {math.ceil(per_pass / layout.devices_per_worker)} or more, or --accumulate",
        )
    return make_stages(first, growth, workers, most)


def growth_line(config: TrainConfig, layout: Layout, stages: Sequence[Stage]) -> dict[str, str]:
    """A line of the explanation, where there is growth to explain."""
    return {"batch growth": describe(stages, layout.data_size, config.stop.epochs)} if len(stages) > 1 else {}


def num_ghosts(num_samples: int, ghost_batch_size: int) -> int:
    """Ghosts of a pass: as few as there can be of at most that size, but none of a single sample."""
    # Only an odd pass in ghosts of 2 comes to the second term: a sample alone has no variance.
    return max(1, min(-(-num_samples // ghost_batch_size), num_samples // 2))


def norm_text(config: TrainConfig, layout: Layout, step_samples: int, accumulate: int) -> str:
    """Over which samples batch norm takes its statistics, in words."""
    size = config.batch.ghost_batch_size
    if size is None:
        is_synchronised = config.speed.sync_batch_norm and layout.data_size > 1
        whose = f"all {counted(layout.data_size, layout.sharer)}" if is_synchronised else "each worker's own samples"
        return f"statistics over {whose}" + ", micro-batch by micro-batch" * (layout.mesh.pipeline > 1)
    num_samples = math.ceil(math.ceil(step_samples / layout.data_size) / accumulate / layout.devices_per_worker)
    count = num_ghosts(num_samples, size)
    low, uneven = divmod(num_samples, count)
    text = f"statistics over ghosts of at most {size} of each worker's own samples"
    if count == 1:
        return f"{text}: one ghost of {low}, as a pass has no more (plain batch norm)"
    return f"{text}: {count} of {low}{f' or {low + 1}' if uneven else ''} in a pass of {num_samples}"
