"""Worker processes that read a data set ahead, seeded sample by sample, and never outlive their trainer."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import select
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from multiprocessing.util import get_temp_dir
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from stormo.data.batches import Collate, are_same, collate, is_opaque, move, tensors_in
from stormo.data.generators import generators_kept, host_states, same_states, seed_host, set_host_states
from stormo.data.sending import Travels
from stormo.errors import SettingError

Tag = TypeVar("Tag")
Key = tuple[int, int]  # a sample and the seed of its own randomness


def stream(
    data: Dataset[Any],
    batches: Iterable[list[Key]],
    device: torch.device,
    num_workers: int,
    make_batch: Collate = collate,
) -> DataLoader[Any]:
    """A loader of the given batches; with `num_workers` 0 they are read where they are asked for."""
    return open_loader(Seeded(data), device, num_workers, batch_sampler=batches, collate_fn=Answering(make_batch))


def open_loader(data: Dataset[Any], device: torch.device, num_workers: int, **reading: Any) -> DataLoader[Any]:
    """torch's loader with processes that can be relied on; `reading` says how it makes batches."""
    context = multiprocessing.get_context("forkserver") if num_workers else None
    if context is not None:
        context.set_forkserver_preload(["torch", "stormo.data.undisturbed"])  # imported once, not by every process
    return DataLoader(
        data,
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
        persistent_workers=num_workers > 0,
        prefetch_factor=4 if num_workers else None,
        generator=torch.Generator().manual_seed(0),  # never draw from the global generator: it would shift dropout
        multiprocessing_context=context,
        worker_init_fn=_ending_with_this_process() if num_workers else None,
        **reading,
    )


def shut_down(loader: DataLoader[Any]) -> None:
    """End a loader's processes now rather than at garbage collection."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:
        iterator._shutdown_workers()
        loader._iterator = None


class Ahead(Generic[Tag]):
    """A loader's batches on the device: the next one is copied, on a stream of its own, while this one is used."""

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self.loader = loader
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def batches(self, tags: Iterable[Tag]) -> Iterator[tuple[Any, Tag]]:
        """The next batches of the loader, one for each tag."""
        ahead: tuple[Any, Any] | None = None
        pending: list[Tag] = []
        source = iter(self.loader)
        for tag in tags:
            # The copy of this batch starts before the one ahead of it is handed out and computed on.
            arrived = self._to_device(answered(next(source)))
            if ahead is not None:
                yield self._usable(*ahead), pending.pop()
            ahead = arrived
            pending.append(tag)
        if ahead is not None:
            yield self._usable(*ahead), pending.pop()

    def _to_device(self, data: Any) -> tuple[Any, Any]:
        if self._copies is None or is_opaque(data):  # its memory could not be kept for the stream that uses it
            return move(data, self._device), None
        with torch.cuda.stream(self._copies):
            return move(data, self._device), self._copies.record_event()

    def _usable(self, data: Any, copied: Any) -> Any:
        if copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            for tensor in tensors_in(data):
                if tensor.is_cuda:  # what moves itself may leave some on the host: a packed sequence its batch sizes
                    tensor.record_stream(current)  # keep its memory until this stream is done with it
        return data


@dataclass(frozen=True, slots=True)
class Refusal:
    """A sentence for the user on its way out of a loading process, where torch would wrap it in a traceback."""

    sentence: str


def answered(batch: Any) -> Any:
    """The batch, or the error that it stands for."""
    if isinstance(batch, Refusal):
        raise SettingError.__new__(SettingError, batch.sentence)  # it is whole already
    return batch


class Answering:
    """A way to make batches whose errors for the user become a `Refusal`."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        """A batch of these samples."""
        try:
            return samples if isinstance(samples, Refusal) else self._collate(samples)
        except SettingError as error:
            return Refusal(str(error))


class Seeded(Travels, Dataset[Any]):
    """Reads every sample as if all generators were seeded for it: a data set's own randomness depends on the position.

    Seeding takes longer than many a sample. It is left out as long as reading draws nothing, which is looked at twice:
    the first sample is the same under two seeds, and a batch leaves the generators where they were. Where one has
    moved them it is read again with seeds, and every batch from then on is read so.
    """

    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data
        self.draws = _may_draw(data)
        self._needs_seeds: bool | None = None  # where it may draw: not known before the first batch

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        """The samples of a batch."""
        if self.draws and self._needs_seeds is None:
            samples = self._read_seeded(keys)
            index, seed = keys[0]
            self._needs_seeds = not are_same(samples[:1], self._read_seeded([(index, seed ^ 1)]))
            return samples
        if self._needs_seeds:
            return self._read_seeded(keys)
        before = host_states() if self.draws else None
        samples = read(self.data, [index for index, _ in keys])
        if before is None or same_states(before, host_states()):
            return samples
        set_host_states(before)
        self._needs_seeds = True
        return self._read_seeded(keys)

    def _read_seeded(self, keys: list[Key]) -> list[Any]:
        samples = []
        with generators_kept():  # putting them back takes longer than a seed, and is done once
            for index, seed in keys:
                seed_host(seed)
                samples.append(read_one(self.data, index))
        return samples


def read(data: Any, indices: list[int]) -> list[Any]:
    """Samples by their numbers, at once where a data set has a way to, as torch's loaders read them."""
    if callable(getattr(data, "__getitems__", None)):
        return list(data.__getitems__(indices))
    return [data[index] for index in indices]


def read_one(data: Any, index: int) -> Any:
    """One sample; the way to read many is taken only where there is no other."""
    inner = data
    while isinstance(inner, Subset):
        inner = inner.dataset
    has_one = getattr(type(inner), "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__
    return data[index] if has_one else read(data, [index])[0]


def _may_draw(data: Any) -> bool:
    """Whether reading could draw random numbers; what holds tensors and hands out rows does not."""
    while type(data) is Subset:
        data = data.dataset
    return type(data) is not TensorDataset


def _ending_with_this_process() -> Callable[[int], None]:
    """For `worker_init_fn`: have a loading process end when the one that calls this does, even if it is killed.

    It is a child of the fork server, which in turn lives until all its children have ended: torch's own look at the
    parent would wait for ever.
    """
    _kill_at_exit(os.getpid())
    get_temp_dir()  # one for all loading processes, which this one removes; a killed one would leave its own
    return functools.partial(_end_with, os.getpid())


@functools.cache
def _kill_at_exit(pid: int) -> None:
    """At the end Python sends loading processes a SIGTERM, which they ignore, and waits for them: kill them before."""

    def kill() -> None:
        if os.getpid() == pid:  # not in a process that was forked from it
            for child in multiprocessing.active_children():
                if child.daemon and isinstance(child, ForkServerProcess):
                    child.kill()

    atexit.register(kill)


def _end_with(trainer_pid: int, _: int) -> None:
    from stormo.data.undisturbed import ignore_stop_signals  # not in the trainer, whose signals these are

    ignore_stop_signals()  # again, as torch has just set handlers of its own

    def wait() -> None:
        waiting = select.poll()
        waiting.register(trainer, select.POLLIN)
        waiting.poll()
        shutil.rmtree(get_temp_dir(), ignore_errors=True)  # the trainer's, which may have been killed
        os._exit(1)

    try:
        trainer = os.pidfd_open(trainer_pid)
    except ProcessLookupError:  # it has ended already
        os._exit(1)
    threading.Thread(target=wait, name="stormo-ends-with-trainer", daemon=True).start()
