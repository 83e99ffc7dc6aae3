"""Trains each task of `users` with one worker, and with more workers and micro-batches: are the weights equal?"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.command import free_port, largest, relative_difference, torchrun_variables

LIMIT = 1e-10
_TIMEOUT_S = 120.0
_USERS = Path(__file__).with_name("users.py")
_FLAGS = "--device cpu --precision fp64 --global-batch-size 20 --epochs 2 --base-lr 0.05 --lr-rule none --momentum 0.9"
_FLAGS += " --warmup-epochs 0 --checkpoint-every 0 --no-tensorboard --no-energy --loader-workers 0"
_TWO, _THREE, _ACCUMULATED, _BOTH = (2, ""), (3, ""), (1, "--accumulate 2"), (2, "--accumulate 2")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One task or script on several worker counts, compared with one process in float64.

    `equal`: the same weights to rounding on all of them. `refused`: every start whose result would have differed ended
    with exit code 2 and a sentence that names the remedy. `silent`: a different result, without any message.
    """

    name: str
    verdict: Literal["equal", "refused", "silent"]
    detail: str


@dataclass(frozen=True, slots=True)
class Case:
    """A task, how it is started beside one worker, and what must come of it.

    Args:
        task: a class of `users`.
        starts: numbers of workers and further flags.
        refusal: texts that the error of every start must have; none where all must be equal.
        also_single: whether one worker must be refused as well.
        says: a text in the output of runs that may differ.
        flags: of all starts.
    """

    task: str
    starts: tuple[tuple[int, str], ...] = (_TWO, _THREE)
    refusal: tuple[str, ...] = ()
    also_single: bool = False
    says: str = ""
    flags: str = ""


CASES = (
    Case("TokenMean", (_TWO, _THREE, _ACCUMULATED), refusal=("(loss, count)",)),
    Case("TokenCount", (_TWO, _THREE, _ACCUMULATED, _BOTH)),
    Case("MaskedMean", (_TWO, _THREE, _ACCUMULATED), refusal=("(loss, count)",)),
    Case("MaskedCount", (_TWO, _THREE, (1, "--accumulate 4"))),
    Case("BatchDice", (_TWO, _THREE, _ACCUMULATED), refusal=("(loss, count)", "local")),
    Case("LocalDice", (_TWO, _THREE), says="local"),
    Case("SumLoss", (_TWO, _THREE, _ACCUMULATED), refusal=("sum",)),
    Case("SaidSum", (_TWO, _THREE, _ACCUMULATED)),
    Case("Unused", (_TWO, _THREE)),
    Case("Frozen", (_TWO, _BOTH)),
    Case("TiedWeights", (_TWO, _THREE)),
    Case("BatchNorm", (_TWO, _THREE), flags="--sync-batch-norm"),
    Case("OwnOptimizer", (_TWO, _BOTH)),
    Case("OwnScheduler", (_TWO,), refusal=("optimizer()",), also_single=True),
    Case("Stream", (_TWO, _THREE)),
    Case("ShardedStream", (_TWO, _THREE), refusal=("rank",)),
)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a start ended."""

    start: str
    code: int
    said: str
    folder: Path

    @property
    def last_line(self) -> str:
        """What was said last."""
        return next((line.strip() for line in reversed(self.said.splitlines()) if line.strip()), "")


def run(folder: Path, cases: Sequence[Case] = CASES) -> list[Outcome]:
    """Train every task in a folder, and say what became of each."""
    outcomes = []
    for case in cases:
        print(f"training {case.task} ...", file=sys.stderr, flush=True)
        outcomes.append(_judge(case, folder))
    return outcomes


def _judge(case: Case, folder: Path) -> Outcome:
    alone = _start(case, folder, 1, "")
    if alone.code and not case.also_single:
        return _wrong(case, alone)
    differences = [0.0]
    ends = [*([alone] if case.also_single else []), *(_start(case, folder, *start) for start in case.starts)]
    for ended in ends:
        texts = case.refusal or (case.says,)
        if ended.code != (2 if case.refusal else 0) or not all(text in ended.said for text in texts):
            return _wrong(case, ended)
        if not case.refusal:
            differences.append(_difference(ended.folder, alone.folder))
    if case.refusal:
        return Outcome(case.task, "refused", ends[-1].last_line)
    if case.says:
        return Outcome(case.task, "refused", f"differs by {largest(differences):.1e}, and the run says so")
    most = largest(differences)
    verdict: Literal["equal", "silent"] = "equal" if most <= LIMIT else "silent"
    return Outcome(case.task, verdict, f"differs by {most:.1e} on {', '.join(ended.start for ended in ends)}")


def _wrong(case: Case, ended: Ended) -> Outcome:
    """Not what must come of it: a missing refusal, or a refusal or failure without a reason."""
    meant = "no refusal" if case.refusal and not ended.code else f"exit code {ended.code}"
    return Outcome(case.task, "silent", f"{meant} on {ended.start}: {ended.last_line}")


def _difference(folder: Path, reference: Path) -> float:
    from stormo import checkpoint
    from stormo.telemetry.folder import RunFolder

    ours, theirs = (
        checkpoint.load(checkpoint.find(RunFolder(path).checkpoints)[0].path).model for path in (folder, reference)
    )
    return relative_difference(ours, theirs)


def _start(case: Case, folder: Path, num_workers: int, more: str) -> Ended:
    name = f"{case.task}-{num_workers}{more.replace('-', '').replace(' ', '')}"
    arguments = [*_FLAGS.split(), *case.flags.split(), *more.split(), "--runs-folder", str(folder), "--run-name", name]
    arguments = ["train", f"{_USERS}:{case.task}", *arguments, "--num-gpus", str(num_workers)]
    workers = f"{num_workers} worker{'s' * (num_workers > 1)}{f' {more}' * bool(more)}"
    code, said = run_command(arguments, num_workers)
    return Ended(workers, code, said, folder / name)


def run_command(arguments: Sequence[str], num_workers: int) -> tuple[int, str]:
    """Run `stormo` in processes that have torch already, as torchrun would start them; exit code and output."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "stormo.training.trainer", "benchmarks.own_tasks.tasks"])
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when the server imports it
    port = free_port()
    with tempfile.TemporaryDirectory() as temporary:
        outputs = [Path(temporary, str(rank)) for rank in range(num_workers)]
        processes = []
        for rank, output in enumerate(outputs):
            process = context.Process(target=_become, args=(list(arguments), rank, num_workers, port, str(output)))
            process.start()
            processes.append(process)
        for process in processes:
            process.join(_TIMEOUT_S)
            if process.exitcode is None:
                process.kill()
                process.join()
        codes = [process.exitcode or 0 for process in processes]
        said = "\n".join(output.read_text(encoding="utf-8", errors="replace") for output in outputs if output.exists())
    return next((code for code in codes if code), 0), said


def _become(arguments: list[str], rank: int, size: int, port: int, output: str) -> None:
    """Make this process a rank of the command."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    os.environ.update(torchrun_variables(rank, size, port))
    from stormo.cli import main

    sys.argv = ["stormo", *arguments]
    sys.exit(main(arguments))
