"""A few samples of the training set as a batch, before there is a loader."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from stormo.data.batches import move
from stormo.data.reading import is_stream
from stormo.data.streaming import read
from stormo.data.tensors import TensorData
from stormo.tasks.task import Task


def sample_batch(task: Task, num_samples: int, device: torch.device) -> Any:
    """The first samples, collated and augmented as in training; fewer where there are fewer."""
    data = task.datasets()[0]
    if isinstance(data, TensorData):
        batch: Any = tuple(tensor[:num_samples] for tensor in data.tensors)
    else:
        some = itertools.islice(iter(data), num_samples) if is_stream(data) else _first(data, num_samples)
        batch = task.collate(list(some))
    batch = move(batch, device)
    if task.num_draws:
        batch = task.augment(batch, torch.full((num_samples, task.num_draws), 0.5, device=device))
    return batch


def _first(data: Any, num_samples: int) -> list[Any]:
    return read(data, list(range(min(num_samples, len(data)))))
