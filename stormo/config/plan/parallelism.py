"""What each strategy needs of the other settings: checks, choices and lines of the explanation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stormo.config.layout import Layout
from stormo.config.plan.steps import Interval, Stage, num_steps, parse_interval
from stormo.config.schema import TrainConfig
from stormo.config.strategies import names
from stormo.errors import SettingError, pluralize

STAGES_PER_WORKER: Mapping[str, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2}
# w of the idle share (p - 1) / (w m + p - 1): two stages halve the wait, backwards in two parts cut it to a sixth.
_WORK = {"interleaved": 2, "zero-bubble": 6}
_MICRO_BATCHES_PER_STAGE = 4  # by default: the bubble of gpipe is below a fifth then
_AVERAGING_STEPS = 16  # by default
_COMPRESSION = {
    "bf16": "gradients are sent as bf16, half the bytes of fp32, and summed in fp32",
    "fp16": "gradients are sent as fp16 with a scale for each bucket, half the bytes of fp32, and summed in fp32",
    "powersgd": "two matrices of rank {rank} are sent for each large weight, with error feedback",
}


def check_parallelism(config: TrainConfig, layout: Layout) -> None:
    """Refuse settings that do not go with the strategy."""
    if layout.is_sharded:
        _check_sharded(config, layout)
    if layout.mesh.pipeline > 1:
        _check_pipeline(config, layout)
    elif given := sorted(config.given & {"schedule", "micro_batches"}):
        raise SettingError(
            f"--{given[0].replace('_', '-')} {getattr(config.sharding, given[0])} was set",
            f"the mesh has no pipeline of several workers ({config.workers.mesh})",
            "set pipeline=2 or more in --mesh, or leave it out",
        )
    if layout.spec.local_updates and config.speed.sync_batch_norm:
        raise SettingError(
            f"--sync-batch-norm was set with --strategy {layout.strategy}",
            "the weights of its workers differ, so that they cannot share statistics",
            "set --no-sync-batch-norm, or --strategy ddp",
        )
    asked = config.workers.strategy  # on one worker for now, too
    if asked in names(lambda row: not row.takes_fp16) and config.speed.precision == "fp16":
        raise SettingError(
            f"--precision fp16 was set with --strategy {asked}",
            "each server would decide alone whether the scaled loss has overflowed",
            "set --precision bf16 or fp32, or --strategy ddp",
        )
    if "staleness" in layout.spec.options and config.workers.staleness:
        _check_stale(config)
    if config.workers.tune_link and layout.backend != "nccl":
        raise SettingError(
            f"--tune-link was set with backend {layout.backend}",
            "it tunes NCCL's sockets",
            "set --backend nccl, or leave it out" if layout.device_type == "cuda" else "leave it out: NCCL needs GPUs",
        )
    if config.optimizer.ema is not None and layout.spec.local_updates:
        raise SettingError(
            f"--ema {config.optimizer.ema:g} was set with strategy {layout.strategy}",
            "each worker steps alone between averagings, and no step has weights to average",
            "leave it out, or set --strategy ddp",
        )
    method = config.workers.compress
    if method != "none" and not layout.spec.takes_compression:
        raise SettingError(
            f"--compress {method} was set with strategy {layout.strategy}",
            "it is for replicas of the model, which exchange whole gradients",
            "set --strategy ddp, or --compress none",
        )


def _check_sharded(config: TrainConfig, layout: Layout) -> None:
    if config.batch.batch_size == "auto":
        raise SettingError(
            "--batch-size auto was set",
            f"each worker tries sizes alone and under strategy {layout.strategy} they compute together",
            "set a number",
        )
    if config.speed.channels_last:
        by_itself = layout.zero and layout.mesh.pipeline == 1 and not config.speed.compile
        raise SettingError(
            "--channels-last was set",
            f"strategy {layout.strategy} shards weights in their default layout"
            + (", and on GPUs puts activations into channels last by itself (not in fp64)" if by_itself else ""),
            "leave it out, or set --strategy ddp",
        )


def _check_pipeline(config: TrainConfig, layout: Layout) -> None:
    sharding, optimizer = config.sharding, config.optimizer
    if optimizer.gradient_noise_batch is not None:
        raise SettingError(
            f"--gradient-noise-batch {optimizer.gradient_noise_batch} was set",
            "it is put on the output of the whole model, which a pipeline computes in micro-batches",
            "leave it out, or set --strategy fsdp",
        )
    if layout.spec.schedule or sharding.schedule != "zero-bubble":
        return
    for is_set, said, why in (
        (layout.zero, "the axis shard", "torch's sharding sums the gradients of weights in backward"),
        (
            sharding.checkpoint_activations,
            "--checkpoint-activations",
            "a block would be recomputed for each of its weights",
        ),
        (config.speed.compile, "--compile", "a compiled stage has one backward"),
    ):
        if is_set:
            raise SettingError(
                f"{said} was set with --schedule zero-bubble",
                f"it computes the gradients of weights separately and {why}",
                "set another --schedule, or leave one of them out",
            )


def _check_stale(config: TrainConfig) -> None:
    """Refuse what needs the gradient of the whole batch, or all workers at the same step."""
    optimizer = config.optimizer
    one_by_one = "each worker's gradient is applied when it comes"
    for is_set, said, why in (
        (config.run.deterministic, "--deterministic", f"{one_by_one}, in an order that varies"),
        (config.speed.sync_batch_norm, "--sync-batch-norm", "workers would wait for one another in every layer"),
        (optimizer.clip_norm is not None, f"--clip-norm {optimizer.clip_norm}", one_by_one),
        (optimizer.gradient_noise is not None, f"--gradient-noise {optimizer.gradient_noise}", one_by_one),
        (optimizer.ema is not None, f"--ema {optimizer.ema}", one_by_one),
    ):
        if is_set:
            staleness = f"--staleness {config.workers.staleness}"
            raise SettingError(f"{said} was set with {staleness}", why, "leave it out, or set --staleness 0")


def max_staleness(config: TrainConfig, layout: Layout) -> int:
    """The most updates by other workers between reading weights and applying the gradient computed with them.

    A worker begins step t when all others have done t - 1 - K. What it sends in step t, it has computed with weights
    that it got at the end of step t - 1, when another may have done t - 2 - K only; until it sends, that one can do
    step t + K: 2 K + 2 more.
    """
    return (2 * config.workers.staleness + 2) * (layout.world_size - 1)


def compression_line(config: TrainConfig, layout: Layout, precision: str) -> dict[str, str]:
    """How gradients are sent."""
    method = config.workers.compress
    if method == "none":
        return {}
    if method == "powersgd" and precision == "fp16":
        raise SettingError(
            "--compress powersgd was set with fp16",
            "its error feedback has the loss scale of one step, which the next step may change",
            "set --precision bf16 or fp32, or --compress fp16",
        )
    if layout.world_size == 1:
        return {"compression": f"{method}, but one worker has nothing to send"}
    return {"compression": _COMPRESSION[method].format(rank=config.workers.compress_rank)}


def choose_averaging(
    config: TrainConfig, layout: Layout, stages: Sequence[Stage], steps_per_epoch: int
) -> tuple[Interval | None, dict[str, str]]:
    """How often the weights of local updates are averaged (None: never), with its line of the explanation."""
    if not layout.spec.local_updates:
        return None, {}
    asked = config.optimizer.average_every
    total = num_steps(stages, config.stop.epochs)
    if asked is None:
        every: Interval | None = Interval(min(_AVERAGING_STEPS, steps_per_epoch))
    else:
        every = parse_interval("--average-every", asked, steps_per_epoch, "set one of these")
    if every is None or every.steps > total or (every.epochs or 0) > config.stop.epochs:
        epochs = pluralize(config.stop.epochs, "epoch")
        raise SettingError(
            f"--average-every {asked} was set",
            f"the run has {epochs} = {pluralize(total, 'step')}, and its weights would never be averaged",
            f"set --average-every {total} to average once, at the end, or fewer steps",
        )
    return every, {"averaging": _averaging_text(config, layout, every, steps_per_epoch)}


def _averaging_text(config: TrainConfig, layout: Layout, every: Interval, steps_per_epoch: int) -> str:
    optimizer, steps = config.optimizer, every.steps
    arithmetic = "" if every.epochs is None else f" = {every.epochs:g} × {steps_per_epoch}"
    often = f", {steps_per_epoch / steps:.3g} times an epoch" if steps < steps_per_epoch else ""
    sent = f": 1/{steps} of what ddp sends" if steps > 1 else ": as much as ddp sends"
    if layout.world_size == 1:
        sent = "; with one worker there is nothing to send"
    text = f"the weights of {pluralize(layout.world_size, 'worker')} every {pluralize(steps, 'step')}{arithmetic}"
    text += often + sent
    if (optimizer.outer_lr, optimizer.outer_momentum) != (1, 0):
        text += f"; outer step with a learning rate of {optimizer.outer_lr:g}"
        if optimizer.outer_momentum:
            text += f" and a Nesterov momentum of {optimizer.outer_momentum:g}"
    return text


def choose_micro_batches(config: TrainConfig, layout: Layout, micro_batch_size: int) -> int:
    """Micro-batches of a pipeline, all of one size; 1 without a pipeline."""
    stages, asked = layout.mesh.pipeline, config.sharding.micro_batches
    if stages == 1 or layout.spec.schedule:
        return 1
    is_looped = STAGES_PER_WORKER[config.sharding.schedule] > 1
    unit = stages if is_looped else 1  # looped schedules take micro-batches in rounds of all workers
    fitting = [n for n in range(unit, micro_batch_size + 1, unit) if micro_batch_size % n == 0]
    if asked is not None:
        if asked not in fitting:
            parts = pluralize(asked, "equal part")
            parts += f", a multiple of {stages} with --schedule {config.sharding.schedule}" * is_looped
            raise SettingError(
                f"--micro-batches {asked} was set",
                f"{pluralize(micro_batch_size, 'sample')} of a worker cannot be split into {parts}",
                f"set one of {', '.join(map(str, fitting[-6:]))}" if fitting else "set another --batch-size",
            )
        return asked
    if not fitting:
        raise SettingError(
            f"--schedule {config.sharding.schedule} was set",
            f"it takes micro-batches in rounds of {stages} and {micro_batch_size} samples cannot be split so",
            f"set a --batch-size that {stages} divides, or --schedule 1f1b",
        )
    return max([n for n in fitting if n <= _MICRO_BATCHES_PER_STAGE * stages] or fitting[:1])


def even_bubble(schedule: str, stages: int, micro_batches: int) -> float:
    """The idle share of the workers' time if all stages took equally long, a backward twice as long as a forward."""
    return (stages - 1) / (_WORK.get(schedule, 1) * micro_batches + stages - 1)


def sharding_lines(
    config: TrainConfig, layout: Layout, micro_batch_size: int, micro_batches: int
) -> list[tuple[str, str]]:
    """Lines of the explanation on pipeline, recomputing and offloading."""
    lines, sharding, stages = list[tuple[str, str]](), config.sharding, layout.mesh.pipeline
    if stages > 1:
        schedule = layout.spec.schedule or sharding.schedule
        per_worker = 1 if layout.spec.schedule else STAGES_PER_WORKER[schedule]
        text = f"{pluralize(stages * per_worker, 'stage')} on {pluralize(stages, 'worker')}, {schedule}, "
        size = pluralize(-(-micro_batch_size // micro_batches), "sample")
        text += f"{pluralize(micro_batches, 'micro-batch')} of {size}"
        work = _WORK.get(schedule, 1)
        below = f"{work} × {micro_batches}" if work > 1 else f"{micro_batches}"
        bubble = even_bubble(schedule, stages, micro_batches)
        text += f"; bubble {bubble:.0%} = ({stages} - 1) / ({below} + {stages} - 1)"
        lines.append(("pipeline", text))
    if sharding.checkpoint_activations:
        lines.append(("activations", "recomputed in backward, block by block"))
    if sharding.offload:
        lines.append(("offload", "sharded weights, gradients and optimizer state are kept and stepped in host memory"))
    return lines
