"""Training time, input wait and memory of a run: the time of the slowest worker, taken when the device has finished."""

from __future__ import annotations

import resource
import time

import torch

from stormo.data.loaders import Loader
from stormo.progress import Progress
from stormo.world.world import World


class Stopwatch:
    """Runs while the model trains; stands still for validation and checkpoints."""

    def __init__(self, world: World, loader: Loader, progress: Progress) -> None:
        self._world = world
        self._loader = loader
        self._progress = progress
        self._started_s: float | None = None
        self._mark_s = time.perf_counter()
        self._mark_samples = progress.samples_seen
        self._mark_wait_s = 0.0

    def start(self) -> None:
        """Begin to count."""
        self._synchronize()
        self._started_s = time.perf_counter()
        self._mark_s, self._mark_wait_s, self._mark_samples = self._started_s, 0.0, self._progress.samples_seen
        self._loader.wait_s = 0.0

    def pause(self) -> None:
        """Add the time since `start`, as the slowest worker saw it, to the progress. All workers must call it."""
        self._synchronize()
        assert self._started_s is not None
        times = torch.tensor([time.perf_counter() - self._started_s, self._loader.wait_s], dtype=torch.float64)
        elapsed_s, wait_s = self._world.max(times).tolist()
        self._progress.train_time_s += elapsed_s
        self._progress.epoch_time_s += elapsed_s
        self._progress.wait_s += wait_s
        self._started_s = None

    def running_s(self) -> float:
        """Seconds since `start`."""
        return 0.0 if self._started_s is None else time.perf_counter() - self._started_s

    def since_last_s(self) -> float:
        """Seconds since the last interval ended."""
        return time.perf_counter() - self._mark_s

    def interval(self, samples_seen: int) -> tuple[float, float]:
        """Samples per second and share of waiting since the last call or `start`."""
        now_s = time.perf_counter()
        elapsed_s = max(now_s - self._mark_s, 1e-9)
        rate = (samples_seen - self._mark_samples) / elapsed_s
        wait = (self._loader.wait_s - self._mark_wait_s) / elapsed_s
        self._mark_s, self._mark_samples, self._mark_wait_s = now_s, samples_seen, self._loader.wait_s
        return rate, wait

    def wait_fraction(self) -> float:
        """Share of all training time that the slowest loader kept its worker waiting."""
        return self._progress.wait_s / max(self._progress.train_time_s, 1e-9)

    def peak_memory_bytes(self) -> int:
        """The most memory any worker has held: on its GPU, or of its process."""
        if self._world.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._world.device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return int(self._world.max(torch.tensor([peak], dtype=torch.int64)))

    def _synchronize(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
