"""Hands a script to sbatch, says what to set where Slurm refuses it, and keeps the job's number (`slurm.json`)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from stormo.errors import SettingError, StormoError
from stormo.system.files import BadFileError, read_object
from stormo.telemetry.folder import write_json

RECORD = "slurm.json"  # in the run folder
_TIMEOUT_S = 120.0  # a busy controller answers late
_JOB_ID = re.compile(r"\d+(_\d+)?", flags=re.ASCII)  # nothing else is passed to Slurm's commands
# What to set where Slurm refuses, by a part of its reason.
_INSTEAD = {
    "account": "set --account to one of yours (sacctmgr show associations user=$USER), or another --partition",
    "partition": "set --partition to one of: {partitions}",
    "qos": "set --qos to one of yours (sacctmgr show associations user=$USER format=account,qos)",
    "reservation": "see scontrol show reservation",
    "time limit": "set a shorter --time (sinfo shows the limit of each partition)",
    "generic resource": "set --num-gpus to what a node has (sinfo --format='%P %G'), or --device cpu",
    "node": "ask for what the cluster has (sinfo --Node --long shows it)",
    "memory": "set a smaller --mem",
    "processors": "ask for fewer workers or --cpus-per-task",
    "feature": "set another --constraint (sinfo --format='%P %f' shows them)",
}


def require_slurm() -> None:
    """Refuse where there is no Slurm."""
    if shutil.which("sbatch") is None:
        raise SettingError(
            "a job was to be submitted to Slurm",
            "this machine has no sbatch",
            "submit on a login node of the cluster; --print shows the script anywhere",
        )


def submit(script: Path) -> str:
    """Submit a script; returns the number of the job."""
    done = _run("sbatch", "--parsable", str(script))
    if done.returncode == 0:
        return done.stdout.strip().splitlines()[-1].partition(";")[0]
    reason = _reason(done.stderr)
    # sbatch fails alike where it refuses and where the controller is down; sinfo fails only in the second case.
    if shutil.which("sinfo") is not None and _sinfo().returncode != 0:
        raise SettingError(
            "the job was handed to Slurm",
            f"Slurm cannot be reached ({reason})",
            "see whether slurmctld is up (scontrol ping) and whether this machine has its slurm.conf",
        )
    raise SettingError("the job was handed to Slurm", f"sbatch refused it ({reason})", _instead(reason))


def write_record(folder: Path, *, job_id: str, log: Path) -> None:
    """Write the job's number to the run folder."""
    record = {"run": folder.name, "job_id": job_id, "log": str(log), "submitted_unix_s": time.time()}
    write_json(folder / RECORD, record)


def read_job_id(folder: Path) -> str | None:
    """The number of the last job of a run; None before the first."""
    path = folder / RECORD
    try:
        job_id = read_object(path).get("job_id")
    except FileNotFoundError:
        return None
    if not isinstance(job_id, str) or not _JOB_ID.fullmatch(job_id):
        raise BadFileError(path, "it holds something else than the number of a job")
    return job_id


def state_of(job_id: str) -> str:
    """The state of a job that waits or runs, in Slurm's word; empty for one that has ended."""
    done = _run("squeue", "--noheader", f"--jobs={job_id}", "--format=%T")
    return done.stdout.strip() if done.returncode == 0 else ""  # Slurm forgets a job some minutes after its end


def _reason(stderr: str) -> str:
    """Slurm's own reason: what it says first is the particular, what it says last the general."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line).strip() for line in stderr.splitlines() if line.strip()]
    said = list(dict.fromkeys(line.removeprefix("Batch job submission failed: ").rstrip(".") for line in lines))
    return "; ".join(said) or "it gave no reason"


def _instead(reason: str) -> str:
    advice = next((text for part, text in _INSTEAD.items() if part in reason.lower()), "ask for something else")
    if "{partitions}" not in advice:
        return advice
    names = dict.fromkeys(_sinfo().stdout.split())
    return advice.replace("{partitions}", ", ".join(names) or "those that sinfo shows")


def _sinfo() -> subprocess.CompletedProcess[str]:
    return _run("sinfo", "--noheader", "--format=%R")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise SettingError(
            f"{command[0]} was needed", "this machine does not have it", "go to a login node of a cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise StormoError(f"{command[0]} did not answer within {_TIMEOUT_S:g} s.") from None
