"""The verb `submit`: makes the run folder, hands the script to Slurm, and follows."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from stormo.errors import SettingError
from stormo.submit import client, submitted
from stormo.submit.asking import read_job
from stormo.submit.follow import Log, follow, follow_sweep, reference, state_of
from stormo.submit.script import SCRIPT, Job, log_of, render
from stormo.submit.submitted import Submitted
from stormo.telemetry.folder import write_whole
from stormo.telemetry.text import run_reference, write_text


def main(arguments: list[str]) -> int:
    """Read the options and go."""
    job = read_job(arguments)
    script = render(job)
    if job.slurm.print:
        say(script)
        return 0
    client.require_slurm()
    earlier = [_earlier(job.run_folder(run)) for run in job.runs]
    logs = [Log(path=log_of(job, run)) for run in job.runs]
    for log in logs:
        log.skip()
    job_id = _submit(job, script)
    folders = [job.run_folder(run) for run in job.runs]
    for number, (run, folder) in enumerate(zip(job.runs, folders, strict=True)):
        record = Submitted(
            run=run.name,
            job_id=f"{job_id}_{number}" if job.is_array else job_id,
            log=str(log_of(job, run)),
            sweep=job.name if job.is_array else None,
            settings=run.words,
            submitted_unix_s=time.time(),
            earlier_jobs=earlier[number],
        )
        submitted.write(folder, record)
    if job.is_array:
        say(f"job {job_id}: runs {job.runs[0].name} to {job.runs[-1].name} in {job.runs_folder}\n")
    else:
        say(f"job {job_id}: run {job.name} in {folders[0]}, log {log_of(job, job.runs[0])}\n")
    if not job.slurm.follow:
        name = reference(folders, job.name) if job.is_array else run_reference(folders[0].name, str(folders[0]))
        say(f"stormo status {name} shows how it is doing, stormo cancel {name} ends it\n")
        return 0
    if job.is_array:
        return follow_sweep(folders, job.name, say)
    return follow(folders[0], say, logs[0])


def say(text: str) -> None:
    """Write to the terminal, at once."""
    write_text(text, sys.stdout)


def _earlier(folder: Path) -> tuple[str, ...]:
    """The jobs that a run had before; one that still waits or runs is not given a second."""
    record = submitted.read(folder)
    if record is None:
        return ()
    job_id, state = state_of(folder)
    if not state.has_ended:
        raise SettingError(
            f"run {folder.name} was to be submitted",
            f"job {job_id} carries it already ({state.state.lower()})",
            f"wait for its end, or end it with stormo cancel {run_reference(folder.name, str(folder))}",
        )
    return (*record.earlier_jobs, record.job_id)


def _submit(job: Job, script: str) -> str:
    """Hand the script over; where Slurm refuses it, nothing is left behind."""
    made: list[Path] = []
    try:
        for run in job.runs:
            folder = job.run_folder(run)
            made += [path for path in (folder, *folder.parents) if not path.exists()][::-1]
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (folder / SCRIPT).exists():
                made.append(folder / SCRIPT)
            write_whole(folder / SCRIPT, script)
        return client.submit(job.run_folder(job.runs[0]) / SCRIPT)
    except BaseException as error:
        for path in reversed(made):
            with contextlib.suppress(OSError):
                path.unlink() if path.is_file() else path.rmdir()
        if isinstance(error, OSError):
            raise SettingError(
                f"the job of {job.name} was to be kept in {job.runs_folder}",
                f"nothing can be written there ({error.strerror})",
                "set another --runs-folder",
            ) from None
        raise
