"""From the settings to the nodes of a job: which process this is, the workers it starts, and `--max-restarts`."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from stormo.config.layout import DEFAULT_PORT, Launched, Layout
from stormo.config.schema import NodeRange, TrainConfig
from stormo.errors import EXIT_FAILURE, SettingError, pluralize
from stormo.launch import Node, RankInfo
from stormo.launch.control import JoinError, RefusedError
from stormo.launch.environments.detect import LAUNCHERS, check_flags, detect
from stormo.launch.environments.slurm import check_without_srun, gpus_on_node, hints
from stormo.launch.environments.torchrun import check_restarts as check_restarts_of_torchrun
from stormo.launch.output import say
from stormo.system.hardware import num_cores
from stormo.version import __version__

# How `stormo run` hands its own flags to the workers, whose script asks for the world.
DEVICE, BACKEND, TIMEOUT, PROFILE = "STORMO_DEVICE", "STORMO_BACKEND", "STORMO_TIMEOUT", "STORMO_PROFILE"

_MOST_WORKERS, _MOST_WORKERS_PER_CORE = 256, 16  # more is a typing error, and would take the node down
_FLAGS = ("num_nodes", "node_id", "num_gpus", "master_addr", "master_port")
_TRY_AGAIN_S = 0.5


def find_rank_info(config: TrainConfig, *, is_single_process: bool = False) -> RankInfo | None:
    """Who this process is if a launcher started it; the user's flags must not contradict it.

    `is_single_process`: one process is wanted, even in a Slurm job of several tasks.
    """
    if isinstance(config.workers.num_nodes, NodeRange):
        nodes = str(config.workers.num_nodes)
        raise SettingError(
            f"--num-nodes {nodes} was set",
            "stormo starts a fixed number of nodes",
            f"let torchrun start it where nodes come and go: torchrun --nnodes {nodes} --max-restarts 3 "
            "--rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id NAME -m stormo train (or your script)",
        )
    flags = {name: getattr(config.workers, name) if name in config.given else None for name in _FLAGS}
    info = detect(os.environ, master_addr=flags["master_addr"], master_port=flags["master_port"])
    launcher = config.workers.launcher
    if info is None:
        if launcher == "auto" and not is_single_process:
            hint = check_without_srun(os.environ, num_gpus=flags["num_gpus"], num_nodes=flags["num_nodes"])
            if hint is not None:
                say(hint)
        return None
    if launcher != "auto":
        raise SettingError(
            f"--launcher {launcher} was set",
            f"{LAUNCHERS[info.launcher].command} has started this process already",
            f"drop --launcher, or type the command without {LAUNCHERS[info.launcher].command}",
        )
    check_flags(info, **flags)
    if info.launcher == "slurm" and info.is_main:
        for hint in hints(os.environ, info, os.getpid()):
            say(hint)
    return info


def check_restarts(config: TrainConfig, info: RankInfo | None) -> None:
    """Refuse restarts that nothing would do, or that would not find the run."""
    restarts, run = config.workers.max_restarts, config.run
    if info is not None and info.launcher == "torchrun" and "max_restarts" in config.given:
        check_restarts_of_torchrun(os.environ, restarts)
    if restarts < 1 or (info is not None and info.launcher in ("local", "torchrun")):
        return
    if info is not None:
        command = LAUNCHERS[info.launcher].command
        raise SettingError(
            f"--max-restarts {restarts} was set",
            f"{command} started the workers, and it starts none again",
            "leave it out, and type the same command with --run-name NAME --resume after a failure",
        )
    if config.workers.num_nodes > 1 and run.run_name is None:
        raise SettingError(
            f"--max-restarts {restarts} was set without --run-name",
            "every node must find the run to resume",
            "set the same --run-name on every node",
        )
    if run.resume and (Path(run.resume) / "manifest.json").is_file():
        raise SettingError(
            f"--resume {run.resume} was set with --max-restarts {restarts}",
            "every restart would go back to that one checkpoint",
            "name the run instead of the checkpoint",
        )


def launched_by(info: RankInfo | None) -> Launched | None:
    """The shape of a world that another program has started; None where stormo starts it."""
    if info is None or info.launcher == "local":
        return None
    return shape_of(info)


def shape_of(info: RankInfo) -> Launched:
    """The shape of the world that this process is in."""
    return Launched(
        launcher=info.launcher,
        world_size=info.world_size,
        local_size=info.local_size,
        num_nodes=info.num_nodes,
        gpus_on_node=gpus_on_node(os.environ) if info.launcher == "slurm" else None,
    )


def node_of(config: TrainConfig, layout: Layout) -> Node:
    """This node, when stormo starts its workers."""
    workers, cores = config.workers, num_cores()
    if layout.workers_per_node > max(_MOST_WORKERS, _MOST_WORKERS_PER_CORE * cores):
        raise SettingError(
            f"--num-gpus {layout.workers_per_node} was set",
            f"this node has {pluralize(cores, 'core')}, for which so many processes would wait in turn",
            f"set --num-gpus {cores} or something near",
        )
    return Node(
        num_workers=layout.workers_per_node,
        slices=layout.slices,
        shares_a_gpu=layout.shares_a_gpu,
        num_nodes=workers.num_nodes,
        node_id=workers.node_id,
        master_addr=workers.master_addr if "master_addr" in config.given else None,
        master_port=workers.master_port or DEFAULT_PORT,
        script_port=workers.master_port or 0,
    )


def equal_settings(settings: Mapping[str, str], layout: Layout) -> dict[str, Any]:
    """The settings that must be equal on all nodes, and their digest."""
    settings = {
        **settings,
        "the release of stormo": __version__,
        "the device": layout.device_type,
        "the communication library": layout.backend,
        "whether workers share a GPU": str(layout.shares_a_gpu),
    }
    return {"digest": hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest(), "options": settings}


def run_with_restarts(attempt: Callable[[int], int], *, restarts: int, signals: Collection[int], join_s: float) -> int:
    """Run attempt 0, and after a failure attempt 1 and so on; the exit code of the last.

    Bad settings, divergence and stop signals have other exit codes, which are not retried.

    Args:
        attempt: runs the workers of this node, and fails on every node when one of them does.
        restarts: how many attempts may follow the first.
        signals: those that were forwarded to the workers; after one there is no restart.
        join_s: how long a restart may wait for the other nodes, which may still end their last attempt.
    """
    code = attempt(0)
    for number in range(1, restarts + 1):
        if code != EXIT_FAILURE or signals:
            return code
        say(f"restart {number} of {restarts}")
        code = _join_and_run(attempt, number, join_s)
    if restarts and code == EXIT_FAILURE and not signals:
        say(f"no restart is left of {restarts}")
    return code


def _join_and_run(attempt: Callable[[int], int], number: int, join_s: float) -> int:
    deadline = time.monotonic() + join_s
    while True:
        try:
            return attempt(number)
        except (JoinError, RefusedError):
            if time.monotonic() > deadline:
                raise
        time.sleep(_TRY_AGAIN_S)
