"""The job of a scheduler that an attempt of a run belongs to, from the variables it sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def scheduler_job(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Number, restarts and nodes of the Slurm job around this process; None outside of one."""
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


def job_words(job: Mapping[str, Any] | None) -> str:
    """`Slurm job 12, restart 1, on n[1-2]`; empty for none."""
    if not job:
        return ""
    restart = f", restart {job['restarts']}" if job.get("restarts") else ""
    nodes = f", on {job['nodes']}" if job.get("nodes") else ""
    return f"{job.get('scheduler')} job {job.get('id')}{restart}{nodes}"
