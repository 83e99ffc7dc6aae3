from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stormo.distributed import nccl_probe
from stormo.distributed.link_tuning import Probe
from stormo.distributed.nccl_probe import LARGE_BYTES, SMALL_BYTES, AllReduce, NcclUniqueId, measure

SIZES = [*SMALL_BYTES, *LARGE_BYTES]
ORDER = {"number": 0, "variables": {}, "calls": 3, "sizes": SIZES, "tree": False, "ids": None}


class FakeFunction:
    """A function of a C library: notes its calls and returns a code, or what `act` makes."""

    def __init__(self, name: str, library: FakeLibrary) -> None:
        self._name, self._library = name, library

    def __call__(self, *arguments: Any) -> Any:
        self._library.calls.append((self._name, arguments, os.environ.get("NCCL_ALGO")))
        act = self._library.acts.get(self._name)
        return act(*arguments) if act else 0


class FakeLibrary:
    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], str | None]] = []
        self.acts: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> FakeFunction:
        made = FakeFunction(name, self)
        setattr(self, name, made)
        return made

    def made(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments, _ in self.calls if called == name]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, FakeLibrary]]:
    found = {"libcuda.so.1": FakeLibrary(), "libnccl.so.2": FakeLibrary()}
    monkeypatch.setattr(ctypes, "CDLL", found.__getitem__)
    monkeypatch.setenv("NCCL_ALGO", "")
    return found


def no_ids(make: Callable[[], list[str]]) -> list[str]:
    return make()


def test_every_size_is_measured_on_one_communicator(libraries: dict[str, FakeLibrary]) -> None:
    found = measure(AllReduce("libnccl.so.2", 1, 2, 4), ORDER, no_ids)
    nccl = libraries["libnccl.so.2"]
    assert list(found) == ["seconds"]
    assert list(found["seconds"]) == [str(size) for size in SIZES]
    counts = [arguments[2] for arguments in nccl.made("ncclAllReduce")]
    assert [counts.count(size // 4) for size in SMALL_BYTES] == [22, 22]  # with two warm-ups
    assert [counts.count(size // 4) for size in LARGE_BYTES] == [5] * 4
    assert len(nccl.made("ncclGetUniqueId")) == 1
    ((_, size, _, rank),) = nccl.made("ncclCommInitRank")
    assert (rank, size) == (2, 4)
    assert libraries["libcuda.so.1"].made("cuDeviceGet")[0][1] == 1


def test_small_messages_by_tree_have_a_communicator_of_their_own(libraries: dict[str, FakeLibrary]) -> None:
    ids = [bytes([number] * 128).hex() for number in (1, 2)]
    found = measure(AllReduce("libnccl.so.2", 0, 1, 2), {**ORDER, "tree": True}, lambda make: ids)
    assert list(found["tree"]) == [str(size) for size in SMALL_BYTES]
    calls = [
        (arguments, algo) for name, arguments, algo in libraries["libnccl.so.2"].calls if name == "ncclCommInitRank"
    ]
    assert [(bytes(arguments[2]).hex(), algo) for arguments, algo in calls] == [(ids[0], ""), (ids[1], "Tree")]


def test_an_id_keeps_its_zeros(libraries: dict[str, FakeLibrary]) -> None:
    content = bytes(range(128))

    def fill(pointer: Any) -> int:
        ctypes.memmove(pointer, content, 128)
        return 0

    libraries["libnccl.so.2"].acts["ncclGetUniqueId"] = fill
    assert bytes.fromhex(AllReduce("libnccl.so.2", 0, 0, 2).new_id()) == content
    assert ctypes.sizeof(NcclUniqueId) == 128


@pytest.mark.parametrize(
    ("library", "call", "text"),
    [
        ("libcuda.so.1", "cuInit", "cuInit gave error 100"),
        ("libnccl.so.2", "ncclCommInitRank", "ncclCommInitRank gave error 100 (Duplicate GPU detected)"),
    ],
)
def test_an_error_names_the_call(libraries: dict[str, FakeLibrary], library: str, call: str, text: str) -> None:
    libraries[library].acts[call] = lambda *_: 100
    libraries["libnccl.so.2"].acts["ncclGetLastError"] = lambda *_: b"Duplicate GPU detected\n"
    with pytest.raises(OSError, match="gave error") as raised:
        measure(AllReduce("libnccl.so.2", 0, 0, 2), ORDER, no_ids)
    assert str(raised.value) == text


def test_the_program_says_what_it_lacks(tmp_path: Path) -> None:
    """The real program, with a library that is none: it ends, and the worker is told."""
    words = [sys.executable, "-P", "-m", nccl_probe.__name__]
    with closing(Probe(lambda fd: [*words, str(fd), str(tmp_path / "libnccl.so.2"), "0", "0", "2"], 60.0)) as probe:
        probe.order(ORDER)
        assert probe.answer(0) == {"error": "the measuring process is gone"}
