"""Shows what a job writes until it has ended, over all its attempts; going away does nothing to the job."""

from __future__ import annotations

import codecs
import errno
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from stormo.errors import EXIT_FAILURE, EXIT_INTERRUPTED
from stormo.submit import client, submitted
from stormo.submit.client import JobState, NoAnswerError
from stormo.telemetry.text import run_reference

_LOOK_AT_LOG_S = 0.5
_ASK_SLURM_S = 2.0  # at first; later less often: the controller serves the whole cluster
_ASK_AT_LEAST_S = 15.0
# Reasons that do not pass by waiting, and what a job needs then.
_NEVER = {
    "AccountNotAllowed": "another --account",
    "BadConstraints": "another --constraint",
    "InvalidAccount": "another --account",
    "InvalidQOS": "another --qos",
    "JobHeldAdmin": "a word with the administrators",
    "JobHeldUser": "scontrol release",
    "PartitionNodeLimit": "fewer --num-nodes or another --partition",
    "PartitionTimeLimit": "a shorter --time or another --partition",
    "QOSNotAllowed": "another --qos",
}
Say = Callable[[str], None]


@dataclass(kw_only=True)
class Log:
    """Reads what was appended to a file since the last time."""

    path: Path
    _file: BinaryIO | None = None
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def skip(self) -> None:
        """Leave out what earlier jobs of the run wrote."""
        self._open()
        if self._file is not None:
            self._file.seek(0, 2)

    def read(self) -> str:
        """The new text; all of a file that was made anew, or cut, since the last time."""
        text = ""
        try:
            text += self._read()
            is_another = self._is_another()
            text += self._read() if is_another else ""  # what came to the old one in between
        except OSError as error:
            if error.errno != errno.ESTALE:  # deleted on a file system of the network
                raise
            is_another = True
        if is_another:
            self.close()
            self._file = None
            self._decoder.reset()
            text += self._read()
        return text

    def _read(self) -> str:
        self._open()
        return "" if self._file is None else self._decoder.decode(self._file.read())

    def _is_another(self) -> bool:
        if self._file is None:
            return False
        try:
            now = self.path.stat()
        except FileNotFoundError:  # perhaps to be made again
            return False
        was = os.fstat(self._file.fileno())
        return (now.st_dev, now.st_ino) != (was.st_dev, was.st_ino) or now.st_size < self._file.tell()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        if self._file is None and self.path.is_file():
            self._file = self.path.open("rb")


def follow(folder: Path, write: Say, log: Log) -> int:
    """Follow one run to its end; the exit code of its job."""
    record = submitted.read(folder)
    assert record is not None
    told = ""
    try:
        for job_id, state in _states([folder], log, write):
            words = waiting_words(job_id, state)
            if words and words != told:
                write(f"{words}\n")
            told = words or told
            if state.has_ended:
                write(log.read())
                write(f"{end_words(folder, job_id, state)}\n")
                return exit_code(state)
    except KeyboardInterrupt:
        write(f"\n{gone_words(record.job_id, run_reference(folder.name, str(folder)))}\n")
        return EXIT_INTERRUPTED
    finally:
        log.close()
    raise AssertionError("a job is followed until it has ended")


def follow_sweep(folders: Sequence[Path], name: str, write: Say) -> int:
    """Say how many runs of a sweep wait, run and have ended, until all have; the worst exit code."""
    states: dict[str, JobState] = {}
    number = told = ""
    try:
        for job_id, state in _states(folders, None, write):
            states[job_id.partition("_")[2]] = state
            number = job_id.partition("_")[0]
            words = counts(states)
            if len(states) == len(folders) and words != told:
                write(f"{words}\n")
                told = words
            if len(states) == len(folders) and all(one.has_ended for one in states.values()):
                return max(exit_code(one) for one in states.values())
    except KeyboardInterrupt:
        write(f"\n{gone_words(number, reference(folders, name))}\n")
        return EXIT_INTERRUPTED
    raise AssertionError("a sweep is followed until it has ended")


def counts(states: Mapping[str, JobState]) -> str:
    """The runs of a sweep in numbers."""
    kinds: dict[str, int] = {}
    for state in states.values():
        kinds[state_word(state)] = kinds.get(state_word(state), 0) + 1
    return ", ".join(f"{number} {word}" for word, number in kinds.items())


def _states(folders: Sequence[Path], log: Log | None, write: Say) -> Iterator[tuple[str, JobState]]:
    """What Slurm says of each run, again and again, with what is new in the log shown between."""
    ended: set[Path] = set()
    pause_s, is_silent = _ASK_SLURM_S, False
    while True:
        for folder in folders:
            if folder in ended:
                continue
            try:
                job_id, state = state_of(folder)
            except NoAnswerError as error:
                if not is_silent:
                    write(f"stormo: {error} It is asked again.\n")
                is_silent = True
                continue
            is_silent = False
            if state.has_ended:
                ended.add(folder)
            yield job_id, state
        pause_s = min(pause_s * 1.2, _ASK_AT_LEAST_S)
        asked_s, noted = time.monotonic(), _num_notes(folders)
        while time.monotonic() - asked_s < pause_s:
            if log is not None:
                write(log.read())
            time.sleep(_LOOK_AT_LOG_S)
            if _num_notes(folders) != noted:  # a start or an end
                pause_s = _ASK_SLURM_S


def _num_notes(folders: Sequence[Path]) -> int:
    return sum(len(submitted.read_attempts(folder)) for folder in folders)


def state_of(folder: Path) -> tuple[str, JobState]:
    """The job that carries a run now, and its state."""
    record = submitted.read(folder)
    assert record is not None
    while True:
        attempts = submitted.read_attempts(folder)
        job_id = submitted.current_job(record, attempts)
        state = client.look(job_id) or _by_attempts(job_id, attempts)
        # A job that ends notes before its end which other one goes on.
        if not state.has_ended or job_id == submitted.current_job(record, submitted.read_attempts(folder)):
            return job_id, state


def _by_attempts(job_id: str, attempts: Sequence[submitted.Attempt]) -> JobState:
    """How a job ended that Slurm has forgotten, from what its script noted."""
    own = [attempt for attempt in attempts if attempt.job_id == job_id]
    last = own[-1] if own else None
    if last is not None and last.what == "cancel":
        return JobState(state="CANCELLED", exit_code=128 + 15)
    if last is not None and last.what == "end" and last.detail.isdecimal():
        code = int(last.detail)
        return JobState(state="FAILED" if code else "COMPLETED", exit_code=code)
    return JobState(state="FORGOTTEN", exit_code=EXIT_FAILURE)


def exit_code(state: JobState) -> int:
    """The job's exit code; one that ended otherwise than by itself has failed."""
    return state.exit_code if state.state == "COMPLETED" else state.exit_code or EXIT_FAILURE


def state_word(state: JobState) -> str:
    """The state in a word of ours where there is one."""
    words = {"PENDING": "waiting", "COMPLETED": "done", "TIMEOUT": "out of time", "FORGOTTEN": "no longer known"}
    return words.get(state.state, state.state.lower().replace("_", " "))


def waiting_words(job_id: str, state: JobState) -> str:
    """Why a job waits, or that it runs."""
    if state.state == "RUNNING":
        again = f", attempt {state.restarts + 1}" if state.restarts else ""
        return f"job {job_id} runs on {state.nodes}{again}"
    if state.state != "PENDING":
        return ""
    reason = f": {state.reason.replace('_', ' ')}" if state.reason else ""
    needs = f"; it needs {_NEVER[state.reason]}" if state.reason in _NEVER else ""
    return f"job {job_id} is waiting in the queue{reason}{needs}"


def end_words(folder: Path, job_id: str, state: JobState) -> str:
    """How a job ended, and what can be done about it."""
    name = run_reference(folder.name, str(folder))
    if state.state == "COMPLETED":
        return f"job {job_id} is done; stormo show {name} tells the result"
    again = f"the same command with --run-name {folder.name} --resume goes on from the last checkpoint"
    if state.state == "CANCELLED":
        return f"job {job_id} was cancelled; {again}"
    if state.state == "TIMEOUT":
        return f"job {job_id} was ended by the time limit before it had saved: set a larger --warn-s; {again}"
    if state.state == "FORGOTTEN":
        return f"job {job_id} is not known to Slurm any more, and it noted no end; {again}"
    return f"job {job_id} ended with exit code {exit_code(state)} ({state_word(state)}); {again}"


def gone_words(job_id: str, run: str) -> str:
    """What is said to a user who does not want to wait."""
    return f"job {job_id} goes on; stormo status {run} --follow shows it again, stormo cancel {run} ends it"


def reference(folders: Sequence[Path], name: str) -> str:
    """How to name the runs of a sweep on a command line."""
    parent = folders[0].parent
    in_folder = "" if parent.resolve() == Path("runs").resolve() else f" --runs-folder {shlex.quote(str(parent))}"
    return f"{shlex.quote(name)}{in_folder}"
