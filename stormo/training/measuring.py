"""Opens the node's recorder: one rank of each node records the devices of all ranks on it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import torch

from stormo.distributed.world import World
from stormo.energy import own_meter
from stormo.energy.node_metrics import NodeMetrics
from stormo.energy.node_recorder import NodeRecorder, NoNodeRecorder, steady_unix_s
from stormo.energy.nvml import Device, NvmlUnavailableError, open_nvml

AnyNodeRecorder = NodeRecorder | NoNodeRecorder


def open_node_recorder(world: World, *, devices_per_worker: int, is_on: bool) -> AnyNodeRecorder:
    """A recorder in one rank of each node, and one that does nothing in the others. All ranks call it."""
    if not is_on:
        return NoNodeRecorder()
    uuids, main_unix_s = gpus_by_node(world, devices_per_worker=devices_per_worker)
    clock = shared_clock(world, main_unix_s)
    place = world.place
    if place.local_rank:
        return NoNodeRecorder()
    own = uuids.get(str(place.node_id), [])
    meter, _ = own_meter(own, place.node_id)
    return NodeRecorder(
        meter,
        NodeMetrics(_devices(own)).sample,
        place.node_id,
        socket.gethostname(),
        num_nodes=len(uuids),
        clock=clock,
    )


def shared_clock(world: World, main_unix_s: float) -> Callable[[], float]:
    """The clock of rank 0, which has just sent its time: the files of all nodes are read as one."""
    ahead_s = 0.0 if world.is_main else main_unix_s - steady_unix_s()
    return lambda: steady_unix_s() + ahead_s


def gpus_by_node(world: World, *, devices_per_worker: int) -> tuple[dict[str, list[str]], float]:
    """The GPUs of the job by node (a rank may see all, or only its own), and rank 0's time. All ranks call it."""
    own = []
    if world.device.type == "cuda":
        indices = [world.device.index] if devices_per_worker == 1 else range(devices_per_worker)
        own = [str(torch.cuda.get_device_properties(index).uuid) for index in indices]
    gathered = world.gather_objects([world.place.node_id, own])
    by_node: dict[str, list[str]] = {}
    for node_id, uuids in gathered or []:
        known = by_node.setdefault(str(node_id), [])
        known += [uuid for uuid in uuids if uuid not in known]
    found, main_unix_s = world.broadcast_object([by_node, steady_unix_s()])
    return found, main_unix_s


def _devices(uuids: Sequence[str]) -> list[Device]:
    """Empty where NVML cannot be opened; the energy account says why."""
    if not uuids:
        return []
    try:
        nvml = open_nvml()
    except NvmlUnavailableError:
        return []
    return [device for device in map(nvml.find, uuids) if device is not None]
