"""What the energy figures are worth, on one GPU: counter against power, repeats, the cost of measuring, the bill.

    python -m benchmarks.energy [--data-folder FOLDER] [--repeats 5] [--epochs 6] [--skip-plain]

`counter_vs_power`: joules by the GPU's counter over those by its power, sampled 20 times a second and integrated, over
all of the runs. `variation`: the coefficient of variation of the bills (GPU) of equal runs. `overhead`: time of a
training epoch with measuring over the time without, in interleaved pairs, of which the median is shown. `energy_j`: of
a run that ends when 85 % were held for two epochs, and `plain_energy_j` that of a plain script, both by the GPU's
counter over the whole process, from its start on cold caches to its end. `train_energy_j`: of the first of the two,
while it trained, by its bill.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command import data_folder, result_line, run_to_end, train_command
from benchmarks.time_to_accuracy import FAST, as_flags, measured, run_stormo
from stormo.energy import Meter, Source
from stormo.energy.probes import NvidiaProbe
from stormo.system.nvml import Device, NvmlUnavailableError, open_nvml

_REFRESH_S = 0.1


class PowerProbe:
    """A GPU's power, although it has a counter."""

    notes = ()

    def __init__(self, device: Device) -> None:
        self._device = device
        self.sources = (
            Source(
                id="power",
                kind="gpu",
                name=device.name,
                method="power",
                resolution_j=1e-4,
                interval_s=_REFRESH_S,
            ),
        )

    def read(self) -> dict[str, float]:
        """Watts now."""
        power_w = self._device.power_w()
        return {} if power_w is None else {"power": power_w}

    def close(self) -> None:
        """Nothing is open."""


def run(name: str, folder: Path, flags: list[str]) -> tuple[dict[str, Any], float]:
    """One `stormo train`: its summary, and the median time of an epoch after the first."""
    run_to_end(train_command("fashion-mnist", *flags, "--run-name", name, "--runs-folder", str(folder)))
    summary = json.loads((folder / name / "summary.json").read_text())
    events = [json.loads(line) for line in (folder / name / "events.jsonl").read_text().splitlines()]
    times_s = [event["epoch_time_s"] for event in events if event["event"] == "epoch_done"]
    return summary, statistics.median(times_s[1:])


def main() -> int:
    """Run everything and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-folder", help="with the files of Fashion-MNIST; default: where stormo keeps them")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs with and without measuring (default: 5)")
    parser.add_argument("--epochs", type=int, default=6, help="of each of them (default: 6)")
    parser.add_argument("--skip-plain", action="store_true")
    options = parser.parse_args()
    if options.repeats < 2 or options.epochs < 2:
        parser.error("there is no variation of one run and no epoch after the first of one: set 2 or more")
    images = data_folder(options.data_folder)
    try:
        device = open_nvml().visible()[0]
    except (NvmlUnavailableError, IndexError) as error:
        sys.exit(f"this benchmark measures a GPU and none can be read here ({error}); run it on a machine with one")
    data = ["--task.data-folder", images]
    fixed = as_flags(FAST | {"--epochs": str(options.epochs), "--target-accuracy": "2"}, 0) + data
    bills_j, ratios = [], []
    counter = Meter([NvidiaProbe([device]), PowerProbe(device)])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run("warm-up", folder, fixed)  # reads the libraries and heats the GPU
        before = counter.read()
        for repeat in range(options.repeats):
            sides = {"--energy": math.nan, "--no-energy": math.nan}
            for side in list(sides)[:: 1 if repeat % 2 else -1]:
                summary, sides[side] = run(f"{repeat}{side}", folder, [*fixed, side])
                if side == "--energy":
                    bills_j.append(summary["energy_kinds_j"]["gpu"])
            ratios.append(sides["--energy"] / sides["--no-energy"])
            print(
                f"repeat {repeat}: {bills_j[-1]:.0f} J, epoch with measuring {ratios[-1]:.4f} of one without",
                flush=True,
            )
        drawn = {key: value - before[key] for key, value in counter.read().items()}
        counter.close()
        target = run_stormo("target", as_flags(FAST, 0), folder, data)
    plain_j = math.nan
    if not options.skip_plain:
        plain = [sys.executable, "-m", "benchmarks.plain_script", "--data-folder", images]
        _, plain_j, output = measured(plain)
        print(output.splitlines()[-1])
    print(f"{device.name}: counter {drawn[device.physical_uuid]:.0f} J, integrated power {drawn['power']:.0f} J")
    parts = ", ".join(f"{part} {joules:.0f} J" for part, joules in target["energy_parts_j"].items())
    print(f"85 % held for two epochs, by the run's own bill: {parts}; bound ± {target['energy_error_j']:.0f} J")
    figures = {
        "counter_vs_power": drawn[device.physical_uuid] / drawn["power"],
        "variation": statistics.stdev(bills_j) / statistics.fmean(bills_j),
        "overhead": statistics.median(ratios),
        "train_energy_j": target["train_energy_j"],
        "energy_j": target["energy_j"] if target["time_to_target_s"] is not None else math.nan,
        "plain_energy_j": plain_j,
    }
    print(result_line(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
