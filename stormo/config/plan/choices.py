"""What is chosen automatically, each with its reason: number format, layout, compile, graph, loader, checkpoints."""

from __future__ import annotations

import platform

from stormo.config.layout import Layout
from stormo.config.plan.every import read_every
from stormo.config.plan.facts import Facts
from stormo.config.schema import TrainConfig
from stormo.config.strategies import with_option
from stormo.errors import SettingError, counted
from stormo.system.hardware import peak_tflops

# What the automatic choices assume; measured on an H200 with the reference job (docs/speed.md).
COMPILE_COST_S = 25.0
AUTOTUNE_COST_S = 8.0
AUTOTUNE_SAVES = 0.08
_ASSUMED_UTILISATION = 0.35
_MAX_RESIDENT_BYTES = 8 * 2**30


def choose_precision(config: TrainConfig, layout: Layout) -> tuple[str, str]:
    """The number format of the heavy arithmetic, and why."""
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
    # On one worker too, for now.
    takers = "servers take" * (config.workers.strategy in with_option("servers")) or (
        "PowerSGD takes" * (config.workers.compress == "powersgd")
    )
    if gpu.has_fp16_matrix_units and takers:
        return "fp32", f"{gpu.name} has no bf16, and {takers} no gradients of scaled losses"
    if gpu.has_fp16_matrix_units:
        return "fp16", f"fast on {gpu.name}{speed}, which has no bf16; losses are scaled, weights stay fp32"
    return "fp32", f"{gpu.name} has no 16-bit matrix units"


def choose_channels_last(config: TrainConfig, layout: Layout, precision: str) -> tuple[bool, str]:
    """The memory layout of images, and why."""
    if config.speed.channels_last is not None:
        return config.speed.channels_last, "as set"
    if layout.is_sharded:
        return False, f"strategy {layout.strategy} cuts weights in their plain layout"
    if layout.device_type == "cuda" and precision != "fp64":
        return True, "the layout of the GPU's matrix units"
    if layout.device_type == "cpu" and platform.machine() in ("aarch64", "arm64"):
        return True, "convolutions are faster so on ARM"
    return False, "the plain layout is as good on this device"


def estimate_s(config: TrainConfig, layout: Layout, facts: Facts, precision: str) -> float | None:
    """Seconds that training will about take; None where devices or task do not tell."""
    peak = peak_flops(layout, precision)
    if peak is None or facts.flops_per_sample is None:
        return None
    return config.stop.epochs * facts.num_train * facts.flops_per_sample / (peak * _ASSUMED_UTILISATION)


def peak_flops(layout: Layout, precision: str) -> float | None:
    """The published peak of all devices together, operations per second; None where it is not known."""
    peaks = peak_tflops(layout.gpu.name) if layout.gpu else None
    if peaks is None or precision == "fp64":
        return None
    peak = {"bf16": peaks[0], "fp16": peaks[0], "tf32": peaks[1] or peaks[2], "fp32": peaks[2]}[precision]
    return peak * 1e12 * layout.world_size * layout.devices_per_worker


def weigh(
    asked: bool | None, seconds: float | None, cost_s: float, saves: float | None, layout: Layout
) -> tuple[bool, str]:
    """Whether something that costs time once and saves a share of the rest pays, and why."""
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


def choose_graph(
    config: TrainConfig, layout: Layout, compiled: bool, is_short: bool, accumulate: int
) -> tuple[bool, str]:
    """Whether a step is replayed as a CUDA graph, and why."""
    asked = config.speed.graph
    if asked is False:
        return False, "as set"
    single = f"only strategy single is captured and it is {layout.strategy}", "set --strategy single"
    if layout.world_size > 1 and not layout.spec.local_updates:
        single = f"{layout.world_size} workers exchange gradients during a step", "leave it out, or set --num-gpus 1"
    is_auto = config.batch.batch_size == "auto"
    # What stands against it, why, and what to set instead; the first one holds.
    obstacles = (
        (layout.device_type == "cpu", "a CUDA graph runs on a GPU and the workers run on CPUs", "leave it out"),
        (layout.is_sharded, "workers that share a model speak with each other during a step", "leave it out"),
        (not layout.spec.takes_cuda_graph, *single),
        (
            config.batch.grow_batch is not None,
            "one size of batch is replayed and it is to grow",
            "leave out --grow-batch",
        ),
        (
            accumulate > 1,
            f"a replay writes gradients and {accumulate} passes are to be summed",
            "leave it out" if is_auto else "leave out --accumulate",
        ),
        (compiled, "a compiled step is not captured", "set --no-compile"),
        (is_short, "a full batch is replayed and there are too few samples for one", "set a smaller batch"),
        (
            config.sharding.checkpoint_activations,
            "computing activations again keeps random states, which cannot be captured",
            "leave out --checkpoint-activations",
        ),
        (
            config.optimizer.gradient_noise_batch is not None,
            "a replay repeats what it captured and gradient noise is drawn anew",
            "leave it out",
        ),
    )
    found = next(((why, instead) for holds, why, instead in obstacles if holds), None)
    if found is None:
        return True, "a step is replayed without Python" if asked is None else "as set"
    if asked:
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
        return "streamed", f"{size:.1f} GiB are more than the {most:.1f} GiB that are kept on a device"
    return "resident", f"{_size(facts.train_bytes)} are kept on each device, batches are made there"


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
            "the training set is a stream, which one process reads in its order and several would read several times",
            "set --loader-workers 1, or 0 to read it in the worker itself",
        )
    reader = "itself" if processes == 0 else "by one loading process, as its order cannot be shared out"
    text = f"a stream in its own order; every worker reads it, {reader}"
    epoch = f"{counted(asked or 0, 'sample')} {'is' if asked == 1 else 'are'} an epoch"
    return text + (f"; {epoch}, and the next one goes on from there" if asked else "")


def choose_checkpoints(config: TrainConfig, steps_per_epoch: int) -> tuple[int | None, float | None, str]:
    """Steps between checkpoints (None for none), the epochs they were set as, and both in words."""
    instead = "set one of these, or 0 for none"
    every = read_every("--checkpoint-every", config.run.checkpoint_every, steps_per_epoch, instead)
    if every is None:
        return None, None, "only at the end (--checkpoint-every 0)"
    arithmetic = "" if every.epochs is None else f" = {every.epochs:g} × {steps_per_epoch}"
    num_kept = config.run.keep_checkpoints
    kept = f"the last {num_kept} and the best are kept"
    if num_kept == 1 and config.stop.on_divergence != "ignore":
        kept += ", and the one before, to go back to on divergence"
    return every.steps, every.epochs, f"every {counted(every.steps, 'step')}{arithmetic}; {kept}"


# What a run does on divergence, by --on-divergence.
_WHEN_LOST = {
    "stop": "it ends",
    "rollback": "it goes back, with the rate × {factor:g}, at most {times}",
    "ignore": "it trains on",
}


def stop_text(config: TrainConfig, facts: Facts) -> str:
    """When training ends, in words."""
    stop = config.stop
    lost = _WHEN_LOST[stop.on_divergence].format(factor=stop.rollback_factor, times=counted(stop.max_rollbacks, "time"))
    return f"{_targets_text(config, facts)}; on divergence {lost} (--on-divergence {stop.on_divergence})"


def _targets_text(config: TrainConfig, facts: Facts) -> str:
    stop = config.stop
    known = "" if facts.has_accuracy else " (if the task reports one)"
    targets = []
    if stop.target_accuracy is not None and facts.has_accuracy is not False:
        targets.append(f"validation accuracy of {stop.target_accuracy:g}{known}")
    if stop.target_loss is not None:
        targets.append(f"validation loss of {stop.target_loss:g}")
    if not targets and stop.target_accuracy is not None:
        return f"{counted(stop.epochs, 'epoch')} (this task reports no accuracy; --target-loss would set a target)"
    if not targets:
        return f"{counted(stop.epochs, 'epoch')} (--target-accuracy or --target-loss would set a target)"
    held = f" held for {counted(stop.patience, 'epoch')}"
    return f"{' or '.join(targets)}{held}, or {counted(stop.epochs, 'epoch')}"


def data_text(facts: Facts) -> str:
    """What the training set is, in words."""
    digest = f", SHA-256 {facts.data_sha256}" if facts.data_sha256 else ""
    return f"; {facts.data}{digest}" if facts.data else ""
