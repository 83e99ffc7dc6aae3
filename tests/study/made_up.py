"""Measurements made up from a known truth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stormo.study.measurement import Measurement


def measurement(workers: int, rate: float, *, mode: str = "strong", repeat: int = 1, **more: Any) -> Measurement:
    return Measurement(
        mode=mode, workers=workers, repeat=repeat, samples_per_s=rate, units_per_s=rate, unit="images", **more
    )


def step_s(mode: str, workers: int, one_worker_s: float, serial: float, communication_s: float) -> float:
    """The time of a step, written out as the page has it."""
    ring = communication_s * (workers - 1) / workers
    if mode == "strong":
        return one_worker_s * (serial + (1 - serial) / workers) + ring
    return one_worker_s * (serial * workers + 1 - serial) + ring


def truth(
    mode: str,
    counts: Sequence[int],
    *,
    one_worker_s: float = 0.2,
    serial: float = 0.03,
    communication_s: float = 0.01,
    repeats: int = 1,
    noise: float = 0.0,
    is_exposed: bool = False,
    seed: int = 0,
) -> list[Measurement]:
    """Runs whose steps take what the model says, give or take some noise."""
    generator = np.random.default_rng(seed)
    found = []
    for repeat in range(1, repeats + 1):
        for workers in counts:
            batch = 64.0 if mode == "strong" else 64.0 * workers
            exact_s = step_s(mode, workers, one_worker_s, serial, communication_s)
            ring_s = communication_s * (workers - 1) / workers
            time_s = exact_s * (1 + noise * generator.standard_normal())
            exposed_s = ring_s + noise * exact_s * generator.standard_normal()
            more = {"exposed_min_s": exposed_s / batch, "exposed_mean_s": exposed_s / batch} if is_exposed else {}
            found.append(measurement(workers, batch / time_s, mode=mode, repeat=repeat, batch=batch, **more))
    return found


def write_run(folder: Path, rate: float, *, batch: int = 32, num_epochs: int = 3, **more: Any) -> None:
    """The files of a run that trained at a rate: its first epoch is slow, as first epochs are."""
    folder.mkdir(parents=True)
    samples, time_s = 0, 0.0
    events: list[dict[str, Any]] = [{"event": "run_started", "global_batch_size": batch, "resumed_at_step": None}]
    for epoch in range(1, num_epochs + 1):
        epoch_s = 1000 / rate * (5.0 if epoch == 1 else 1.0)
        samples, time_s = samples + 1000, time_s + epoch_s
        events.append(
            {
                "event": "epoch_done",
                "epoch": epoch,
                "step": samples // batch,
                "samples_seen": samples,
                "epoch_time_s": epoch_s,
                "cumulative_time_s": time_s,
                "samples_per_s": 1000 / epoch_s,
                "units_per_s": 2000 / epoch_s,
                "unit": "tokens",
                **more,
            }
        )
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events), encoding="utf-8")
