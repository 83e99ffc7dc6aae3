"""Time and energy to 85 % held for two epochs, and to 95 %, on one GPU; a plain script beside it in the same run.

    python -m benchmarks.time_to_accuracy [--data-folder FOLDER] [--seeds 3]

Every run is a fresh process without compiled kernels from an earlier one; wall time is from process start to process
end. `wall_time_s` is that of the very first process, which also reads every library from a cold disk when the machine
has just been started; `warm_wall_time_s` is the median of the others, and what the plain script gets. Energy is the
GPU's own counter over the whole process; `nan` where it cannot be read. `train_energy_j` is that of the training alone;
`nan` also where the bill has more than GPUs. `images_per_s` is the steady state of a run long enough for autotuned
convolutions to pay; `fast_images_per_s` that of the short runs.
"""

from __future__ import annotations

import argparse
import compileall
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import stormo
from benchmarks.command import data_folder

FAST: dict[str, str | None] = {
    "--batch-size": "512",
    "--base-lr": "0.05",
    "--nesterov": None,
    "--warmup-epochs": "0.2",
    "--warmup-from": "0.1",
    "--decay": "step",
    "--decay-every": "0.6",
    "--decay-factor": "0.1",
    "--epochs": "2",
    "--checkpoint-every": "0",
}
ACCURATE = FAST | {
    "--base-lr": "0.2",
    "--weight-decay": "0.0005",
    "--warmup-epochs": "2",
    "--warmup-from": "0.05",
    "--decay": "linear",
    "--epochs": "15",
    "--autotune": None,
    "--task.augment": None,
    "--task.label-smoothing": "0.1",
    "--target-accuracy": "0.95",
    "--patience": "1",
}
# Long enough that trying out convolutions pays, so that it shows what a long run settles at.
STEADY = FAST | {"--epochs": "5", "--target-accuracy": "2", "--autotune": None}


def as_flags(recipe: dict[str, str | None], seed: int) -> list[str]:
    """A recipe as a command line."""
    return [word for flag, value in recipe.items() for word in (flag, value) if word is not None] + [
        "--seed",
        str(seed),
    ]


def energy_counter_j() -> float:
    """The GPU's total-energy counter in joules, or nan."""
    try:
        import pynvml  # type: ignore[import-untyped, import-not-found, unused-ignore]

        pynvml.nvmlInit()
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0))) / 1000
    except Exception:
        return math.nan


def measured(command: list[str]) -> tuple[float, float, str]:
    """Run a command on cold caches: wall seconds, joules, standard output."""
    with tempfile.TemporaryDirectory() as cold:
        environ = dict(os.environ, TRITON_CACHE_DIR=f"{cold}/triton", TORCHINDUCTOR_CACHE_DIR=f"{cold}/inductor")
        before_j, began = energy_counter_j(), time.perf_counter()
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        wall_s, energy_j = time.perf_counter() - began, energy_counter_j() - before_j
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return wall_s, energy_j, done.stdout


def run_stormo(name: str, flags: list[str], folder: Path, data: list[str]) -> dict[str, Any]:
    """One `stormo train`: its summary, with measured wall time, energy and the last epoch's throughput."""
    command = [sys.executable, "-m", "stormo", "train", *flags, *data, "--run-name", name, "--runs-folder", str(folder)]
    wall_s, energy_j, output = measured(command)
    print(output)
    summary: dict[str, Any] = json.loads((folder / name / "summary.json").read_text())
    events = [json.loads(line) for line in (folder / name / "events.jsonl").read_text().splitlines()]
    steady = [event["units_per_s"] for event in events if event["event"] == "epoch_done"][-1]
    parts_j = summary["energy_parts_j"] if set(summary["energy_kinds_j"]) == {"gpu"} else None
    train_j = parts_j["training"] + parts_j["waiting"] if parts_j else math.nan
    return summary | {
        "wall_time_s": wall_s,
        "energy_j": energy_j,
        "train_energy_j": train_j,
        "steady_images_per_s": steady,
    }


def main() -> None:
    """Run everything and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-folder", help="with the files of Fashion-MNIST; default: where stormo keeps them")
    parser.add_argument("--seeds", type=int, default=3, help="runs of the 85 %% recipe")
    parser.add_argument("--accurate-seeds", type=int, default=3, help="runs of the 95 %% recipe")
    parser.add_argument("--skip-plain", action="store_true")
    parser.add_argument("--skip-accurate", action="store_true")
    options, extra = parser.parse_known_args()
    images = data_folder(options.data_folder)
    if shutil.which("nvidia-smi") is None:
        sys.exit("this benchmark measures a GPU and none is here; run it on a machine with one")
    compileall.compile_dir(Path(stormo.__file__).parent, quiet=1)  # as pip does when it installs a package
    folder = Path(tempfile.mkdtemp())
    data = ["--task.data-folder", images]
    fast = [run_stormo(f"fast-{s}", as_flags(FAST, s) + extra, folder, data) for s in range(options.seeds)]
    for run in fast:
        print(_row("85 % held two epochs", run))
    steady = run_stormo("steady", as_flags(STEADY, 0) + extra, folder, data)
    accurate = []
    if not options.skip_accurate:
        seeds = range(options.accurate_seeds)
        accurate = [run_stormo(f"acc-{s}", as_flags(ACCURATE, s) + extra, folder, data) for s in seeds]
    for run in accurate:
        print(_row("95 %", run))
    plain: dict[str, float] = {}
    if not options.skip_plain:
        script = [sys.executable, "-m", "benchmarks.plain_script", "--data-folder", images]
        wall_s, energy_j, output = measured(script)
        print(output)
        plain = json.loads(output.splitlines()[-1]) | {"wall_time_s": wall_s, "energy_j": energy_j}
    figures = {
        "images_per_s": steady["steady_images_per_s"],
        "fast_images_per_s": _median(fast, "steady_images_per_s"),
        "train_time_s": _median(fast, "time_to_target_s"),
        "wall_time_s": fast[0]["wall_time_s"],
        "warm_wall_time_s": _median(fast[1:], "wall_time_s"),
        "train_energy_j": _median(fast, "train_energy_j"),
        "energy_j": _median(fast, "energy_j"),
        "accuracy": _median(fast, "validation_accuracy"),
        "accurate_train_time_s": _median(accurate, "time_to_target_s"),
        "accurate_wall_time_s": _median(accurate, "wall_time_s"),
        "accurate_accuracy": _median(accurate, "validation_accuracy"),
        "accurate_energy_j": _median(accurate, "energy_j"),
    } | {f"plain_{key}": value for key, value in plain.items()}
    print("RESULT " + " ".join(f"{key}={value:.6g}" for key, value in figures.items()))
    limits = {"train_time_s": 4.5, "wall_time_s": 20.0} | ({"accurate_train_time_s": 27.0} if accurate else {})
    missed = [f"{key} <= {limit}" for key, limit in limits.items() if not figures[key] <= limit]  # nan is a miss
    missed += ["images_per_s >= 30000"] if not figures["images_per_s"] >= 30_000 else []
    sys.exit(f"missed on an H200: {', '.join(missed)}" if missed else 0)


def _median(runs: list[dict[str, Any]], key: str) -> float:
    values = [run[key] for run in runs if run[key] is not None]
    return statistics.median(values) if values and len(values) == len(runs) else math.nan  # a miss is no figure


def _row(label: str, run: dict[str, Any]) -> str:
    target_s = run["time_to_target_s"]
    return (
        f"{label}: {'missed' if target_s is None else f'{target_s:.2f} s'} of training in {run['epochs_run']} epochs, "
        f"wall {run['wall_time_s']:.1f} s (set-up {run['setup_time_s']:.1f} s: "
        + ", ".join(f"{part} {seconds:.1f}" for part, seconds in run["setup_parts_s"].items())
        + "), "
        f"{run['steady_images_per_s']:.0f} images/s, accuracy {run['validation_accuracy']:.4f}, {run['energy_j']:.0f} J"
    )


if __name__ == "__main__":
    main()
