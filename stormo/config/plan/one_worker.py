"""What makes a run on several workers differ from the same command on one, and the flags that make both equal."""

from __future__ import annotations

import math
from dataclasses import replace

from stormo.config.layout import Layout
from stormo.config.plan.batch import per_worker
from stormo.config.plan.rate import choose_rate
from stormo.config.schema import TrainConfig
from stormo.errors import counted

LABEL = "as 1 worker"
_EQUAL = "yes, to rounding, but for random numbers such as dropout's"


def one_worker_line(
    config: TrainConfig,
    layout: Layout,
    global_batch_size: int,
    has_batch_norms: bool | None,
    loss_reduction: str = "mean",
) -> dict[str, str]:
    """The line of the plan on it; none where one worker, or one group of them, takes all samples.

    Args:
        config: the settings.
        layout: of the workers.
        global_batch_size: of the plan.
        has_batch_norms: whether the model has any; None where that is not known yet.
        loss_reduction: of the task.
    """
    num_sharers = layout.data_size * layout.devices_per_worker
    if num_sharers == 1:
        return {}
    if layout.spec.local_updates or ("staleness" in layout.spec.options and config.workers.staleness):
        return {LABEL: f"no: strategy {layout.strategy} is another algorithm than one worker's steps"}
    if loss_reduction == "local":
        return {LABEL: "no: the task's loss_reduction is \"local\", a loss of each worker's own samples"}
    differences = [
        *_batch(config, layout, num_sharers, global_batch_size),
        *_norms(config, layout, num_sharers, global_batch_size, has_batch_norms),
    ]
    if config.workers.compress != "none":
        differences.append(f"--compress none (gradients travel in fewer bytes with {config.workers.compress})")
    return {LABEL: f"no; set {' and '.join(differences)} for the same result" if differences else _EQUAL}


def _batch(config: TrainConfig, layout: Layout, num_sharers: int, global_batch_size: int) -> list[str]:
    if config.resumed and config.batch.on_resize == "scale":
        return ["--on-resize keep (the batch follows the number of workers)"]
    is_kept = config.resumed is not None and all(change.key != "batch_size" for change in config.changed)
    if is_kept or config.batch.global_batch_size is not None:
        return []
    config = replace(config, resumed=None)
    of_one = per_worker(config) * config.batch.accumulate
    flags, rate = f"--global-batch-size {of_one}", config.optimizer.base_lr
    if config.optimizer.base_batch_size is None:
        rate, _ = choose_rate(config, of_one)
    if rate != config.optimizer.base_lr:
        flags += f" --base-lr {rate:g}"
    is_scaled = choose_rate(config, global_batch_size)[0] != rate
    scaled = ["learning rate"] * is_scaled + ["warm-up"] * bool(config.optimizer.warmup_epochs)
    also = f", {' and '.join(scaled)} scaled with it" if scaled else ""
    return [f"{flags} (this run has {global_batch_size} = {of_one} × {counted(num_sharers, layout.sharer)}{also})"]


def _norms(
    config: TrainConfig, layout: Layout, num_sharers: int, global_batch_size: int, has_batch_norms: bool | None
) -> list[str]:
    ghost = config.batch.ghost_batch_size
    if has_batch_norms is False or (config.speed.sync_batch_norm and ghost is None):
        return []
    where = " if the model has batch norm" if has_batch_norms is None else ""
    if ghost is not None:
        is_even = global_batch_size % (num_sharers * config.batch.accumulate * ghost) == 0
        share = math.ceil(global_batch_size / num_sharers / config.batch.accumulate)
        flag = f"a --ghost-batch-size that divides the {counted(share, 'sample')} of a {layout.sharer}'s pass"
        return [] if is_even else [f"{flag}{where}"]
    return [f"--sync-batch-norm{where} (batch norm takes the statistics of each {layout.sharer}'s own samples)"]
