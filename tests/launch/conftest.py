"""Starts agents with small workers, and checks after every test that nothing of theirs is left."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import command
from tests.launch import agent_program

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MARK = "STORMO_TEST_MARK"


class Job:
    """A program under test; its output goes to files, so that it never waits for a reader.

    A command is executed. A function runs in a fork of this process, which has imported everything already.
    """

    def __init__(
        self,
        program: Sequence[str] | Callable[[], object],
        environ: dict[str, str],
        folder: Path,
        mark: str,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.mark = mark
        folder.mkdir()
        self._out, self._err = folder / "out", folder / "err"
        environ = {**environ, MARK: mark}
        self.process: subprocess.Popen[bytes] | ForkedProcess
        with self._out.open("wb") as out, self._err.open("wb") as err:
            if callable(program):
                self.process = ForkedProcess(program, environ, (out.fileno(), err.fileno()), pass_fds)
            else:
                self.process = subprocess.Popen(
                    program, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ, pass_fds=pass_fds
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

    def worker_pid(self, rank: int, program: str = "worker_program") -> int:
        for pid in marked_processes(self.mark):
            variables = environment_of(pid)
            if variables.get("RANK") == str(rank) and program in command_of(pid):
                return pid
        raise AssertionError(f"no worker of rank {rank}")


class ForkedProcess:
    """A function in a forked process, with the methods of `subprocess.Popen` that are needed."""

    def __init__(
        self, main: Callable[[], object], environ: dict[str, str], outputs: tuple[int, int], pass_fds: Sequence[int]
    ) -> None:
        self.returncode: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of torch, which the child does not use
            self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                _become(environ, outputs, pass_fds)
                main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout_s: float = 30.0) -> int:
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout_s)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _become(environ: dict[str, str], outputs: tuple[int, int], pass_fds: Sequence[int]) -> None:
    """Make this forked process look like one that was executed: outputs, variables and descriptors."""
    gc.disable()  # what is collected here could close descriptors of the same number
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target, fd in enumerate(outputs, start=1):
        os.dup2(fd, target)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, mode, closefd=False) for fd, mode in enumerate("rww"))
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if fd > 2 and fd not in pass_fds:
            with contextlib.suppress(OSError):
                os.close(fd)
    os.environ.clear()
    os.environ.update(environ)


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


def worker_command(scenario: dict[str, Any]) -> list[str]:
    """What starts a worker, without site, which takes longer than all else."""
    return [sys.executable, "-S", str(HERE / "worker_program.py"), json.dumps(scenario)]


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

    def start(program: Any, pass_fds: Sequence[int] = (), **environ: str) -> Job:
        folder = tmp_path / f"job{len(jobs)}"
        jobs.append(Job(program, {**clean_environ(), **environ}, folder, mark, pass_fds))
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
        arguments = {"command": worker_command(scenario), "node": node or {"num_workers": 2}, **arguments}
        return start_program(lambda: agent_program.main(arguments), **environ)

    return start


@pytest.fixture
def free_port() -> int:
    return command.free_port()
