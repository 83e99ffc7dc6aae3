"""Worker processes that read a map-style data set ahead, seeded sample by sample, and never outlive their trainer."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import select
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

from stormo.data.order import seed_generators

Key = tuple[int, int]  # a sample and the seed of its own randomness


def stream(data: Dataset[Any], batches: Iterable[list[Key]], device: torch.device, num_workers: int) -> DataLoader[Any]:
    """A loader of the given batches; with `num_workers` 0 they are read where they are asked for."""
    context = multiprocessing.get_context("forkserver") if num_workers else None
    if context is not None:
        context.set_forkserver_preload(["torch"])  # imported once, not by every process
    return DataLoader(
        Seeded(data),
        batch_sampler=batches,
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
        persistent_workers=num_workers > 0,
        prefetch_factor=4 if num_workers else None,
        generator=torch.Generator().manual_seed(0),  # never draw from the global generator: it would shift dropout
        multiprocessing_context=context,
        worker_init_fn=_ending_with_this_process() if num_workers else None,
    )


def shut_down(loader: DataLoader[Any]) -> None:
    """End a loader's processes now rather than at garbage collection."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:
        iterator._shutdown_workers()
        loader._iterator = None


class Seeded(Dataset[Any]):
    """Seeds every generator before each sample, so that a data set's own randomness depends on the position alone."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data

    def __getitem__(self, key: tuple[int, int]) -> Any:
        index, seed = key
        before = random.getstate(), numpy.random.get_state()
        with torch.random.fork_rng(devices=[]):
            seed_generators(seed)
            try:
                return self.data[index]
            finally:
                random.setstate(before[0])
                numpy.random.set_state(before[1])


def _ending_with_this_process() -> Callable[[int], None]:
    """For `worker_init_fn`: have a loading process end when the one that calls this does, even if it is killed.

    It is a child of the fork server, which in turn lives until all its children have ended: torch's own look at the
    parent would wait for ever.
    """
    return functools.partial(_end_with, os.getpid())


def _end_with(trainer_pid: int, _: int) -> None:
    def wait() -> None:
        waiting = select.poll()
        waiting.register(trainer, select.POLLIN)
        waiting.poll()
        os._exit(1)

    try:
        trainer = os.pidfd_open(trainer_pid)
    except ProcessLookupError:  # it has ended already
        os._exit(1)
    threading.Thread(target=wait, name="stormo-ends-with-trainer", daemon=True).start()
