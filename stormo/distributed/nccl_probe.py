"""Times NCCL's all-reduce under other settings, beside a worker: `python -m stormo.distributed.nccl_probe`.

NCCL reads its variables once in a process, so each order of the worker is measured in a fork. Neither process imports
torch, which would take seconds. The fork is made before anything of CUDA is initialised.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from stormo.system.process import die_with_parent

SMALL_BYTES = (2 << 10, 16 << 10)
LARGE_BYTES = (25 << 20, 10 << 20, 8 << 20, 5 << 20)
_SMALL_CALLS, _WARM_UPS = 20, 2
_FLOAT32, _SUM, _ID_BYTES = 7, 0, 128  # of nccl.h
_NON_BLOCKING_STREAM, _BLOCKING_SYNC = 1, 4  # of cuda.h
_NUM_SPINS = 10_000
Exchange = Callable[[Callable[[], list[str]]], list[str]]
Measure = Callable[[Mapping[str, Any], Exchange], dict[str, Any]]


class NcclUniqueId(ctypes.Structure):
    """How the ranks of a communicator find one another."""

    _fields_ = (("internal", ctypes.c_byte * _ID_BYTES),)


def serve(connection: Connection, measure: Measure) -> None:
    """Measure what the worker orders, each in a fork, until it closes the connection."""
    child = 0
    try:
        while True:
            order = json.loads(connection.recv_bytes())
            child = _end(child)
            child = os.fork()
            if child == 0:
                _measure_here(connection, measure, order)
            child = _spin(connection, child, order["number"])
    except (EOFError, ConnectionError):
        _end(child)


def _measure_here(connection: Connection, measure: Measure, order: Mapping[str, Any]) -> None:
    """Measure in this process, which does not return."""
    try:
        die_with_parent()
        os.environ.update(order["variables"])

        def exchange(make: Callable[[], list[str]]) -> list[str]:
            """The ids that rank 0 makes, on all ranks."""
            if order["ids"] is None:
                order_ids = make()
                _say(connection, order["number"], {"ids": order_ids})
                return order_ids
            return list(order["ids"])

        answer = measure(order, exchange)
    except BaseException as error:  # which the worker reports
        answer = {"error": str(error) or type(error).__name__}
    with contextlib.suppress(OSError):
        _say(connection, order["number"], answer)
        # Other ranks may still wait for what NCCL's threads here have to send: the next order ends this process.
        signal.pause()
    os._exit(0)


def _say(connection: Connection, number: int, answer: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps({"number": number, **answer}).encode())


def _spin(connection: Connection, child: int, number: int) -> int:
    """Wait for the next order, and keep a core busy as training does: NCCL's threads then find fewer free ones."""
    while not connection.poll():
        for _ in range(_NUM_SPINS):
            pass
        if child and os.waitpid(child, os.WNOHANG)[0]:
            child = 0
            _say(connection, number, {"error": "the measuring process crashed"})
    return child


def _end(child: int) -> int:
    if child:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return 0


class AllReduce:
    """All-reduces of one rank by ctypes."""

    def __init__(self, library: str, device: int, rank: int, world_size: int) -> None:
        self._device, self._rank, self._world_size = device, rank, world_size
        self._cuda, self._nccl = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(library)
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._nccl.ncclGetLastError.restype = ctypes.c_char_p
        self._nccl.ncclGetLastError.argtypes = [pointer]
        self._nccl.ncclAllReduce.argtypes = [pointer, pointer, ctypes.c_size_t, number, number, pointer, pointer]
        self._nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, NcclUniqueId, number]
        self._stream, self._buffer = ctypes.c_void_p(), ctypes.c_uint64()

    def open_device(self) -> None:
        """Make a stream, and a buffer for the largest message."""
        context, device, size = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_size_t(max(LARGE_BYTES))
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), self._device)
        self._call("cuDevicePrimaryCtxSetFlags_v2", device, _BLOCKING_SYNC)  # waiting takes no core
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(self._buffer), size)
        self._call("cuMemsetD8_v2", self._buffer, ctypes.c_ubyte(0), size)
        self._call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING_STREAM)

    def new_id(self) -> str:
        """A communicator's id, of which this process serves the rendezvous."""
        made = NcclUniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made).hex()

    def communicator(self, unique_id: str) -> ctypes.c_void_p:
        """A communicator of all ranks. All ranks call it."""
        made, its_id = ctypes.c_void_p(), NcclUniqueId.from_buffer_copy(bytes.fromhex(unique_id))
        self._call("ncclCommInitRank", ctypes.byref(made), self._world_size, its_id, self._rank)
        return made

    def seconds(self, communicator: ctypes.c_void_p, num_bytes: int, num_calls: int) -> float:
        """The time of one all-reduce. All ranks call it."""
        buffer, began_s = self._buffer.value, 0.0
        for number in range(_WARM_UPS + num_calls):
            if number == _WARM_UPS:
                self._call("cuStreamSynchronize", self._stream)
                began_s = time.perf_counter()
            words = (buffer, buffer, num_bytes // 4, _FLOAT32, _SUM, communicator, self._stream)
            self._call("ncclAllReduce", *words)
        self._call("cuStreamSynchronize", self._stream)
        return (time.perf_counter() - began_s) / num_calls

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._nccl if name.startswith("nccl") else self._cuda, name)(*arguments)
        if result:
            why = self._nccl.ncclGetLastError(None) if name.startswith("nccl") else None
            raise OSError(f"{name} gave error {result}" + (f" ({why.decode(errors='replace').strip()})" if why else ""))


def measure(all_reduce: AllReduce, order: Mapping[str, Any], exchange: Exchange) -> dict[str, Any]:
    """Seconds by message size; of small ones also by tree, with a communicator of its own, where the order says so."""
    all_reduce.open_device()
    ids = exchange(lambda: [all_reduce.new_id() for _ in range(1 + order["tree"])])

    def by_size(unique_id: str, sizes: Sequence[int]) -> dict[str, float]:
        communicator = all_reduce.communicator(unique_id)
        calls = {size: _SMALL_CALLS if size in SMALL_BYTES else order["calls"] for size in sizes}
        return {str(size): all_reduce.seconds(communicator, size, calls[size]) for size in sizes}

    found: dict[str, Any] = {"seconds": by_size(ids[0], order["sizes"])}
    if order["tree"]:
        os.environ["NCCL_ALGO"] = "Tree"  # read for each communicator
        found["tree"] = by_size(ids[1], SMALL_BYTES)
    return found


def main(arguments: Sequence[str]) -> None:
    """Serve the worker at the other end of a socket."""
    die_with_parent()
    descriptor, library, device, rank, world_size = arguments
    all_reduce = AllReduce(library, int(device), int(rank), int(world_size))
    serve(Connection(int(descriptor)), lambda order, exchange: measure(all_reduce, order, exchange))


if __name__ == "__main__":
    main(sys.argv[1:])
