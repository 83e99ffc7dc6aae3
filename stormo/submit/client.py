"""Slurm's own commands, and what they answer in words; each is asked once and nothing is kept."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from stormo.errors import SettingError, StormoError

_TIMEOUT_S = 120.0  # a busy controller answers late; without an answer nothing may hang for ever
_STILL_THERE = {
    *("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"),
    *("RESIZING", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "RESV_DEL_HOLD"),
}
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


_DOWN = "see whether slurmctld is up (scontrol ping) and whether this machine reaches it and has its slurm.conf"


class NoAnswerError(StormoError):
    """A command of Slurm's failed, which may be for a moment only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """What Slurm says of a job."""

    state: str  # in Slurm's words: PENDING, RUNNING, COMPLETED, ...
    reason: str = ""  # why it waits or has ended
    exit_code: int = 0  # as a shell would say it
    restarts: int = 0
    nodes: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it will not run again by itself."""
        return self.state not in _STILL_THERE


def require_slurm() -> None:
    """Refuse where there is no Slurm."""
    if shutil.which("sbatch") is None:
        raise SettingError(
            "a job was to be submitted to Slurm",
            "sbatch is not among the commands of this machine",
            "do it on a login node of the cluster; --print shows the script anywhere",
        )


def submit(script: Path) -> str:
    """Hand a script to Slurm; the number of the job."""
    done = _run("sbatch", "--parsable", str(script))
    if done.returncode != 0:
        reason, said = refusal(done.stderr), "the job was handed to Slurm"
        if not _is_up():
            raise SettingError(said, f"Slurm cannot be reached ({reason})", _DOWN)
        raise SettingError(said, f"sbatch refused it ({reason})", _instead(reason))
    return done.stdout.strip().splitlines()[-1].partition(";")[0]


def refusal(stderr: str) -> str:
    """Slurm's own reason, in one piece: what it says first is the particular, what it says last the general."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line).strip() for line in stderr.splitlines() if line.strip()]
    said = list(dict.fromkeys(line.removeprefix("Batch job submission failed: ").rstrip(".") for line in lines))
    return "; ".join(said) or "it gave no reason"


def look(job_id: str) -> JobState | None:
    """What Slurm says of a job; None of one that it has forgotten."""
    done = _run("scontrol", "--oneliner", "show", "job", job_id)
    if done.returncode == 0 and "JobState=" in done.stdout:
        return read_job(done.stdout.strip().splitlines()[0])
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        raise NoAnswerError(f"scontrol does not answer ({refusal(done.stderr)}).")
    return _look_back(job_id)


def read_job(line: str) -> JobState:
    """One line of `scontrol --oneliner show job`."""
    found = dict(re.findall(r"(?:^| )(\w+)=(.*?)(?= \w[\w/:]*=|$)", line))
    code, _, number = found.get("ExitCode", "0:0").partition(":")
    reason = found.get("Reason", "")
    nodes = found.get("NodeList", "")
    return JobState(
        state=found["JobState"],
        reason="" if reason == "None" else reason,
        exit_code=_shell_code(code, number),
        restarts=int(found.get("Restarts", "0")),
        nodes="" if nodes == "(null)" else nodes,
    )


def cancel(job_id: str) -> None:
    """End a job for good."""
    done = _run("scancel", job_id)
    if done.returncode != 0:
        reason, said = refusal(done.stderr), f"job {job_id} was to be cancelled"
        if not _is_up():
            raise SettingError(said, f"Slurm cannot be reached ({reason})", _DOWN)
        raise SettingError(said, f"scancel refused ({reason})", "see squeue --me")


def _look_back(job_id: str) -> JobState | None:
    """What the accounting remembers of a job that the controller has forgotten."""
    if shutil.which("sacct") is None:
        return None
    words = ("--allocations", "--noheader", "--parsable2", "--format=State,ExitCode,NodeList")
    done = _run("sacct", f"--jobs={job_id}", *words)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:  # a cluster need not have any accounting
        return None
    state, code, nodes = (*lines[-1].split("|"), "", "")[:3]
    return JobState(state=state.split()[0], exit_code=_shell_code(*code.partition(":")[::2]), nodes=nodes.strip())


def _shell_code(code: str, signal_number: str) -> int:
    number = int(signal_number) if signal_number.isdecimal() else 0
    return 128 + number if number else int(code) if code.isdecimal() else 0


def _instead(reason: str) -> str:
    advice = next((words for part, words in _INSTEAD.items() if part in reason.lower()), "ask for something else")
    return advice.replace("{partitions}", _partitions()) if "{partitions}" in advice else advice


def _is_up() -> bool:
    """Whether the controller answers, which what a command says of a failure does not tell in the same words."""
    return shutil.which("sinfo") is None or _run("sinfo", "--noheader", "--format=%R").returncode == 0


def _partitions() -> str:
    done = _run("sinfo", "--noheader", "--format=%R")
    names = list(dict.fromkeys(done.stdout.split())) if done.returncode == 0 else []
    return ", ".join(names) or "those that sinfo shows"


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            timeout=_TIMEOUT_S,
            check=False,
            start_new_session=True,  # Ctrl-C is for the one who follows, not for these
        )
    except FileNotFoundError:
        raise SettingError(
            f"{words[0]} was needed", "it is not among the commands of this machine", "go to a login node of a cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{words[0]} did not answer within {_TIMEOUT_S:g} s.") from None
