"""From the settings of workers to a node of a job: which process this is, and the workers that it starts."""

from __future__ import annotations

import os

from stormo.config import TrainConfig
from stormo.launch import Node, Place
from stormo.launch.detect import check_flags, detect
from stormo.layout import DEFAULT_PORT, Launched, Layout

# How `stormo run` hands its own flags to the workers, whose script asks for the world.
DEVICE, BACKEND, TIMEOUT = "STORMO_DEVICE", "STORMO_BACKEND", "STORMO_TIMEOUT"

_FLAGS = ("num_nodes", "node_id", "num_gpus", "master_addr", "master_port")


def find_place(config: TrainConfig) -> Place | None:
    """Who this process is if a launcher started it, which the user's flags must not contradict."""
    flags = {name: getattr(config.workers, name) if name in config.given else None for name in _FLAGS}
    place = detect(os.environ, master_addr=flags["master_addr"], master_port=flags["master_port"])
    if place is not None:
        check_flags(place, **flags)
    return place


def launched_by(place: Place | None) -> Launched | None:
    """The shape of a world that another program has started; None where stormo starts it."""
    if place is None or place.launcher == "local":
        return None
    return Launched(
        launcher=place.launcher, world_size=place.world_size, local_size=place.local_size, num_nodes=place.num_nodes
    )


def node_of(config: TrainConfig, layout: Layout) -> Node:
    """This node, when stormo starts its workers."""
    workers = config.workers
    return Node(
        num_workers=layout.workers_per_node,
        num_nodes=workers.num_nodes,
        node_id=workers.node_id,
        master_addr=workers.master_addr if "master_addr" in config.given else None,
        master_port=workers.master_port or DEFAULT_PORT,
        store_port=workers.master_port or 0,
    )
