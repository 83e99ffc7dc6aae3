"""A run that is killed again and again and resumed each time, against the same run left alone.

    python -m benchmarks.kill_resume [--kills 20] [--seed 0]

The real command trains a small network (dropout, batch norm, augmentation) on two workers with a checkpoint every
three steps. SIGKILL hits the agent, one worker or all of them at a random moment of start-up, training, saving or
validation; then `--resume`. What was trained on is what the task itself wrote down at every optimizer step
(small_tasks.Witness): the chain of steps that leads to the final weights must hold every sample once an epoch.
After each kill, the checkpoints that follow must have the very digests of the undisturbed run at the same steps, and
no process may be left behind.

    python -m benchmarks.kill_resume --world-sizes 2,1,3

resumes on other worker counts in turn, in float64, without dropout and with synchronised batch norm: the same samples
in the same order, and weights that agree to rounding.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.command import numbers, one_thread, relative_difference, result_line, small_task, spaced, train_command
from benchmarks.lineage import lost_and_repeated, read_attempt, read_log, trace
from benchmarks.small_tasks import WITNESS_FOLDER

MOMENTS = ("start-up", "training", "training", "saving", "validation")
NUM_SAMPLES, GLOBAL_BATCH_SIZE, CHECKPOINT_EVERY = 201, 32, 3
STEPS_PER_EPOCH = math.ceil(NUM_SAMPLES / GLOBAL_BATCH_SIZE)
ROUNDING = 1e-9  # float64 over all steps on changing worker counts

_POLL_S = 0.002
_GRACE_S = 20.0  # for what a kill left to end by itself
_STUCK_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """What was killed, when, and how the run went on."""

    target: str
    moment: str
    last_step_logged: int  # of this attempt, by rank 0
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
        from stormo.telemetry.files import read_events

        return read_events(self.path / "events.jsonl")

    def saved(self, attempt: int) -> dict[int, str]:
        """Step to weights digest of the checkpoints an attempt published."""
        start = self.num_events[attempt - 1] if attempt else 0
        events = self.events()[start : self.num_events[attempt]]
        return {event["step"]: event["weights_sha256"] for event in events if event["event"] == "checkpoint_saved"}


class Attempt:
    """One start of the command, with a mark by which all its processes are found."""

    def __init__(self, run: Run, num_workers: int) -> None:
        from stormo.telemetry.files import RunFolder

        self.run = run
        self.number = len(run.num_events)
        self.num_workers = num_workers
        self.mark = f"{run.folder.name}-{run.name}-{self.number}"
        self.log_folder = run.log_folder(self.number)
        self.log_folder.mkdir()
        self.output = run.folder / f"{run.name}-output-{self.number}.txt"
        words = [*run.flags, "--runs-folder", str(run.folder), "--num-gpus", str(num_workers)]
        words += ["--resume", run.name] if RunFolder(run.path).is_run else ["--run-name", run.name]
        self.began_s = time.monotonic()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                train_command(*words),
                env=one_thread({processes.MARK: self.mark, WITNESS_FOLDER: str(self.log_folder)}),
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

    def wait_for(self, moment: str, draw: random.Random) -> bool:
        """Wait for a random instant of the given moment; False when the command ended before it."""
        if moment == "start-up":
            until_s = self.began_s + draw.uniform(0, self.run.first_step_s)
            self._wait(lambda: time.monotonic() >= until_s)
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
        """SIGKILL, then wait for everything that is left to end by itself."""
        workers = processes.workers_of(self.process.pid, self.mark)
        rank = int(target.partition(" ")[2]) if target.startswith("rank") else None
        if rank is not None and rank not in workers:
            rank, target = None, "agent"  # it has not been started yet
        if rank is not None:
            victims = [workers[rank]]
        else:
            victims = [self.process.pid, *(workers.values() if target == "all" else ())]
        processes.kill(victims)
        killed_s = time.monotonic()
        self._wait(lambda: self.process.poll() is not None)
        left = processes.wait_until_gone(self.mark, _GRACE_S)
        gone_after_s = time.monotonic() - killed_s
        processes.kill(left)
        if left and processes.wait_until_gone(self.mark, _GRACE_S):
            sys.exit(f"attempt {self.number} left processes that cannot be ended: {sorted(left)}")
        if self.process.returncode == 0:
            sys.exit(f"attempt {self.number} was killed ({target}) and still reports success")
        self.run.num_events.append(len(self.run.events()))
        return Kill(
            target=target,
            moment=moment,
            last_step_logged=self._num_steps(),
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
                processes.kill(processes.marked(self.mark))
                sys.exit(
                    f"attempt {self.number} made no progress for {_STUCK_S:g} s:\n{self.output.read_text()[-4000:]}"
                )
            time.sleep(_POLL_S)


def flags(options: argparse.Namespace, epochs: int) -> list[str]:
    """The settings of the run."""
    words = [
        small_task("Witness"),
        *("--task.train-samples", str(NUM_SAMPLES), "--task.validation-samples", "150", "--task.augment"),
        *("--validation-batch-size", "10", "--global-batch-size", str(GLOBAL_BATCH_SIZE), "--epochs", str(epochs)),
        *("--base-lr", "0.02", "--nesterov", "--weight-decay", "0.0005", "--warmup-epochs", "1"),
        *("--warmup-from", "0.1", "--decay", "cosine", "--target-accuracy", "1.1", "--device", "cpu"),
        *("--checkpoint-every", str(CHECKPOINT_EVERY), "--seed", str(options.seed), "--deterministic"),
    ]
    if options.world_sizes:
        words += ["--precision", "fp64", "--task.dropout", "0", "--sync-batch-norm"]
    else:
        words += ["--task.dropout", "0.1"]
    return words + (["--task.data-folder", options.data_folder] if options.data_folder else [])


def run_undisturbed(run: Run, num_workers: int) -> None:
    """Train to the end in one attempt, and learn how long things take here."""
    attempt = Attempt(run, num_workers)
    while not attempt.log() and attempt.process.poll() is None:
        time.sleep(_POLL_S)
    run.first_step_s = time.monotonic() - attempt.began_s
    attempt.wait_to_end()
    saves = [event["save_time_s"] for event in run.events() if event["event"] == "checkpoint_saved"]
    run.save_s = sorted(saves)[len(saves) // 2]


def run_killed(run: Run, num_kills: int, world_sizes: Sequence[int], draw: random.Random) -> list[Kill]:
    """Kill and resume, then train to the end."""
    kills: list[Kill] = []
    while len(kills) < num_kills:
        num_workers = world_sizes[len(kills) % len(world_sizes)]
        attempt = Attempt(run, num_workers)
        moment = draw.choice(MOMENTS)
        targets = ["agent", "all", *(f"rank {rank}" for rank in range(num_workers))] if num_workers > 1 else ["all"]
        target = draw.choice(targets)
        if not attempt.wait_for(moment, draw):
            attempt.wait_to_end()
            print(f"the run ended before kill {len(kills) + 1}", file=sys.stderr)
            return kills
        kills.append(attempt.kill(target, moment))
        one = kills[-1]
        print(
            f"kill {len(kills)} of {num_kills}: {one.target} during {one.moment} on {num_workers} workers, "
            f"{one.last_step_logged} steps into the attempt; all gone after {one.gone_after_s:.1f} s",
            file=sys.stderr,
            flush=True,
        )
    Attempt(run, world_sizes[len(kills) % len(world_sizes)]).wait_to_end()
    return kills


def equal_after(run: Run, clean: Run, kill: int) -> bool:
    """Whether the first checkpoints after a kill have the digests of the undisturbed run at the same steps."""
    expected = clean.saved(0)
    for attempt in range(kill + 1, len(run.num_events)):
        saved = run.saved(attempt)
        if saved:
            return all(expected.get(step) == digest for step, digest in saved.items())
    return False


def final_difference(run: Run, clean: Run) -> float:
    """The largest relative difference of the final weights and running statistics."""
    from stormo import checkpoint

    last = [checkpoint.load(checkpoint.find(one.path / "checkpoints")[0].path).model for one in (run, clean)]
    return relative_difference(*last)


def compare(run: Run, clean: Run, kills: Sequence[Kill], epochs: int) -> tuple[dict[str, Any], list[str]]:
    """The figures, and a table of the kills."""
    from stormo.telemetry.files import RunFolder, read_summary

    chains = []
    for one in (run, clean):
        attempts = [read_attempt(one.log_folder(number), number) for number in range(len(one.num_events))]
        chains.append(trace(attempts))
    lost, repeated = lost_and_repeated(chains[0], NUM_SAMPLES, STEPS_PER_EPOCH, epochs)
    digests = [(read_summary(RunFolder(one.path)) or {}).get("weights_sha256") for one in (run, clean)]
    equal = [equal_after(run, clean, index) for index in range(len(kills))]
    rows = [["kill", "target", "moment", "steps in attempt", "gone after", "digests after it"]]
    rows += [
        [
            str(index),
            kill.target,
            kill.moment,
            str(kill.last_step_logged),
            f"{kill.gone_after_s:.1f} s",
            "equal" if equal[index - 1] else "differ",
        ]
        for index, kill in enumerate(kills, start=1)
    ]
    figures = {
        "kills": len(kills),
        "equal_digests": sum(equal),
        "samples_lost": lost,
        "samples_repeated": repeated,
        "same_order": [step.samples for step in chains[0]] == [step.samples for step in chains[1]],
        "final_digest_equal": digests[0] is not None and digests[0] == digests[1],
        "orphans": sum(kill.num_orphans for kill in kills),
        "max_relative_difference": final_difference(run, clean),
    }
    return figures, spaced(rows)


def is_kept(figures: dict[str, Any], num_kills: int, *, same_world_size: bool) -> bool:
    """Whether every promise was kept."""
    if figures["kills"] != num_kills or figures["samples_lost"] or figures["samples_repeated"] or figures["orphans"]:
        return False
    if not figures["same_order"]:
        return False
    if same_world_size:
        return figures["equal_digests"] == num_kills and bool(figures["final_digest_equal"])
    return bool(figures["max_relative_difference"] <= ROUNDING)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train twice, once disturbed, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the run, and of what is killed when")
    parser.add_argument("--world-sizes", type=numbers, default=(), help="resume on these worker counts in turn")
    parser.add_argument("--data-folder", help="with the data set's files; default: found or fetched")
    options = parser.parse_args(arguments)
    epochs = options.kills + 4  # an attempt is killed within about an epoch of its first step
    world_sizes = options.world_sizes or (2,)
    draw = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="stormo-kill-resume-"))
    clean = Run(folder=folder, name="undisturbed", flags=flags(options, epochs))
    print(f"training {epochs} epochs = {epochs * STEPS_PER_EPOCH} steps undisturbed ...", file=sys.stderr, flush=True)
    run_undisturbed(clean, world_sizes[0])
    run = Run(folder=folder, name="killed", flags=clean.flags, first_step_s=clean.first_step_s, save_s=clean.save_s)
    kills = run_killed(run, options.kills, world_sizes, draw)
    figures, table = compare(run, clean, kills, epochs)
    kept = is_kept(figures, options.kills, same_world_size=len(set(world_sizes)) == 1)
    print("\n".join(table))
    if kept:
        shutil.rmtree(folder)
    else:
        print(f"everything is kept in {folder}")
    print(result_line(figures))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
