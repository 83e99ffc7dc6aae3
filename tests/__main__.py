"""Runs all tests in three processes side by side, as most of them wait for programs that they have started.

`python -m tests` is what `make test` calls. One group is shown as it goes, then the next: what that has done by then,
and how it goes on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

BESIDE = (
    ("tests/launch", "tests/system"),
    ("tests/benchmarks", "tests/docs", "tests/layers", "tests/test_run.py", "tests/test_train.py"),
)


def main(arguments: list[str]) -> int:
    """Run all groups; the exit code is that of the first that fails."""
    pytest = [sys.executable, "-m", "pytest", *arguments]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would each compile all modules
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in BESIDE]
        processes = [
            subprocess.Popen(
                [*pytest, "-o", f"cache_dir=.pytest_cache/{index}", *paths], stdout=output, stderr=subprocess.STDOUT
            )
            for index, (paths, output) in enumerate(zip(BESIDE, outputs, strict=True))
        ]
        for process in processes:
            stack.callback(process.terminate)  # where this is interrupted
        codes = [subprocess.call([*pytest, "tests", *(f"--ignore={path}" for paths in BESIDE for path in paths)])]
        for process, output in zip(processes, outputs, strict=True):
            codes.append(_follow(process, output.fileno()))
    return next((code for code in codes if code), 0)


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
