"""The stage `speed` of `benchmarks.slices`: the real command `stormo train` beside hand-written loops and peers.

All train the reference job for two epochs, one after the other, round by round; the speed is that of the second epoch.
A ratio compares two sides of the same round; the median over the rounds is the figure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.command import aligned, free_port, torchrun_variables, train_command
from benchmarks.slice_devices import Devices
from benchmarks.slice_peers import FIGURE, PACKAGES, package_of

SIDES = (
    *("stormo", "plain", "same link", "stormo untuned", "accelerate", "lightning"),
    *("stormo fsdp", "plain fsdp", "stormo sync norm"),
)
_PEERS = {"plain": "plain", "same link": "plain", "plain fsdp": "fsdp", "accelerate": "accelerate"}
_PEERS |= {"lightning": "lightning"}
_FLAGS = {
    "stormo untuned": ("--no-tune-link",),  # stormo with NCCL's own settings
    "stormo fsdp": ("--strategy", "fsdp"),
    "stormo sync norm": ("--sync-batch-norm",),
}
# Figure: (side, beside which other side); speeds are divided.
RATIOS = {
    "ddp_vs_plain_4": ("stormo", "plain"),
    "ddp_vs_accelerate_4": ("stormo", "accelerate"),
    "ddp_vs_lightning_4": ("stormo", "lightning"),
    "ddp_vs_plain_same_link_4": ("stormo", "same link"),
    "fsdp_vs_plain_4": ("stormo fsdp", "plain fsdp"),
    "sync_bn_cost": ("stormo", "stormo sync norm"),
}
_RUN_S = 120.0  # after which a run has hung
_FIRST_GUESS_S = 45.0  # that a run may take


class SideFailedError(Exception):
    """A side has no figure; the text says why."""


@dataclass(kw_only=True)
class Speed:
    """Images per second by (side, number of devices), one for each round."""

    images_per_s: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    link: dict[str, str] | None = None  # NCCL settings that stormo chose

    def ratio(self, figure: str, size: int) -> float:
        """The median over the rounds; not a number where a side was not measured."""
        ours, theirs = (self.images_per_s.get((side, size), []) for side in RATIOS[figure])
        return _median([a / b for a, b in zip(ours, theirs, strict=False)])

    def lines(self) -> list[str]:
        """The table."""
        head = ["images/s of the second epoch", "devices", "rounds", "median"]
        rows = [
            [side, str(size), " / ".join(f"{one:,.0f}" for one in values), f"{_median(values):,.0f}"]
            for (side, size), values in self.images_per_s.items()
        ]
        return aligned([head, *rows])


def _median(values: Sequence[float]) -> float:
    """Of those that were measured."""
    measured = [value for value in values if not math.isnan(value)]
    return statistics.median(measured) if measured else math.nan


class SpeedStage:
    """Runs every side on some of the devices."""

    def __init__(self, devices: Devices, options: argparse.Namespace, folder: Path) -> None:
        self._devices, self._options, self._folder = devices, options, folder
        self._deadline_s = time.monotonic() + options.budget_s
        self._took_s: dict[str, float] = {}
        self._number = 0
        self.speed = Speed(link=options.link)

    def run(self, main_size: int, others: Sequence[int], sides: Sequence[str]) -> Speed:
        """All sides in turn, round by round; then stormo and the plain loop on other numbers of devices."""
        for _ in range(self._options.rounds):
            for side in sides:
                self._measure(side, main_size)
        for size in others:
            for side in ("stormo", "plain"):
                self._measure(side, size)
        return self.speed

    def _measure(self, side: str, size: int) -> None:
        began_s = time.monotonic()
        if began_s + self._took_s.get(side, _FIRST_GUESS_S) > self._deadline_s:
            value, text = math.nan, f"not run: {self._options.budget_s:g} s would be over (--budget-s)"
        else:
            try:
                value = self._images_per_s(side, size)
                text = f"{value:,.0f} images/s"
            except SideFailedError as error:
                value, text = math.nan, str(error)
            self._took_s[side] = time.monotonic() - began_s
        self.speed.images_per_s.setdefault((side, size), []).append(value)
        print(f"{side}, {size}: {text} ({time.monotonic() - began_s:.1f} s)", file=sys.stderr, flush=True)

    def _images_per_s(self, side: str, size: int) -> float:
        devices = self._devices.take(0, size)
        if side not in _PEERS:
            return self._stormo(side, devices)
        peer = _PEERS[side]
        if peer in PACKAGES and package_of(peer) is None:
            raise SideFailedError(f"the package {peer} is not installed")
        if side == "same link" and self.speed.link is None:
            raise SideFailedError("stormo has recorded no NCCL settings, and --link gives none")
        return self._peer(peer, devices, self.speed.link or {} if side == "same link" else {})

    def _stormo(self, side: str, devices: Devices) -> float:
        options, self._number = self._options, self._number + 1
        name = f"run-{self._number}"
        command = train_command(
            *("fashion-mnist", "--device", devices.device, "--num-gpus", len(devices), "--epochs", 2),
            *("--global-batch-size", options.global_batch_size, "--task.width", options.width),
            *("--task.train-samples", options.samples, "--task.validation-samples", min(1000, options.samples)),
            *("--task.data-folder", str(options.data_folder), "--target-accuracy", 2, "--checkpoint-every", 0),
            *(["--autotune"] if devices.device == "cuda" else []),  # as in the other loops, and in longer runs
            *("--runs-folder", str(self._folder), "--run-name", name, *_FLAGS.get(side, ())),
        )
        _finish([_start(command, devices.of_command(), self._folder / f"{name}.txt")])
        lines = (self._folder / name / "events.jsonl").read_text(encoding="utf-8").splitlines()
        epochs = [event for event in map(json.loads, lines) if event["event"] == "epoch_done"]
        if side == "stormo" and len(devices) == min(4, len(self._devices)):
            self.speed.link = options.link or recorded_link(self._folder / name)
            print(f"link: {self.speed.link}", file=sys.stderr, flush=True)
        return float(epochs[-1]["samples_per_s"])

    def _peer(self, peer: str, devices: Devices, link: Mapping[str, str]) -> float:
        options, port = self._options, free_port()
        command = [sys.executable, "-m", "benchmarks.slice_peers", peer, "--device", devices.device]
        command += ["--width", str(options.width), "--samples", str(options.samples)]
        command += ["--global-batch-size", str(options.global_batch_size), "--data-folder", str(options.data_folder)]
        size, self._number = len(devices), self._number + 1
        outputs = [self._folder / f"{peer}-{self._number}-{rank}.txt" for rank in range(size)]
        started = []
        for rank, output in enumerate(outputs):
            # Each device counts as a node, so that every rank takes its first GPU.
            places = torchrun_variables(rank, size, port, num_nodes=size)
            started.append(_start(command, {**places, **devices.of_rank(rank), **link}, output))
        _finish(started)
        printed = [line for line in outputs[0].read_text(encoding="utf-8").splitlines() if FIGURE in line]
        return float(json.loads(printed[-1])[FIGURE])


def recorded_link(run_folder: Path) -> dict[str, str] | None:
    """The NCCL settings that a run of stormo has measured; none for NCCL's defaults, None without a measurement."""
    summary: dict[str, Any] = json.loads((run_folder / "summary.json").read_text(encoding="utf-8"))
    found: dict[str, Any] | None = summary.get("link")
    return None if found is None else dict(found["variables"])


Started = tuple[subprocess.Popen[bytes], Path]


def _start(command: list[str], variables: Mapping[str, str], output: Path) -> Started:
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    return process, output


def _finish(started: Sequence[Started]) -> None:
    """Wait for all; once one fails or hangs, end the others."""
    deadline_s = time.monotonic() + _RUN_S
    try:
        while any(process.poll() is None for process, _ in started):
            failed = [one for one in started if one[0].poll()]
            if failed or time.monotonic() > deadline_s:
                break
            time.sleep(0.02)
    finally:
        for process, _ in started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    codes = [process.wait() for process, _ in started]
    bad = next((rank for rank, code in enumerate(codes) if code > 0), next((r for r, c in enumerate(codes) if c), None))
    if bad is not None:
        text = started[bad][1].read_text(encoding="utf-8", errors="replace")[-2000:]
        raise SideFailedError(f"process {bad} ended with {codes[bad]}: {text}")


def run_stage(devices: Devices, options: argparse.Namespace) -> Speed:
    """Measure on 4 devices; on 2 and on all of them stormo and the plain loop alone."""
    size = min(4, len(devices))
    with tempfile.TemporaryDirectory() as folder:
        stage = SpeedStage(devices, options, Path(folder))
        if options.quick:
            return stage.run(size, [], SIDES[:2])
        return stage.run(size, [2, len(devices)], SIDES)
