"""The arithmetic of a run: (settings, devices, facts of the task) -> every effective value, with its reason.

Pure functions of numbers; every check of a user's settings is here, so that it fails before any process starts.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass

from stormo.config import TrainConfig
from stormo.errors import SettingError
from stormo.hardware import Gpu, peak_tflops

# What the automatic choices assume; measured on an H200 with the reference job (docs/speed.md).
_COMPILE_COST_S = 25.0
_AUTOTUNE_COST_S = 8.0
_AUTOTUNE_SAVES = 0.08
_ASSUMED_UTILISATION = 0.35

_MAX_RESIDENT_BYTES = 8 * 2**30
_PORTS = (1024, 49151)
DEFAULT_PORT = 29500


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """The shape of a world that another program (torchrun, srun, mpirun) has already started."""

    launcher: str
    world_size: int
    local_size: int
    num_nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Who takes part: known before any process starts and before the task is loaded."""

    device_type: str  # "cpu" or "cuda"
    gpu: Gpu | None
    backend: str
    strategy: str
    num_nodes: int
    workers_per_node: int
    devices_per_worker: int
    world_size: int
    explanation: tuple[tuple[str, str], ...]


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


def resolve_layout(config: TrainConfig, gpus: Sequence[Gpu], launched: Launched | None = None) -> Layout:
    """Devices, workers, backend and strategy, from the settings and what this node shows."""
    workers = config.workers
    _check_workers(config)
    device_type, device_reason = _device(config, gpus)
    strategy_is_dp = workers.strategy == "dp"
    if launched:
        per_node, num_nodes, world_size = launched.local_size, launched.num_nodes, launched.world_size
        origin = f"started by {launched.launcher}"
    else:
        per_node = workers.num_gpus or (len(gpus) if device_type == "cuda" else 1)
        num_nodes = workers.num_nodes
        world_size = per_node * num_nodes
        origin = "as set" if workers.num_gpus else "all that are visible" if device_type == "cuda" else "the default"
    if device_type == "cuda":
        _check_gpus(config, per_node, len(gpus), launched)
    devices_per_worker = 1
    if strategy_is_dp:
        _check_data_parallel(config, device_type, num_nodes, launched)
        devices_per_worker, per_node, world_size = per_node, 1, 1
    backend, backend_reason = _backend(config, device_type, world_size)
    strategy, strategy_reason = _strategy(config, world_size, devices_per_worker)
    unit = "GPU" if device_type == "cuda" else "CPU process"
    plural = "es" if unit == "CPU process" else "s"
    count = per_node * devices_per_worker
    total = f"{world_size} = {num_nodes} node{'s' * (num_nodes > 1)} × {count} {unit}{plural * (count > 1)}"
    if strategy_is_dp:
        total = f"1 process that drives {count} GPU{'s' * (count > 1)}"
    elif world_size != per_node * num_nodes:
        total = f"{world_size} on {num_nodes} nodes, {per_node} of them on this one"
    return Layout(
        device_type=device_type,
        gpu=gpus[0] if device_type == "cuda" else None,
        backend=backend,
        strategy=strategy,
        num_nodes=num_nodes,
        workers_per_node=per_node,
        devices_per_worker=devices_per_worker,
        world_size=world_size,
        explanation=(
            ("workers", f"{total} ({origin}; {device_reason}); {backend_reason}"),
            ("strategy", f"{strategy}: {strategy_reason}"),
        ),
    )


def _check_workers(config: TrainConfig) -> None:
    workers = config.workers
    _at_least("--num-gpus", workers.num_gpus, 1)
    _at_least("--num-nodes", workers.num_nodes, 1)
    if not 0 <= workers.node_id < workers.num_nodes:
        raise SettingError(
            f"--node-id {workers.node_id} was set with --num-nodes {workers.num_nodes}",
            f"the nodes are counted from 0 to {workers.num_nodes - 1}",
            f"set --node-id to a number from 0 to {workers.num_nodes - 1}"
            if workers.num_nodes > 1
            else f"set --num-nodes {workers.node_id + 1} or more, or leave --node-id out",
        )
    port = workers.master_port
    if port is not None and not _PORTS[0] <= port <= _PORTS[1]:
        raise SettingError(
            f"--master-port {port} was set", f"it lies outside {_PORTS[0]} to {_PORTS[1]}", "set a port in that range"
        )
    if workers.timeout <= 0:
        raise SettingError(f"--timeout {workers.timeout:g} was set", "it must be above 0 seconds", "set --timeout 600")


def _at_least(flag: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise SettingError(
            f"{flag} {value:g} was set", f"it must be at least {least:g}", f"set {flag} {least:g} or more"
        )


def _device(config: TrainConfig, gpus: Sequence[Gpu]) -> tuple[str, str]:
    asked = config.workers.device
    if asked == "cuda" and not gpus:
        raise SettingError(
            "--device cuda was set", "no GPU is visible to this process", "set --device cpu, or check nvidia-smi"
        )
    if asked == "cpu":
        return "cpu", "--device cpu"
    if gpus:
        names = sorted({gpu.name for gpu in gpus})
        return "cuda", f"{len(gpus)} × {names[0]} visible" if len(names) == 1 else f"{len(gpus)} GPUs visible"
    return "cpu", "no GPU is visible"


def _check_gpus(config: TrainConfig, per_node: int, num_visible: int, launched: Launched | None) -> None:
    bound_one_each = launched is not None and num_visible == 1  # srun --gpus-per-task and the like
    shared_on_purpose = config.workers.backend == "gloo"  # NCCL refuses two ranks on a GPU, Gloo takes them
    if per_node > num_visible and not bound_one_each and not shared_on_purpose:
        raise SettingError(
            f"{per_node} workers were asked for on this node",
            f"it shows {num_visible} GPU{'s' * (num_visible != 1)} and each worker needs its own",
            f"set --num-gpus {num_visible}, or --device cpu, or --backend gloo to let workers share a GPU",
        )


def _check_data_parallel(config: TrainConfig, device_type: str, num_nodes: int, launched: Launched | None) -> None:
    if config.speed.sync_batch_norm:
        raise SettingError(
            "--strategy dp was set with --sync-batch-norm",
            "DataParallel's threads cannot exchange statistics",
            "set --strategy ddp",
        )
    if device_type == "cpu":
        raise SettingError(
            "--strategy dp was set", "DataParallel splits a batch over GPUs and none is used", "set --strategy ddp"
        )
    if num_nodes > 1 or (launched is not None and launched.world_size > 1):
        raise SettingError(
            "--strategy dp was set for several processes",
            "DataParallel is one process that drives the GPUs of one node",
            "set --strategy ddp, or start one process",
        )


def _backend(config: TrainConfig, device_type: str, world_size: int) -> tuple[str, str]:
    asked = config.workers.backend
    if asked == "nccl" and device_type == "cpu":
        raise SettingError(
            "--backend nccl was set", "NCCL moves GPU memory and the workers run on CPUs", "set --backend gloo"
        )
    backend = asked if asked != "auto" else "nccl" if device_type == "cuda" else "gloo"
    if world_size == 1:
        return backend, "no communication needed"
    return backend, f"{backend} {'as set' if asked != 'auto' else 'for GPUs' if backend == 'nccl' else 'for CPUs'}"


def _strategy(config: TrainConfig, world_size: int, devices_per_worker: int) -> tuple[str, str]:
    asked = config.workers.strategy
    if asked == "single" and world_size > 1:
        raise SettingError(
            f"--strategy single was set with {world_size} workers",
            "single trains on one device",
            "set --strategy ddp, or --num-gpus 1 --num-nodes 1",
        )
    if asked == "dp":
        return "dp", f"DataParallel, threads of one process over {devices_per_worker} GPUs, as set; ddp is faster"
    if asked == "ddp":
        return "ddp", "as set" if world_size > 1 else "as set; with one worker there is nothing to average"
    if world_size == 1:
        return "single", "one worker, nothing to average"
    return "ddp", f"the model is copied to {world_size} workers, their gradients are averaged during backward"


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
    _at_least("--batch-size", config.batch.batch_size, 1)
    _at_least("--accumulate", config.batch.accumulate, 1)
    _at_least("--epochs", stop.epochs, 1)
    _at_least("--patience", stop.patience, 1)
    _at_least("--validation-batch-size", config.speed.validation_batch_size, 1)
    _at_least("--loader-workers", config.speed.loader_workers, 0)
    _at_least("--keep-checkpoints", run.keep_checkpoints, 1)
    _at_least("--seed", run.seed, 0)
    for flag, value in (
        ("--weight-decay", optimizer.weight_decay),
        ("--warmup-epochs", optimizer.warmup_epochs),
        ("--warmup-from", optimizer.warmup_from),
    ):
        _at_least(flag, value, 0)
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
