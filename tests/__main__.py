"""Runs the checks and all tests: what `make test` calls.

Five pytest processes run side by side, because many tests wait for programs that they have started; ruff and mypy run
beside them. The first group is shown live, then each of the others. A few tests that fail are run once more, alone: a
test that fails only beside the others is named, a test that fails again has failed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

CHECKS = ("ruff check .", "ruff format --check .", "mypy")
GROUPS = (
    ("tests/system",),
    ("tests/parallel", "tests/api", "tests/commands/test_evaluate.py"),
    ("tests/launch", "tests/checkpoint", "tests/data", "tests/docs"),
    ("tests/benchmarks", "tests/layers", "tests/commands/test_run.py", "tests/commands/test_train.py"),
)
MAX_RETRIES = 8  # more failures than these do not come from the load
CACHE = Path(".pytest_cache")


def main(arguments: list[str]) -> int:
    """Run everything; the exit code is that of the first part that fails again when it is alone."""
    pytest = [sys.executable, "-m", "pytest", *arguments]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would each compile all modules
    others = [f"--ignore={path}" for paths in GROUPS for path in paths]
    bin_folder = Path(sys.executable).parent
    checks = " && ".join(f"{bin_folder / command}" for command in CHECKS)
    commands = [["sh", "-c", checks]]
    commands += [[*_nice(paths), *pytest, *_cache(index), *paths] for index, paths in enumerate(GROUPS, start=1)]
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        processes = [
            subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            for command, output in zip(commands, outputs, strict=True)
        ]
        for process in processes:
            stack.callback(process.terminate)  # after Ctrl-C
        first = subprocess.call([*_nice(()), *pytest, *_cache(0), "tests", *others])
        check, *rest = [_follow(process, output.fileno()) for process, output in zip(processes, outputs, strict=True)]
    return _retry([first, *rest], pytest) or check


def _nice(paths: tuple[str, ...]) -> list[str]:
    """The system tests have priority: they mostly wait, and would otherwise end last."""
    return [] if "tests/system" in paths or shutil.which("nice") is None else ["nice", "-n", "5"]


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


def _follow(process: subprocess.Popen[bytes], output_fd: int) -> int:
    """Show the output of a process until it ends."""
    shown_bytes = 0
    while True:
        has_ended = process.poll() is not None
        while chunk := os.pread(output_fd, 2**16, shown_bytes):  # read() would move the process's own offset
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
            shown_bytes += len(chunk)
        if has_ended:
            return process.returncode
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
