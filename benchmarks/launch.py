"""Seconds from a command to its first training step on two CPU workers: stormo against torchrun.

    python -m benchmarks.launch [--pairs 10] [--also world,train]

The same script (`launch_script.py`, DDP by hand, nothing of stormo in it) is started by torchrun and by `stormo run`;
the time runs from just before the command is started until rank 0 has ended its first optimizer step. They take turns,
in random order within a pair, after one round that is not measured and leaves all files in memory. A ratio is stormo's
time over torchrun's, pair by pair; its median must not exceed 1. CPU time of all processes, to their end, is shown
too, which shows on a busy machine whether a difference is work or waiting. Beside it, against the same torchrun: the
script with stormo.World under `stormo run`, and the same network and data as a task of `stormo train` with everything
that is on by default: checks, warm-up, run folder, energy.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.command import one_thread, result_line, train_command
from benchmarks.paired_timing import Times, ratios

PROMISED = 1.0
NUM_WORKERS = 2
_ROOT = Path(__file__).parents[1]
_SCRIPT = Path(__file__).with_name("launch_script.py")
_TASK = f"{Path(__file__).with_name('launch_task.py')}:OneStep"
_TIMEOUT_S = 300.0


def torchrun(file: Path) -> list[str]:
    """The plain script by torch's launcher."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(NUM_WORKERS),
        str(_SCRIPT),
        str(file),
    ]


def stormo_run(file: Path, *flags: str) -> list[str]:
    """The same script by stormo's."""
    own = ["--num-gpus", str(NUM_WORKERS), "--device", "cpu"]
    return [sys.executable, "-m", "stormo", "run", str(_SCRIPT), *own, "--", str(file), *flags]


def stormo_world(file: Path) -> list[str]:
    """The script with stormo.World."""
    return stormo_run(file, "--world")


def stormo_train(file: Path) -> list[str]:
    """The task, whose one epoch is one step."""
    flags = ["--num-gpus", str(NUM_WORKERS), "--device", "cpu", "--epochs", "1"]
    flags += ["--task.file", str(file), "--runs-folder", str(file.parent), "--run-name", f"{file.name}-run"]
    return train_command(_TASK, *flags)


SIDES: dict[str, tuple[str, Callable[[Path], list[str]]]] = {
    "torchrun": ("torchrun script.py", torchrun),
    "run": ("stormo run script.py", stormo_run),
    "world": ("stormo run script.py, with stormo.World", stormo_world),
    "train": ("stormo train task.py", stormo_train),
}


def start(command: list[str], file: Path) -> tuple[float, float]:
    """Seconds until the first step, and of CPU; the command is run to its end, and ends the benchmark if it fails."""
    began_s, began_cpu_s = time.monotonic(), _cpu_s()
    done = subprocess.run(
        command, cwd=_ROOT, env=one_thread(), capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    if done.returncode or not file.exists():
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return float(file.read_text(encoding="utf-8")) - began_s, _cpu_s() - began_cpu_s


def _cpu_s() -> float:
    """Of all processes that were started here and have ended."""
    times = os.times()
    return times.children_user + times.children_system


def measure(names: Sequence[str], num_pairs: int, num_warm_ups: int) -> Times:
    """Seconds of every side in every pair."""
    draw = random.Random(0)
    times = Times(wall_s=[], cpu_s=[])
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(-num_warm_ups, num_pairs):
            wall_s, cpu_s = [0.0] * len(names), [0.0] * len(names)
            for side in draw.sample(range(len(names)), len(names)):
                file = Path(folder, f"{names[side]}-{pair}")
                wall_s[side], cpu_s[side] = start(SIDES[names[side]][1](file), file)
            print("  ".join(f"{name} {seconds:.2f} s" for name, seconds in zip(names, wall_s, strict=True)), flush=True)
            if pair >= 0:
                times.wall_s.append(wall_s)
                times.cpu_s.append(cpu_s)
    return times


def compared(times_s: list[list[float]], side: int) -> tuple[float, float, float]:
    """Median and quartiles of a side's time over torchrun's; a single pair has no others beside it."""
    return ratios(times_s if len(times_s) > 1 else times_s * 2, side)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="measured starts of each side (default: 10)")
    parser.add_argument("--warm-ups", type=int, default=1, help="starts of each side before them (default: 1)")
    parser.add_argument("--also", default="world,train", help="what else is started (default: world,train; or none)")
    options = parser.parse_args(arguments)
    also = [] if options.also == "none" else options.also.split(",")
    if not set(also) <= {"world", "train"}:
        parser.error(f"--also {options.also}: choose among world, train and none")
    names = ["torchrun", "run", *also]
    times = measure(names, options.pairs, options.warm_ups)
    figures: dict[str, float | int] = {}
    for side, name in enumerate(names):
        wall_s, cpu_s = (statistics.median(pair[side] for pair in seconds) for seconds in (times.wall_s, times.cpu_s))
        against = ""
        if side:
            median, lower, upper = compared(times.wall_s, side)
            against = f"; over torchrun's: median {median:.3f}, quartiles {lower:.3f} to {upper:.3f}"
            if name == "run":
                figures = {"median_ratio": median, "q25": lower, "q75": upper, "pairs": len(times.wall_s)}
                figures["cpu_median_ratio"] = compared(times.cpu_s, side)[0]
            else:
                figures[f"{name}_median_ratio"] = median
                figures[f"{name}_cpu_median_ratio"] = compared(times.cpu_s, side)[0]
        print(f"{SIDES[name][0]}: {wall_s:.2f} s, {cpu_s:.2f} s of CPU{against}")
    print(result_line(figures))
    return 0 if figures["median_ratio"] <= PROMISED else 1


if __name__ == "__main__":
    sys.exit(main())
