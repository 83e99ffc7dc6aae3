"""Ranks started by torchrun (torch.distributed.run), one agent a node; reads the variables it documents."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from stormo.errors import SettingError
from stormo.launch.rank_info import RankInfo, host_name, read_torch_variables
from stormo.system.process import start_ticks

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where the agent looks for the error of a worker
_SURVIVOR_LATER_S = 5  # torchrun sees a worker that was killed at most a second or two after its peers
_NO_ID = "none"  # what torchrun calls a job without --rdzv-id


def detect(environ: Mapping[str, str]) -> bool:
    """Whether torchrun started this process; a bare RANK or WORLD_SIZE left in a shell does not count."""
    return "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ and "LOCAL_RANK" in environ


def rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Who this process is, according to torchrun."""
    return read_torch_variables(environ, "torchrun", node_id="GROUP_RANK", num_nodes="GROUP_WORLD_SIZE")


def check_restarts(environ: Mapping[str, str], max_restarts: int) -> None:
    """Refuse a number of restarts other than torchrun's, which does them."""
    actual = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if actual != str(max_restarts):
        raise SettingError(
            f"--max-restarts {max_restarts} was set",
            f"torchrun starts the workers, with --max-restarts {actual}",
            "give it to torchrun instead",
        )


def launch_id(environ: Mapping[str, str]) -> str | None:
    """Identifies one torchrun over its restarts: its --rdzv-id or, without, the agent of this node."""
    if not detect(environ) or "TORCHELASTIC_MAX_RESTARTS" not in environ:
        return None
    run_id = environ["TORCHELASTIC_RUN_ID"]
    if run_id != _NO_ID:
        return run_id
    agent = os.getppid()
    started = start_ticks(agent)
    return None if started is None else f"{host_name()} {agent} {started}"


def note_failure(environ: Mapping[str, str], message: str, *, is_cause: bool = True) -> None:
    """Write the error of this worker for torchrun's agent.

    torchrun calls the earliest failure the root cause, to the second, so that a survivor's gets a later time.
    """
    path = environ.get(_ERROR_FILE)
    if path:
        text = json.dumps({"message": message, "timestamp": int(time.time()) + (0 if is_cause else _SURVIVOR_LATER_S)})
        with contextlib.suppress(OSError):
            Path(path).write_text(text, encoding="utf-8")
