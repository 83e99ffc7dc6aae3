"""Runs all tests in two processes: those that mostly wait for other programs beside those that compute.

`python -m tests` is what `make test` calls. The output of the waiting ones is shown when they have ended.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

WAITING = ("tests/launch", "tests/system")


def main(arguments: list[str]) -> int:
    """Run both; the exit code is that of the first that fails."""
    pytest = [sys.executable, "-m", "pytest", *arguments]
    with tempfile.TemporaryFile() as output:
        waiting = subprocess.Popen(
            [*pytest, "-o", "cache_dir=.pytest_cache/waiting", *WAITING], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            computing = subprocess.call([*pytest, "tests", *(f"--ignore={folder}" for folder in WAITING)])
            print(f"waiting for {' and '.join(WAITING)} …", flush=True)
            waited = waiting.wait()
        finally:
            waiting.terminate()  # where this is interrupted
        output.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(output.read())
    return computing or waited


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
