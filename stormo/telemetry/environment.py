"""`environment.json`: machine, software, command and scheduler job of a run, with secrets masked."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import stormo
from stormo.system.files import MASK, is_secret_name
from stormo.system.process import process_start_unix_s

_GIT_TIMEOUT_S = 5.0
_RECORDED_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_RECORDED_VARIABLE_PREFIXES = ("SLURM_", "NCCL_", "GLOO_")
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")
_TOKEN_SHAPE = re.compile(r"\b(?:hf_|ghp_|gho_|ghs_|github_pat_|glpat-|sk-|xox[abp]-|AKIA)[A-Za-z0-9_-]{12,}")


def collect_environment(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What is needed to repeat the run; `extra` adds what needs torch, such as its version."""
    environment: dict[str, Any] = {
        "time_unix_s": time.time(),
        "started_unix_s": process_start_unix_s(),  # by which the agent finds the run of its workers
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "num_cpus": len(os.sched_getaffinity(0)),  # that this process may use
        "python": platform.python_version(),
        "stormo": stormo.__version__,
        "pid": os.getpid(),
        "command": mask_secrets(_typed(sys.argv)),
        "working_folder": str(Path.cwd()),
        **_git_state(Path.cwd()),
        "variables": {
            name: MASK if is_secret_name(name) else value
            for name, value in sorted(os.environ.items())
            if name in _RECORDED_VARIABLES or name.startswith(_RECORDED_VARIABLE_PREFIXES)
        },
    }
    return {**environment, **extra}


def _typed(arguments: Sequence[str]) -> list[str]:
    """The command line with `stormo` by name, not by its path, so that it can be typed elsewhere."""
    program = Path(arguments[0])
    is_ours = program.name == "stormo" or program == Path(stormo.__file__).with_name("__main__.py")
    return ["stormo" if is_ours else arguments[0], *arguments[1:]]


def mask_secrets(arguments: Sequence[str]) -> list[str]:
    """The command line with everything that looks like a password or a token masked."""
    masked: list[str] = []
    follows_secret_name = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_option = argument.startswith("-")
        if follows_secret_name and not is_option:
            masked.append(MASK)
            follows_secret_name = False
            continue
        follows_secret_name = is_option and not equals and is_secret_name(name)
        if equals and is_secret_name(name):
            masked.append(f"{name}={MASK}")
        else:
            masked.append(_TOKEN_SHAPE.sub(MASK, _URL_PASSWORD.sub(rf"\1:{MASK}@", argument)))
    return masked


def _git_state(folder: Path) -> dict[str, Any]:
    """The commit and whether tracked files differ from it, or why they are not known."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except FileNotFoundError:
        return {"git_commit": None, "git_commit_reason": "git is not installed"}
    except subprocess.TimeoutExpired:
        return {"git_commit": None, "git_commit_reason": f"git did not answer within {_GIT_TIMEOUT_S:g} s"}
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines()
        return {"git_commit": None, "git_commit_reason": lines[0] if lines else f"git ended with {error.returncode}"}
    return {"git_commit": commit.strip(), "git_has_changes": bool(changes.strip())}


def _git(folder: Path, *arguments: str) -> str:
    # Without optional locks, a status never blocks the user's own git commands.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=_GIT_TIMEOUT_S,
        encoding="utf-8",
        errors="replace",
    )
    return done.stdout


def scheduler_job(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Number, restarts and nodes of the Slurm job of this process; None outside of one."""
    if "SLURM_JOB_ID" not in environ:
        return None
    job_id = environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        job_id = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    return {
        "scheduler": "Slurm",
        "id": job_id,
        "restarts": int(restarts) if restarts.isdecimal() else 0,
        "nodes": environ.get("SLURM_JOB_NODELIST"),
    }


def job_text(job: Mapping[str, Any] | None) -> str:
    """`Slurm job 12, restart 1, on n[1-2]`; empty for none."""
    if not job:
        return ""
    restart = f", restart {job['restarts']}" if job.get("restarts") else ""
    nodes = f", on {job['nodes']}" if job.get("nodes") else ""
    return f"{job.get('scheduler')} job {job.get('id')}{restart}{nodes}"
