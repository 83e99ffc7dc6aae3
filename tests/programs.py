"""Programs as `python` or torchrun starts them: one process, or several of which each is a rank; see `tests.forked`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import free_port, torchrun_variables
from tests import forked

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
        self.processes: list[forked.Popen] = []
        for rank in range(num_workers):
            variables = kept | torchrun_variables(rank, num_workers, port, num_nodes) | environ
            with Path(self.path("out", rank)).open("wb") as out, Path(self.path("err", rank)).open("wb") as err:
                self.processes.append(
                    forked.Popen(
                        [sys.executable, *self._words],
                        cwd=folder,
                        env=variables,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                    )
                )

    def wait(self, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        """How it ended: the exit code of the first rank that failed, and what all have written, rank by rank."""
        deadline_s = time.monotonic() + timeout_s
        try:
            codes = [process.wait(max(deadline_s - time.monotonic(), 0.0)) for process in self.processes]
        except subprocess.TimeoutExpired:
            said = self._read("err")
            self.kill()
            raise AssertionError(f"{self._words} did not end within {timeout_s:g} s: {said}") from None
        code = next(filter(None, codes), 0)
        done = subprocess.CompletedProcess(self._words, code, self._read("out"), self._read("err"))
        self._outputs.cleanup()
        return done

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self._outputs.cleanup()

    def path(self, kind: str, rank: int) -> str:
        """Where a rank's `out` or `err` goes."""
        return str(Path(self._outputs.name, f"{kind}{rank}"))

    def _read(self, kind: str) -> str:
        paths = [Path(self.path(kind, rank)) for rank in range(len(self.processes))]
        return "".join(path.read_text(encoding="utf-8") for path in paths if path.exists())


def run(
    words: Sequence[str], folder: Path, num_workers: int = 1, num_nodes: int = 1, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; see `Program`."""
    return Program(words, folder, num_workers, num_nodes, **environ).wait()
