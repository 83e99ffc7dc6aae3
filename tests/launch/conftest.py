"""Starts agents with small workers, and checks after every test that nothing of theirs is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MARK = "STORMO_TEST_MARK"


class Job:
    """A program under test; its output goes to files, so that it never waits for a reader."""

    def __init__(
        self, command: list[str], environ: dict[str, str], folder: Path, mark: str, pass_fds: Sequence[int] = ()
    ) -> None:
        self.mark = mark
        folder.mkdir()
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**environ, MARK: mark},
                pass_fds=pass_fds,
            )

    @property
    def out(self) -> str:
        return self._out.read_bytes().decode("utf-8", "replace")

    @property
    def err(self) -> str:
        return self._err.read_bytes().decode("utf-8", "replace")

    @property
    def err_bytes(self) -> bytes:
        return self._err.read_bytes()

    def wait(self, timeout_s: float = 30.0) -> int:
        return self.process.wait(timeout_s)

    def wait_for(self, condition: Callable[[Job], bool], timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition(self):
            assert time.monotonic() < deadline, f"never happened; out:\n{self.out}\nerr:\n{self.err}"
            time.sleep(0.02)

    def wait_until_ready(self, num_workers: int) -> None:
        self.wait_for(lambda job: job.out.count("ready") >= num_workers)

    def worker_pid(self, rank: int) -> int:
        for pid in marked_processes(self.mark):
            variables = environment_of(pid)
            if variables.get("RANK") == str(rank) and "worker_program" in command_of(pid):
                return pid
        raise AssertionError(f"no worker of rank {rank}")


def environment_of(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def marked_processes(mark: str) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in pids if environment_of(pid).get(MARK) == mark]


def clean_environ() -> dict[str, str]:
    foreign = ("SLURM", "OMPI", "PMI", "MPI_", "TORCHELASTIC", "STORMO", "GLOO", "NCCL")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
    kept = {name: value for name, value in os.environ.items() if name not in names and not name.startswith(foreign)}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def mark() -> Iterator[str]:
    """A mark in the environment of every process of one test; none that carries it may outlive the test."""
    value = uuid.uuid4().hex
    yield value
    deadline = time.monotonic() + 5.0
    while (left := marked_processes(value)) and time.monotonic() < deadline:
        time.sleep(0.05)
    described = [f"{pid}: {command_of(pid)}" for pid in left]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not described, f"processes left behind: {described}"


@pytest.fixture
def start_program(mark: str, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts a program with the mark; it is killed after the test if it still runs, so that the test can end."""
    jobs: list[Job] = []

    def start(command: list[str], pass_fds: Sequence[int] = (), **environ: str) -> Job:
        folder = tmp_path / f"job{len(jobs)}"
        jobs.append(Job(command, {**clean_environ(), **environ}, folder, mark, pass_fds))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()


@pytest.fixture
def start_agent(start_program: Callable[..., Job]) -> Callable[..., Job]:
    """Starts the agent of a node whose workers follow a scenario: rank (or "*") to a list of actions."""

    def start(scenario: dict[str, list[list[Any]]], *, node: dict[str, Any] | None = None, **arguments: Any) -> Job:
        environ = arguments.pop("environ", {})
        arguments.setdefault("timeout_s", 30.0)
        command = [sys.executable, str(HERE / "worker_program.py"), json.dumps(scenario)]
        arguments = {"command": command, "node": node or {"num_workers": 2}, **arguments}
        return start_program([sys.executable, str(HERE / "agent_program.py"), json.dumps(arguments)], **environ)

    return start


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
