"""Makes `summary.json`: the result of a run over all its attempts. Rank 0 writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stormo.config.plan import Plan
from stormo.config.plan.parallelism import max_staleness
from stormo.config.plan.steps import stage_of
from stormo.config.schema import TrainConfig
from stormo.energy import read_bill
from stormo.energy.summary import energy_summary
from stormo.errors import pluralize
from stormo.optim.noise_scale import NoiseScale
from stormo.training.state import RunState


def make_summary(config: TrainConfig, plan: Plan, state: RunState, run_folder: Path, stopped_by: str) -> dict[str, Any]:
    """The summary from the settings, counters and files of the run; a figure that was not measured is None."""
    progress = state.progress
    validation, best = progress.validation or {}, progress.best_validation or {}
    trained_s = progress.train_time_s
    return {
        "task": config.task,
        "strategy": plan.layout.strategy,
        "mesh": str(plan.layout.mesh) if plan.layout.is_sharded else None,
        "device": plan.layout.gpu.name if plan.layout.gpu else "cpu",
        "precision": plan.precision,
        "link": plan.initial.link,
        "world_size": plan.layout.world_size,
        "global_batch_size": plan.global_batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "accumulate": plan.accumulate,
        "epochs_run": progress.epochs_done,
        "steps": progress.step,
        "samples_seen": progress.samples_seen,
        "samples_trained": progress.samples_trained,
        **_speed(plan, progress.samples_trained / trained_s if trained_s else None),
        "train_time_s": trained_s,
        "time_to_target_s": progress.time_to_target_s,
        "validation_accuracy": validation.get("accuracy"),
        "validation_loss": validation.get("loss"),
        "validation": progress.validation,
        "best_validation_accuracy": best.get("accuracy"),
        "best_validation_loss": best.get("loss"),
        "input_wait_fraction": progress.wait_s / trained_s if trained_s else None,
        "peak_memory_bytes": progress.peak_memory_bytes,
        "peak_reserved_memory_bytes": progress.peak_reserved_memory_bytes,
        "sample_order_sha256": progress.sample_order_sha256,
        "num_resumes": progress.num_resumes,
        "num_rollbacks": progress.num_rollbacks,
        **energy_summary(
            read_bill(run_folder) if config.energy.energy else None,
            config.energy,
            num_samples=progress.samples_seen,
            target_unix_s=progress.target_unix_s,
        ),
        "pipeline": state.strategy.pipeline_trace(),
        **_noise_scale(config, plan, state, stopped_by),
        **_staleness(config, plan, state),
        "stopped_by": stopped_by,
    }


def _speed(plan: Plan, samples_per_s: float | None) -> dict[str, Any]:
    """Samples and the task's own units per second, and the share of the devices' peak."""
    facts = plan.facts
    figures: dict[str, Any] = {"samples_per_s": samples_per_s, "unit": facts.unit}
    figures[f"{facts.unit}_per_s"] = None if samples_per_s is None else samples_per_s * facts.units_per_sample
    figures["mfu"] = None if samples_per_s is None else plan.mfu(samples_per_s)
    if figures["mfu"] is None:
        figures["mfu_reason"] = plan.mfu_reason() or "nothing was trained"
    return figures


def _noise_scale(config: TrainConfig, plan: Plan, state: RunState, stopped_by: str) -> dict[str, Any]:
    """The gradient noise scale, its range, and what it means for this run."""
    meter, found, advice = state.strategy.noise_scale, NoiseScale(value=None), None
    if meter is None:
        found = replace(found, reason=state.strategy.noise_scale_reason)
    elif stopped_by != "error":  # a device that failed cannot be asked
        found = meter.read()
        if found.high is not None or config.optimizer.noise_scale:  # asked for, it says why it cannot tell
            epoch = min(state.progress.epoch, plan.epochs)
            advice = found.advice(stage_of(plan.stages, epoch).global_batch_size)
    return {
        "noise_scale": found.value,
        "noise_scale_low": found.low,
        "noise_scale_high": found.high,
        "noise_scale_reason": found.reason or None,
        "noise_scale_advice": advice,
    }


def _staleness(config: TrainConfig, plan: Plan, state: RunState) -> dict[str, Any]:
    """The age of the gradients that servers used, in steps taken since with those of other workers."""
    seen = state.strategy.stale_gradients
    if not seen:
        return {"staleness_mean": None, "staleness_max": None, "staleness_bound": None}
    return {
        "staleness_mean": sum(age * number for age, number in seen.items()) / sum(seen.values()),
        "staleness_max": max(seen),
        "staleness_bound": max_staleness(config, plan.layout),
    }


def staleness_sentence(summary: Mapping[str, Any]) -> str | None:
    """The age of gradients, beside what the settings allow."""
    if summary["staleness_mean"] is None:
        return None
    return (
        f"Stale gradients: on average {summary['staleness_mean']:.1f} updates old, at most {summary['staleness_max']} "
        f"(possible with {summary['world_size']} workers: {summary['staleness_bound']})."
    )


def pipeline_sentence(summary: Mapping[str, Any]) -> str | None:
    """The measured bubble of a pipeline, beside that of its schedule."""
    seen = summary["pipeline"]
    if seen is None:
        return None
    predicted = seen["predicted_bubble"]
    by_schedule = "" if predicted is None else f", {predicted:.0%} by the schedule"
    return (
        f"Pipeline: its workers were idle for {seen['measured_bubble']:.0%} of a step{by_schedule} "
        f"({seen['schedule']}, {pluralize(seen['micro_batches'], 'micro-batch')})."
    )
