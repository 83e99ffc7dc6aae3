"""The verb `scale`: measures or reads, then says whether more workers pay."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stormo.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_RESUMABLE, SettingError, counted
from stormo.study.curve import make_curve
from stormo.study.fit import fit_model
from stormo.study.measurement import Measurement, read_table
from stormo.study.results import Answer, write_results
from stormo.study.runs import (
    Failed,
    Runner,
    StoppedError,
    check_folder,
    check_runs,
    open_folder,
    run_child,
    run_study,
    stop_signals,
)
from stormo.study.settings import read_arguments, read_mode, read_study
from stormo.study.text import report_lines
from stormo.telemetry.text import write_text


def main(arguments: list[str], run: Runner = run_child) -> int:
    """Read the options and go; `run` does one training."""
    own, rest = read_arguments(arguments)
    if own.table is not None:
        return _from_table(own, rest)
    study = read_study(own, rest)
    check_folder(study)
    check_runs(study)
    try:
        open_folder(study)
    except OSError as error:
        raise _cannot_write(study.output, error) from None
    _say(f"{study.output}: the same command with --output {study.output} goes on where this one ends")
    load, num_cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > num_cpus / 2:
        _say(f"other programs are at work here (load {load:.1f} on {counted(num_cpus, 'core')}): figures will scatter")
    if study.on_cpus and "OMP_NUM_THREADS" not in os.environ:
        _say(
            f"CPU workers share the {counted(num_cpus, 'core')} of this machine, and one worker alone uses them all: "
            "with OMP_NUM_THREADS=1 every worker has one"
        )
    if study.lone_note:
        _say(f"1 worker: {study.lone_note}")
    try:
        with stop_signals():
            measurements, failed = run_study(study, run, _say)
    except KeyboardInterrupt as stopped:
        _say(f"stopped; go on with the same command and --output {study.output}")
        return EXIT_RESUMABLE if isinstance(stopped, StoppedError) else EXIT_INTERRUPTED
    except OSError as error:  # runs that have ended are kept
        raise _cannot_write(study.output, error) from None
    if study.node_id > 0:
        return EXIT_FAILURE if failed else 0  # node 0 has the figures
    _answer(measurements, study.modes, study.output, failed=failed)
    return EXIT_FAILURE if failed else 0


def _from_table(own: argparse.Namespace, rest: Sequence[str]) -> int:
    for_training = ("workers", "num_nodes", "repeats", "seconds", "batch_size", "global_batch_size")
    given = [f"--{name.replace('_', '-')}" for name in for_training if getattr(own, name) is not None]
    if rest or given:
        raise SettingError(
            f"--from {own.table} was set with {[*rest, *given][0]}",
            "a table is read and nothing is trained",
            "leave one of them out",
        )
    modes = read_mode(own.mode)
    if len(modes) > 1:
        raise SettingError("--mode both was set with --from", "a table is measured in one way", "set strong or weak")
    path = Path(own.table)
    table = read_table(path, modes[0])
    if table.unused:
        _say(f"columns of {path} that are not used: {', '.join(table.unused)}")
    folder = Path(own.output) if own.output else Path("runs") / f"scale-{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    _answer(table.measurements, modes, folder, energy_per=table.energy_per)
    return 0


def _answer(
    measurements: Sequence[Measurement],
    modes: Sequence[str],
    folder: Path,
    *,
    failed: Sequence[Failed] = (),
    energy_per: str = "sample",
) -> None:
    """Print the table, the bars and the paragraph of every mode, and write the files."""
    answers: list[Answer] = []
    for mode in modes:
        curve = make_curve(measurements, mode, energy_per)
        if curve is not None:
            answers.append((curve, fit_model(curve.measurements, mode)))
    plain = not _takes_blocks()
    _say("")
    for curve, fit in answers:
        write_text("\n".join(report_lines(curve, fit, plain=plain)) + "\n", sys.stdout)
    if failed:
        _say(f"{counted(len(failed), 'run')} failed:")
        for one in failed:
            _say(f"  {one.cell.words}: {one.error}")
    if answers:
        try:
            lines = write_results(folder, answers, [_failure(one) for one in failed])
        except OSError as error:
            raise _cannot_write(folder, error) from None
        for line in lines:
            _say(line)


def _cannot_write(folder: Path, error: OSError) -> SettingError:
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    return SettingError(f"--output {folder} was set", f"nothing can be written there ({what})", "set another folder")


def _failure(one: Failed) -> dict[str, Any]:
    return {"name": one.cell.name, "mode": one.cell.mode, "workers": one.cell.workers, "error": one.error}


def _takes_blocks() -> bool:
    """Whether the terminal shows block characters; a pipe gets plain signs, which every tool can read."""
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    return sys.stdout.isatty() and encoding == "utf8"


def _say(line: str) -> None:
    write_text(f"{line}\n", sys.stdout)
