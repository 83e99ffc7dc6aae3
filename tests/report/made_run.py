"""Writes the folder of a run that never took place: every figure known, in the files a real one leaves behind."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stormo.parallel.pipeline.schedules import idle_share
from tests.parallel.pipeline.simulation import pipeline_order, simulate

BEGIN_UNIX_S = 1_790_000_000.0
STEPS_PER_EPOCH = 20


@dataclass(frozen=True, kw_only=True)
class MadeRun:
    """What the run was like; every epoch takes ten seconds of training and two of validation."""

    name: str = "made"
    epochs: int = 4
    num_workers: int = 2
    num_nodes: int = 1
    num_gpus: int = 2  # of each node
    has_energy: bool = True
    has_ended: bool = True
    resumed_after_epoch: int | None = None  # a second attempt, ten minutes later
    speed: float = 1000.0
    seed: int = 0
    base_lr: float = 0.01
    notice: str = "the loader waits for a slow disk"
    begin_unix_s: float = BEGIN_UNIX_S
    pipeline: Mapping[str, Any] | None = None  # as summary.json has it

    def write(self, runs: Path) -> Path:
        """Write every file; returns the folder."""
        folder = runs / self.name
        (folder / "nodes").mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(self.config(), encoding="utf-8")
        (folder / "environment.json").write_text(json.dumps(self.environment()), encoding="utf-8")
        append(folder / "events.jsonl", self.events())
        for node in range(self.num_nodes):
            append(folder / "nodes" / f"{node}.jsonl", self.node_lines(node))
        if self.has_ended:
            (folder / "summary.json").write_text(json.dumps(self.summary()), encoding="utf-8")
        return folder

    def config(self) -> str:
        return (
            f'task = "made-task"\n\n[batch]\nbatch_size = 32\n\n[optimizer]\nbase_lr = {self.base_lr}\n\n'
            f'[run]\nrun_name = {json.dumps(self.name)}\n\n[energy]\ncurrency = "EUR"\n'
        )

    def environment(self) -> dict[str, Any]:
        return {
            "time_unix_s": self.begin_unix_s,
            "host": "host0",
            "python": "3.11.7",
            "torch": "2.13.0",
            "gpu": "NVIDIA H200",
            "command": ["stormo", "train", "made-task", "--run-name", self.name],
            "variables": {"OMP_NUM_THREADS": "1"},
        }

    def summary(self) -> dict[str, Any]:
        return {
            "run_name": self.name,
            "task": "made-task",
            "device": "NVIDIA H200",
            "precision": "bf16",
            "strategy": "ddp",
            "world_size": self.num_workers,
            "global_batch_size": 32 * self.num_workers,
            "epochs_run": self.epochs,
            "steps": self.epochs * STEPS_PER_EPOCH,
            "samples_seen": int(self.epochs * 10 * self.speed),
            "unit": "images",
            "images_per_s": self.speed,
            "train_time_s": 10.0 * self.epochs,
            "wall_time_s": 12.0 * self.epochs + 5,
            "time_to_target_s": 10.0 * (self.epochs - 1),
            "validation": {"accuracy": 0.9134, "loss": 0.25},
            "validation_accuracy": 0.9134,
            "validation_loss": 0.25,
            "best_validation_accuracy": 0.915,
            "energy_cost": 0.0123 if self.has_energy else None,
            "co2e_g": 12.5 if self.has_energy else None,
            "num_resumes": int(self.resumed_after_epoch is not None),
            "noise_scale_advice": "Gradient noise scale: larger batches bring little beyond about 300 samples.",
            "pipeline": self.pipeline,
            "stopped_by": "target",
        }

    def attempts(self) -> list[tuple[float, int, int]]:
        """When each attempt begins, its first epoch and the one after its last."""
        split = self.resumed_after_epoch
        if split is None:
            return [(self.begin_unix_s, 1, self.epochs + 1)]
        return [(self.begin_unix_s, 1, split + 1), (self.begin_unix_s + 12 * split + 600, split + 1, self.epochs + 1)]

    def events(self) -> Iterable[dict[str, Any]]:
        chance = random.Random(self.seed)
        for begin_unix_s, first, end in self.attempts():
            yield {
                "event": "run_started",
                "time_unix_s": begin_unix_s,
                "run_name": self.name,
                "task": "made-task",
                "world_size": self.num_workers,
                "global_batch_size": 32 * self.num_workers,
                "epochs": self.epochs,
                "steps_per_epoch": STEPS_PER_EPOCH,
                "resumed_at_step": None if first == 1 else (first - 1) * STEPS_PER_EPOCH,
                "explanation": ["workers        2 = 1 node × 2 GPUs", "seed           0"],
            }
            for epoch in range(first, end):
                yield from self._epoch(epoch, begin_unix_s + 12.0 * (epoch - first), chance)
        if self.has_ended:
            last_unix_s = begin_unix_s + 12.0 * (end - first) + 1
            yield {"event": "notice", "time_unix_s": last_unix_s, "kind": "warning", "text": self.notice}
            yield {"event": "run_ended", "time_unix_s": last_unix_s, "summary": self.summary()}

    def _epoch(self, epoch: int, begin_unix_s: float, chance: random.Random) -> Iterable[dict[str, Any]]:
        for position in range(1, STEPS_PER_EPOCH + 1):
            step = (epoch - 1) * STEPS_PER_EPOCH + position
            yield {
                "event": "step_done",
                "time_unix_s": begin_unix_s + position / 2,
                "epoch": epoch,
                "step": step,
                "step_in_epoch": position,
                "steps_in_epoch": STEPS_PER_EPOCH,
                "samples_seen": int(step * self.speed / 2),
                "loss": 2.3 * math.exp(-step / 60) + 0.2 + 0.06 * chance.random(),
                "learning_rate": self.base_lr * min(step / 40, 1.0),
                "samples_per_s": self.speed * (0.95 + 0.1 * chance.random()),
                "units_per_s": self.speed * (0.95 + 0.1 * chance.random()),
                "unit": "images",
                "input_wait_fraction": 0.02 * chance.random(),
                "train_time_s": (epoch - 1) * 10 + position / 2,
                "global_batch_size": 32 * self.num_workers,
                "noise_scale": None if step < 10 else 250 + 2.0 * step + 30 * chance.random(),
                "power_w": None,
            }
        yield {
            "event": "epoch_done",
            "time_unix_s": begin_unix_s + 11.5,
            "epoch": epoch,
            "step": epoch * STEPS_PER_EPOCH,
            "samples_seen": int(epoch * 10 * self.speed),
            "epoch_time_s": 10.0,
            "cumulative_time_s": 10.0 * epoch,
            "samples_per_s": self.speed,
            "units_per_s": self.speed,
            "unit": "images",
            "train_loss": 2.3 * math.exp(-epoch / 3) + 0.2,
            "peak_memory_bytes": 3 * 2**30,
            "validation": {
                "accuracy": 0.92 - 0.5 * math.exp(-epoch / 1.5),
                "loss": 2.2 * math.exp(-epoch / 2.5) + 0.25,
            },
            "workers": [
                {
                    "rank": rank,
                    "node": rank * self.num_nodes // self.num_workers,
                    "train_time_s": 10.0,
                    "input_wait_s": 0.1,
                    "exposed_s": 1.0 + 0.5 * chance.random() - (0.9 if rank == 1 else 0.0),
                }
                for rank in range(self.num_workers)
            ],
        }
        yield {
            "event": "checkpoint_saved",
            "time_unix_s": begin_unix_s + 11.9,
            "epoch": epoch + 1,
            "step": epoch * STEPS_PER_EPOCH,
            "path": f"checkpoints/step-{epoch * STEPS_PER_EPOCH:08d}",
            "save_time_s": 0.3,
        }

    def node_lines(self, node: int) -> Iterable[dict[str, Any]]:
        """Each GPU draws 300 W in training and 150 W else, and the CPU 80 W; a reading a second."""
        sources = [_source(f"GPU-{node}-{gpu}", "gpu", interval_s=0.1) for gpu in range(self.num_gpus)]
        sources.append(_source("package-0", "cpu", interval_s=0.001))
        for begin_unix_s, first, end in self.attempts():
            yield {
                "kind": "start",
                "time_unix_s": begin_unix_s - 2,
                "node_id": str(node),
                "host": f"host{node}",
                "resumed_at_step": None if first == 1 else (first - 1) * STEPS_PER_EPOCH,
                "step": (first - 1) * STEPS_PER_EPOCH,
                "sources": sources if self.has_energy else [],
                "missing": [{"kind": "dram", "reason": "this CPU has no DRAM counter"}],
            }
            joules = {source["id"]: 0.0 for source in sources}
            for second in range(-1, 12 * (end - first) + 1):
                place = second % 12
                phase = "starting" if second < 1 else "training" if 1 <= place <= 10 else "validation"
                for source in sources:
                    watts = 80.0 if source["kind"] == "cpu" else 300.0 if phase == "training" else 150.0
                    joules[source["id"]] += watts
                if self.has_energy:
                    yield {
                        "kind": "energy",
                        "time_unix_s": begin_unix_s + second,
                        "step": (first - 1) * STEPS_PER_EPOCH + max(second, 0) * STEPS_PER_EPOCH // 12,
                        "phase": phase,
                        "joules": dict(joules),
                        "waiting_s": {"input": 0.01 * max(second, 0), "communication": 0.1 * max(second, 0)},
                    }
                if second % 2 == 0:
                    yield self.sample(node, begin_unix_s + second, phase)
            if self.has_ended or end <= self.epochs:
                yield {"kind": "end", "time_unix_s": begin_unix_s + 12 * (end - first) + 0.5}

    def sample(self, node: int, time_unix_s: float, phase: str) -> dict[str, Any]:
        wave = math.sin(time_unix_s / 5 + node)
        busy = phase == "training"
        return {
            "kind": "sample",
            "time_unix_s": time_unix_s,
            "host": f"host{node}",
            "cpu_fraction": 0.4 + 0.1 * wave,
            "memory_used_bytes": 20 * 2**30 + 2**28 * wave,
            "memory_total_bytes": 128 * 2**30,
            "disk_read_bytes_per_s": 2e6 * (1 + wave),
            "disk_write_bytes_per_s": 1e6,
            "network_in_bytes_per_s": 4e8 * busy,
            "network_out_bytes_per_s": 3.8e8 * busy,
            "cpu_temperature_c": None,
            "cpu_clock_mhz": None,
            "gpus": [
                {
                    "uuid": f"GPU-{node}-{gpu}",
                    "index": gpu,
                    "utilisation": (0.93 if busy else 0.4) + 0.03 * wave,
                    "memory_used_bytes": (9 + gpu) * 2**30,
                    "memory_total_bytes": 139 * 2**30,
                    "power_w": 300.0 if busy else 150.0,
                    "temperature_c": 45 + 3 * gpu + 8 * busy + wave,
                    "sm_clock_mhz": 1900 + 30 * wave,
                }
                for gpu in range(self.num_gpus)
            ],
        }


def _source(source_id: str, kind: str, *, interval_s: float) -> dict[str, Any]:
    return {
        "id": source_id,
        "kind": kind,
        "name": kind,
        "method": "counter",
        "resolution_j": 0.001,
        "interval_s": interval_s,
    }


def schedule_trace(schedule: str, num_workers: int, micro_batches: int, per_worker: int = 1) -> dict[str, Any]:
    """A run of the schedule in which the first action took longer and delayed all others."""
    num_stages = per_worker * num_workers
    spans = simulate(pipeline_order(schedule, num_workers, num_stages, micro_batches))
    late_s = 0.001 * max(span.stop for span in spans)
    moved = [span._replace(start=0.01 * span.start + late_s, stop=0.01 * span.stop + late_s) for span in spans]
    moved[0] = moved[0]._replace(start=moved[0].start - late_s)
    return {
        "schedule": schedule,
        "num_stages": num_stages,
        "micro_batches": micro_batches,
        "predicted_bubble": idle_share(spans, num_workers),
        "measured_bubble": idle_share(moved, num_workers),
        "spans": [list(span) for span in moved],
    }


def append(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Append objects as a run does."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
