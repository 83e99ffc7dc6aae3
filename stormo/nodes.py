"""From the settings of workers to the nodes of a job: which process this is, and the workers that it starts."""

from __future__ import annotations

import os
import sys

from stormo.config import TrainConfig, least_nodes
from stormo.errors import SettingError, counted
from stormo.hardware import num_cores
from stormo.launch import Node, Place
from stormo.launch.allocation import check_alone, gpus_on_node, hints
from stormo.launch.detect import LAUNCHERS, check_flags, detect
from stormo.launch.elastic import becomes_agent
from stormo.layout import DEFAULT_PORT, Launched, Layout

# How `stormo run` hands its own flags to the workers, whose script asks for the world.
DEVICE, BACKEND, TIMEOUT = "STORMO_DEVICE", "STORMO_BACKEND", "STORMO_TIMEOUT"

_MOST_WORKERS, _MOST_WORKERS_PER_CORE = 256, 16  # more of them are a slip of the hand, and would take the node down
_FLAGS = ("num_nodes", "node_id", "num_gpus", "master_addr", "master_port")


def find_place(config: TrainConfig, *, is_meant_alone: bool = False) -> Place | None:
    """Who this process is if a launcher started it, which the user's flags must not contradict.

    Args:
        is_meant_alone: whether one process is what the user wants even in a Slurm job of several tasks.
    """
    flags = {name: getattr(config.workers, name) if name in config.given else None for name in _FLAGS}
    place = detect(os.environ, master_addr=flags["master_addr"], master_port=flags["master_port"])
    launcher = config.workers.launcher
    if place is None:
        if launcher == "auto" and not is_meant_alone:
            num_nodes = None if flags["num_nodes"] is None else least_nodes(flags["num_nodes"])
            _say(check_alone(os.environ, num_gpus=flags["num_gpus"], num_nodes=num_nodes))
        return None
    if launcher != "auto":
        raise SettingError(
            f"--launcher {launcher} was set",
            f"{LAUNCHERS[place.launcher].command} has started this process already",
            f"drop --launcher, or type the command without {LAUNCHERS[place.launcher].command}",
        )
    if not becomes_agent(config, place):
        check_flags(place, **flags)
    if place.launcher == "slurm" and place.is_main:
        for hint in hints(os.environ, place, os.getpid()):
            _say(hint)
    return place


def _say(sentence: str | None) -> None:
    if sentence:
        print(f"stormo: {sentence}", file=sys.stderr)  # noqa: T201


def launched_by(place: Place | None) -> Launched | None:
    """The shape of a world that another program has started; None where stormo starts it."""
    if place is None or place.launcher == "local":
        return None
    return Launched(
        launcher="torch's elastic agent" if place.launcher == "elastic" else place.launcher,
        world_size=place.world_size,
        local_size=place.local_size,
        num_nodes=place.num_nodes,
        gpus_on_node=gpus_on_node(os.environ) if place.launcher == "slurm" else None,
    )


def node_of(config: TrainConfig, layout: Layout) -> Node:
    """This node, when stormo starts its workers."""
    workers, cores = config.workers, num_cores()
    if layout.workers_per_node > max(_MOST_WORKERS, _MOST_WORKERS_PER_CORE * cores):
        raise SettingError(
            f"--num-gpus {layout.workers_per_node} was set",
            f"this node has {counted(cores, 'core')}, for which so many processes would wait in turn",
            f"set --num-gpus {cores} or something near",
        )
    return Node(
        num_workers=layout.workers_per_node,
        num_nodes=workers.num_nodes,
        node_id=workers.node_id,
        master_addr=workers.master_addr if "master_addr" in config.given else None,
        master_port=workers.master_port or DEFAULT_PORT,
        script_port=workers.master_port or 0,
    )
