"""Measures training time, waiting, memory and energy, once the device has finished its work.

The time of a run is that of its slowest rank; every epoch reports those of each rank. One rank of each node records the
devices of all ranks on it.
"""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stormo.data.loaders import Loader
from stormo.distributed.devices import device_uuid
from stormo.distributed.world import World
from stormo.energy.meter import MAX_ERROR, own_meter
from stormo.energy.node_metrics import NodeMetrics
from stormo.energy.node_recorder import Mark, NodeRecorder, NoNodeRecorder, steady_unix_s
from stormo.parallel.base import Strategy
from stormo.system.nvml import Device, NvmlUnavailableError, open_nvml
from stormo.training.state import Progress

_UNKNOWN = -1.0  # in a row of figures, where no figure is negative


class GpuPeak:
    """The peak GPU memory of this process, including a captured CUDA graph; made after the capture.

    While a graph is replayed, the allocator counts only what was allocated when its capture ended. The rest of the
    graph's pool counts as idle, but is in use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uncounted_bytes = _idle_in_pools(device)
        self._before = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)

    def used_bytes(self) -> int:
        """Of tensors and graphs."""
        return max(self._before[0], torch.cuda.max_memory_allocated(self._device) + self._uncounted_bytes)

    def reserved_bytes(self) -> int:
        """What the allocator has taken, with what it keeps for later."""
        return max(self._before[1], torch.cuda.max_memory_reserved(self._device))


def _idle_in_pools(device: torch.device) -> int:
    """Bytes of the graphs' pools that no tensor uses."""
    if torch.cuda.get_allocator_backend() != "native":  # CUDA's own shows no pools
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


class TrainingClock:
    """Runs while the model trains; stands still for validation and checkpoints."""

    def __init__(
        self, world: World, loader: Loader, progress: Progress, strategy: Strategy, node_recorder: NodeRecorder
    ) -> None:
        self._world = world
        self._loader = loader
        self._progress = progress
        self._strategy = strategy
        self._node_recorder = node_recorder
        self._input_s = 0.0  # that this rank waited for its loader, up to the last pause
        self._own = [0.0, 0.0]  # of this rank since the last epoch: training time, input wait
        self._exposed_mark_s = strategy.exposed_s or 0.0
        self._energy_mark: Mark | None = None  # where the open window of energy began
        self._started_s: float | None = None
        # At the end of the last interval, by counters that neither a pause nor a rollback resets.
        self._mark_s, self._mark_samples, self._mark_wait_s = progress.train_time_s, progress.samples_trained, 0.0
        self._memory = GpuPeak(world.device) if world.device.type == "cuda" else None

    def start(self) -> None:
        """Start to count."""
        self._world.wait_for_device()
        self._node_recorder.enter("training", self._progress.step, self.waiting_s())  # may read counters
        self._started_s = time.perf_counter()
        self._loader.wait_s = 0.0
        if self._energy_mark is None:
            self._energy_mark = self._node_recorder.mark()

    def pause(self) -> None:
        """Add the time since `start`, of the slowest rank, to the progress. All ranks call it."""
        self._world.wait_for_device()
        assert self._started_s is not None
        own_s, own_wait_s = time.perf_counter() - self._started_s, self._loader.wait_s
        self._node_recorder.enter("idle", self._progress.step, self.waiting_s())
        self._own = [self._own[0] + own_s, self._own[1] + own_wait_s]
        self._input_s += own_wait_s
        self._loader.wait_s = 0.0
        elapsed_s, wait_s = self._world.max(torch.tensor([own_s, own_wait_s], dtype=torch.float64)).tolist()
        self._progress.train_time_s += elapsed_s
        self._progress.epoch_time_s += elapsed_s
        self._progress.wait_s += wait_s
        self._started_s = None

    def waiting_s(self) -> dict[str, float | None]:
        """Seconds that this rank has waited since its start, by what for."""
        return {"input": self._input_s + self._loader.wait_s, "communication": self._strategy.exposed_s}

    def step_done(self) -> None:
        """Tell the node's recorder how far the run is."""
        self._node_recorder.advance(self._progress.step, self.waiting_s())

    def end_of_epoch(self) -> dict[str, Any]:
        """What every rank did since the epoch before, and what all nodes drew, for `EpochDone`. All ranks call it.

        An epoch too short for the energy counters is counted with those after it.
        """
        exposed_s, rank_info = self._strategy.exposed_s, self._world.rank_info
        exposed = _UNKNOWN if exposed_s is None else exposed_s - self._exposed_mark_s
        mark = self._node_recorder.mark()
        window = self._node_recorder.between(self._energy_mark, mark)
        energy = [0.0, 0.0] if rank_info.local_rank else [_UNKNOWN, 0.0]
        if window is not None:
            energy = [window.measured_j, window.error_j]
        rows = torch.zeros(self._world.size, 6, dtype=torch.float64)
        rows[self._world.rank] = torch.tensor([*self._own, exposed, rank_info.node_id, *energy], dtype=torch.float64)
        self._own, self._exposed_mark_s = [0.0, 0.0], exposed_s or 0.0
        found = self._world.sum(rows).tolist()
        by_node_j, error_j = [row[4] for row in found], sum(row[5] for row in found)
        energy_j = None if _UNKNOWN in by_node_j else sum(by_node_j)
        if energy_j is not None and error_j > MAX_ERROR * energy_j:
            energy_j = None
        else:
            self._energy_mark = mark
        workers = tuple(
            {
                "rank": rank,
                "node": int(node_id),
                "train_time_s": train_s,
                "input_wait_s": wait_s,
                "exposed_s": None if exposed_s == _UNKNOWN else exposed_s,
            }
            for rank, (train_s, wait_s, exposed_s, node_id, *_) in enumerate(found)
        )
        power_w = None if energy_j is None or window is None else energy_j / max(window.seconds, 1e-9)
        return {"workers": workers, "energy_j": energy_j, "power_w": power_w}

    def running_s(self) -> float:
        """Seconds since `start`."""
        return 0.0 if self._started_s is None else time.perf_counter() - self._started_s

    def since_last_s(self) -> float:
        """Seconds of training since the last interval ended."""
        return self._progress.train_time_s + self.running_s() - self._mark_s

    def interval(self) -> tuple[float, float]:
        """Samples per second of training and share of waiting since the last call."""
        elapsed_s = max(self.since_last_s(), 1e-9)
        num_samples, wait_s = self._progress.samples_trained, self._input_s + self._loader.wait_s
        rate, wait = (num_samples - self._mark_samples) / elapsed_s, (wait_s - self._mark_wait_s) / elapsed_s
        self._mark_s, self._mark_samples, self._mark_wait_s = self._mark_s + elapsed_s, num_samples, wait_s
        return rate, wait

    def wait_fraction(self) -> float:
        """Share of the training time that ranks waited for their loaders."""
        return self._progress.wait_s / max(self._progress.train_time_s, 1e-9)

    def peak_memory_bytes(self) -> tuple[int, int | None]:
        """The peak memory of all ranks: used (GPU, or process without one), and reserved on the GPU or None.

        All ranks call it.
        """
        used, reserved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0
        if self._memory is not None:
            used, reserved = self._memory.used_bytes(), self._memory.reserved_bytes()
        used, reserved = self._world.max(torch.tensor([used, reserved], dtype=torch.int64)).tolist()
        return used, None if self._memory is None else reserved


def open_node_recorder(world: World, *, devices_per_worker: int, is_on: bool) -> NodeRecorder:
    """A recorder in one rank of each node, and one that does nothing in the others. All ranks call it."""
    if not is_on:
        return NoNodeRecorder()
    uuids, clock = gpus_by_node(world, devices_per_worker=devices_per_worker)
    rank_info = world.rank_info
    if rank_info.local_rank:
        return NoNodeRecorder()
    own = uuids.get(str(rank_info.node_id), [])
    meter, _ = own_meter(own, rank_info.node_id)
    return NodeRecorder(
        meter,
        NodeMetrics(_devices(own)).sample,
        rank_info.node_id,
        socket.gethostname(),
        num_nodes=len(uuids),
        clock=clock,
    )


def gpus_by_node(world: World, *, devices_per_worker: int) -> tuple[dict[str, list[str]], Callable[[], float]]:
    """The GPUs of the job by node (a rank may see all, or only its own), and the clock of rank 0. All ranks call it.

    The files of all nodes have the time of rank 0, as they are read as one.
    """
    own = []
    if world.device.type == "cuda":
        indices = [world.device.index] if devices_per_worker == 1 else range(devices_per_worker)
        own = [device_uuid(index) for index in indices]
    gathered = world.gather_objects([world.rank_info.node_id, own])
    by_node: dict[str, list[str]] = {}
    for node_id, uuids in gathered or []:
        known = by_node.setdefault(str(node_id), [])
        known += [uuid for uuid in uuids if uuid not in known]
    found, main_unix_s = world.broadcast_object([by_node, steady_unix_s()])
    ahead_s = 0.0 if world.is_main else main_unix_s - steady_unix_s()
    return found, lambda: steady_unix_s() + ahead_s


def _devices(uuids: Sequence[str]) -> list[Device]:
    """Empty where NVML cannot be opened; the energy account says why."""
    if not uuids:
        return []
    try:
        nvml = open_nvml()
    except NvmlUnavailableError:
        return []
    return [device for device in map(nvml.find, uuids) if device is not None]
