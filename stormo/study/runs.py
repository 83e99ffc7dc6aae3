"""The runs of a study: their order, the folder that keeps them, and each as a child process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from stormo.config.plan import Facts, resolve
from stormo.energy.linefile import LineFile
from stormo.errors import EXIT_RESUMABLE, EXIT_USAGE, SettingError, StormoError, counted
from stormo.study.measurement import Measurement, measure_run, measured_s
from stormo.study.settings import Cell, Study, make_cells
from stormo.system.files import (
    MAX_RECORDS_BYTES,
    BadFileError,
    create,
    fits,
    parse_json,
    read_bytes,
    read_lines,
    read_object,
)
from stormo.system.process import own_command
from stormo.tasks.check import check_task
from stormo.telemetry.folder import write_json
from stormo.telemetry.text import format_duration, format_rate
from stormo.training.settings import checked, read_settings


class CellFile:
    """The runs that have ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.done: dict[str, Mapping[str, Any]] = {}
        for line in _whole_lines(path):
            if line.get("state") == "done":
                self.done[str(line.get("name"))] = line

    def measurement(self, cell: Cell) -> Measurement | None:
        """What a run measured, if it has ended well."""
        line = self.done.get(cell.name)
        if not line or not line.get("measurement"):
            return None
        figures = line["measurement"]
        if not fits(figures, Measurement) or not _is_measured(figures):
            raise BadFileError(self._path, f"the figures of {cell.name} are not what a run has measured")
        return Measurement(**figures)

    def add(self, cell: Cell, state: str, measurement: Measurement | None = None, error: str | None = None) -> None:
        """Keep the end of a run: "done" with its figures, or "failed" with the reason."""
        figures = asdict(measurement) if measurement else None
        line = {"name": cell.name, "state": state, "measurement": figures, "error": error}
        file = LineFile(self._path)
        file.append([line])
        file.close()
        if state == "done":
            self.done[cell.name] = line


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Every line that is a JSON object; one that a kill cut short is left out, and its run is done again."""
    found = []
    try:
        for text in read_lines(path):
            try:
                line = parse_json(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                found.append(line)
    except FileNotFoundError:
        return []
    return found


def _is_measured(figures: Mapping[str, Any]) -> bool:
    needed = ("mode", "workers", "repeat", "samples_per_s", "units_per_s", "unit")
    return all(name in figures for name in needed) and min(figures["workers"], figures["samples_per_s"]) > 0


_SETTINGS, _ARGUMENTS = "settings", "train_arguments"


def check_folder(study: Study) -> None:
    """Refuse a folder in which another study lies."""
    before, now = _read_study_file(study), study.identity()
    if before is None:
        return
    if isinstance(before.get(_SETTINGS), dict):  # which say it all, however they are written
        of_runs = {key: value for key, value in now[_SETTINGS].items() if key in before[_SETTINGS]}
        _compare(study, before[_SETTINGS], of_runs)
    else:  # of a release that kept none
        _compare(study, before, {_ARGUMENTS: now[_ARGUMENTS]})
    _compare(study, before, {key: value for key, value in now.items() if key not in (_SETTINGS, _ARGUMENTS)})


def open_folder(study: Study) -> None:
    """Make the folder, and keep what the study is."""
    study.output.parent.mkdir(parents=True, exist_ok=True)
    study.output.mkdir(mode=0o700, exist_ok=True)
    (study.output / "logs").mkdir(mode=0o700, exist_ok=True)
    before = _read_study_file(study)
    if before is None or _SETTINGS not in before:
        write_json(_study_file(study), study.identity())


def _study_file(study: Study) -> Path:
    return study.output / ("study.json" if study.node_id == 0 else f"study-node{study.node_id}.json")


def _read_study_file(study: Study) -> dict[str, Any] | None:
    """What the study that lies there is; None where there is none."""
    try:
        return read_object(_study_file(study))
    except FileNotFoundError:
        return None
    except BadFileError as error:
        raise SettingError(
            f"--output {study.output} was set",
            f"{_study_file(study).name} there is not what a study wrote ({error.problem})",
            "set another folder",
        ) from None


def _compare(study: Study, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key, value in now.items():
        if before.get(key) != value:
            flag = "" if key in (_ARGUMENTS, "task") else f" (--{key.replace('_', '-')})"
            raise SettingError(
                f"--output {study.output} was set",
                f"the study there has {key} = {_spelled(before.get(key))}, not {_spelled(value)}{flag}",
                "set the same options, or another folder",
            )


def _spelled(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return " ".join(str(item) for item in value) if isinstance(value, list) else str(value)


_POLL_S = 0.1
_ENOUGH_S = 1.0  # between two looks at how far a run is
_ASK_S = 0.3  # from asking a run to stop after its step, to telling it to stop at once
_WAIT_S = 3.0  # for its workers to end
_PR_SET_PDEATHSIG = 1

Runner = Callable[[Sequence[str], Path, Callable[[], bool]], int]


class StoppedError(KeyboardInterrupt):
    """SIGTERM or a closed terminal: the study ends like on Ctrl-C, and can go on later."""


def run_child(arguments: Sequence[str], log: Path, is_enough: Callable[[], bool]) -> int:
    """Run `stormo train` with these arguments, its output into a file; the exit code, negative for a signal."""
    command = [*own_command("train"), *arguments]
    libc = ctypes.CDLL(None)

    def die_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)

    with create(log) as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C reaches the study alone, which ends the run
            preexec_fn=die_with_parent,  # noqa: PLW1509 (there is one thread)
        )
    try:
        return _watch(process, is_enough)
    finally:
        _end(process)


def _watch(process: subprocess.Popen[bytes], is_enough: Callable[[], bool]) -> int:
    asked, looked_s = False, time.monotonic()
    while process.poll() is None:
        time.sleep(_POLL_S)
        if not asked and time.monotonic() - looked_s > _ENOUGH_S:
            looked_s = time.monotonic()
            if is_enough():
                process.terminate()  # all its workers stop after the same step
                asked = True
    assert process.returncode is not None
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the run and all its workers at once, however it is doing."""
    if process.poll() is None:
        # The second Ctrl-C has its agent kill the workers; a kill alone would leave that to the kernel.
        for wait_s in (_ASK_S, _WAIT_S):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # whatever it has started and left
    process.wait()


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """Turn SIGTERM and a closed terminal into an exception while the body runs, so that children are ended."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedError

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def last_words(log: Path) -> str:
    """What a run that failed said: stormo's own sentence, or its last line."""
    try:
        text = read_bytes(log, MAX_RECORDS_BYTES).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines()]
    except OSError:
        return "it left no output"
    said = [line for line in lines if line]
    own = [line.removeprefix("stormo: ") for line in said if line.startswith("stormo: ")]
    return own[0] if own else said[-1] if said else "it said nothing"


_GOOD_ENDS = (0, EXIT_RESUMABLE)  # to its last epoch, or ended once it had been measured for long enough


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A run that did not end well."""

    cell: Cell
    error: str
    is_refused: bool = False  # its settings cannot hold, and would not in another repeat


def run_study(study: Study, run: Runner, say: Callable[[str], None]) -> tuple[list[Measurement], list[Failed]]:
    """Do every run that is not done yet; give the figures of all, and those that failed."""
    mine, kept = _own_cells(study), _cell_file(study)
    failed: list[Failed] = []
    for number, cell in enumerate(mine, start=1):
        head = f"[{number}/{len(mine)}] {cell.words}"
        if cell.name in kept.done:
            say(f"{head}: done before")
            continue
        same = _refused_before(cell, failed)
        if same is not None:
            failed.append(replace(same, cell=cell))
            say(f"{head}: left out, as its settings were refused before")
            continue
        began_s = time.monotonic()
        try:
            found = _run_cell(study, cell, run)
        except StormoError as error:
            kept.add(cell, "failed", error=str(error))
            failed.append(Failed(cell=cell, error=str(error), is_refused=isinstance(error, _RefusedError)))
            say(f"{head}: failed: {error}")
            continue
        kept.add(cell, "done", found)
        speed = f"{format_rate(found.units_per_s)} {found.unit}/s over {found.basis}" if found else "done"
        say(f"{head}: {speed} ({format_duration(time.monotonic() - began_s)} in all)")
    return [found for cell in mine if (found := kept.measurement(cell)) is not None], failed


def runs_to_do(study: Study) -> list[Cell]:
    """The runs in which this node takes part and that have not ended well."""
    done = _cell_file(study).done
    return [cell for cell in _own_cells(study) if cell.name not in done]


def _own_cells(study: Study) -> list[Cell]:
    cells = make_cells(study.workers, study.num_nodes, study.modes, study.repeats, study.seed)
    return [cell for cell in cells if study.node_id < cell.num_nodes]


def _refused_before(cell: Cell, failed: Sequence[Failed]) -> Failed | None:
    """An earlier repeat of the same run whose settings were refused, and would be again."""
    for one in failed:
        if one.is_refused and (one.cell.mode, one.cell.workers) == (cell.mode, cell.workers):
            return one
    return None


class _RefusedError(StormoError):
    """`stormo train` refused its settings."""


def _run_cell(study: Study, cell: Cell, run: Runner) -> Measurement | None:
    """One run; its figures on node 0, which alone has its files."""
    folder, log = study.output / "runs" / cell.name, study.output / "logs" / f"{cell.name}.node{study.node_id}.txt"
    is_main = study.node_id == 0
    if is_main and folder.exists():
        shutil.rmtree(folder)  # of this study, and never ended

    def is_enough() -> bool:
        return is_main and study.seconds is not None and measured_s(folder) >= study.seconds

    code = run(study.arguments(cell), log, is_enough)
    if code not in _GOOD_ENDS:
        kind = _RefusedError if code == EXIT_USAGE else StormoError
        raise kind(f"{last_words(log)} (exit code {code}; all it said is in {log})")
    if not is_main:
        return None
    measured = measure_run(folder, cell)
    if not study.keeps_checkpoints:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a run that was ended early has saved itself
    return replace(measured, note=study.lone_note) if cell.workers == 1 else measured


def _cell_file(study: Study) -> CellFile:
    """This node's; another node goes by that of node 0 where it sees it, so that all do the same runs."""
    shared = study.output / "cells.jsonl"
    if study.node_id == 0:
        return CellFile(shared)
    own = CellFile(study.output / f"cells-node{study.node_id}.jsonl")
    if shared.is_file():
        own.done = CellFile(shared).done
    return own


class RefusedRunError(StormoError):
    """What some runs of a study would be refused with, and which."""

    exit_code = EXIT_USAGE


def check_runs(study: Study) -> None:
    """Refuse a study of which `stormo train` would refuse a run that is not done yet, in its words."""
    alike = {(cell.mode, cell.workers, cell.num_nodes): cell for cell in runs_to_do(study)}  # whatever the repeat
    facts: Facts | None = None
    refused: dict[Cell, SettingError] = {}
    for cell in alike.values():
        try:
            config, task_class = read_settings(study.arguments(cell))
            check_task(task_class)
            layout, task = checked(config, task_class)
            if not task.needs_data_for_facts():
                facts = facts or task.facts()
                resolve(config, layout, facts)
        except SettingError as error:
            refused[cell] = error
    if not refused:
        return
    as_told = [cell for cell in alike.values() if cell.workers > 1 or not study.lone_note]
    if len({str(error) for error in refused.values()}) == 1 and refused.keys() >= {*as_told}:
        raise next(iter(refused.values()))
    fewest = min(refused, key=lambda cell: cell.workers)
    raise RefusedRunError(f"{_described(study, fewest)}: {refused[fewest]}")


def _described(study: Study, cell: Cell) -> str:
    mode = f"{cell.mode}, " if len(study.modes) > 1 and cell.mode != "both" else ""
    nodes = f" on {counted(cell.num_nodes, 'node')}" if cell.num_nodes > 1 else ""
    return f"{mode}{counted(cell.workers, 'worker')}{nodes}"
