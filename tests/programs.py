"""Programs in processes that have torch already: a server imports it once and forks whatever is to be run.

What a test starts to look at the start itself, or at the agent of a node, it must start as a user does. All else is
run here: one process as by `python`, several as by torchrun, of which each is a rank of its own.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import free_port, torchrun_variables

# The compiler too, which DDP and the optimizers of torch import.
_PRELOAD = ["torch", "torch._dynamo", "stormo.data.loaders", "stormo.training.trainer"]
_FOREIGN = ("SLURM_", "OMPI_", "PMI", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "STORMO_", "TINY_")


class Program:
    """A program under way; its output goes to files, so that it never waits for a reader.

    Args:
        words: what follows `python` on the command line: a script or `-m` and a module, and its arguments.
        folder: where it is run.
        num_workers: how many ranks there are.
        num_nodes: on how many nodes they believe to be.
        environ: variables besides those of this process.
    """

    def __init__(
        self, words: Sequence[str], folder: Path, num_workers: int = 1, num_nodes: int = 1, **environ: str
    ) -> None:
        self._words = list(words)
        self._outputs = tempfile.TemporaryDirectory()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        port = free_port()
        self._processes: list[Any] = []
        for rank in range(num_workers):
            variables = kept | torchrun_variables(rank, num_workers, port, num_nodes) | environ
            arguments = (self._words, str(folder), variables, self._path("out", rank), self._path("err", rank))
            self._processes.append(fork(_become, arguments))

    def wait(self, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        """How it ended: the exit code of the first rank that failed, and what all have written, rank by rank."""
        deadline_s = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(deadline_s - time.monotonic(), 0.0))
        if any(process.exitcode is None for process in self._processes):
            said = self._read("err")
            self.kill()
            raise AssertionError(f"{self._words} did not end within {timeout_s:g} s: {said}")
        code = next((process.exitcode for process in self._processes if process.exitcode), 0)
        done = subprocess.CompletedProcess(self._words, code, self._read("out"), self._read("err"))
        self._outputs.cleanup()
        return done

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._outputs.cleanup()

    def _path(self, kind: str, rank: int) -> str:
        return str(Path(self._outputs.name, f"{kind}{rank}"))

    def _read(self, kind: str) -> str:
        paths = [Path(self._path(kind, rank)) for rank in range(len(self._processes))]
        return "".join(path.read_text(encoding="utf-8") for path in paths if path.exists())


def run(
    words: Sequence[str], folder: Path, num_workers: int = 1, num_nodes: int = 1, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; see `Program`."""
    return Program(words, folder, num_workers, num_nodes, **environ).wait()


def fork(function: Callable[..., None], arguments: tuple[Any, ...], *, is_daemon: bool = False) -> Any:
    """A process that calls a function of a module; the server is started with the first one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)  # here, as the loaders of the product say what they need there
    process = context.Process(target=function, args=arguments, daemon=is_daemon)
    process.start()
    return process


def _become(words: list[str], folder: str, environ: dict[str, str], out: str, err: str) -> None:
    """Make this process the program."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, folder)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing ends without
        sys.stdout.flush()
