"""Runs one `stormo train` as a child, ends it once it has been measured for long enough, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from stormo.system.files import MAX_RECORDS_BYTES, create, read_bytes
from stormo.system.process import die_with_parent, own_command

_POLL_S = 0.1
_ENOUGH_S = 1.0  # between two looks at how far a run is
_ASK_S = 0.3  # from asking a run to stop after its step, to telling it to stop at once
_WAIT_S = 3.0  # for its workers to end

Runner = Callable[[Sequence[str], Path, Callable[[], bool]], int]


class StoppedError(KeyboardInterrupt):
    """SIGTERM or a closed terminal: the study ends like on Ctrl-C, and can go on later."""


def run_child(arguments: Sequence[str], log: Path, is_enough: Callable[[], bool]) -> int:
    """Run `stormo train` with these arguments, its output into a file; the exit code, negative for a signal."""
    command = [*own_command("train"), *arguments]
    with create(log) as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C reaches the study alone, which ends the run
            preexec_fn=die_with_parent,  # noqa: PLW1509 (there is one thread)
        )
    try:
        return _watch(process, is_enough)
    finally:
        _end(process)


def _watch(process: subprocess.Popen[bytes], is_enough: Callable[[], bool]) -> int:
    asked, looked_s = False, time.monotonic()
    while process.poll() is None:
        time.sleep(_POLL_S)
        if not asked and time.monotonic() - looked_s > _ENOUGH_S:
            looked_s = time.monotonic()
            if is_enough():
                process.terminate()  # all its workers stop after the same step
                asked = True
    assert process.returncode is not None
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the run and all its workers at once, however it is doing."""
    if process.poll() is None:
        # The second Ctrl-C has its agent kill the workers; a kill alone would leave that to the kernel.
        for wait_s in (_ASK_S, _WAIT_S):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # whatever it has started and left
    process.wait()


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """Turn SIGTERM and a closed terminal into an exception while the body runs, so that children are ended."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedError

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def last_words(log: Path) -> str:
    """What a run that failed said: stormo's own sentence, or its last line."""
    try:
        text = read_bytes(log, MAX_RECORDS_BYTES).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines()]
    except OSError:
        return "it left no output"
    said = [line for line in lines if line]
    own = [line.removeprefix("stormo: ") for line in said if line.startswith("stormo: ")]
    return own[0] if own else said[-1] if said else "it said nothing"
