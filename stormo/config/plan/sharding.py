"""What a model that is spread asks of the other settings: every check, and the lines of the explanation."""

from __future__ import annotations

from collections.abc import Mapping

from stormo.config.layout import Layout, at_least
from stormo.config.schema import TrainConfig
from stormo.errors import SettingError, counted

STAGES_PER_WORKER: Mapping[str, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2}
_PER_STAGE = 4  # micro-batches for each stage, where none are set: the bubble of gpipe is below a fifth then


def check_sharding(config: TrainConfig, layout: Layout) -> None:
    """Refuse what cannot be had with this mesh."""
    sharding, given = config.sharding, config.given
    at_least("--micro-batches", sharding.micro_batches, 1)
    if layout.mesh.pipeline == 1:
        for name in sorted({"schedule", "micro_batches"} & given):
            raise SettingError(
                f"--{name.replace('_', '-')} {getattr(sharding, name)} was set",
                "it is for a pipeline and the model is not cut into stages",
                "set --strategy pipeline or an axis pipeline of --mesh, or leave it out",
            )
    if sharding.offload and not layout.zero:
        raise SettingError(
            "--offload was set",
            f"it keeps the parts of the axis shard in host memory and strategy {layout.strategy} has none",
            "set --strategy fsdp, which also runs on one worker, or leave it out",
        )
    units = sharding.checkpoint_activations or layout.zero == 3 or config.speed.compile
    if sharding.shard_modules is not None and not units:
        raise SettingError(
            f"--shard-modules {sharding.shard_modules} was set",
            "they are the units of fsdp, of --checkpoint-activations and of --compile, and none of these is on",
            "set one of these, or leave it out",
        )
    if layout.is_sharded:
        _check_spread(config, layout)
    if layout.mesh.pipeline > 1:
        _check_pipeline(config, layout)


def _check_spread(config: TrainConfig, layout: Layout) -> None:
    if config.batch.batch_size == "auto":
        raise SettingError(
            "--batch-size auto was set",
            f"it tries sizes on each worker by itself and under strategy {layout.strategy} they compute together",
            "set a number",
        )
    if config.speed.channels_last:
        raise SettingError(
            "--channels-last was set",
            f"strategy {layout.strategy} cuts weights in their plain layout",
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
    if layout.spec.schedule and (sharding.micro_batches or 1) > 1:
        raise SettingError(
            f"--micro-batches {sharding.micro_batches} was set with --strategy {layout.strategy}",
            f"{layout.strategy} sends a whole pass from layer to layer",
            "set --strategy pipeline, or leave it out",
        )
    if layout.spec.schedule and "schedule" in config.given:
        raise SettingError(
            f"--schedule {sharding.schedule} was set with --strategy {layout.strategy}",
            f"{layout.strategy} has one micro-batch and so one order",
            "set --strategy pipeline, or leave it out",
        )
    if layout.zero and sharding.schedule == "zero-bubble":
        raise SettingError(
            "--schedule zero-bubble was set with the axis shard",
            "it takes the gradients of weights apart from backward, in which torch's sharding sums them",
            "leave out the axis shard, or set another --schedule",
        )
    if sharding.checkpoint_activations and sharding.schedule == "zero-bubble" and not layout.spec.schedule:
        raise SettingError(
            "--checkpoint-activations was set with --schedule zero-bubble",
            "it takes the gradients of weights one by one and would compute a block again for each",
            "set another --schedule, or leave one of them out",
        )
    if config.speed.compile and sharding.schedule == "zero-bubble":
        raise SettingError(
            "--compile was set with --schedule zero-bubble",
            "it computes the two halves of backward apart and a compiled stage has them in one",
            "set another --schedule, or leave out --compile",
        )


def choose_micro_batches(config: TrainConfig, layout: Layout, pass_samples: int) -> int:
    """Parts of a pass in a pipeline, all of one size; 1 without a pipeline."""
    stages, asked = layout.mesh.pipeline, config.sharding.micro_batches
    if stages == 1 or layout.spec.schedule:
        return 1
    is_looped = STAGES_PER_WORKER[config.sharding.schedule] > 1
    unit = stages if is_looped else 1  # such schedules go through the workers in full rounds
    if asked is not None:
        if pass_samples % asked or asked % unit:
            why = f"a pass of {counted(pass_samples, 'sample')} cannot be cut into {asked} equal parts"
            if asked % unit:
                why = f"--schedule {config.sharding.schedule} takes rounds of {stages} workers"
            raise SettingError(
                f"--micro-batches {asked} was set",
                why,
                f"set {_listed([n for n in range(1, pass_samples + 1) if pass_samples % n == 0 and n % unit == 0])}",
            )
        return asked
    fitting = [n for n in range(unit, pass_samples + 1, unit) if pass_samples % n == 0]
    if not fitting:
        raise SettingError(
            f"--schedule {config.sharding.schedule} was set",
            f"it takes micro-batches in rounds of {stages} and a pass of {pass_samples} cannot be cut so",
            f"set a --batch-size that {stages} divides, or --schedule 1f1b",
        )
    return max([n for n in fitting if n <= _PER_STAGE * stages] or fitting[:1])


def _listed(numbers: list[int]) -> str:
    if not numbers:
        return "another --batch-size"
    named = [str(number) for number in numbers[-6:]]
    return f"one of {', '.join(named)}" if len(named) > 1 else named[0]


def even_bubble(schedule: str, stages: int, micro_batches: int) -> float | None:
    """The idle share of all workers' time if all stages took equally long; None where there is no formula."""
    if schedule == "zero-bubble":
        return None
    return (stages - 1) / (STAGES_PER_WORKER[schedule] * micro_batches + stages - 1)


def sharding_lines(config: TrainConfig, layout: Layout, pass_samples: int, micro_batches: int) -> list[tuple[str, str]]:
    """Lines of the explanation, where there is something to explain."""
    lines, sharding, stages = list[tuple[str, str]](), config.sharding, layout.mesh.pipeline
    if stages > 1:
        schedule = layout.spec.schedule or sharding.schedule
        per_worker = 1 if layout.spec.schedule else STAGES_PER_WORKER[schedule]
        text = f"{counted(stages * per_worker, 'stage')} on {counted(stages, 'worker')}, {schedule}, "
        text += f"{micro_batches} × {counted(-(-pass_samples // micro_batches), 'sample')} a pass"
        bubble = even_bubble("gpipe" if layout.spec.schedule else schedule, stages, micro_batches)
        if bubble is not None:
            below = f"{per_worker} × {micro_batches}" if per_worker > 1 else f"{micro_batches}"
            text += f"; bubble {bubble:.0%} = ({stages} - 1) / ({below} + {stages} - 1)"
        lines.append(("pipeline", text))
    if sharding.checkpoint_activations:
        lines.append(("activations", "computed again in backward, block by block"))
    if sharding.offload:
        kept = "weights, gradients and optimizer state of the shards"
        lines.append(("offload", f"{kept} are kept in host memory and stepped there"))
    return lines
