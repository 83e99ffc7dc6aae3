"""Each task of `users` by the real command on one worker, and on more workers and passes: are the weights the same?"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.command import largest, relative_difference
from benchmarks.own_tasks.outcome import Outcome

LIMIT = 1e-10
_TIMEOUT_S = 120.0
_USERS = Path(__file__).with_name("users.py")
_FLAGS = "--device cpu --precision fp64 --global-batch-size 20 --epochs 2 --base-lr 0.05 --lr-rule none --momentum 0.9"
_FLAGS += " --warmup-epochs 0 --checkpoint-every 0 --no-tensorboard --no-energy --loader-workers 0"
_TWO, _THREE, _PASSES, _BOTH = (2, ""), (3, ""), (1, "--accumulate 2"), (2, "--accumulate 2")


@dataclass(frozen=True, slots=True)
class Case:
    """A task, how it is started beside one worker, and what must come of it.

    Args:
        task: a class of `users`.
        starts: numbers of workers and further flags.
        words: that the refusal of every start must hold; none where all must be equal.
        also_alone: whether one worker must be refused as well.
        says: a text in the output of runs that may differ.
        flags: of all starts.
    """

    task: str
    starts: tuple[tuple[int, str], ...] = (_TWO, _THREE)
    words: tuple[str, ...] = ()
    also_alone: bool = False
    says: str = ""
    flags: str = ""


CASES = (
    Case("TokenMean", (_TWO, _THREE, _PASSES), words=("(loss, count)",)),
    Case("TokenCount", (_TWO, _THREE, _PASSES, _BOTH)),
    Case("MaskedMean", (_TWO, _THREE, _PASSES), words=("(loss, count)",)),
    Case("MaskedCount", (_TWO, _THREE, (1, "--accumulate 4"))),
    Case("BatchDice", (_TWO, _THREE, _PASSES), words=("(loss, count)", "local")),
    Case("LocalDice", (_TWO, _THREE), says="local"),
    Case("SumLoss", (_TWO, _THREE, _PASSES), words=("sum",)),
    Case("SaidSum", (_TWO, _THREE, _PASSES)),
    Case("Unused", (_TWO, _THREE)),
    Case("Frozen", (_TWO, _BOTH)),
    Case("TiedWeights", (_TWO, _THREE)),
    Case("BatchNorm", (_TWO, _THREE), flags="--sync-batch-norm"),
    Case("OwnOptimizer", (_TWO, _BOTH)),
    Case("OwnScheduler", (_TWO,), words=("optimizer()",), also_alone=True),
    Case("Stream", (_TWO, _THREE)),
    Case("ShardedStream", (_TWO, _THREE), words=("rank",)),
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
    if alone.code and not case.also_alone:
        return _wrong(case, alone)
    differences = [0.0]
    ends = [*([alone] if case.also_alone else []), *(_start(case, folder, *start) for start in case.starts)]
    for ended in ends:
        words = case.words or (case.says,)
        if ended.code != (2 if case.words else 0) or not all(word in ended.said for word in words):
            return _wrong(case, ended)
        if not case.words:
            differences.append(_difference(ended.folder, alone.folder))
    if case.words:
        return Outcome(case.task, "refused", ends[-1].last_line)
    if case.says:
        return Outcome(case.task, "refused", f"differs by {largest(differences):.1e}, and the run says so")
    most = largest(differences)
    verdict: Literal["equal", "silent"] = "equal" if most <= LIMIT else "silent"
    return Outcome(case.task, verdict, f"differs by {most:.1e} on {', '.join(ended.start for ended in ends)}")


def _wrong(case: Case, ended: Ended) -> Outcome:
    """Not what must come of it: no word where there should be one, or a refusal or a failure for no reason."""
    meant = "no refusal" if case.words and not ended.code else f"exit code {ended.code}"
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
    words = [*_FLAGS.split(), *case.flags.split(), *more.split(), "--runs-folder", str(folder), "--run-name", name]
    words = ["train", f"{_USERS}:{case.task}", *words, "--num-gpus", str(num_workers)]
    workers = f"{num_workers} worker{'s' * (num_workers > 1)}{f' {more}' * bool(more)}"
    code, said = run_command(words, num_workers)
    return Ended(workers, code, said, folder / name)


def run_command(words: Sequence[str], num_workers: int) -> tuple[int, str]:
    """Run `stormo` in processes that have torch already, as torchrun would start them; exit code and output."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "stormo.training.trainer", "benchmarks.own_tasks.tasks"])
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when the server imports it
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as temporary:
        outputs = [Path(temporary, str(rank)) for rank in range(num_workers)]
        processes = []
        for rank, output in enumerate(outputs):
            process = context.Process(target=_become, args=(list(words), rank, num_workers, port, str(output)))
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


def _become(words: list[str], rank: int, size: int, port: int, output: str) -> None:
    """Make this process a rank of the command."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    if size > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
        numbers |= {"GROUP_WORLD_SIZE": 1, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in numbers.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "own_tasks"})
    from stormo.cli import main

    sys.argv = ["stormo", *words]
    sys.exit(main(words))
