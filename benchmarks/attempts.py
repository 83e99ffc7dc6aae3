"""A run that is started again and again: its attempts, the moments at which one can be killed, and what is left.

All processes of an attempt are found by a mark in their environment (Linux), wherever they went.
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.command import one_thread, train_command
from benchmarks.lineage import read_log
from benchmarks.small_tasks import WITNESS_FOLDER

MARK = "STORMO_BENCHMARK_ATTEMPT"
MOMENTS = ("start-up", "training", "training", "saving", "validation")
NUM_SAMPLES, GLOBAL_BATCH_SIZE, CHECKPOINT_EVERY = 201, 32, 3
STEPS_PER_EPOCH = math.ceil(NUM_SAMPLES / GLOBAL_BATCH_SIZE)

_POLL_S = 0.002
_GRACE_S = 20.0  # for the processes that a kill left to end
_STUCK_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """What was killed, when, and what it left."""

    target: str
    moment: str
    num_steps: int  # of this attempt, as rank 0's witness wrote
    cut_a_save: bool
    gone_after_s: float
    num_orphans: int


@dataclass(kw_only=True)
class Run:
    """A run and its attempts so far."""

    folder: Path
    name: str
    flags: list[str]
    num_events: list[int] = field(default_factory=list)  # complete ones after each attempt
    first_step_s: float = 10.0  # from the start of the command, as an undisturbed attempt took
    save_s: float = 0.1

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder / self.name

    def log_folder(self, attempt: int) -> Path:
        """Where the witness of an attempt writes."""
        return self.folder / f"{self.name}-witness-{attempt}"

    def events(self) -> list[dict[str, Any]]:
        """Every complete event so far."""
        from stormo.telemetry.events import read_events

        return read_events(self.path / "events.jsonl")

    def unpublished(self) -> set[str]:
        """What lies among the checkpoints and is none: the rest of a save that was cut off."""
        folder = self.path / "checkpoints"
        return (
            {entry.name for entry in folder.iterdir() if not entry.name.startswith("step-")}
            if folder.is_dir()
            else set()
        )

    def saved(self, attempt: int) -> dict[int, str]:
        """Step to weights digest of the checkpoints an attempt published."""
        start = self.num_events[attempt - 1] if attempt else 0
        events = self.events()[start : self.num_events[attempt]]
        return {event["step"]: event["weights_sha256"] for event in events if event["event"] == "checkpoint_saved"}


class Attempt:
    """One start of the command, with a mark by which all its processes are found."""

    def __init__(self, run: Run, num_workers: int) -> None:
        self.run = run
        self.number = len(run.num_events)
        self.num_workers = num_workers
        self.mark = f"{run.folder.name}-{run.name}-{self.number}"
        self.log_folder = run.log_folder(self.number)
        self.log_folder.mkdir()
        self.output = run.folder / f"{run.name}-output-{self.number}.txt"
        # As in a batch script: the first attempt finds nothing to resume and begins.
        arguments = [*run.flags, "--num-gpus", str(num_workers), "--resume"]
        arguments += ["--runs-folder", str(run.folder), "--run-name", run.name]
        self._unpublished_before = run.unpublished()
        self.began_s = time.monotonic()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                train_command(*arguments),
                env=one_thread({MARK: self.mark, WITNESS_FOLDER: str(self.log_folder)}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def log(self) -> list[dict[str, Any]]:
        """What rank 0's witness has written so far."""
        return read_log(self.log_folder / "rank-0.jsonl")

    def wait_to_end(self) -> None:
        """Wait for success; end the benchmark otherwise."""
        self._wait(lambda: self.process.poll() is not None)
        if self.process.returncode:
            sys.exit(f"attempt {self.number} ended with {self.process.returncode}:\n{self.output.read_text()[-4000:]}")
        self.run.num_events.append(len(self.run.events()))

    def wait_for_first_step(self) -> float:
        """Seconds from the start of the command to the first line of the witness."""
        self._wait(lambda: bool(self.log()))
        return time.monotonic() - self.began_s

    def wait_for(self, moment: str, draw: random.Random) -> bool:
        """Wait for a random instant of the given moment; False when the command ended before it."""
        if moment == "start-up":
            until_s = self.began_s + draw.uniform(0, self.run.first_step_s)
            # On a machine that is faster by now, the first step ends the start-up.
            self._wait(lambda: time.monotonic() >= until_s or bool(self.log()))
        elif moment == "validation":
            self._wait(lambda: any(event["event"] == "validation" for event in self.log()))
            time.sleep(draw.uniform(0, 0.02))
        else:
            num_steps = draw.randint(1, STEPS_PER_EPOCH)
            if moment == "saving":
                # Attempts begin at a checkpoint, so every third step from there is followed by one.
                num_steps = -(-num_steps // CHECKPOINT_EVERY) * CHECKPOINT_EVERY
            self._wait(lambda: self._num_steps() >= num_steps)
            time.sleep(draw.uniform(0, self.run.save_s))
        return self.process.poll() is None

    def kill(self, target: str, moment: str) -> Kill:
        """SIGKILL, then wait for all processes that are left to end."""
        workers = workers_of(self.process.pid, self.mark)
        rank = int(target.partition(" ")[2]) if target.startswith("rank") else None
        if rank is not None and rank not in workers:
            rank, target = None, "agent"  # it has not been started yet
        if rank is not None:
            victims = [workers[rank]]
        else:
            victims = [self.process.pid, *(workers.values() if target == "all" else ())]
        kill_all(victims)
        killed_s = time.monotonic()
        self._wait(lambda: self.process.poll() is not None)
        left = wait_until_gone(self.mark, _GRACE_S)
        gone_after_s = time.monotonic() - killed_s
        kill_all(left)
        if left and wait_until_gone(self.mark, _GRACE_S):
            sys.exit(f"attempt {self.number} left processes that cannot be ended: {sorted(left)}")
        if self.process.returncode == 0:
            sys.exit(f"attempt {self.number} was killed ({target}) and still reports success")
        self.run.num_events.append(len(self.run.events()))
        return Kill(
            target=target,
            moment=moment,
            num_steps=self._num_steps(),
            cut_a_save=bool(self.run.unpublished() - self._unpublished_before),
            gone_after_s=gone_after_s,
            num_orphans=len(left),
        )

    def _num_steps(self) -> int:
        return sum(event["event"] == "step" for event in self.log())

    def _wait(self, is_reached: Callable[[], bool]) -> None:
        """Poll until something is reached or the command has ended."""
        deadline_s = time.monotonic() + _STUCK_S
        while not is_reached() and self.process.poll() is None:
            if time.monotonic() > deadline_s:
                kill_all(marked(self.mark))
                sys.exit(
                    f"attempt {self.number} made no progress for {_STUCK_S:g} s:\n{self.output.read_text()[-4000:]}"
                )
            time.sleep(_POLL_S)


def marked(mark: str) -> set[int]:
    """The living processes that carry the mark; zombies have no environment and do not count."""
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and wanted in _environment(int(folder.name)):
            found.add(int(folder.name))
    return found


def workers_of(agent_pid: int, mark: str) -> dict[int, int]:
    """Rank to process id of the workers that an agent has started so far."""
    found = {}
    for pid in marked(mark) - {agent_pid}:
        if _parent(pid) != agent_pid:  # a helper of a worker inherits its rank
            continue
        for entry in _environment(pid):
            if entry.startswith(b"RANK="):
                found[int(entry.removeprefix(b"RANK="))] = pid
    return found


def kill_all(pids: Iterable[int]) -> None:
    """SIGKILL each; one that has just ended is no mistake."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until_gone(mark: str, timeout_s: float) -> set[int]:
    """Wait for every marked process to end; return those that did not."""
    deadline = time.monotonic() + timeout_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _environment(pid: int) -> list[bytes]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
