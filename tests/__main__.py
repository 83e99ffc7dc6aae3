"""Runs the checks and all tests: what `make test` calls.

Five groups of tests run side by side, because many tests wait for programs that they have started; ruff and mypy run
beside them. Each group is a fork of this process, which imports torch once for all. The first is shown live, then each
of the others. A few tests that fail are run once more, alone: a test that fails only beside the others is named, a test
that fails again has failed.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import forked

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is imported
CHECKS = ("ruff check .", "ruff format --check .", "mypy")
GROUPS = (  # of about equal CPU time, with the rest as another one; the system tests mostly wait
    ("tests/system",),
    ("tests/parallel", "tests/api", "tests/optim"),
    ("tests/launch", "tests/checkpoint", "tests/data", "tests/docs", "tests/tasks", "tests/distributed"),
    ("tests/benchmarks", "tests/layers", "tests/commands", "tests/predict", "tests/energy"),
)
MAX_RETRIES = 8  # more failures than these do not come from the load
CACHE = Path(".pytest_cache")


def main(arguments: list[str]) -> int:
    """Run everything; the exit code is that of the first part that fails again when it is alone."""
    forked.take_interrupts()  # before the servers of forked programs are started
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would each compile all modules
    others = [f"--ignore={path}" for paths in GROUPS for path in paths]
    bin_folder = Path(sys.executable).parent
    checks = " && ".join(f"{bin_folder / command}" for command in CHECKS)
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in (CHECKS, *GROUPS)]
        checking = subprocess.Popen(["sh", "-c", checks], stdout=outputs[0], stderr=subprocess.STDOUT)
        stack.callback(checking.terminate)  # after Ctrl-C
        for name in forked.PRELOAD:
            importlib.import_module(name)
        running: list[Group] = []
        for index, paths in enumerate([("tests", *others), *GROUPS]):
            # The system tests have priority: they mostly wait, and would otherwise end last.
            niceness = 0 if "tests/system" in paths else 5
            output_fd = outputs[index].fileno() if index else None
            running.append(Group([*arguments, *_cache(index), *paths], niceness, output_fd))
            stack.callback(running[-1].terminate)
        codes = [_follow(group, group.output_fd) for group in running]
        check = _follow(checking, outputs[0].fileno())
    return _retry(codes, [sys.executable, "-m", "pytest", *arguments]) or check


class Group:
    """A fork that runs pytest; its output goes into a file, or where that of this process goes."""

    def __init__(self, arguments: list[str], niceness: int, output_fd: int | None) -> None:
        self.output_fd = output_fd
        self.returncode: int | None = None
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                for stream in (1, 2) if output_fd is not None else ():
                    os.dup2(output_fd, stream)
                os.nice(niceness)
                forked.start_server()
                code = int(pytest.main(arguments))
                atexit._run_exitfuncs()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def terminate(self) -> None:
        """End it, if it still runs."""
        if self.poll() is None:
            os.kill(self._pid, signal.SIGTERM)


def _cache(index: int) -> list[str]:
    return ["-o", f"cache_dir={CACHE / str(index)}"]


def _retry(codes: list[int], pytest: list[str]) -> int:
    """Run the tests that have failed once more, with nothing beside them."""
    failed = [name for index, code in enumerate(codes) if code for name in _failures(index)]
    if not any(codes) or not set(codes) <= {0, 1} or not 0 < len(failed) <= MAX_RETRIES:
        return next((code for code in codes if code), 0)
    print(f"\nOnce more, alone: {', '.join(failed)}", flush=True)
    code = subprocess.call([*pytest, "-o", f"cache_dir={CACHE / 'again'}", *failed])
    if not code:
        print(f"Failed beside others, passed alone: {', '.join(failed)}", flush=True)
    return code


def _failures(index: int) -> list[str]:
    file = CACHE / str(index) / "v" / "cache" / "lastfailed"
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else []


def _follow(process: subprocess.Popen[bytes] | Group, output_fd: int | None) -> int:
    """Show the output of a process, where it has a file for it, until it ends."""
    shown_bytes = 0
    while True:
        has_ended = process.poll() is not None
        # read() would move the process's own offset
        while output_fd is not None and (chunk := os.pread(output_fd, 2**16, shown_bytes)):
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
            shown_bytes += len(chunk)
        if has_ended:
            assert process.returncode is not None
            return process.returncode
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
