"""Runs a study: checks its runs, keeps them in its folder, and starts each as a child process."""

from __future__ import annotations

import contextlib
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
from stormo.errors import EXIT_RESUMABLE, EXIT_USAGE, SettingError, StormoError, pluralize
from stormo.study.measurement import Measurement, measure_run, measured_s
from stormo.study.study import Run, Study, make_runs
from stormo.system.files import (
    MAX_RECORDS_BYTES,
    BadFileError,
    LineFile,
    create,
    fits,
    parse_json,
    read_bytes,
    read_lines,
    read_object,
)
from stormo.system.process import die_with_parent, stormo_command
from stormo.tasks.check import check_task
from stormo.telemetry.folder import write_json
from stormo.telemetry.text import format_duration, format_rate
from stormo.training.settings import checked, read_settings

_GOOD_EXIT_CODES = (0, EXIT_RESUMABLE)  # trained to its last epoch, or stopped once it was measured for long enough
_REQUIRED = ("mode", "workers", "repeat", "samples_per_s", "units_per_s", "unit")
_POLL_S = 0.1
_CHECK_PROGRESS_S = 1.0
_INTERRUPT_S = 0.3  # between the first Ctrl-C and the second
_WAIT_S = 3.0  # for the workers to end

Runner = Callable[[Sequence[str], Path, Callable[[], bool]], int]


class StoppedError(KeyboardInterrupt):
    """SIGTERM or a closed terminal: the study ends as on Ctrl-C, and can be resumed."""


class RefusedRunError(StormoError):
    """`stormo train` refuses the settings of a run."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRun:
    """A run that failed."""

    run: Run
    error: str


class RunFile:
    """`runs.jsonl`: one line for each run that has ended, done or failed. A run that is done is not repeated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.done: dict[str, Mapping[str, Any]] = {}
        with contextlib.suppress(FileNotFoundError):
            for text in read_lines(path):
                with contextlib.suppress(ValueError):  # a line that a kill cut short
                    line = parse_json(text)
                    if isinstance(line, dict) and line.get("state") == "done":
                        self.done[str(line.get("name"))] = line

    def measurement(self, run: Run) -> Measurement | None:
        """What a run measured, if it is done."""
        figures = self.done.get(run.name, {}).get("measurement")
        if not figures:
            return None
        is_measurement = fits(figures, Measurement) and all(name in figures for name in _REQUIRED)
        if not is_measurement or min(figures["workers"], figures["samples_per_s"]) <= 0:
            raise BadFileError(self._path, f"the figures of {run.name} are not those of a measurement")
        return Measurement(**figures)

    def add(self, run: Run, state: str, measurement: Measurement | None = None, error: str | None = None) -> None:
        """Append a run that is "done", with its figures, or "failed", with the error."""
        figures = asdict(measurement) if measurement else None
        line = {"name": run.name, "state": state, "measurement": figures, "error": error}
        file = LineFile(self._path)
        file.append([line])
        file.close()
        if state == "done":
            self.done[run.name] = line


def open_run_file(study: Study) -> RunFile:
    """This node's file; other nodes follow that of node 0 where they see it, so that all do the same runs."""
    shared = study.output / "runs.jsonl"
    if study.node_id == 0:
        return RunFile(shared)
    own = RunFile(study.output / f"runs-node{study.node_id}.jsonl")
    if shared.is_file():
        own.done = RunFile(shared).done
    return own


def check_folder(study: Study) -> None:
    """Refuse a folder that holds another study."""
    before, now = _read_identity(study), study.identity()
    if before is None:
        return
    settings = now.pop("settings")
    _compare(study, before["settings"], {key: settings[key] for key in settings if key in before["settings"]})
    _compare(study, before, now)


def open_folder(study: Study) -> None:
    """Make the folder, and write what the study is."""
    study.output.parent.mkdir(parents=True, exist_ok=True)
    study.output.mkdir(mode=0o700, exist_ok=True)
    (study.output / "logs").mkdir(mode=0o700, exist_ok=True)
    if _read_identity(study) is None:
        write_json(_identity_file(study), study.identity())


def _identity_file(study: Study) -> Path:
    return study.output / ("study.json" if study.node_id == 0 else f"study-node{study.node_id}.json")


def _read_identity(study: Study) -> dict[str, Any] | None:
    try:
        identity = read_object(_identity_file(study))
        if not isinstance(identity.get("settings"), dict):
            raise BadFileError(_identity_file(study), "it has no settings")
        return identity
    except FileNotFoundError:
        return None
    except BadFileError as error:
        raise SettingError(
            f"--output {study.output} was set",
            f"{_identity_file(study).name} there was not written by a study ({error.problem})",
            "set another folder",
        ) from None


def _compare(study: Study, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key, value in now.items():
        if before.get(key) != value:
            flag = "" if key == "task" else f" (--{key.replace('_', '-')})"
            raise SettingError(
                f"--output {study.output} was set",
                f"the study there has {key} = {_spelled(before.get(key))}, not {_spelled(value)}{flag}",
                "set the same options, or another folder",
            )


def _spelled(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return " ".join(str(item) for item in value) if isinstance(value, list) else str(value)


def _own_runs(study: Study) -> list[Run]:
    """The runs in which this node takes part."""
    runs = make_runs(study.workers, study.num_nodes, study.modes, study.repeats, study.seed)
    return [run for run in runs if study.node_id < run.num_nodes]


def check_runs(study: Study) -> None:
    """Refuse a study if `stormo train` would refuse one of the runs that are left to do."""
    done = open_run_file(study).done
    left = [run for run in _own_runs(study) if run.name not in done]
    runs = {(run.mode, run.workers, run.num_nodes): run for run in left}.values()  # repeats have the same settings
    facts: Facts | None = None
    refused: dict[Run, SettingError] = {}
    for run in runs:
        try:
            config, task_class = read_settings(study.arguments(run))
            check_task(task_class)
            layout, task = checked(config, task_class)
            if not task.needs_data_for_facts():
                facts = facts or task.facts()
                resolve(config, layout, facts)
        except SettingError as error:
            refused[run] = error
    if not refused:
        return
    fewest = min(refused, key=lambda run: run.workers)
    # One worker with other settings says nothing of those that were set.
    if refused.keys() >= {run for run in runs if run.workers > 1 or not study.single_worker_note}:
        raise refused[fewest]
    mode = f"{fewest.mode}, " if len(study.modes) > 1 and fewest.mode != "both" else ""
    nodes = f" on {pluralize(fewest.num_nodes, 'node')}" if fewest.num_nodes > 1 else ""
    raise RefusedRunError(f"{mode}{pluralize(fewest.workers, 'worker')}{nodes}: {refused[fewest]}")


def run_study(study: Study, train: Runner, show: Callable[[str], None]) -> tuple[list[Measurement], list[FailedRun]]:
    """Do every run that is not done; return the measurements of all, and the runs that failed."""
    runs, file = _own_runs(study), open_run_file(study)
    failed: list[FailedRun] = []
    for number, run in enumerate(runs, start=1):
        head = f"[{number}/{len(runs)}] {run.label}"
        if run.name in file.done:
            show(f"{head}: done before")
            continue
        start_s = time.monotonic()
        try:
            found = _measure(study, run, train)
        except StormoError as error:
            file.add(run, "failed", error=str(error))
            failed.append(FailedRun(run=run, error=str(error)))
            show(f"{head}: failed: {error}")
            continue
        file.add(run, "done", found)
        speed = f"{format_rate(found.units_per_s)} {found.unit}/s over {found.basis}" if found else "done"
        show(f"{head}: {speed} ({format_duration(time.monotonic() - start_s)} in all)")
    return [found for run in runs if (found := file.measurement(run)) is not None], failed


def _measure(study: Study, run: Run, train: Runner) -> Measurement | None:
    """Train one run; its figures on node 0, which alone has its files."""
    folder, log = study.output / "runs" / run.name, study.output / "logs" / f"{run.name}.node{study.node_id}.txt"
    is_main = study.node_id == 0
    if is_main and folder.exists():
        shutil.rmtree(folder)  # left by an earlier call, and not done

    def is_measured() -> bool:
        return is_main and study.seconds is not None and measured_s(folder) >= study.seconds

    code = train(study.arguments(run), log, is_measured)
    if code not in _GOOD_EXIT_CODES:
        raise StormoError(f"{error_in_log(log)} (exit code {code}; its output is in {log})")
    if not is_main:
        return None
    measured = measure_run(folder, run)
    if not study.keeps_checkpoints:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a run that is stopped saves a checkpoint
    return replace(measured, note=study.single_worker_note) if run.workers == 1 else measured


def run_child(arguments: Sequence[str], log: Path, is_measured: Callable[[], bool]) -> int:
    """Run `stormo train`, its output into a file, until it ends or is measured; return its exit code."""
    with create(log) as file:
        process = subprocess.Popen(
            [*stormo_command("train"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C reaches the study alone, which ends the run
            preexec_fn=die_with_parent,  # noqa: PLW1509 (there is one thread)
        )
    is_stopping, checked_s = False, time.monotonic()
    try:
        while process.poll() is None:
            time.sleep(_POLL_S)
            if not is_stopping and time.monotonic() - checked_s > _CHECK_PROGRESS_S:
                checked_s = time.monotonic()
                if is_measured():
                    process.terminate()  # all its workers stop after the same step
                    is_stopping = True
        assert process.returncode is not None
        return process.returncode
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the run and all its workers at once."""
    if process.poll() is None:
        # On the second Ctrl-C the agent kills the workers itself; after a kill the kernel would have to.
        for wait_s in (_INTERRUPT_S, _WAIT_S):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # whatever it started and left
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


def error_in_log(log: Path) -> str:
    """The error that a failed run printed, or its last line."""
    try:
        text = read_bytes(log, MAX_RECORDS_BYTES).decode(errors="replace")
    except OSError:
        return "it left no output"
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("stormo: ") for line in lines if line.startswith("stormo: ")]
    if not errors:
        tracebacks = [number for number, line in enumerate(lines) if line.startswith("Traceback ")]
        below = lines[tracebacks[-1] + 1 :] if tracebacks else []
        errors = [line for line in below if not line[0].isspace()]  # the first one; its message may go on
    return (errors or lines[-1:] or ["it printed nothing"])[0].strip()
