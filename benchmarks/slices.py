"""Exactness and speed over real NCCL, on a machine whose GPU is cut into slices (MIG).

    stormo doctor --slices 7                        # cuts the GPU, as root
    python -m benchmarks.slices [--only exactness|speed] [--store]

Each slice is a device of its own, with a rank of its own. NCCL talks over loopback sockets, as over a slow network: see
docs/slices.md. Stage `exactness`: every strategy, product of axes and optimizer against one process
(`benchmarks.slice_exactness`); on a GPU that is not cut, seven ranks share it. Stage `speed`, on slices alone: the
reference job beside hand-written loops, Accelerate and Lightning (`benchmarks.slice_speed`). Each takes about 9
minutes; --budget-s starts nothing that would end later. With --store the figures go to benchmarks/results/slices.json,
or shared_gpu.json; a stage that was not run keeps its stored ones. The last line is `RESULT workers=7 configurations=…
max_relative_difference_fp64=… ddp_vs_plain_4=… …`, nan for what was not measured.
--device cpu --quick tries the benchmark itself on CPU processes; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import slice_exactness, slice_speed
from benchmarks.command import data_folder, largest, result_line
from benchmarks.slice_devices import Devices, cpu_processes, find_devices

ROOT = Path(__file__).parents[1]
STORED = ROOT / "benchmarks" / "results" / "slices.json"
SHARED = STORED.with_name("shared_gpu.json")  # of ranks that share a whole GPU
LEAST = 7
FIGURES = ("workers", "configurations", "max_relative_difference_fp64", *slice_speed.RATIOS)
_EXACTNESS = FIGURES[:3]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages, print the figures and store them."""
    options = _options(arguments)
    devices = cpu_processes(options.workers) if options.device == "cpu" else find_devices(LEAST)
    is_speed_of_turns = options.only != "exactness" and devices.are_shared
    if is_speed_of_turns or len(devices) < (2 if options.quick else LEAST):
        print(
            f"stormo: this benchmark needs {LEAST} slices of a GPU and found {devices.machine}: cut one with "
            "`stormo doctor --slices 7` as root, or `nvidia-smi -i 0 -mig 1; nvidia-smi mig -i 0 "
            "-cgi 19,19,19,19,19,19,19 -C`.",
            file=sys.stderr,
        )
        return 2
    options.data_folder = Path(data_folder(options.data_folder))
    figures: dict[str, Any] = dict.fromkeys(FIGURES, math.nan)
    figures["workers"] = len(devices)
    details: dict[str, Any] = {}
    is_good = True
    if options.only != "speed":
        outcomes = slice_exactness.run_stage(
            devices, options.data_folder, budget_s=options.budget_s, quick=options.quick
        )
        is_good = _sum_up(outcomes, figures, details)
    if options.only != "exactness":
        speed = slice_speed.run_stage(devices, options)
        print("\n".join(speed.lines()))
        figures |= {name: speed.ratio(name, min(4, len(devices))) for name in slice_speed.RATIOS}
        measured = {f"{side}, {size}": values for (side, size), values in speed.images_per_s.items()}
        details["speed"] = {"images_per_s": measured, "link": speed.link, "samples": options.samples}
        is_good = is_good and not math.isnan(figures["ddp_vs_plain_4"])
    if options.store:
        store(SHARED if devices.are_shared else STORED, devices, figures, details, options.commit or _commit())
    print(result_line(figures))
    return 0 if is_good else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("exactness", "speed"), help="one stage")
    parser.add_argument("--store", action="store_true", help="write benchmarks/results/slices.json")
    parser.add_argument("--commit", help="of the code, for --store; default: asked of git")
    parser.add_argument("--budget-s", type=float, default=600.0, help="seconds for a stage (default: 600)")
    parser.add_argument("--rounds", type=int, default=2, help="of the speed on 4 devices (default: 2)")
    parser.add_argument("--samples", type=int, default=30_720, help="images of an epoch (default: 30720)")
    parser.add_argument("--global-batch-size", type=int, default=512)
    parser.add_argument("--width", type=float, default=10.0, help="of the WideResNet (default: 10)")
    parser.add_argument("--link", type=link, help="NCCL settings for `same link`; default: those that stormo chose")
    parser.add_argument("--data-folder", help="with the files of Fashion-MNIST; default: where stormo keeps them")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--workers", type=int, default=7, help="with --device cpu: processes (default: 7)")
    parser.add_argument("--quick", action="store_true", help="two cases and two sides, to try the benchmark itself")
    options = parser.parse_args(arguments)
    if options.store and (options.quick or options.device == "cpu"):
        parser.error("--store is for figures of slices")
    return options


def link(text: str) -> dict[str, str]:
    """`NCCL_MIN_NCHANNELS=4 NCCL_MAX_NCHANNELS=4`, for argparse."""
    words = [word.partition("=") for word in text.split()]
    if not words or not all(name.startswith("NCCL_") and value for name, _, value in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as NCCL_MIN_NCHANNELS=4 NCCL_MAX_NCHANNELS=4")
    return {name: value for name, _, value in words}


def _sum_up(outcomes: Sequence[slice_exactness.Outcome], figures: dict[str, Any], details: dict[str, Any]) -> bool:
    """Add the figures of the stage; whether all was as it should be."""
    checked = [one for one in outcomes if one.kind != "control"]
    figures["configurations"] = len(checked)
    figures["max_relative_difference_fp64"] = largest(one.difference for one in checked if one.kind == "fp64")
    by_kind: dict[str, dict[str, float]] = {}
    for one in outcomes:
        by_kind.setdefault(one.kind, {})[one.name] = one.difference
    for kind, cases in by_kind.items():
        least = f", at least {min(cases.values()):.1e}" if kind == "control" else ""
        print(f"{kind}: {len(cases)} cases, at most {largest(cases.values()):.1e}{least}")
    for one in outcomes:
        if not one.is_good:
            print(f"not as it should be: {one.name}: {one.difference:.1e}")
    details["exactness"] = {"differences": by_kind}
    return all(one.is_good for one in outcomes)


def store(path: Path, devices: Devices, figures: dict[str, Any], details: dict[str, Any], commit: str | None) -> None:
    """Write the figures of the stages that were run; the others keep what is stored."""
    told = {
        "machine": devices.machine,
        "torch": importlib.metadata.version("torch"),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    result: dict[str, Any] = {**dict.fromkeys(FIGURES), **stored.get("result", {})}
    for stage, names in (("exactness", _EXACTNESS), ("speed", tuple(slice_speed.RATIOS))):
        if stage in details:
            result |= {name: figures[name] for name in names}
            stored[stage] = {**told, **details[stage]}
    made: dict[str, Any] = {
        "figure": "every parallel setup over NCCL against one process, and the speed beside other loops, on slices",
        "command": "python -m benchmarks.slices",
        **told,
        "result": result,
        **{stage: stored[stage] for stage in ("exactness", "speed") if stage in stored},
    }
    path.write_text(json.dumps(_without_nan(made), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _without_nan(value: Any) -> Any:
    """With None where a number is none, for JSON."""
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
