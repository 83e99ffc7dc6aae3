"""The arithmetic of a run: (settings, devices, facts of the task) -> every effective value, with its reason.

Pure functions of numbers; every check of a user's settings is here, so that it fails before any process starts.
"""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, replace

from stormo.config import TrainConfig
from stormo.errors import SettingError
from stormo.hardware import peak_tflops
from stormo.layout import Layout, at_least

# What the automatic choices assume; measured on an H200 with the reference job (docs/speed.md).
_COMPILE_COST_S = 25.0
_AUTOTUNE_COST_S = 8.0
_AUTOTUNE_SAVES = 0.08
_ASSUMED_UTILISATION = 0.35
_MAX_RESIDENT_BYTES = 8 * 2**30
_SEARCHED = ", in passes that --batch-size auto finds once the workers hold the model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the arithmetic needs to know of a task."""

    num_train: int  # 0 for a stream that does not tell
    num_validation: int | None  # None for a stream that does not tell: they are counted while it is read
    is_stream: bool = False  # the training set can only be read in its own order
    flops_per_sample: float | None = None  # forward and backward
    compile_saves: float | None = None  # share of a step's time that torch.compile is known to save
    train_bytes: int | None = None  # of the whole training set, where it can be kept on a device
    unit: str = "samples"  # what speed is counted in: images, tokens, ...
    units_per_sample: int = 1
    has_accuracy: bool | None = None  # whether metrics() reports an `accuracy`; None is not known beforehand
    data: str = ""  # what the training set is, in words
    data_sha256: str | None = None  # of all data, where it is known beforehand: it must be the same on every node


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Every effective value of a run."""

    layout: Layout
    facts: Facts
    global_batch_size: int
    accumulate: int
    steps_per_epoch: int
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
    explanation: tuple[tuple[str, str], ...]

    @property
    def total_steps(self) -> int:
        """Steps of all epochs."""
        return self.steps_per_epoch * self.epochs

    def mfu(self, samples_per_s: float) -> float | None:
        """The share of all devices' peak that training at this speed makes use of, where both are known."""
        peak = _peak_flops(self.layout, self.precision)
        if peak is None or self.facts.flops_per_sample is None:
            return None
        return samples_per_s * self.facts.flops_per_sample / peak

    def mfu_reason(self) -> str | None:
        """Why `mfu` is not known, or None where it is."""
        if self.layout.gpu is None:
            return "the peak of the CPUs is not known"
        if _peak_flops(self.layout, self.precision) is None:
            return f"no published peak of {self.layout.gpu.name} in {self.precision} is known"
        if self.facts.flops_per_sample is None:
            return "the task does not say how many operations a sample takes (facts().flops_per_sample)"
        return None

    @property
    def share(self) -> int:
        """The most samples of one worker in one step."""
        return math.ceil(min(self.global_batch_size, self.facts.num_train) / self.layout.world_size)

    @property
    def batch_per_pass(self) -> int:
        """The most samples of one worker in one pass."""
        return math.ceil(self.share / self.accumulate)

    def lines(self) -> tuple[str, ...]:
        """The explanation as aligned lines."""
        width = max(len(label) for label, _ in self.explanation)
        return tuple(f"{label:<{width}}  {text}" for label, text in self.explanation)


def resolve(config: TrainConfig, layout: Layout, facts: Facts) -> Plan:
    """Batch, learning rate, precision and the rest, from the settings, the layout and the task's facts."""
    _check_numbers(config)
    _check_data(config, facts)
    facts = replace(facts, num_train=_num_train(config, facts))
    global_batch_size, batch_text = _batch(config, layout, facts)
    steps_per_epoch = math.ceil(facts.num_train / global_batch_size)
    learning_rate, rate_text = _learning_rate(config, layout, global_batch_size)
    warmup_steps = round(config.optimizer.warmup_epochs * steps_per_epoch)
    start = learning_rate * _warmup_fraction(config, layout)
    if config.resumed:
        start = config.resumed.warmup_start
    precision, precision_reason = _precision(config, layout)
    channels_last, layout_reason = _channels_last(config, layout, precision)
    seconds = _estimate_s(config, layout, facts, precision)
    compiled, compile_reason = _weigh(config.speed.compile, seconds, _COMPILE_COST_S, facts.compile_saves, layout)
    autotune, autotune_reason = _weigh(config.speed.autotune, seconds, _AUTOTUNE_COST_S, _AUTOTUNE_SAVES, layout)
    is_short = global_batch_size > facts.num_train
    graph, graph_reason = _graph(config, layout, compiled, is_short, config.batch.accumulate)
    checkpoint_steps, checkpoint_text = _checkpoints(config, steps_per_epoch)
    loader, loader_reason = _loader(config, layout, facts)
    last = facts.num_train - (steps_per_epoch - 1) * global_batch_size
    on_off = {True: "on", False: "off"}
    return Plan(
        layout=layout,
        facts=facts,
        global_batch_size=global_batch_size,
        accumulate=config.batch.accumulate,
        steps_per_epoch=steps_per_epoch,
        epochs=config.stop.epochs,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        warmup_start=start if warmup_steps else learning_rate,
        precision=precision,
        compile=compiled,
        graph=graph,
        channels_last=channels_last,
        autotune=autotune,
        loader=loader,
        checkpoint_steps=checkpoint_steps,
        explanation=(
            *layout.explanation,
            ("global batch", batch_text),
            ("learning rate", rate_text + _schedule_text(config, start, learning_rate, warmup_steps)),
            (
                "steps",
                f"{steps_per_epoch} an epoch = ceil({facts.num_train} samples / {global_batch_size})"
                + (f", the last one with {last}" if last != global_batch_size else "")
                + f"; at most {config.stop.epochs} epochs = {steps_per_epoch * config.stop.epochs} steps",
            ),
            ("precision", f"{precision}: {precision_reason}"),
            ("channels last", f"{on_off[channels_last]}: {layout_reason}"),
            ("compile", f"{on_off[compiled]}: {compile_reason}"),
            ("graph", f"{on_off[graph]}: {graph_reason}"),
            ("autotune", f"{on_off[autotune]}: {autotune_reason}"),
            ("data", f"{loader}: {loader_reason}" + _data_text(facts)),
            (
                "batch norm",
                f"statistics over all {layout.world_size} workers"
                if config.speed.sync_batch_norm and layout.world_size > 1
                else "statistics over each worker's own samples",
            ),
            ("stop", _stop_text(config, facts)),
            ("checkpoints", checkpoint_text),
            ("seed", f"{config.run.seed}" + (", deterministic" if config.run.deterministic else "")),
        ),
    )


def with_passes(config: TrainConfig, plan: Plan, accumulate: int, reason: str, graph_obstacle: str | None) -> Plan:
    """The plan with every worker's share cut into the passes that --batch-size auto has found.

    `graph_obstacle` says why a step that could be replayed should not be, unless the user has set --graph.
    """
    is_short = plan.global_batch_size > plan.facts.num_train
    graph, graph_reason = _graph(config, plan.layout, plan.compile, is_short, accumulate)
    if graph and config.speed.graph is None and graph_obstacle is not None:
        graph, graph_reason = False, graph_obstacle
    found, workers = replace(plan, accumulate=accumulate, graph=graph), plan.layout.world_size
    step_samples = min(plan.global_batch_size, plan.facts.num_train)
    low, high = step_samples // (workers * accumulate), found.batch_per_pass
    passes = f"{accumulate} pass{'es' * (accumulate > 1)} of {low}{f' to {high}' if high > low else ''}"
    said = dict(plan.explanation)
    text = f" = {passes} (auto: {reason}) × {workers} worker{'s' * (workers > 1)}"
    said["global batch"] = said["global batch"].replace(_SEARCHED, text)
    said["graph"] = f"{'on' if graph else 'off'}: {graph_reason}"
    return replace(found, explanation=tuple(said.items()))


def _check_data(config: TrainConfig, facts: Facts) -> None:
    before, now = config.resumed.data_sha256 if config.resumed else None, facts.data_sha256
    if before is not None and now is not None and before != now:
        raise SettingError(
            f"a run that was trained on data of SHA-256 {before} was to go on",
            f"the data here ({facts.data}) has {now}",
            "go on where the same data is (another release of Python has another library), or start a new run",
        )


def _stop_text(config: TrainConfig, facts: Facts) -> str:
    stop = config.stop
    targets = [] if facts.has_accuracy is False else [f"validation accuracy of {stop.target_accuracy:g}"]
    if stop.target_loss is not None:
        targets.append(f"validation loss of {stop.target_loss:g}")
    if not targets:
        return f"{stop.epochs} epochs (this task reports no accuracy; --target-loss would set a target)"
    held = f" held for {stop.patience} epoch{'s' * (stop.patience > 1)}"
    return f"{' or '.join(targets)}{held}, or {stop.epochs} epochs"


def _data_text(facts: Facts) -> str:
    digest = f", SHA-256 {facts.data_sha256}" if facts.data_sha256 else ""
    return f"; {facts.data}{digest}" if facts.data else ""


def _check_numbers(config: TrainConfig) -> None:
    if config.stop.target_accuracy >= 10:
        raise SettingError(
            f"--target-accuracy {config.stop.target_accuracy:g} was set",
            "it is a fraction, of which 1 is all",
            f"set --target-accuracy {config.stop.target_accuracy / 100:g}",
        )
    optimizer, stop, run = config.optimizer, config.stop, config.run
    at_least("--batch-size", _per_worker(config), 1)
    at_least("--accumulate", config.batch.accumulate, 1)
    at_least("--epoch-samples", config.batch.epoch_samples, 1)
    if config.batch.batch_size == "auto" and config.batch.accumulate > 1:
        raise SettingError(
            f"--accumulate {config.batch.accumulate} was set with --batch-size auto",
            "auto finds the passes that make up the global batch",
            "leave out --accumulate or set it to 1, or set --batch-size to a number",
        )
    at_least("--epochs", stop.epochs, 1)
    at_least("--patience", stop.patience, 1)
    at_least("--validation-batch-size", config.speed.validation_batch_size, 1)
    at_least("--loader-workers", config.speed.loader_workers, 0)
    at_least("--keep-checkpoints", run.keep_checkpoints, 1)
    at_least("--seed", run.seed, 0)
    for flag, value in (
        ("--weight-decay", optimizer.weight_decay),
        ("--warmup-epochs", optimizer.warmup_epochs),
        ("--warmup-from", optimizer.warmup_from),
    ):
        at_least(flag, value, 0)
    for flag, value in (
        ("--base-lr", optimizer.base_lr),
        ("--clip-norm", optimizer.clip_norm),
        ("--decay-every", optimizer.decay_every),
        ("--decay-factor", optimizer.decay_factor),
    ):
        if value is not None and value <= 0:
            raise SettingError(f"{flag} {value:g} was set", "it must be above 0", f"set {flag} to a positive number")
    if not 0 <= optimizer.momentum < 1:
        raise SettingError(
            f"--momentum {optimizer.momentum:g} was set", "it must lie in [0, 1)", "set something like --momentum 0.9"
        )
    if optimizer.nesterov and (optimizer.momentum == 0 or optimizer.optimizer != "sgd"):
        raise SettingError(
            f"--nesterov was set with --optimizer {optimizer.optimizer} --momentum {optimizer.momentum:g}",
            "Nesterov's momentum needs sgd and a momentum above 0",
            "set --momentum 0.9, or --no-nesterov",
        )
    name = run.run_name
    if name is not None and (not name or "/" in name or name in (".", "..") or len(name.encode()) > 200):
        raise SettingError(
            f"--run-name {name[:40]!r} was set",
            "it names a folder in --runs-folder",
            "set a plain name of at most 200 bytes, without /",
        )
    if (optimizer.warmup_from or 0) > 1:
        raise SettingError(
            f"--warmup-from {optimizer.warmup_from:g} was set",
            "it is the fraction of the rate that warm-up starts from",
            "set a number from 0 to 1",
        )
    if run.seed >= 2**63:
        raise SettingError(f"--seed {run.seed} was set", "it must fit in 63 bits", "set a smaller seed")


def _per_worker(config: TrainConfig) -> int:
    size = config.batch.batch_size
    return config.auto_batch_size if size == "auto" else size


def _batch(config: TrainConfig, layout: Layout, facts: Facts) -> tuple[int, str]:
    workers, accumulate = layout.world_size * layout.devices_per_worker, config.batch.accumulate
    product = f"{workers} worker{'s' * (workers > 1)} × {accumulate} accumulation"
    per_worker, is_auto = _per_worker(config), config.batch.batch_size == "auto"
    total = config.resumed.global_batch_size if config.resumed else config.batch.global_batch_size
    if total is None:
        total = per_worker * workers * accumulate
        text = f"{total} = {per_worker} per worker × {product}"
        if is_auto:
            text = f"{total} ({per_worker} for each of {workers} worker{'s' * (workers > 1)})" + _SEARCHED
    else:
        is_set = "batch_size" in config.given and not config.resumed and not is_auto
        if is_set and per_worker * workers * accumulate != total:
            raise SettingError(
                f"--global-batch-size {total} and --batch-size {per_worker} were both set",
                f"{per_worker} per worker × {product} makes {per_worker * workers * accumulate}",
                "set only one of them",
            )
        if total < workers * accumulate:
            raise SettingError(
                f"a global batch of {total} was set",
                f"{product} cut it into {workers * accumulate} parts of at least one sample",
                f"set --global-batch-size {workers * accumulate} or more",
            )
        low, uneven = divmod(total, workers * accumulate)
        origin = "before" if config.resumed else "set"
        text = f"{total} as {origin} = {low}{f' to {low + 1}' if uneven else ''} per worker × {product}"
        if is_auto:
            text = f"{total} as {origin}" + _SEARCHED
    if facts.num_validation == 0:
        raise no_validation_samples()
    if facts.num_train < workers:
        raise SettingError(
            f"{workers} workers were asked for",
            f"the training set has {facts.num_train} samples, fewer than one for each",
            f"set --num-gpus so that at most {facts.num_train} workers take part",
        )
    if total > facts.num_train:
        text += f"; larger than the {facts.num_train} training samples, so a step takes {facts.num_train}"
    return total, text


def _num_train(config: TrainConfig, facts: Facts) -> int:
    """Samples of an epoch: the training set's, or for a stream what the user says."""
    asked = config.batch.epoch_samples
    if asked is not None and not facts.is_stream:
        raise SettingError(
            f"--epoch-samples {asked} was set",
            f"the training set has {facts.num_train} samples, which are an epoch",
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


def _learning_rate(config: TrainConfig, layout: Layout, global_batch_size: int) -> tuple[float, str]:
    base, rule = config.optimizer.base_lr, config.optimizer.lr_rule
    if config.resumed:
        return config.resumed.learning_rate, f"{config.resumed.learning_rate:g} as before"
    if config.batch.global_batch_size is not None:
        return base, f"{base:g} as set, for the global batch as set"
    ratio = global_batch_size // _per_worker(config)
    if rule == "none" or ratio == 1:
        return base, f"{base:g} as set" + (f" for any batch (the batch is {ratio} × one worker's)" * (ratio > 1))
    factor = float(ratio) if rule == "linear" else math.sqrt(ratio)
    factor_text = f"{ratio}" if rule == "linear" else f"√{ratio}"
    return base * factor, f"{base * factor:g} = {base:g} × {factor_text} ({rule})"


def _warmup_fraction(config: TrainConfig, layout: Layout) -> float:
    if config.optimizer.warmup_from is not None:
        return config.optimizer.warmup_from
    if config.batch.global_batch_size is not None:
        return 1.0  # the workers did not make the batch, and must not make a difference
    return 1 / (layout.world_size * layout.devices_per_worker)


def _schedule_text(config: TrainConfig, start: float, learning_rate: float, warmup_steps: int) -> str:
    optimizer = config.optimizer
    text = ""
    if warmup_steps and start == learning_rate:
        text += "; no warm-up, as it would start from the full rate (--warmup-from sets another start)"
    elif warmup_steps:
        text += f"; warm-up from {start:g} over {optimizer.warmup_epochs:g} epochs = {warmup_steps} steps"
    falls = {
        "none": "",
        "cosine": f"; then down a cosine to 0 at epoch {config.stop.epochs}",
        "linear": f"; then down a line to 0 at epoch {config.stop.epochs}",
        "step": f"; then × {optimizer.decay_factor:g} every {optimizer.decay_every:g} epochs",
    }
    return text + falls[optimizer.decay]


def _precision(config: TrainConfig, layout: Layout) -> tuple[str, str]:
    asked = config.speed.precision
    if asked == "tf32" and layout.device_type == "cpu":
        raise SettingError(
            "--precision tf32 was set", "TF32 exists only on GPUs and the workers run on CPUs", "set fp32"
        )
    if asked != "auto":
        return asked, "as set"
    if layout.device_type == "cpu":
        return "fp32", "CPUs gain little from 16 bits"
    gpu = layout.gpu
    assert gpu is not None
    peaks = peak_tflops(gpu.name)
    speed = f" ({peaks[0]:g} against {peaks[2]:g} TFLOP/s in fp32)" if peaks else ""
    if gpu.has_bf16:
        return "bf16", f"fast on {gpu.name}{speed}, range of fp32; weights stay fp32"
    if gpu.has_fp16_matrix_units:
        return "fp16", f"fast on {gpu.name}{speed}, which has no bf16; losses are scaled, weights stay fp32"
    return "fp32", f"{gpu.name} has no 16-bit matrix units"


def _channels_last(config: TrainConfig, layout: Layout, precision: str) -> tuple[bool, str]:
    if config.speed.channels_last is not None:
        return config.speed.channels_last, "as set"
    if layout.device_type == "cuda" and precision != "fp64":
        return True, "the layout of the GPU's matrix units"
    if layout.device_type == "cpu" and platform.machine() in ("aarch64", "arm64"):
        return True, "convolutions are faster so on ARM"
    return False, "the plain layout is as good on this device"


def _estimate_s(config: TrainConfig, layout: Layout, facts: Facts, precision: str) -> float | None:
    peak = _peak_flops(layout, precision)
    if peak is None or facts.flops_per_sample is None:
        return None
    return config.stop.epochs * facts.num_train * facts.flops_per_sample / (peak * _ASSUMED_UTILISATION)


def _peak_flops(layout: Layout, precision: str) -> float | None:
    """The published peak of all devices together, operations per second; None where it is not known."""
    peaks = peak_tflops(layout.gpu.name) if layout.gpu else None
    if peaks is None or precision == "fp64":
        return None
    peak = {"bf16": peaks[0], "fp16": peaks[0], "tf32": peaks[1] or peaks[2], "fp32": peaks[2]}[precision]
    return peak * 1e12 * layout.world_size * layout.devices_per_worker


def _weigh(
    asked: bool | None, seconds: float | None, cost_s: float, saves: float | None, layout: Layout
) -> tuple[bool, str]:
    if asked is not None:
        return asked, "as set"
    if layout.device_type == "cpu":
        return False, "does not pay on CPUs"
    if saves == 0:
        return False, "this task's layers are fused already and faster without"
    if seconds is None or saves is None:
        return False, "its gain cannot be estimated for this task and device"
    gain_s = seconds * saves
    verdict = "saves" if gain_s > cost_s else "would save"
    return (
        gain_s > cost_s,
        f"{verdict} about {gain_s:.0f} s of an estimated {seconds:.0f} s, costs about {cost_s:.0f} s",
    )


def _graph(config: TrainConfig, layout: Layout, compiled: bool, is_short: bool, accumulate: int) -> tuple[bool, str]:
    asked = config.speed.graph
    if asked is False:
        return False, "as set"
    obstacle: tuple[str, str] | None = None  # and what to set instead
    if layout.device_type == "cpu":
        obstacle = "a CUDA graph runs on a GPU and the workers run on CPUs", "leave it out"
    elif layout.strategy != "single":
        obstacle = f"only strategy single is captured and it is {layout.strategy}", "set --strategy single"
        if layout.world_size > 1:
            count = layout.world_size
            obstacle = f"{count} workers exchange gradients during a step", "leave it out, or set --num-gpus 1"
    elif accumulate > 1:
        mend = "leave it out" if config.batch.batch_size == "auto" else "leave out --accumulate"
        obstacle = f"a replay writes gradients and {accumulate} passes are to be summed", mend
    elif compiled:
        obstacle = "a compiled step is not captured", "set --no-compile"
    elif is_short:
        obstacle = "a full batch is replayed and there are too few samples for one", "set a smaller batch"
    if obstacle is None:
        return True, "a step is replayed without Python" if asked is None else "as set"
    if asked:
        raise SettingError("--graph was set", *obstacle)
    return False, obstacle[0]


def _loader(config: TrainConfig, layout: Layout, facts: Facts) -> tuple[str, str]:
    asked = config.speed.loader
    if asked == "resident" and facts.train_bytes is None:
        raise SettingError(
            "--loader resident was set",
            "this task's data set is not held in tensors",
            "set --loader streamed, or let train_data() return a stormo.data.TensorData",
        )
    if facts.is_stream:
        return "streamed", _stream_text(config)
    if asked != "auto":
        return asked, "as set"
    if facts.train_bytes is None:
        return "streamed", "the data set is not held in tensors"
    limit = min(_MAX_RESIDENT_BYTES, layout.gpu.memory_bytes // 4) if layout.gpu else _MAX_RESIDENT_BYTES
    if facts.train_bytes > limit:
        size, most = facts.train_bytes / 2**30, limit / 2**30
        return "streamed", f"{size:.1f} GiB are more than the {most:.1f} GiB that are kept on a device"
    return "resident", f"{facts.train_bytes / 2**20:.0f} MiB are kept on each device, batches are made there"


def _stream_text(config: TrainConfig) -> str:
    processes, asked = config.speed.loader_workers, config.batch.epoch_samples
    if (processes or 0) > 1:
        raise SettingError(
            f"--loader-workers {processes} was set",
            "the training set is a stream, which one process reads in its order and several would read several times",
            "set --loader-workers 1, or 0 to read it in the worker itself",
        )
    reader = "itself" if processes == 0 else "by one loading process, as its order cannot be shared out"
    text = f"a stream in its own order; every worker reads it, {reader}"
    return text + (f"; {asked} samples are an epoch, and the next one goes on from there" if asked else "")


def _checkpoints(config: TrainConfig, steps_per_epoch: int) -> tuple[int | None, str]:
    text = config.run.checkpoint_every
    number, is_epochs = (text[:-2], True) if text.endswith("ep") else (text, False)
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if value < 0 or not math.isfinite(value) or (not is_epochs and value != int(value)):
        raise SettingError(
            f"--checkpoint-every {text} was set",
            "it is neither a number of steps (500) nor of epochs (1ep, 0.25ep)",
            "set one of these, or 0 for none",
        )
    if value == 0:
        return None, "only at the end (--checkpoint-every 0)"
    steps = max(1, round(value * steps_per_epoch)) if is_epochs else int(value)
    arithmetic = f" = {value:g} × {steps_per_epoch}" if is_epochs else ""
    return steps, f"every {steps} steps{arithmetic}; the last {config.run.keep_checkpoints} and the best are kept"
