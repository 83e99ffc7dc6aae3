"""What a submitted run keeps in its folder: its job (`slurm.json`), and what became of each attempt.

The job's own script writes the attempts, one line each: the job, the time, and what happened.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from stormo.errors import SettingError, unknown_name
from stormo.submit.script import ATTEMPTS
from stormo.system.files import MAX_JSON_BYTES, BadFileError, fits, open_to_append, read_bytes, read_object, write_all
from stormo.telemetry.folder import write_json

RECORD = "slurm.json"
_JOB_ID = re.compile(r"\d+(_\d+)?", flags=re.ASCII)  # as it goes to scancel and scontrol


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """One run and its job; a run that is submitted again has another job."""

    run: str
    job_id: str  # 12, or 12_3 of an array
    log: str
    sweep: str | None  # the name that the runs of an array have in common
    settings: tuple[str, ...]  # that are this run's own in a sweep
    submitted_unix_s: float
    earlier_jobs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One line of what the script wrote: start NODES, end CODE, requeue, chain JOB, cancel."""

    job_id: str
    time_unix_s: float
    what: str
    detail: str


def write(folder: Path, submitted: Submitted) -> None:
    """Keep it in the run folder."""
    write_json(folder / RECORD, asdict(submitted))


def read(folder: Path) -> Submitted | None:
    """What was submitted for a run, or None."""
    path = folder / RECORD
    try:
        content = read_object(path)
    except FileNotFoundError:
        return None
    known = {one.name for one in fields(Submitted)}
    if not fits(content, Submitted) or not known <= content.keys() or not _JOB_ID.fullmatch(content["job_id"]):
        raise BadFileError(path, "it is not what was written there")
    lists: dict[str, Any] = {name: tuple(content.pop(name)) for name in ("settings", "earlier_jobs")}
    return Submitted(**content, **lists)


def read_attempts(folder: Path) -> list[Attempt]:
    """Everything the script of the job has noted so far; a line that is not whole is left out."""
    try:
        lines = read_bytes(folder / ATTEMPTS, MAX_JSON_BYTES).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        words = (*line.split(" ", 3), "")[:4]
        is_whole = len(line.split(" ")) >= 3 and words[1].isdecimal() and len(words[1]) < 20
        if is_whole and _JOB_ID.fullmatch(words[0]):
            found.append(Attempt(job_id=words[0], time_unix_s=float(words[1]), what=words[2], detail=words[3].strip()))
    return found


def note(folder: Path, job_id: str, what: str) -> None:
    """Add a line to what the script writes."""
    with open_to_append(folder / ATTEMPTS) as file:
        write_all(file, f"{job_id} {int(time.time())} {what}\n".encode())


def current_job(submitted: Submitted, attempts: Sequence[Attempt]) -> str:
    """The job that carries the run now: the last of those that were chained to the one submitted."""
    job_id = submitted.job_id
    for attempt in attempts:
        if attempt.what == "chain" and attempt.job_id == job_id and _JOB_ID.fullmatch(attempt.detail):
            job_id = attempt.detail
    return job_id


def list_submitted(runs_folder: Path) -> list[Path]:
    """The folders of all runs that were submitted, the last one first."""
    if not runs_folder.is_dir():
        return []
    found = [path.parent for path in runs_folder.glob(f"*/{RECORD}")]
    return sorted(found, key=lambda folder: ((folder / RECORD).stat().st_mtime, folder.name), reverse=True)


def find(runs_folder: Path, name: str) -> list[Path]:
    """The folders that a name stands for: a run, a job, or all runs of a sweep."""
    if (Path(name) / RECORD).is_file():
        return [Path(name)]
    known = {folder: record for folder in list_submitted(runs_folder) if (record := read(folder))}
    for matches in (
        [folder for folder in known if folder.name == name],
        [folder for folder, record in known.items() if name in _jobs(folder, record)],
        [folder for folder, record in known.items() if record.sweep == name or _array(record) == name],
    ):
        if matches:
            return sorted(matches, key=lambda folder: folder.name)
    if not known:
        raise SettingError(
            f"{name!r} was asked for", f"no run in {runs_folder} was submitted", "submit one with stormo submit"
        )
    raise unknown_name("submitted run or job", name, [folder.name for folder in known])


def _jobs(folder: Path, record: Submitted) -> set[str]:
    return {record.job_id, current_job(record, read_attempts(folder))}


def _array(record: Submitted) -> str:
    return record.job_id.partition("_")[0] if "_" in record.job_id else ""
