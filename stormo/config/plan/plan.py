"""Every effective value of a run, from (settings, devices, facts of the task)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stormo.config.layout import Layout
from stormo.config.link import link_line
from stormo.config.plan.batch import (
    BatchText,
    choose_batch,
    choose_stages,
    growth_line,
    norm_text,
    num_train,
    per_worker,
)
from stormo.config.plan.checks import check_data, check_numbers
from stormo.config.plan.choices import (
    COMPILE_COST_S,
    choose_autotune,
    choose_channels_last,
    choose_checkpoints,
    choose_graph,
    choose_loader,
    choose_noise_scale,
    choose_precision,
    data_text,
    estimate_s,
    noise_lines,
    pays_off,
    peak_flops,
    stop_text,
)
from stormo.config.plan.learning_rate import (
    choose_learning_rate,
    optimizer_text,
    schedule_text,
    task_learning_rate_text,
    task_optimizer_text,
    warmup_fraction,
)
from stormo.config.plan.parallelism import (
    check_parallelism,
    choose_averaging,
    choose_micro_batches,
    compression_line,
    sharding_lines,
)
from stormo.config.plan.resume import initial_batch, rescale_on_resume, resize
from stormo.config.plan.steps import Facts, Interval, Stage, check_profile, num_steps, recut, stage_of
from stormo.config.schema import ResolvedBatch, TrainConfig
from stormo.errors import pluralize


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Every effective value of a run."""

    layout: Layout
    facts: Facts
    global_batch_size: int
    accumulate: int
    steps_per_epoch: int
    stages: tuple[Stage, ...]  # several if the batch grows; batch and steps above are those of the first
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
    checkpoints: Interval | None
    averaging: Interval | None = None  # of the weights of local updates
    micro_batches: int = 1  # of a pipeline
    noise_scale: bool = False  # whether it is measured
    noise_scale_reason: str = ""
    initial: ResolvedBatch  # from which a resume with other workers computes its batch and learning rate
    batch_text: BatchText
    explanation: tuple[tuple[str, str], ...]

    @property
    def total_steps(self) -> int:
        """Steps of all epochs."""
        return num_steps(self.stages, self.epochs)

    def at_epoch(self, epoch: int) -> Plan:
        """The plan with the batch of an epoch."""
        stage = stage_of(self.stages, epoch)
        return replace(self, global_batch_size=stage.global_batch_size, accumulate=stage.accumulate)

    def schedule_step(self, epoch: int, position: int) -> float:
        """The position of warm-up and decay, in steps of the first batch."""
        return (epoch - 1) * self.steps_per_epoch + position / self.global_batch_size

    def is_checkpoint_due(self, epoch: int, step: int, position: int) -> bool:
        """Whether a checkpoint is due after a step, which ends at a position in an epoch."""
        return self.checkpoints is not None and self.checkpoints.is_due(self.stages, epoch, step, position)

    def is_averaging_due(self, epoch: int, step: int, position: int) -> bool:
        """Whether the weights are averaged after a step, which ends at a position in an epoch."""
        return self.averaging is not None and self.averaging.is_due(self.stages, epoch, step, position)

    def mfu(self, samples_per_s: float) -> float | None:
        """Model FLOPs utilisation at this speed, where it is known."""
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
        """The most samples of one worker in a step."""
        return math.ceil(min(self.global_batch_size, self.facts.num_train) / self.layout.data_size)

    @property
    def micro_batch_size(self) -> int:
        """The most samples of one worker in a micro-batch."""
        return math.ceil(self.share / self.accumulate)

    def lines(self) -> tuple[str, ...]:
        """The explanation as aligned lines."""
        width = max(len(label) for label, _ in self.explanation)
        return tuple(f"{label:<{width}}  {text}" for label, text in self.explanation)

    def minor_lines(self, config: TrainConfig) -> frozenset[str]:
        """The lines that say nothing of this run: what its device lacks, and defaults that nobody has set."""
        is_off = {
            **dict.fromkeys(("channels last", "compile", "graph", "autotune"), self.layout.device_type == "cpu"),
            "link": self.layout.num_nodes == 1 and not self.layout.shares_a_gpu,
            "batch norm": self.layout.data_size * self.layout.devices_per_worker == 1,
            "noise scale": not self.noise_scale,
            "checkpoints": True,
        }
        minor = {label for label, settings in _SETTINGS.items() if is_off[label] and config.given.isdisjoint(settings)}
        lines = zip(self.explanation, self.lines(), strict=True)
        return frozenset(line for (label, _), line in lines if label in minor)


def check_settings(config: TrainConfig, layout: Layout) -> None:
    """Refuse what cannot hold for any data."""
    check_numbers(config)
    check_parallelism(config, layout)
    choose_graph(config, layout, None, compiled=False, is_short=False, accumulate=1)  # may refuse --graph


def resolve(config: TrainConfig, layout: Layout, facts: Facts) -> Plan:
    """Batch, learning rate, precision and the rest, from the settings, the layout and the task's facts."""
    check_settings(config, layout)
    check_data(config, facts)
    facts = replace(facts, num_train=num_train(config, facts))
    before = config.resumed
    rescaled, new_rate_text = rescale_on_resume(config, layout)
    resized = resize(rescaled, layout, facts)
    config = resized.config
    global_batch_size, batch_text = choose_batch(config, layout, facts)
    if before is not None and before.global_batch_size != global_batch_size:
        batch_text = replace(batch_text, notes=f"{batch_text.notes}; {before.global_batch_size} before")
    if resized.batch_text is not None:
        batch_text = BatchText(resized.batch_text, batch_text.parts if config.batch.batch_size == "auto" else "")
    batch_text = replace(batch_text, notes=batch_text.notes + resized.batch_note)
    steps_per_epoch = math.ceil(facts.num_train / global_batch_size)
    stages = choose_stages(config, layout, facts, global_batch_size)
    noise = noise_lines(config, stages)
    if config.command.profile is not None:
        check_profile(config.command.profile, num_steps(stages, config.stop.epochs))
    learning_rate, rate_text = choose_learning_rate(config, global_batch_size)
    rate_text = new_rate_text or rate_text
    if before is not None and before.learning_rate != learning_rate:
        rate_text += f"; {before.learning_rate:g} before"
    rate_text = resized.rate_text or rate_text
    has_warmup = config.optimizer.decay != "one-cycle"
    warmup_steps = round(config.optimizer.warmup_epochs * steps_per_epoch) if has_warmup else 0
    num_workers = layout.data_size * layout.devices_per_worker
    start = learning_rate * warmup_fraction(config, num_workers, learning_rate)
    start = config.resumed.warmup_start if config.resumed else start
    precision, precision_reason = choose_precision(config, layout)
    seconds = estimate_s(config, layout, facts, precision)
    compiled, compile_reason = pays_off(config.speed.compile, seconds, COMPILE_COST_S, facts.compile_saves, layout)
    channels_last, layout_reason = choose_channels_last(config, layout, precision, compiled)
    autotune, autotune_reason = choose_autotune(config, layout, seconds)
    is_short = global_batch_size > facts.num_train
    graph, graph_reason = choose_graph(config, layout, facts, compiled, is_short, config.batch.accumulate)
    checkpoints, checkpoint_text = choose_checkpoints(config, steps_per_epoch)
    averaging, averaging_line = choose_averaging(config, layout, stages, steps_per_epoch)
    loader, loader_reason = choose_loader(config, layout, facts)
    noise_scale, noise_scale_reason = choose_noise_scale(config, layout, stages)
    micro_batch_size = math.ceil(stages[0].share(layout.data_size) / config.batch.accumulate)
    micro_batches = choose_micro_batches(config, layout, micro_batch_size)
    last = facts.num_train - (steps_per_epoch - 1) * global_batch_size
    start = start if warmup_steps else learning_rate
    found = ResolvedBatch(global_batch_size=global_batch_size, learning_rate=learning_rate, warmup_start=start)
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
        checkpoints=checkpoints,
        averaging=averaging,
        micro_batches=micro_batches,
        noise_scale=noise_scale,
        noise_scale_reason=noise_scale_reason,
        initial=initial_batch(rescaled, layout, facts, found, micro_batch_size),
        batch_text=batch_text,
        explanation=(
            *([("changed", ", ".join(map(str, config.changed)))] if config.changed else []),
            *one_worker_line(config, layout, global_batch_size, facts.has_batch_norms).items(),
            *layout.explanation,
            *averaging_line.items(),
            *(compression_line(config, layout, precision) | link_line(config, layout)).items(),
            *sharding_lines(config, layout, micro_batch_size, micro_batches),
            ("global batch", str(batch_text)),
            *growth_line(config, layout, stages).items(),
            ("optimizer", optimizer_text(config)),
            ("learning rate", rate_text + schedule_text(config, start, learning_rate, warmup_steps)),
            (
                "steps",
                f"{steps_per_epoch} an epoch = ceil({pluralize(facts.num_train, 'sample')} / {global_batch_size})"
                + (f", the last one with {last}" if last != global_batch_size else "")
                + f"; at most {pluralize(config.stop.epochs, 'epoch')} = "
                + pluralize(num_steps(stages, config.stop.epochs), "step")
                + (" with the batches that grow" if len(stages) > 1 else ""),
            ),
            ("precision", f"{precision}: {precision_reason}"),
            ("channels last", f"{on_off[channels_last]}: {layout_reason}"),
            ("compile", f"{on_off[compiled]}: {compile_reason}"),
            ("graph", f"{on_off[graph]}: {graph_reason}"),
            ("autotune", f"{on_off[autotune]}: {autotune_reason}"),
            ("data", f"{loader}: {loader_reason}" + data_text(facts)),
            ("batch norm", norm_text(config, layout, stages[0])),
            *noise,
            ("noise scale", f"{on_off[noise_scale]}: {noise_scale_reason}"),
            ("stop", stop_text(config, facts)),
            ("checkpoints", checkpoint_text),
            ("seed", f"{config.run.seed}" + (", deterministic" if config.run.deterministic else "")),
        ),
    )


def with_task_optimizer(
    config: TrainConfig, plan: Plan, name: str | None = None, *, no_noise_scale: str | None = None
) -> Plan:
    """The plan of a task with an optimizer; `name` is that of its class once it has been made.

    `no_noise_scale` says why the noise scale is not measured with it, if it is not.
    """
    base = config.optimizer.base_lr
    rate = task_learning_rate_text(config, plan.learning_rate, is_made=name is not None)
    rate += schedule_text(config, plan.warmup_start / base, plan.learning_rate / base, plan.warmup_steps, sign="× ")
    lines = dict(plan.explanation) | {"optimizer": task_optimizer_text(config, name), "learning rate": rate}
    if no_noise_scale is not None:
        lines["noise scale"] = f"off: {no_noise_scale}"
    is_measured = plan.noise_scale and no_noise_scale is None
    return replace(plan, explanation=tuple(lines.items()), noise_scale=is_measured)


def with_micro_batches(
    config: TrainConfig, plan: Plan, accumulate: int, reason: str, graph_obstacle: str | None
) -> Plan:
    """The plan with the micro-batches that --batch-size auto has found.

    `graph_obstacle` says why a step should not be replayed, unless the user has set --graph.
    """
    is_short = plan.global_batch_size > plan.facts.num_train
    graph, graph_reason = choose_graph(config, plan.layout, plan.facts, plan.compile, is_short, accumulate)
    if graph and config.speed.graph is None and graph_obstacle is not None:
        graph, graph_reason = False, graph_obstacle
    workers = plan.layout.data_size
    stages = recut(plan.stages, accumulate, workers)
    noise_scale, noise_scale_reason = choose_noise_scale(config, plan.layout, stages, is_found=True)
    found = replace(plan, accumulate=accumulate, graph=graph, stages=stages)
    step_samples = min(plan.global_batch_size, plan.facts.num_train)
    low, high = step_samples // (workers * accumulate), found.micro_batch_size
    parts = f"{pluralize(accumulate, 'micro-batch')} of {low}{f' to {high}' if high > low else ''}"
    parts = f" = {parts} (auto: {reason}) × {pluralize(workers, plan.layout.sharer)}"
    batch_text = replace(plan.batch_text, parts=parts)
    lines = {**dict(plan.explanation), "global batch": str(batch_text)}
    lines |= growth_line(config, plan.layout, stages)
    lines["graph"] = f"{'on' if graph else 'off'}: {graph_reason}"
    lines["noise scale"] = f"{'on' if noise_scale else 'off'}: {noise_scale_reason}"
    lines["batch norm"] = norm_text(config, plan.layout, stages[0])
    return replace(
        found,
        noise_scale=noise_scale,
        noise_scale_reason=noise_scale_reason,
        batch_text=batch_text,
        explanation=tuple(lines.items()),
    )


# The settings behind lines of the explanation that a run may do without.
_SETTINGS = {
    "link": ("tune_link",),
    "channels last": ("channels_last",),
    **{name: (name,) for name in ("compile", "graph", "autotune")},
    "batch norm": ("sync_batch_norm", "ghost_batch_size"),
    "noise scale": ("noise_scale",),
    "checkpoints": ("checkpoint_every", "keep_checkpoints", "async_checkpoint"),
}
# Of these, the lines that depend on layers.
_LAYERS = {"channels last": "convolution of images", "batch norm": "batch norm"}


def with_layers(
    config: TrainConfig,
    plan: Plan,
    *,
    has_convolutions: bool | None,
    has_batch_norms: bool | None,
    loss_reduction: str = "mean",
) -> Plan:
    """The plan without lines on layers that the model lacks; None where that is not known."""
    lines = dict(plan.explanation)
    lines |= one_worker_line(config, plan.layout, plan.global_batch_size, has_batch_norms, loss_reduction)
    for (label, layer), has_some in zip(_LAYERS.items(), (has_convolutions, has_batch_norms), strict=True):
        if has_some is None:
            lines[label] += f", where the model has a {layer}"
        elif not has_some and config.given.isdisjoint(_SETTINGS[label]):
            del lines[label]
        elif not has_some:
            lines[label] = f"as set, without effect: the model has no {layer}"
    return replace(plan, explanation=tuple(lines.items()))


_ONE_WORKER = "as 1 worker"
_EQUAL = "yes, to rounding, but for random numbers such as dropout's"


def one_worker_line(
    config: TrainConfig,
    layout: Layout,
    global_batch_size: int,
    has_batch_norms: bool | None,
    loss_reduction: str = "mean",
) -> dict[str, str]:
    """Whether the same command on one worker gives the same result, and the flags that make both equal.

    `has_batch_norms` is None where that is not known yet.
    """
    num_parts = layout.data_size * layout.devices_per_worker
    if num_parts == 1:
        return {}
    if layout.spec.local_updates or ("staleness" in layout.spec.options and config.workers.staleness):
        return {_ONE_WORKER: f"no: strategy {layout.strategy} is another algorithm"}
    if loss_reduction == "local":
        return {_ONE_WORKER: "no: the task's loss_reduction is \"local\", a loss of each worker's own samples"}
    differences = [
        *_batch_difference(config, layout, num_parts, global_batch_size),
        *_norm_difference(config, layout, num_parts, global_batch_size, has_batch_norms),
    ]
    if config.workers.compress != "none":
        differences.append(f"--compress none ({config.workers.compress} compresses gradients)")
    return {_ONE_WORKER: f"no; set {' and '.join(differences)} for the same result" if differences else _EQUAL}


def _batch_difference(config: TrainConfig, layout: Layout, num_parts: int, global_batch_size: int) -> list[str]:
    if config.resumed and config.batch.on_resize == "scale":
        return ["--on-resize keep (the batch follows the number of workers)"]
    is_kept = config.resumed is not None and all(change.key != "batch_size" for change in config.changed)
    if is_kept or config.batch.global_batch_size is not None:
        return []
    config = replace(config, resumed=None)
    of_one = per_worker(config) * config.batch.accumulate
    flags, rate = f"--global-batch-size {of_one}", config.optimizer.base_lr
    if config.optimizer.base_batch_size is None:
        rate, _ = choose_learning_rate(config, of_one)
    if rate != config.optimizer.base_lr:
        flags += f" --base-lr {rate:g}"
    is_scaled = choose_learning_rate(config, global_batch_size)[0] != rate
    scaled = ["learning rate"] * is_scaled + ["warm-up"] * bool(config.optimizer.warmup_epochs)
    also = f", {' and '.join(scaled)} scaled with it" if scaled else ""
    return [f"{flags} (this run has {global_batch_size} = {of_one} × {pluralize(num_parts, layout.sharer)}{also})"]


def _norm_difference(
    config: TrainConfig, layout: Layout, num_parts: int, global_batch_size: int, has_batch_norms: bool | None
) -> list[str]:
    ghost = config.batch.ghost_batch_size
    if has_batch_norms is False or (config.speed.sync_batch_norm and ghost is None):
        return []
    where = " if the model has batch norm" if has_batch_norms is None else ""
    if ghost is not None:
        is_even = global_batch_size % (num_parts * config.batch.accumulate * ghost) == 0
        share = math.ceil(global_batch_size / num_parts / config.batch.accumulate)
        flag = f"a --ghost-batch-size that divides the {pluralize(share, 'sample')} of a {layout.sharer}'s micro-batch"
        return [] if is_even else [f"{flag}{where}"]
    return [f"--sync-batch-norm{where} (batch norm takes the statistics of each {layout.sharer}'s own samples)"]
