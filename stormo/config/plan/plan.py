"""Every effective value of a run, from (settings, devices, facts of the task)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stormo.config.layout import Layout
from stormo.config.plan.averaging import check_averaging, choose_averaging
from stormo.config.plan.batch import SEARCHED, choose_batch, choose_stages, growth_line, norm_text, num_train
from stormo.config.plan.checks import check_data, check_numbers
from stormo.config.plan.choices import (
    AUTOTUNE_COST_S,
    AUTOTUNE_SAVES,
    COMPILE_COST_S,
    choose_channels_last,
    choose_checkpoints,
    choose_graph,
    choose_loader,
    choose_precision,
    data_text,
    estimate_s,
    peak_flops,
    stop_text,
    weigh,
)
from stormo.config.plan.compression import check_compression, compression_line
from stormo.config.plan.every import Every
from stormo.config.plan.facts import Facts
from stormo.config.plan.noise import check_noise, choose_noise_scale, noise_lines
from stormo.config.plan.one_worker import one_worker_line
from stormo.config.plan.optimizer import optimizer_text, own_optimizer_text
from stormo.config.plan.profile import check_profile
from stormo.config.plan.rate import choose_rate, own_rate_text, schedule_text, warmup_fraction
from stormo.config.plan.renew import renew
from stormo.config.plan.resize import beginning, resize
from stormo.config.plan.servers import check_servers
from stormo.config.plan.sharding import check_sharding, choose_micro_batches, sharding_lines
from stormo.config.plan.stages import Stage, num_steps, recut, stage_of
from stormo.config.schema import Effective, TrainConfig
from stormo.errors import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Every effective value of a run."""

    layout: Layout
    facts: Facts
    global_batch_size: int
    accumulate: int
    steps_per_epoch: int
    stages: tuple[Stage, ...]  # more than one where the batch grows; batch and steps above are the first one's
    epochs: int
    learning_rate: float
    warmup_steps: int
    warmup_start: float  # learning rate of the first step
    precision: str
    compile: bool
    graph: bool
    channels_last: bool
    autotune: bool
    loader: str
    checkpoint_steps: int | None
    checkpoint_epochs: float | None  # where it was set so
    averaging: Every | None = None  # how often the weights of workers that step by themselves are averaged
    micro_batches: int = 1  # of a full pass in a pipeline
    noise_scale: bool = False  # whether it is measured
    noise_scale_reason: str = ""
    beginning: Effective  # what batch and rate are reckoned from when the run goes on with other workers
    explanation: tuple[tuple[str, str], ...]

    @property
    def total_steps(self) -> int:
        """Steps of all epochs."""
        return num_steps(self.stages, self.epochs)

    def at_epoch(self, epoch: int) -> Plan:
        """The plan as it is in an epoch: with the batch that has grown until then."""
        stage = stage_of(self.stages, epoch)
        return replace(self, global_batch_size=stage.global_batch_size, accumulate=stage.accumulate)

    def schedule_step(self, epoch: int, position: int) -> float:
        """How far training is, in steps of the first batch: what warm-up and decay are counted in."""
        return (epoch - 1) * self.steps_per_epoch + position / self.global_batch_size

    def is_checkpoint_due(self, epoch: int, step: int, position: int) -> bool:
        """Whether a checkpoint is to be saved after a step, which ends at a position of an epoch."""
        if self.checkpoint_steps is None:
            return False
        every = Every(self.checkpoint_steps, self.checkpoint_epochs)
        return every.is_due(self.stages, epoch, step, position)

    def is_averaging_due(self, epoch: int, step: int, position: int) -> bool:
        """Whether weights are to be averaged after a step, which ends at a position of an epoch."""
        return self.averaging is not None and self.averaging.is_due(self.stages, epoch, step, position)

    def mfu(self, samples_per_s: float) -> float | None:
        """The share of all devices' peak that training at this speed makes use of, where both are known."""
        peak = peak_flops(self.layout, self.precision)
        if peak is None or self.facts.flops_per_sample is None:
            return None
        return samples_per_s * self.facts.flops_per_sample / peak

    def mfu_reason(self) -> str | None:
        """Why `mfu` is not known, or None where it is."""
        if self.layout.gpu is None:
            return "the peak of the CPUs is not known"
        if peak_flops(self.layout, self.precision) is None:
            return f"no published peak of {self.layout.gpu.name} in {self.precision} is known"
        if self.facts.flops_per_sample is None:
            return "the task does not say how many operations a sample takes (facts().flops_per_sample)"
        return None

    @property
    def share(self) -> int:
        """The most samples of one worker in one step."""
        return math.ceil(min(self.global_batch_size, self.facts.num_train) / self.layout.data_size)

    @property
    def batch_per_pass(self) -> int:
        """The most samples of one worker in one pass."""
        return math.ceil(self.share / self.accumulate)

    def lines(self) -> tuple[str, ...]:
        """The explanation as aligned lines."""
        width = max(len(label) for label, _ in self.explanation)
        return tuple(f"{label:<{width}}  {text}" for label, text in self.explanation)


def check_settings(config: TrainConfig, layout: Layout) -> None:
    """Refuse what cannot hold, whatever the task's data are."""
    check_numbers(config)
    check_sharding(config, layout)
    check_averaging(config, layout)
    check_servers(config, layout)
    check_compression(config, layout)


def resolve(config: TrainConfig, layout: Layout, facts: Facts) -> Plan:
    """Batch, learning rate, precision and the rest, from the settings, the layout and the task's facts."""
    check_settings(config, layout)
    check_data(config, facts)
    facts = replace(facts, num_train=num_train(config, facts))
    renewed = renew(config, layout)
    begun, resized = renewed.config, resize(renewed.config, layout, facts)
    config = resized.config
    global_batch_size, batch_text = choose_batch(config, layout, facts)
    batch_text += renewed.batch_note(global_batch_size)
    batch_text = (resized.batch_text or batch_text) + resized.batch_note
    steps_per_epoch = math.ceil(facts.num_train / global_batch_size)
    stages = choose_stages(config, layout, facts, global_batch_size)
    check_noise(config, stages)
    if config.command.profile is not None:
        check_profile(config.command.profile, num_steps(stages, config.stop.epochs))
    learning_rate, rate_text = choose_rate(config, global_batch_size)
    rate_text = resized.rate_text or (renewed.rate_text or rate_text) + renewed.rate_note(learning_rate)
    warmup_steps = round(config.optimizer.warmup_epochs * steps_per_epoch)
    num_workers = layout.data_size * layout.devices_per_worker
    start = learning_rate * warmup_fraction(config, num_workers, learning_rate)
    if config.resumed:
        start = config.resumed.warmup_start
    precision, precision_reason = choose_precision(config, layout)
    channels_last, layout_reason = choose_channels_last(config, layout, precision)
    seconds = estimate_s(config, layout, facts, precision)
    compiled, compile_reason = weigh(config.speed.compile, seconds, COMPILE_COST_S, facts.compile_saves, layout)
    autotune, autotune_reason = weigh(config.speed.autotune, seconds, AUTOTUNE_COST_S, AUTOTUNE_SAVES, layout)
    is_short = global_batch_size > facts.num_train
    graph, graph_reason = choose_graph(config, layout, compiled, is_short, config.batch.accumulate)
    checkpoint_steps, checkpoint_epochs, checkpoint_text = choose_checkpoints(config, steps_per_epoch)
    averaging, averaging_line = choose_averaging(config, layout, stages, steps_per_epoch)
    loader, loader_reason = choose_loader(config, layout, facts)
    noise_scale, noise_scale_reason = choose_noise_scale(config, layout, stages)
    share = math.ceil(min(global_batch_size, facts.num_train) / layout.data_size)
    pass_samples = math.ceil(share / config.batch.accumulate)
    micro_batches = choose_micro_batches(config, layout, pass_samples)
    last = facts.num_train - (steps_per_epoch - 1) * global_batch_size
    start = start if warmup_steps else learning_rate
    found = Effective(global_batch_size=global_batch_size, learning_rate=learning_rate, warmup_start=start)
    on_off = {True: "on", False: "off"}
    return Plan(
        layout=layout,
        facts=facts,
        global_batch_size=global_batch_size,
        accumulate=config.batch.accumulate,
        steps_per_epoch=steps_per_epoch,
        stages=stages,
        epochs=config.stop.epochs,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        warmup_start=start,
        precision=precision,
        compile=compiled,
        graph=graph,
        channels_last=channels_last,
        autotune=autotune,
        loader=loader,
        checkpoint_steps=checkpoint_steps,
        checkpoint_epochs=checkpoint_epochs,
        averaging=averaging,
        micro_batches=micro_batches,
        noise_scale=noise_scale,
        noise_scale_reason=noise_scale_reason,
        beginning=replace(beginning(begun, layout, facts, found, pass_samples), own_rate_factor=None),
        explanation=(
            *([("changed", ", ".join(map(str, config.changed)))] if config.changed else []),
            *one_worker_line(config, layout, global_batch_size, facts.has_batch_norms).items(),
            *layout.explanation,
            *averaging_line.items(),
            *compression_line(config, layout, precision).items(),
            *sharding_lines(config, layout, pass_samples, micro_batches),
            ("global batch", batch_text),
            *growth_line(config, layout, stages).items(),
            ("optimizer", optimizer_text(config)),
            ("learning rate", rate_text + schedule_text(config, start, learning_rate, warmup_steps)),
            (
                "steps",
                f"{steps_per_epoch} an epoch = ceil({counted(facts.num_train, 'sample')} / {global_batch_size})"
                + (f", the last one with {last}" if last != global_batch_size else "")
                + f"; at most {counted(config.stop.epochs, 'epoch')} = "
                + counted(num_steps(stages, config.stop.epochs), "step")
                + (" with the batches that grow" if len(stages) > 1 else ""),
            ),
            ("precision", f"{precision}: {precision_reason}"),
            ("channels last", f"{on_off[channels_last]}: {layout_reason}"),
            ("compile", f"{on_off[compiled]}: {compile_reason}"),
            ("graph", f"{on_off[graph]}: {graph_reason}"),
            ("autotune", f"{on_off[autotune]}: {autotune_reason}"),
            ("data", f"{loader}: {loader_reason}" + data_text(facts)),
            (
                "batch norm",
                norm_text(config, layout, min(global_batch_size, facts.num_train), config.batch.accumulate),
            ),
            *noise_lines(config, stages),
            ("noise scale", f"{on_off[noise_scale]}: {noise_scale_reason}"),
            ("stop", stop_text(config, facts)),
            ("checkpoints", checkpoint_text),
            ("seed", f"{config.run.seed}" + (", deterministic" if config.run.deterministic else "")),
        ),
    )


def with_own_optimizer(config: TrainConfig, plan: Plan, name: str | None = None) -> Plan:
    """The plan of a task that brings an optimizer, by the name of its class once it has been made."""
    base = config.optimizer.base_lr
    rate = own_rate_text(config, plan.learning_rate, is_made=name is not None)
    rate += schedule_text(config, plan.warmup_start / base, plan.learning_rate / base, plan.warmup_steps, sign="× ")
    said = dict(plan.explanation) | {"optimizer": own_optimizer_text(config, name), "learning rate": rate}
    begun = replace(plan.beginning, own_rate_factor=plan.beginning.learning_rate / base)
    return replace(plan, explanation=tuple(said.items()), beginning=begun)


def with_passes(config: TrainConfig, plan: Plan, accumulate: int, reason: str, graph_obstacle: str | None) -> Plan:
    """The plan with every worker's share cut into the passes that --batch-size auto has found.

    `graph_obstacle` says why a step that could be replayed should not be, unless the user has set --graph.
    """
    is_short = plan.global_batch_size > plan.facts.num_train
    graph, graph_reason = choose_graph(config, plan.layout, plan.compile, is_short, accumulate)
    if graph and config.speed.graph is None and graph_obstacle is not None:
        graph, graph_reason = False, graph_obstacle
    workers = plan.layout.data_size
    stages = recut(plan.stages, accumulate, workers)
    noise_scale, noise_scale_reason = choose_noise_scale(config, plan.layout, stages, is_found=True)
    found = replace(plan, accumulate=accumulate, graph=graph, stages=stages)
    found = replace(found, noise_scale=noise_scale, noise_scale_reason=noise_scale_reason)
    step_samples = min(plan.global_batch_size, plan.facts.num_train)
    low, high = step_samples // (workers * accumulate), found.batch_per_pass
    passes = f"{accumulate} pass{'es' * (accumulate > 1)} of {low}{f' to {high}' if high > low else ''}"
    said = dict(plan.explanation)
    text = f" = {passes} (auto: {reason}) × {counted(workers, plan.layout.sharer)}"
    said["global batch"] = said["global batch"].replace(SEARCHED, text)
    said |= growth_line(config, plan.layout, stages)
    said["graph"] = f"{'on' if graph else 'off'}: {graph_reason}"
    said["noise scale"] = f"{'on' if noise_scale else 'off'}: {noise_scale_reason}"
    said["batch norm"] = norm_text(config, plan.layout, step_samples, accumulate)
    return replace(found, explanation=tuple(said.items()))
