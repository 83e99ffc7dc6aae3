"""What is chosen automatically, each with its reason."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence

from stormo.config.layout import Layout
from stormo.config.plan.steps import Facts, Interval, Stage, parse_interval
from stormo.config.schema import TrainConfig
from stormo.config.strategies import names
from stormo.errors import SettingError, pluralize
from stormo.system.hardware import peaks_of

# What the automatic choices assume; measured on an H200 with the reference job (docs/speed.md).
COMPILE_COST_S = 25.0
AUTOTUNE_COST_S = 4.0  # 2 s on a warm machine, 12 s on one just started
AUTOTUNE_SAVES = 0.08
_ASSUMED_UTILISATION = 0.35
_MAX_RESIDENT_BYTES = 8 * 2**30


def choose_precision(config: TrainConfig, layout: Layout) -> tuple[str, str]:
    """The number format of matrix products and convolutions, and why."""
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
    peaks = peaks_of(gpu)
    speed = f" ({peaks[0]:.4g} against {peaks[2]:.4g} TFLOP/s in fp32)" if peaks else ""
    if gpu.has_bf16:
        return "bf16", f"fast on {gpu.name}{speed}, range of fp32; weights stay fp32"
    if not gpu.has_fp16_matrix_units:
        return "fp32", f"{gpu.name} has no 16-bit matrix units"
    # Also for a server run that resumes on one worker.
    if config.workers.strategy in names(lambda row: not row.takes_fp16) or config.workers.compress == "powersgd":
        return "fp32", f"{gpu.name} has no bf16, and fp16 does not go with servers or PowerSGD"
    return "fp16", f"fast on {gpu.name}{speed}, which has no bf16; losses are scaled, weights stay fp32"


def choose_channels_last(config: TrainConfig, layout: Layout, precision: str, compiled: bool) -> tuple[bool, str]:
    """The memory layout of images, and why."""
    if config.speed.channels_last is not None:
        return config.speed.channels_last, "as set"
    suits_gpu = layout.device_type == "cuda" and precision != "fp64"
    if layout.is_sharded:
        if suits_gpu and layout.zero and layout.mesh.pipeline == 1 and not compiled:
            return True, "on activations, for the GPU's matrix units; weights are sharded in their default layout"
        return False, f"strategy {layout.strategy} shards weights in their default layout"
    if suits_gpu:
        return True, "the layout of the GPU's matrix units"
    if layout.device_type == "cpu" and platform.machine() in ("aarch64", "arm64"):
        return True, "convolutions are faster with it on ARM"
    return False, "the default layout is as good on this device"


def estimate_s(config: TrainConfig, layout: Layout, facts: Facts, precision: str) -> float | None:
    """Estimated seconds of training; None where devices or task do not tell."""
    peak = peak_flops(layout, precision)
    if peak is None or facts.flops_per_sample is None:
        return None
    return config.stop.epochs * facts.num_train * facts.flops_per_sample / (peak * _ASSUMED_UTILISATION)


def peak_flops(layout: Layout, precision: str) -> float | None:
    """The published peak of all devices together, operations per second; None where it is not known."""
    peaks = peaks_of(layout.gpu) if layout.gpu else None
    if peaks is None or precision == "fp64":
        return None
    peak = {"bf16": peaks[0], "fp16": peaks[0], "tf32": peaks[1] or peaks[2], "fp32": peaks[2]}[precision]
    num_devices = layout.world_size * layout.devices_per_worker
    if layout.shares_whole_gpus:
        num_devices = layout.num_nodes * len(layout.gpus)
    return peak * 1e12 * num_devices


def pays_off(
    asked: bool | None, seconds: float | None, cost_s: float, saves: float | None, layout: Layout
) -> tuple[bool, str]:
    """Whether something that costs time once and saves a share of the training pays off, and why."""
    if asked is not None:
        return asked, "as set"
    if layout.device_type == "cpu":
        return False, "does not pay on CPUs"
    if saves == 0:
        return False, "this task's layers are already fused"
    if seconds is None or saves is None:
        return False, "its gain cannot be estimated for this task and device"
    gain_s = seconds * saves
    verdict = "saves" if gain_s > cost_s else "would save"
    return (
        gain_s > cost_s,
        f"{verdict} about {gain_s:.0f} s of an estimated {seconds:.0f} s, costs about {cost_s:.0f} s",
    )


def choose_autotune(config: TrainConfig, layout: Layout, seconds: float | None) -> tuple[bool, str]:
    """Whether cuDNN times its convolutions, and why."""
    asked, obstacle = config.speed.autotune, ""
    if layout.device_type == "cpu":
        obstacle = "cuDNN runs on a GPU and the workers run on CPUs"
    elif config.run.deterministic:
        obstacle = "--deterministic takes the same algorithms in every run"
    if not obstacle or asked is False:
        return pays_off(asked, seconds, AUTOTUNE_COST_S, AUTOTUNE_SAVES, layout)
    if asked and "autotune" in config.given:
        raise SettingError("--autotune was set", obstacle, "set --no-autotune")
    return False, obstacle


def choose_graph(
    config: TrainConfig, layout: Layout, facts: Facts | None, compiled: bool, is_short: bool, accumulate: int
) -> tuple[bool, str]:
    """Whether a step is replayed as a CUDA graph, and why."""
    asked = config.speed.graph
    if asked is False:
        return False, "as set"
    # Condition, why, what to set instead; the first one counts.
    obstacles = (
        (layout.device_type == "cpu", "a CUDA graph runs on a GPU and the workers run on CPUs", "set --no-graph"),
        (
            not layout.spec.takes_cuda_graph,
            f"the strategies {', '.join(sorted(names(lambda row: row.takes_cuda_graph)))} are captured and this one is "
            f"{layout.strategy}",
            "set --no-graph, or --strategy ddp",
        ),
        (asked is None and layout.is_sharded, "a step with sharded weights is captured where --graph asks for it", ""),
        (
            asked is None and layout.world_size > 1 and facts is not None and facts.train_bytes is None,
            "workers replay a step together, and batches that are not known to be rows of tensors may differ in shape",
            "",
        ),
        (config.sharding.offload, "offloaded weights are copied by Python", "leave out --offload"),
        (
            layout.backend == "gloo" and layout.world_size > 1,
            "Gloo sends gradients through the host, which a replay leaves out",
            "set --backend nccl",
        ),
        (
            config.workers.compress != "none" and layout.world_size > 1,
            "compressed gradients are exchanged by Python",
            "leave out --compress",
        ),
        (config.batch.grow_batch is not None, "the size of a captured batch cannot grow", "leave out --grow-batch"),
        (
            accumulate > 1,
            f"a replay overwrites gradients and {accumulate} micro-batches are summed",
            "set --no-graph" if config.batch.batch_size == "auto" else "leave out --accumulate",
        ),
        (compiled, "a compiled step is not captured", "set --no-compile"),
        (is_short, "a full batch is captured and there are too few samples for one", "set a smaller batch"),
        (
            config.sharding.checkpoint_activations,
            "recomputing activations saves random states, which cannot be captured",
            "leave out --checkpoint-activations",
        ),
        (
            config.optimizer.gradient_noise_batch is not None,
            "a replay would repeat the gradient noise",
            "set --no-graph",
        ),
    )
    found = next(((why, instead) for holds, why, instead in obstacles if holds), None)
    if found is None:
        return True, "a step is replayed without Python" if asked is None else "as set"
    if asked and "graph" in config.given:  # that of a resumed run or a task's defaults has no effect
        raise SettingError("--graph was set", *found)
    return False, found[0]


def choose_loader(config: TrainConfig, layout: Layout, facts: Facts) -> tuple[str, str]:
    """Where the data is kept, and why."""
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
        return "streamed", f"{size:.1f} GiB are more than the {most:.1f} GiB allowed on a device"
    return "resident", f"{_size(facts.train_bytes)} are kept on each device"


def _size(num_bytes: int) -> str:
    for unit, unit_bytes in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.0f} {unit}"
    return f"{num_bytes} bytes"


def _stream_text(config: TrainConfig) -> str:
    processes, asked = config.speed.loader_workers, config.batch.epoch_samples
    if (processes or 0) > 1:
        raise SettingError(
            f"--loader-workers {processes} was set",
            "the training set is a stream, which several processes would read several times",
            "set --loader-workers 1, or 0 to read it in the worker itself",
        )
    reader = "itself" if processes == 0 else "with one loader process"
    text = f"a stream in its own order; every worker reads it {reader}"
    return text + (f"; an epoch is {pluralize(asked, 'sample')}, and the next one continues there" if asked else "")


def choose_checkpoints(config: TrainConfig, steps_per_epoch: int) -> tuple[Interval | None, str]:
    """How often checkpoints are saved (None: only at the end), and a text."""
    instead = "set one of these, or 0 for none"
    every = parse_interval("--checkpoint-every", config.run.checkpoint_every, steps_per_epoch, instead)
    if every is None:
        return None, "only at the end (--checkpoint-every 0)"
    arithmetic = "" if every.epochs is None else f" = {every.epochs:g} × {steps_per_epoch}"
    num_kept = config.run.keep_checkpoints
    kept = f"the last {num_kept} and the best are kept"
    if num_kept == 1 and config.stop.on_divergence != "ignore":
        kept += ", and the one before, for divergence"
    return every, f"every {pluralize(every.steps, 'step')}{arithmetic}; {kept}"


_ON_DIVERGENCE = {
    "stop": "it ends",
    "rollback": "it rolls back, with the learning rate × {factor:g}, at most {times}",
    "ignore": "it continues",
}


def stop_text(config: TrainConfig, facts: Facts) -> str:
    """When training ends."""
    stop = config.stop
    then = _ON_DIVERGENCE[stop.on_divergence].format(
        factor=stop.rollback_factor, times=pluralize(stop.max_rollbacks, "time")
    )
    return f"{_targets_text(config, facts)}; on divergence {then} (--on-divergence {stop.on_divergence})"


def _targets_text(config: TrainConfig, facts: Facts) -> str:
    stop = config.stop
    known = "" if facts.has_accuracy else " (if the task reports one)"
    targets = []
    if stop.target_accuracy is not None and facts.has_accuracy is not False:
        targets.append(f"validation accuracy of {stop.target_accuracy:g}{known}")
    if stop.target_loss is not None:
        targets.append(f"validation loss of {stop.target_loss:g}")
    if not targets and stop.target_accuracy is not None:
        return f"{pluralize(stop.epochs, 'epoch')} (this task reports no accuracy; --target-loss would set a target)"
    if not targets:
        return f"{pluralize(stop.epochs, 'epoch')} (--target-accuracy or --target-loss would set a target)"
    held = f" held for {pluralize(stop.patience, 'epoch')}"
    return f"{' or '.join(targets)}{held}, or {pluralize(stop.epochs, 'epoch')}"


def data_text(facts: Facts) -> str:
    """The training set."""
    digest = f", SHA-256 {facts.data_sha256}" if facts.data_sha256 else ""
    return f"; {facts.data}{digest}" if facts.data else ""


def noise_lines(config: TrainConfig, stages: Sequence[Stage]) -> list[tuple[str, str]]:
    """A line of the explanation, where noise is added; refuses noise that the batch already has."""
    optimizer, texts = config.optimizer, list[str]()
    small = optimizer.gradient_noise_batch
    if small is not None:
        largest = max(min(stage.global_batch_size, stage.num_train) for stage in stages)  # samples of one step
        if largest <= small:
            raise SettingError(
                f"--gradient-noise-batch {small} was set",
                f"the global batch of {largest} is no larger and already has that noise",
                f"set --gradient-noise-batch below {largest}, or leave it out",
            )
        sigma = f"σ = {math.sqrt(largest / small - 1):.3g} = √({largest} / {small} - 1)"
        texts.append(f"each sample's gradient × N(1, σ²), {sigma}" + " in the largest batch" * (len(stages) > 1))
    if optimizer.gradient_noise is not None:
        eta, gamma = optimizer.gradient_noise, optimizer.gradient_noise_decay
        after = " after clipping" * (optimizer.clip_norm is not None)
        texts.append(f"the gradient + N(0, {eta:g} / (1 + step)^{gamma:g}){after}")
    return [("gradient noise", "; ".join(texts))] if texts else []


def choose_noise_scale(
    config: TrainConfig, layout: Layout, stages: Sequence[Stage], *, is_found: bool = False
) -> tuple[bool, str]:
    """Whether it is measured, and why; `is_found` once --batch-size auto has found the micro-batches."""
    reached = [stage for stage in stages if stage.first_epoch <= config.stop.epochs]
    asked = config.optimizer.noise_scale
    if asked is False:
        return False, "as set"
    asked = asked and "noise_scale" in config.given  # that of a resumed run or a task's defaults has no effect
    if obstacle := _noise_obstacle(config, layout):
        said, reason, instead = obstacle
        if asked:
            raise SettingError(f"--noise-scale was set{said}", reason, f"set {instead}, or leave it out")
        return False, reason
    if layout.world_size > 1:
        return True, f"the gradients of {layout.world_size} workers are compared with their mean"
    first = next((stage for stage in reached if stage.accumulate > 1), None)
    if first is not None:
        since = f", from epoch {first.first_epoch} on" if first.first_epoch > 1 else ""
        return True, f"the first of {first.accumulate} micro-batches is compared with the whole step{since}"
    reason = "gradients of two batch sizes are compared, and one worker with one micro-batch has one"
    if asked and (is_found or config.batch.batch_size != "auto"):
        raise SettingError("--noise-scale was set", reason, "set --accumulate 2, or train with several workers")
    return False, reason


def _noise_obstacle(config: TrainConfig, layout: Layout) -> tuple[str, str, str] | None:
    """What it cannot be measured with, why, and what to set instead."""
    if layout.spec.no_noise_scale:
        said = "" if layout.is_sharded else f" with --strategy {layout.strategy}"
        return said, layout.spec.no_noise_scale, "--strategy ddp"
    if config.workers.compress == "powersgd" and layout.world_size > 1:
        reason = "gradients are compared with their mean, which PowerSGD only approximates"
        return " with --compress powersgd", reason, "--compress bf16"
    return None
