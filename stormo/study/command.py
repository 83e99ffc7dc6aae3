"""The verb `scale`: trains at several numbers of workers, or reads a table, and says whether more workers pay."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stormo.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_RESUMABLE, SettingError, pluralize
from stormo.study import runner
from stormo.study.curve import make_curve
from stormo.study.fit import fit_model
from stormo.study.measurement import Measurement, read_csv
from stormo.study.report_text import report_lines
from stormo.study.results import Result, write_results
from stormo.study.study import Scale, read_arguments, read_study
from stormo.telemetry.text import write_text


def main(arguments: list[str], train: runner.Runner = runner.run_child) -> int:
    """Do the study; `train` does one run."""
    given, rest = read_arguments(arguments)
    if "from_" in given:
        return _from_csv(given, rest)
    study = read_study(given, rest)
    runner.check_folder(study)
    runner.check_runs(study)
    try:
        runner.open_folder(study)
    except OSError as error:
        raise _cannot_write(study.output, error) from None
    _print(f"{study.output}: the same command with --output {study.output} resumes this study")
    load, num_cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > num_cpus / 2:
        _print(f"other programs are running (load {load:.1f} on {pluralize(num_cpus, 'core')}): figures will scatter")
    if study.on_cpus and "OMP_NUM_THREADS" not in os.environ:
        _print(
            f"CPU workers share the {pluralize(num_cpus, 'core')} of this machine, and one worker alone uses them all: "
            "OMP_NUM_THREADS=1 gives every worker one"
        )
    if study.single_worker_note:
        _print(f"1 worker: {study.single_worker_note}")
    try:
        with runner.stop_signals():
            measurements, failed = runner.run_study(study, train, _print)
    except KeyboardInterrupt as stopped:
        _print(f"stopped; resume with the same command and --output {study.output}")
        return EXIT_RESUMABLE if isinstance(stopped, runner.StoppedError) else EXIT_INTERRUPTED
    except OSError as error:  # runs that have ended are kept
        raise _cannot_write(study.output, error) from None
    if study.node_id == 0:  # which has the figures
        _show_results(measurements, study.modes, study.output, failed=failed)
    return EXIT_FAILURE if failed else 0


def _from_csv(given: Mapping[str, Any], rest: Sequence[str]) -> int:
    own, path = Scale(**given), Path(given["from_"])
    for_training = ("workers", "num_nodes", "repeats", "seconds", "batch_size", "global_batch_size")
    unused = [*rest, *(f"--{name.replace('_', '-')}" for name in for_training if name in given)]
    if unused:
        why = "a table is read and nothing is trained"
        raise SettingError(f"--from {path} was set with {unused[0]}", why, "leave one of them out")
    if own.mode == "both":
        raise SettingError("--mode both was set with --from", "a table holds one mode", "set strong or weak")
    table = read_csv(path, own.mode)
    if table.unused:
        _print(f"columns of {path} that are not used: {', '.join(table.unused)}")
    folder = Path(own.output) if own.output else Path("runs") / f"scale-{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    _show_results(table.measurements, own.modes, folder, energy_per=table.energy_per)
    return 0


def _show_results(
    measurements: Sequence[Measurement],
    modes: Sequence[str],
    folder: Path,
    *,
    failed: Sequence[runner.FailedRun] = (),
    energy_per: str = "sample",
) -> None:
    """Print the text of every mode, and write the files."""
    curves = [curve for mode in modes if (curve := make_curve(measurements, mode, energy_per)) is not None]
    results: list[Result] = [(curve, fit_model(curve.measurements, curve.mode)) for curve in curves]
    _print("")
    for curve, fit in results:
        write_text("\n".join(report_lines(curve, fit)) + "\n", sys.stdout)
    if failed:
        _print(f"{pluralize(len(failed), 'run')} failed:")
        for one in failed:
            _print(f"  {one.run.label}: {one.error}")
    if results:
        failures = [
            {"name": one.run.name, "mode": one.run.mode, "workers": one.run.workers, "error": one.error}
            for one in failed
        ]
        try:
            for line in write_results(folder, results, failures):
                _print(line)
        except OSError as error:
            raise _cannot_write(folder, error) from None


def _cannot_write(folder: Path, error: OSError) -> SettingError:
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    return SettingError(f"--output {folder} was set", f"nothing can be written there ({what})", "set another folder")


def _print(line: str) -> None:
    write_text(f"{line}\n", sys.stdout)
