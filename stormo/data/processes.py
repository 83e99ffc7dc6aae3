"""Loading processes: torch's DataLoader with processes that forward errors and never outlive their trainer."""

from __future__ import annotations

import atexit
import functools
import io
import multiprocessing
import os
import pickle
import select
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import get_temp_dir
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from stormo.data.batches import Collate, is_opaque, move, tensors_in
from stormo.data.order import MicroBatch
from stormo.errors import SettingError

_MOST_SHARED = 64  # of the 256 descriptors that can be sent at once, some of which are needed otherwise
_ARRAY_DTYPES = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_ARRAY_DTYPES |= {torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128}


class Requests(Sampler[Any]):
    """What a reader is asked for: one item for each micro-batch, set before each iteration."""

    def __init__(self) -> None:
        self.items: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def open_loader(
    data: Dataset[Any], device: torch.device, num_workers: int, make_batch: Collate, **settings: Any
) -> DataLoader[Any]:
    """A DataLoader; with `num_workers` 0 batches are read where they are asked for."""
    context = multiprocessing.get_context("forkserver") if num_workers else None
    if context is not None:
        context.set_forkserver_preload(["stormo.data.loading_process_signals", "torch", __name__])
    return DataLoader(
        data,
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
        persistent_workers=num_workers > 0,
        prefetch_factor=4 if num_workers else None,
        generator=torch.Generator().manual_seed(0),  # never draw from the global generator: it would shift dropout
        multiprocessing_context=context,
        worker_init_fn=_ending_with_this_process() if num_workers else None,
        collate_fn=functools.partial(batch_or_error, make_batch),
        **settings,
    )


def shut_down(loader: DataLoader[Any]) -> None:
    """End a loader's processes now rather than at garbage collection."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:
        iterator._shutdown_workers()
        loader._iterator = None


class DevicePrefetcher:
    """Batches on the device; the next one is copied on a CUDA stream while this one is used."""

    def __init__(self, data: Dataset[Any], device: torch.device, num_workers: int, make_batch: Collate) -> None:
        self._requests = Requests()
        self._loader = open_loader(data, device, num_workers, make_batch, batch_sampler=self._requests)
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def close(self) -> None:
        """End the loading processes now rather than at garbage collection."""
        shut_down(self._loader)

    def batches(self, requests: Iterable[Any], spans: Iterable[MicroBatch]) -> Iterator[tuple[Any, MicroBatch]]:
        """What the data set gives for each request, with its span."""
        self._requests.items = requests
        ahead: tuple[tuple[Any, Any], MicroBatch] | None = None
        source = iter(self._loader)
        for span in spans:
            # The copy of this batch starts before the one ahead of it is handed out and computed on.
            arrived = self._to_device(raise_forwarded(next(source)))
            if ahead is not None:
                yield self._usable(*ahead[0]), ahead[1]
            ahead = arrived, span
        if ahead is not None:
            yield self._usable(*ahead[0]), ahead[1]

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


# Errors for the user


def raise_forwarded(batch: Any) -> Any:
    """The batch; an error that a loading process gave in its place is raised."""
    if isinstance(batch, SettingError):
        raise batch
    return batch


def batch_or_error(make_batch: Collate, samples: Any) -> Any:
    """A batch, or an error for the user in its place; torch would wrap it in a traceback."""
    try:
        return samples if isinstance(samples, SettingError) else make_batch(samples)
    except SettingError as error:
        return error


# A data set on its way to a process


class PickleByValue:
    """Base of what is sent to a loading process: tensors go by shared memory or, where they are many, by value.

    A tensor in shared memory takes a file descriptor, and only a few hundred can be sent at once.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        counting = _CountTensors(io.BytesIO(), protocol)
        counting.dump(vars(self))
        if counting.num_tensors <= _MOST_SHARED:
            return super().__reduce_ex__(protocol)
        content = io.BytesIO()
        _ByValue(content, protocol).dump(vars(self))
        return _unpickled, (type(self), content.getvalue())


def _unpickled(cls: type[Any], content: bytes) -> Any:
    made = object.__new__(cls)
    vars(made).update(pickle.loads(content))
    return made


class _CountTensors(ForkingPickler):
    """Counts tensors and leaves out their content."""

    num_tensors = 0

    def persistent_id(self, value: Any) -> str | None:
        """A stand-in for a tensor."""
        if not isinstance(value, Tensor):
            return None
        self.num_tensors += 1
        return "tensor"


class _ByValue(ForkingPickler):
    """Writes the content of tensors, where multiprocessing shares their memory."""

    def reducer_override(self, value: Any) -> Any:
        """As an array, which does not bring along the tensor that a row is part of; otherwise as plain pickle does."""
        if type(value) is Tensor and value.dtype in _ARRAY_DTYPES and value.is_cpu and not value.requires_grad:
            return torch.from_numpy, (value.numpy(),)
        if isinstance(value, Tensor | torch.UntypedStorage | torch.TypedStorage):
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


# The end of a process


def _ending_with_this_process() -> Callable[[int], None]:
    """For `worker_init_fn`: have a loading process end when the one that calls this does, even if it is killed.

    It is a child of the fork server, which lives until all its children have ended: torch's own look at the parent
    would wait for ever.
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
    from stormo.data.loading_process_signals import ignore_stop_signals

    ignore_stop_signals()  # again, as torch has just set handlers

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
