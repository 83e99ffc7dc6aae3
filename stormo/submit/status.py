"""The verbs `status` and `cancel`: how submitted runs are doing, and their end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from stormo.config.options import Parser
from stormo.submit import client, submitted
from stormo.submit.client import JobState, NoAnswerError
from stormo.submit.follow import Log, exit_code, follow, follow_sweep, state_of, state_word
from stormo.telemetry.folder import RunFolder
from stormo.telemetry.runs_folder import align, overview
from stormo.telemetry.text import run_reference, write_text

_UNKNOWN = "UNKNOWN"  # Slurm does not answer
_TITLES = ("run", "job", "state", "where or why", "starts", "epochs")


def main(arguments: list[str]) -> int:
    """Show one submitted run, the runs of a sweep, or all of them."""
    parser = Parser(prog="stormo status", description="How submitted runs are doing.", allow_abbrev=False)
    parser.add_argument("run", nargs="?", metavar="RUN|JOB", help="run, sweep or number of a job; default all of them")
    parser.add_argument("--runs-folder", default="runs", metavar="FOLDER", help="folder of all runs (default: runs)")
    parser.add_argument("--follow", action="store_true", help="show the output of the job until it ends")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args(arguments)
    runs_folder = Path(parsed.runs_folder)
    folders = submitted.list_submitted(runs_folder) if parsed.run is None else submitted.find(runs_folder, parsed.run)
    if parsed.follow and parsed.run is None:
        parser.error("--follow needs a run or a job")
    if parsed.follow:
        return _follow(folders, parsed.run)
    rows = [_row(folder) for folder in folders]
    if parsed.json:
        _say(json.dumps(rows, indent=2) + "\n")
    elif not rows:
        _say(f"No run in {runs_folder} was submitted: submit one with `stormo submit`.\n")
    else:
        cells = [[str(value) for value in row.values()][: len(_TITLES)] for row in rows]
        _say("\n".join(align([_TITLES, *cells], num_text_columns=4)) + "\n")
        if parsed.run is not None and len(rows) == 1:
            _say("".join(f"{name}: {rows[0][name]}\n" for name in ("folder", "log")))
    return 0


def cancel(arguments: list[str]) -> int:
    """End the job of a run; what it has saved is kept."""
    parser = Parser(prog="stormo cancel", description="End the job of a submitted run.", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN|JOB", help="run, sweep or number of a job")
    parser.add_argument("--runs-folder", default="runs", metavar="FOLDER", help="folder of all runs (default: runs)")
    parsed = parser.parse_args(arguments)
    for folder in submitted.find(Path(parsed.runs_folder), parsed.run):
        job_id, state = state_of(folder)
        name = run_reference(folder.name, str(folder))
        if state.has_ended:
            _say(f"job {job_id} of run {name} has ended already ({state_word(state)})\n")
            continue
        client.cancel(job_id)
        submitted.note(folder, job_id, "cancel")
        _say(f"job {job_id} of run {name} is cancelled; what it has saved is kept\n")
    return 0


def _follow(folders: list[Path], name: str) -> int:
    if len(folders) > 1:
        return follow_sweep(folders, name, _say)
    record = submitted.read(folders[0])
    assert record is not None
    return follow(folders[0], _say, Log(path=Path(record.log)))


def _row(folder: Path) -> dict[str, Any]:
    record = submitted.read(folder)
    assert record is not None
    attempts = submitted.read_attempts(folder)
    try:
        job_id, state = state_of(folder)
    except NoAnswerError as error:
        job_id, state = submitted.current_job(record, attempts), JobState(state=_UNKNOWN, reason=str(error))
    run = RunFolder(folder)
    epochs = overview(run, now_unix_s=0.0).epochs_run if run.is_run else None
    return {
        "run": folder.name,
        "job": job_id,
        "state": state_word(state),
        "why": _why(state),
        "starts": sum(attempt.what == "start" for attempt in attempts),
        "epochs": "n/a" if epochs is None else epochs,
        "settings": list(record.settings),
        "restarts": state.restarts,
        "exit_code": exit_code(state) if _is_known_to_end(state) else None,
        "folder": str(folder),
        "log": record.log,
        "earlier_jobs": list(record.earlier_jobs),
    }


def _why(state: JobState) -> str:
    if _is_known_to_end(state):
        return f"exit code {exit_code(state)}" if state.state != "COMPLETED" else ""
    return state.nodes or state.reason.replace("_", " ")


def _is_known_to_end(state: JobState) -> bool:
    return state.has_ended and state.state != _UNKNOWN


def _say(text: str) -> None:
    write_text(text, sys.stdout)
