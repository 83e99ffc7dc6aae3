"""The arithmetic of a run: (settings, devices, facts of the task) -> every effective value, with its reason.

Pure functions of numbers; every check of a user's settings is here, so that it fails before any process starts.
"""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the arithmetic needs to know of a task."""

    num_train: int
    num_validation: int
    flops_per_sample: float | None = None  # forward and backward
    compile_saves: float | None = None  # share of a step's time that torch.compile is known to save
    train_bytes: int | None = None  # of the whole training set, where it can be kept on a device


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

    def lines(self) -> tuple[str, ...]:
        """The explanation as aligned lines."""
        width = max(len(label) for label, _ in self.explanation)
        return tuple(f"{label:<{width}}  {text}" for label, text in self.explanation)


def resolve(config: TrainConfig, layout: Layout, facts: Facts) -> Plan:
    """Batch, learning rate, precision and the rest, from the settings, the layout and the task's facts."""
    _check_numbers(config)
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
    graph, graph_reason = _graph(config, layout, compiled, global_batch_size > facts.num_train)
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
            ("data", f"{loader}: {loader_reason}"),
            (
                "batch norm",
                f"statistics over all {layout.world_size} workers"
                if config.speed.sync_batch_norm and layout.world_size > 1
                else "statistics over each worker's own samples",
            ),
            (
                "stop",
                f"validation accuracy of {config.stop.target_accuracy:g} held for {config.stop.patience} "
                f"epoch{'s' * (config.stop.patience > 1)}, or {config.stop.epochs} epochs",
            ),
            ("checkpoints", checkpoint_text),
            ("seed", f"{config.run.seed}" + (", deterministic" if config.run.deterministic else "")),
        ),
    )


def _check_numbers(config: TrainConfig) -> None:
    if config.stop.target_accuracy >= 10:
        raise SettingError(
            f"--target-accuracy {config.stop.target_accuracy:g} was set",
            "it is a fraction, of which 1 is all",
            f"set --target-accuracy {config.stop.target_accuracy / 100:g}",
        )
    optimizer, stop, run = config.optimizer, config.stop, config.run
    at_least("--batch-size", config.batch.batch_size, 1)
    at_least("--accumulate", config.batch.accumulate, 1)
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


def _batch(config: TrainConfig, layout: Layout, facts: Facts) -> tuple[int, str]:
    workers, accumulate = layout.world_size * layout.devices_per_worker, config.batch.accumulate
    product = f"{workers} worker{'s' * (workers > 1)} × {accumulate} accumulation"
    per_worker = config.batch.batch_size
    total = config.resumed.global_batch_size if config.resumed else config.batch.global_batch_size
    if total is None:
        total = per_worker * workers * accumulate
        text = f"{total} = {per_worker} per worker × {product}"
    else:
        if not config.resumed and "batch_size" in config.given and per_worker * workers * accumulate != total:
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
    if facts.num_validation < 1:
        raise SettingError(
            "a task without validation samples was given",
            "every epoch ends with a validation",
            "let validation_data() return at least one sample",
        )
    if facts.num_train < workers:
        raise SettingError(
            f"{workers} workers were asked for",
            f"the training set has {facts.num_train} samples, fewer than one for each",
            f"set --num-gpus so that at most {facts.num_train} workers take part",
        )
    if total > facts.num_train:
        text += f"; larger than the {facts.num_train} training samples, so a step takes {facts.num_train}"
    return total, text


def _learning_rate(config: TrainConfig, layout: Layout, global_batch_size: int) -> tuple[float, str]:
    base, rule = config.optimizer.base_lr, config.optimizer.lr_rule
    if config.resumed:
        return config.resumed.learning_rate, f"{config.resumed.learning_rate:g} as before"
    if config.batch.global_batch_size is not None:
        return base, f"{base:g} as set, for the global batch as set"
    ratio = global_batch_size // config.batch.batch_size
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
    peaks = peak_tflops(layout.gpu.name) if layout.gpu else None
    if peaks is None or facts.flops_per_sample is None:
        return None
    peak = {"bf16": peaks[0], "fp16": peaks[0], "tf32": peaks[1] or peaks[2]}.get(precision, peaks[2])
    workers = layout.world_size * layout.devices_per_worker
    flops = config.stop.epochs * facts.num_train * facts.flops_per_sample / workers
    return flops / (peak * 1e12 * _ASSUMED_UTILISATION)


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


def _graph(config: TrainConfig, layout: Layout, compiled: bool, is_short: bool) -> tuple[bool, str]:
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
    elif config.batch.accumulate > 1:
        count = config.batch.accumulate
        obstacle = f"a replay writes gradients and {count} passes are to be summed", "leave out --accumulate"
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
    if asked != "auto":
        return asked, "as set"
    if facts.train_bytes is None:
        return "streamed", "the data set is not held in tensors"
    limit = min(_MAX_RESIDENT_BYTES, layout.gpu.memory_bytes // 4) if layout.gpu else _MAX_RESIDENT_BYTES
    if facts.train_bytes > limit:
        size, most = facts.train_bytes / 2**30, limit / 2**30
        return "streamed", f"{size:.1f} GiB are more than the {most:.1f} GiB that are kept on a device"
    return "resident", f"{facts.train_bytes / 2**20:.0f} MiB are kept on each device, batches are made there"


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
