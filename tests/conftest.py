"""What all tests share: the pool of ranks, the reasons for skipping, the progress line."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import forked
from tests.ranks import Pool

forked.take_interrupts()
HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Other tests run beside: how long an example takes says nothing.
settings.register_profile("stormo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stormo")
MOST_S = 300.0  # for a test, and for what it needs: one that waits for ever fails by name, and the others go on


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with _not_for_ever():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with _not_for_ever():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    with _not_for_ever():
        return (yield)


@contextmanager
def _not_for_ever() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, MOST_S, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _give_up(number: int, frame: FrameType | None) -> None:
    pytest.fail(f"has not ended within {MOST_S:g} s")


@pytest.fixture(scope="session")
def _pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def run_ranks(_pool: Pool) -> Callable[..., list[Any]]:
    """Call a function in several ranks of one Gloo group; see `tests.ranks`."""
    return _pool.run


@pytest.fixture
def forked_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python programs that this process starts are forks; see `tests.forked`."""
    monkeypatch.setattr(subprocess, "Popen", forked.Popen)


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    """What a test sets for its whole process must not reach the next one, nor the programs that one starts.

    A run inside this process ends with stop signals ignored, and double precision is a default of torch's.
    """
    path = list(sys.path)  # a task's file puts its folder there
    _restore_handlers()  # after the run of a module's fixture
    yield
    sys.path[:] = path
    _restore_handlers()
    if "torch" in sys.modules:
        sys.modules["torch"].set_default_dtype(sys.modules["torch"].float32)


def _restore_handlers() -> None:
    for number, handler in HANDLERS.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def pytest_collection_finish() -> None:
    """What the modules hold stays for good: a collection, which the search for a batch makes often, passes it over."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests are skipped by name where there is no GPU, and those of `slices(N)` where fewer slices are visible."""
    from stormo.system.hardware import visible_gpus

    gpus = visible_gpus()
    num_slices = sum(gpu.slice_of is not None for gpu in gpus)
    for item in items:
        if item.get_closest_marker("gpu") and not gpus:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device and none is visible"))
        elif (needed := item.get_closest_marker("slices")) and num_slices < needed.args[0]:
            reason = f"needs {needed.args[0]} slices of GPUs and {num_slices} are visible: stormo doctor --slices"
            item.add_marker(pytest.mark.skip(reason=reason))
