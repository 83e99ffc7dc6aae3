"""Which device a worker takes, and how many cores."""

from __future__ import annotations

import os

import torch

from stormo.hardware import num_cores
from stormo.launch import Place


def device_of(device_type: str, place: Place) -> torch.device:
    """The device of a worker: its own GPU, or the CPU."""
    if device_type == "cpu":
        return torch.device("cpu")
    # A launcher may show each worker one GPU of its own; workers that share GPUs on purpose take them in turn.
    return torch.device("cuda", place.local_rank % torch.cuda.device_count())


def share_cores(place: Place) -> None:
    """Where neither the user nor the launcher has given each worker its cores, let it take its share of them."""
    if place.local_size > 1 and "OMP_NUM_THREADS" not in os.environ and num_cores() == os.cpu_count():
        torch.set_num_threads(max(1, num_cores() // place.local_size))
