"""What a real Slurm (22.05) told its tasks, by the command that started them.

Recorded on two nodes of 8 cores in 2 sockets and 4 GPUs; only the variables that matter here are kept.
"""

from __future__ import annotations

import json
from pathlib import Path

_RECORDED = json.loads((Path(__file__).parent / "environments" / "slurm-22.05.json").read_text())
COMMANDS: list[str] = list(_RECORDED)


def tasks_of(command: str) -> list[dict[str, str]]:
    """The environment of every process that a command started, by job, step and rank."""
    found = _RECORDED[command]
    return [{**found["shared"], **task} for task in found["tasks"]]
