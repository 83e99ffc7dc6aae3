"""Training time, waiting, memory and energy of a run, taken when the device has finished its work.

The time of a run is that of its slowest worker; those of every worker are told by the epoch.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import Any

import torch

from stormo.data.loaders import Loader
from stormo.distributed.world import World
from stormo.energy.keeper import Mark
from stormo.energy.window import MAX_ERROR
from stormo.parallel.base import Strategy
from stormo.training.measuring import AnyKeeper
from stormo.training.progress import Progress

_UNKNOWN = -1.0  # in a row of figures, where no figure is negative


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochFigures:
    """What all workers and nodes did since the epoch before."""

    workers: tuple[dict[str, Any], ...]
    energy_j: float | None
    power_w: float | None


class GpuPeak:
    """The most that this process has held on a GPU, with what a captured pass holds; made once that is captured.

    While a graph is replayed, the allocator counts as allocated what was so when its capture ended. All the rest of the
    graph's own memory is idle by that count, and in use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uncounted_bytes = _idle_in_pools(device)
        self._before = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)

    def held_bytes(self) -> int:
        """By tensors, and by graphs."""
        return max(self._before[0], torch.cuda.max_memory_allocated(self._device) + self._uncounted_bytes)

    def taken_bytes(self) -> int:
        """By the allocator, with what it keeps for later use."""
        return max(self._before[1], torch.cuda.max_memory_reserved(self._device))


def _idle_in_pools(device: torch.device) -> int:
    """Bytes of the pools of graphs that no tensor has."""
    if torch.cuda.get_allocator_backend() != "native":  # CUDA's own shows no pools
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


class Stopwatch:
    """Runs while the model trains; stands still for validation and checkpoints."""

    def __init__(self, world: World, loader: Loader, progress: Progress, strategy: Strategy, keeper: AnyKeeper) -> None:
        self._world = world
        self._loader = loader
        self._progress = progress
        self._strategy = strategy
        self._keeper = keeper
        self._input_s = 0.0  # this worker's waiting for its loader, up to the last pause
        self._own = [0.0, 0.0]  # of this worker since the last epoch: training time, input wait
        self._exposed_mark_s = strategy.exposed_s or 0.0
        self._energy_mark: Mark | None = None  # where the window of energy that is open began
        self._started_s: float | None = None
        # Of the last interval's end, by counters that neither a pause nor a rollback sets back.
        self._mark_s, self._mark_samples, self._mark_wait_s = progress.train_time_s, progress.samples_trained, 0.0
        self._memory = GpuPeak(world.device) if world.device.type == "cuda" else None

    def start(self) -> None:
        """Begin to count."""
        self._synchronize()
        self._started_s = time.perf_counter()
        self._loader.wait_s = 0.0
        self._keeper.enter("training", self._progress.step, self.waiting_s())
        if self._energy_mark is None:
            self._energy_mark = self._keeper.mark()

    def pause(self) -> None:
        """Add the time since `start`, as the slowest worker saw it, to the progress. All workers must call it."""
        self._synchronize()
        assert self._started_s is not None
        own_s, own_wait_s = time.perf_counter() - self._started_s, self._loader.wait_s
        self._keeper.enter("idle", self._progress.step, self.waiting_s())
        self._own = [self._own[0] + own_s, self._own[1] + own_wait_s]
        self._input_s += own_wait_s
        self._loader.wait_s = 0.0
        elapsed_s, wait_s = self._world.max(torch.tensor([own_s, own_wait_s], dtype=torch.float64)).tolist()
        self._progress.train_time_s += elapsed_s
        self._progress.epoch_time_s += elapsed_s
        self._progress.wait_s += wait_s
        self._started_s = None

    def waiting_s(self) -> dict[str, float | None]:
        """Seconds that this worker has waited since the run was started, by what for."""
        return {"input": self._input_s + self._loader.wait_s, "communication": self._strategy.exposed_s}

    def note_step(self) -> None:
        """A step is done: whoever keeps the node's account hears how far it is."""
        self._keeper.advance(self._progress.step, self.waiting_s())

    def end_of_epoch(self) -> EpochFigures:
        """What every worker did since the epoch before, and what all nodes drew meanwhile. All workers must call it.

        Where that is too short for the counters, it is told together with the epochs after it.
        """
        exposed_s, place = self._strategy.exposed_s, self._world.place
        exposed = _UNKNOWN if exposed_s is None else exposed_s - self._exposed_mark_s
        mark = self._keeper.mark()
        window = self._keeper.between(self._energy_mark, mark)
        energy = [0.0, 0.0] if place.local_rank else [_UNKNOWN, 0.0]
        if window is not None:
            energy = [window.measured_j, window.error_j]
        rows = torch.zeros(self._world.size, 6, dtype=torch.float64)
        rows[self._world.rank] = torch.tensor([*self._own, exposed, place.node_id, *energy], dtype=torch.float64)
        self._own, self._exposed_mark_s = [0.0, 0.0], exposed_s or 0.0
        found = self._world.sum(rows).tolist()
        by_node_j, error_j = [row[4] for row in found], sum(row[5] for row in found)
        energy_j = None if _UNKNOWN in by_node_j else sum(by_node_j)
        if energy_j is not None and error_j > MAX_ERROR * energy_j:
            energy_j = None
        else:
            self._energy_mark = mark
        return EpochFigures(
            workers=tuple(
                {
                    "rank": rank,
                    "node": int(node_id),
                    "train_time_s": train_s,
                    "input_wait_s": wait_s,
                    "exposed_s": None if exposed_s == _UNKNOWN else exposed_s,
                }
                for rank, (train_s, wait_s, exposed_s, node_id, *_) in enumerate(found)
            ),
            energy_j=energy_j,
            power_w=None if energy_j is None or window is None else energy_j / max(window.seconds, 1e-9),
        )

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
        """Share of all training time that the slowest loader kept its worker waiting."""
        return self._progress.wait_s / max(self._progress.train_time_s, 1e-9)

    def peak_memory_bytes(self) -> tuple[int, int | None]:
        """The most memory any worker has held, on its GPU or of its process, and has taken of a GPU for that.

        The second is None without a GPU. All workers must call it.
        """
        held, taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0
        if self._memory is not None:
            held, taken = self._memory.held_bytes(), self._memory.taken_bytes()
        held, taken = self._world.max(torch.tensor([held, taken], dtype=torch.int64)).tolist()
        return held, None if self._memory is None else taken

    def _synchronize(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
