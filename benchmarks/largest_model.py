"""The largest GPT of the presets that trains one step on one GPU: plain, recomputing activations, offloading, both.

    python -m benchmarks.largest_model [--batch-size 1] [--budget-s 540] [--memory-gib 24] [--ways plain,offload]

bf16 with weights, gradients and the state of AdamW in float32: 16 bytes for each parameter, on the device, or, with
--offload (under fsdp on one worker), in the host's memory. Every try is a subprocess that builds the model, takes
one whole step and reports the peak of the device's memory; the presets are tried from the largest, until one fits.
What cannot fit by these 16 bytes alone is not tried. `--memory-gib` lets the device's memory seem smaller.
`--device cpu` is for trying the command: nothing but the presets that are named then bounds it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.command import aligned

WAYS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "checkpoint-activations": ("checkpoint_activations",),
    "offload": ("offload",),
    "both": ("checkpoint_activations", "offload"),
}
PRESETS = ("125m", "350m", "1b", "2.7b", "6.7b", "13b")
BYTES_PER_PARAMETER = 16
_HOST_SHARE = 0.9  # of the host's memory that is free: the process needs some for itself
_OUT_OF_MEMORY = 3  # exit code of a try


@dataclass(frozen=True, kw_only=True, slots=True)
class Try:
    """One way to train one preset; `note` says why it did not fit, or what it took."""

    way: str
    preset: str
    fits: bool
    note: str


def num_parameters(preset: str) -> int:
    """Of the GPT of that size."""
    from stormo.tasks.language_model import SIZES, VOCABULARY

    return SIZES[preset].num_parameters(block=SIZES[preset].block, vocabulary=VOCABULARY)


def too_large(preset: str, way: str, device_bytes: float, host_bytes: float) -> str:
    """Why a preset cannot fit, by arithmetic alone; nothing where it might."""
    needed = BYTES_PER_PARAMETER * num_parameters(preset)
    where, room = ("host", host_bytes) if "offload" in WAYS[way] else ("device", device_bytes)
    return f"needs {needed / 2**30:.0f} GiB of the {room / 2**30:.0f} of the {where}" if needed > room else ""


def train_one_step(options: argparse.Namespace) -> int:
    """In a subprocess: one step; its peak as JSON on the last line."""
    import torch

    from benchmarks.strategy_tasks import Words
    from benchmarks.strategy_worker import batches, build, single_world
    from stormo.tasks.language_model import SIZES
    from stormo.training.trainer import set_arithmetic

    is_gpu = options.device == "cuda"
    world = single_world(torch.device("cuda", 0) if is_gpu else torch.device("cpu"))
    if is_gpu and options.memory_gib:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory_gib * 2**30 / whole))
    flags: dict[str, Any] = dict.fromkeys(WAYS[options.way], True)
    flags |= {"strategy": "fsdp" if "offload" in flags else "single", "optimizer": "adamw", "graph": False}
    flags |= {"batch_size": options.batch_size, "precision": "bf16" if is_gpu else "fp32", "compile": False}
    try:
        built = build(world, Words(SIZES[options.try_preset], options.batch_size), {**flags, "noise_scale": False})
        set_arithmetic(built.config, built.plan)
        began_s = time.perf_counter()
        loss = built.strategy.micro_step(next(batches(built.loader)))
        built.strategy.step(1e-4)
        figures: dict[str, float | None] = {"loss": float(loss), "step_s": time.perf_counter() - began_s}
    except RuntimeError as error:  # of which the device's own is one; the host's has no class
        if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
            raise
        print(json.dumps({"error": str(error).split(".")[0]}))
        return _OUT_OF_MEMORY
    figures["peak_bytes"] = torch.cuda.max_memory_allocated() if is_gpu else None
    print(json.dumps(figures))
    world.close()
    return 0


def attempt(way: str, preset: str, options: argparse.Namespace, timeout_s: float) -> Try:
    """Start a try and read how it ended."""
    arguments = ["--try-preset", preset, "--way", way, "--batch-size", str(options.batch_size)]
    arguments += ["--device", options.device]
    arguments += ["--memory-gib", str(options.memory_gib)] if options.memory_gib else []
    command = [sys.executable, "-m", "benchmarks.largest_model", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return Try(way=way, preset=preset, fits=False, note="not known: the budget of time is spent")
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode == _OUT_OF_MEMORY:
        return Try(way=way, preset=preset, fits=False, note=json.loads(last[0])["error"])
    if done.returncode == -9:  # what the kernel does where the host's memory is full
        return Try(way=way, preset=preset, fits=False, note="killed: the host's memory was full")
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    figures = json.loads(last[0])
    peak = "n/a" if figures["peak_bytes"] is None else f"{figures['peak_bytes'] / 2**30:.1f} GiB"
    note = f"{peak} at most, {figures['step_s']:.1f} s, loss {figures['loss']:.2f}"
    return Try(way=way, preset=preset, fits=True, note=note)


def tries_of(way: str, options: argparse.Namespace, memory: tuple[float, float], deadline_s: float) -> list[Try]:
    """From the largest preset until one fits."""
    found: list[Try] = []
    for preset in reversed(options.presets):
        reason = too_large(preset, way, *memory)
        left_s = deadline_s - time.monotonic()
        if reason or left_s <= 0:
            note = reason or "not known: the budget of time is spent"
            found.append(Try(way=way, preset=preset, fits=False, note=note))
        else:
            print(f"trying {preset}, {way} ...", file=sys.stderr, flush=True)
            found.append(attempt(way, preset, options, left_s))
        if found[-1].fits:
            break
    return found


def _memory(options: argparse.Namespace) -> tuple[float, float]:
    """Bytes of the device and of the host that may be taken."""
    import psutil

    from stormo.system.hardware import visible_gpus

    host = _HOST_SHARE * psutil.virtual_memory().available
    if options.device == "cpu":
        return host, host
    whole = float(visible_gpus()[0].memory_bytes)
    return min(whole, options.memory_gib * 2**30) if options.memory_gib else whole, host


def result(found: Sequence[Try]) -> str:
    """The last line: the name of the largest preset of each way, and its parameters."""
    fields = ["RESULT"]
    for way in WAYS:
        name = next((one.preset for one in found if one.way == way and one.fits), "none")
        count = 0 if name == "none" else num_parameters(name)
        fields += [f"{way.replace('-', '_')}={name}", f"{way.replace('-', '_')}_parameters={count}"]
    return " ".join(fields)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try all, print a table and the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=1, help="windows in the step (default: 1)")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds for all (default: 540)")
    parser.add_argument("--memory-gib", type=float, help="use so much of the device's memory; default all")
    parser.add_argument("--presets", type=lambda text: text.split(","), default=list(PRESETS), help="smallest first")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help=", ".join(WAYS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--try-preset", help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    from stormo.system.hardware import visible_gpus

    if options.device == "cuda" and not visible_gpus():
        parser.error("no GPU is visible, and it is its memory that is looked into; --device cpu tries the command")
    if options.try_preset:
        return train_one_step(options)
    deadline_s, memory = time.monotonic() + options.budget_s, _memory(options)
    found = [one for way in options.ways for one in tries_of(way, options, memory, deadline_s)]
    rows = [[one.way, one.preset, "yes" if one.fits else "no", one.note] for one in found]
    print("\n".join(aligned([["way", "preset", "trains", "what it took, or why not"], *rows])))
    print(result(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
