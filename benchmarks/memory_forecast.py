"""What `stormo predict` says of a GPU's memory, against what a training really takes of it.

    python -m benchmarks.memory_forecast [--data-folder FOLDER] [--jobs 3] [--only WORDS]

Every cell is a short training by `stormo train` on one GPU; some run at the same time, as each has its own allocator.
Shown are what a forecast has of it without CUDA's own memory (`allocated_bytes`), the most that was held (of
`summary.json` `peak_memory_bytes`, with all that a CUDA graph keeps to itself where steps are replayed) and the most
that torch's allocator took of the GPU (`peak_reserved_memory_bytes`), with what it keeps for later use. The ratio is
predicted over held; the worst is the one that is farthest from 1, up or down.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import aligned, data_folder, result_line, train_command

_IMAGES = ("fashion-mnist", "--task.train-samples", "8192", "--task.validation-samples", "512")
_STEPS = 4


def words(preset: str, batch_size: int, *flags: str) -> tuple[str, ...]:
    """A short training of the GPT: some full steps, one batch of validation."""
    size = {"125m": 1024, "350m": 1024, "1b": 2048}[preset]
    return (
        *("language-model", "--task.preset", preset, "--batch-size", str(batch_size)),
        *("--task.train-bytes", str(_STEPS * batch_size * size + 1), "--task.validation-bytes", str(4 * size + 1)),
        *flags,
    )


CELLS: tuple[tuple[str, ...], ...] = (
    (*_IMAGES, "--batch-size", "512"),
    (*_IMAGES, "--batch-size", "2048"),
    (*_IMAGES, "--batch-size", "2048", "--checkpoint-activations"),
    (*_IMAGES, "--batch-size", "2048", "--optimizer", "lamb", "--base-lr", "0.001"),
    words("125m", 8),
    words("125m", 32),
    words("125m", 8, "--optimizer", "sgd"),
    words("125m", 32, "--checkpoint-activations"),
    words("125m", 8, "--strategy", "fsdp"),
    words("125m", 8, "--strategy", "fsdp", "--checkpoint-activations"),
    words("125m", 8, "--precision", "fp32"),
    words("350m", 4),
    words("350m", 16),
    words("350m", 16, "--checkpoint-activations"),
    words("350m", 4, "--strategy", "fsdp"),
    words("1b", 4),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One training: what was said, and what it took."""

    flags: tuple[str, ...]
    predicted_bytes: int
    is_captured: bool
    held_bytes: int
    taken_bytes: int

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_bytes / self.held_bytes


def predict(flags: Sequence[str]) -> tuple[int, bool]:
    """What the forecast says of the candidate as set, in this process, and whether a micro-batch would be captured."""
    from stormo.predict.candidates import list_candidates
    from stormo.predict.forecaster import Forecaster
    from stormo.system.hardware import visible_gpus
    from stormo.training.settings import read_settings

    config, task_class = read_settings(list(flags))
    gpus = visible_gpus()[:1]
    study = Forecaster(task_class(config.task_options), config, gpus)
    (candidate,) = [candidate for candidate in list_candidates(config, gpus, study.facts) if candidate.is_as_set]
    _, found = study.forecast(candidate)
    if found is None or found.largest_batch is None:
        sys.exit(f"stormo predict {' '.join(flags)} does not know: {study.notices}")
    return round(found.allocated_bytes), found.terms["captured"] > 0


def measure(flags: Sequence[str], folder: Path, number: int) -> tuple[int, int]:
    """Train, and read the peaks of the run's summary: bytes held and taken."""
    name = f"cell-{number}"
    plain = ("--epochs", "1", "--checkpoint-every", "0", "--no-tensorboard", "--no-energy", "--on-divergence", "ignore")
    command = train_command(*flags, "--num-gpus", 1, *plain, "--runs-folder", str(folder), "--run-name", name)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads((folder / name / "summary.json").read_text())
    return int(summary["peak_memory_bytes"]), int(summary["peak_reserved_memory_bytes"])


def compare(
    every: Sequence[tuple[str, ...]],
    jobs: int,
    folder: Path,
    *,
    measured_by: Callable[[Sequence[str], Path, int], tuple[int, int]] = measure,
    predicted_by: Callable[[Sequence[str]], tuple[int, bool]] = predict,
) -> list[Cell]:
    """Train in threads, and forecast meanwhile."""
    with ThreadPoolExecutor(jobs) as pool:
        under_way = [pool.submit(measured_by, flags, folder, number) for number, flags in enumerate(every)]
        predicted = [predicted_by([*flags, "--num-gpus", "1"]) for flags in every]
        measured = [one.result() for one in under_way]
    return [Cell(flags, *said, *seen) for flags, said, seen in zip(every, predicted, measured, strict=True)]


def summarise(cells: Sequence[Cell]) -> list[str]:
    """The table and the last line."""
    rows = [["training", "predicted", "held", "taken", "captured", "ratio"]]
    for cell in cells:
        sizes = [f"{size / 2**30:.2f}" for size in (cell.predicted_bytes, cell.held_bytes, cell.taken_bytes)]
        rows.append([" ".join(_telling(cell.flags)), *sizes, "yes" if cell.is_captured else "no", f"{cell.ratio:.3f}"])
    ratios = [cell.ratio for cell in cells]
    worst = max(ratios, key=lambda ratio: abs(math.log(ratio)))
    figures = {"median_ratio": statistics.median(ratios), "worst_ratio": worst, "cells": len(cells)}
    return [*aligned(rows), result_line(figures)]


def _telling(flags: Sequence[str]) -> list[str]:
    """The flags without those that say how long a training is."""
    kept, skips = [], False
    for word in flags:
        if skips:
            skips = False
        elif word.startswith("--task.") and word.endswith(("-bytes", "-samples", "-folder")):
            skips = True
        else:
            kept.append(word)
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare all cells, print a table and the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=3, help="trainings at a time (default: 3)")
    parser.add_argument("--only", default="", help="cells whose flags hold these words, such as '350m 16'")
    parser.add_argument("--data-folder", help="with the files of Fashion-MNIST; default: where stormo keeps them")
    options = parser.parse_args(arguments)
    from stormo.system.hardware import visible_gpus

    wanted = [flags for flags in CELLS if all(word in flags for word in options.only.split())]
    has_images = any(flags[0] == "fashion-mnist" for flags in wanted)
    data = ("--task.data-folder", data_folder(options.data_folder)) if has_images else ()
    if not visible_gpus():
        parser.error("no GPU is visible, and it is its memory that is forecast")
    every = [(*flags, *data) if flags[0] == "fashion-mnist" else flags for flags in wanted]
    with tempfile.TemporaryDirectory() as folder:
        cells = compare(every, options.jobs, Path(folder))
    print("\n".join(summarise(cells)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
