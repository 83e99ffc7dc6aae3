"""Runs all tests in five processes side by side, as most of them wait for programs that they have started.

`python -m tests` is what `make test` calls. One group is shown as it goes, then the next: what that has done by then,
and how it goes on. A few tests that fail while five groups share the machine are run once more, alone: what fails only
under that load is named, and what fails again has failed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

BESIDE = (
    ("tests/system",),
    ("tests/parallel",),
    ("tests/launch", "tests/checkpoint", "tests/data"),  # the first hardly does anything but wait
    (
        *("tests/benchmarks", "tests/docs", "tests/layers"),
        *("tests/commands/test_run.py", "tests/commands/test_train.py"),
    ),
)
MOST_AGAIN = 8  # more failures than these are no matter of load
_CACHE = Path(".pytest_cache")


def main(arguments: list[str]) -> int:
    """Run all groups; the exit code is that of the first that fails, alone too."""
    pytest = [sys.executable, "-m", "pytest", *arguments]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would each compile all modules
    beside = tuple(path for paths in BESIDE for path in paths)
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in BESIDE]
        processes = [
            subprocess.Popen(
                [*_behind(paths), *pytest, *_cached(index), *paths], stdout=output, stderr=subprocess.STDOUT
            )
            for index, (paths, output) in enumerate(zip(BESIDE, outputs, strict=True), start=1)
        ]
        for process in processes:
            stack.callback(process.terminate)  # where this is interrupted
        rest = ["tests", *(f"--ignore={path}" for path in beside)]
        codes = [subprocess.call([*_behind(rest), *pytest, *_cached(0), *rest])]
        for process, output in zip(processes, outputs, strict=True):
            codes.append(_follow(process, output.fileno()))
    return _again(codes, pytest)


def _behind(paths: Sequence[str]) -> list[str]:
    """All others let the system tests go first: those mostly wait, and would otherwise end last."""
    return [] if "tests/system" in paths or shutil.which("nice") is None else ["nice", "-n", "5"]


def _cached(index: int) -> list[str]:
    return ["-o", f"cache_dir={_CACHE / str(index)}"]


def _again(codes: list[int], pytest: list[str]) -> int:
    """Run the tests that have failed once more, one after the other on a quiet machine."""
    failed = [name for index, code in enumerate(codes) if code for name in _failures(index)]
    if not any(codes) or not set(codes) <= {0, 1} or not 0 < len(failed) <= MOST_AGAIN:
        return next((code for code in codes if code), 0)
    print(f"\nOnce more, alone: {', '.join(failed)}", flush=True)
    code = subprocess.call([*pytest, "-o", f"cache_dir={_CACHE / 'again'}", *failed])
    if not code:
        print(f"Failed beside others, passed alone: {', '.join(failed)}", flush=True)
    return code


def _failures(index: int) -> list[str]:
    file = _CACHE / str(index) / "v" / "cache" / "lastfailed"
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else []


def _follow(process: subprocess.Popen[bytes], output_fd: int) -> int:
    """Show what a process has written and writes, until its end."""
    shown_bytes = 0
    while True:
        has_ended = process.poll() is not None
        while chunk := os.pread(output_fd, 2**16, shown_bytes):  # a plain read would move the process's place as well
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
            shown_bytes += len(chunk)
        if has_ended:
            return process.returncode
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
