"""The stage `exactness` of `benchmarks.slices`: every parallel setup on real devices against one process.

Few cases for each setup, since every case costs device time. In float64 all must equal one process within 1e-10, in
fp32 within 1e-5. In tf32, bf16 and fp16 they must differ from it by no more than two or three times what single
processes differ that sum the same batch in other orders (`fsdp` gathers weights of 16 bits, which rounds more).
Compressed gradients are rounded: there the workers must be equal to the bit, and the losses close. The real command is
killed on 4 and on 7 devices and resumes on other numbers with other strategies and meshes.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.command import relative_difference, train_command
from benchmarks.rank_pool import RankFailedError, RankPool
from benchmarks.slice_devices import Devices
from benchmarks.strategy_cases import CONTROL_SETUPS, GPT, OPTIMIZERS, RESNET, Case, Setup, setups
from benchmarks.strategy_exactness import CONTROL_LIMIT, LIMIT, Trained, difference, train_rank
from stormo.errors import pluralize

_ROUNDED = ("tf32", "bf16", "fp16")
LIMITS = {"fp64": LIMIT, "fp32": 1e-5, "tf32": 3.0, "bf16": 2.0, "fp16": 3.0}
LIMITS |= {"16-bit gradients": 0.01, "low-rank gradients": 0.5}
_PARTS = (2, 3, 4, 7)  # in which a single process sums a batch, for the spread of a number format
_CASE_S = 60.0  # after which a case has hung
_EVERY_OPTIMIZER = {2: ("ddp", "zero2"), 4: ("fsdp", "tensor"), 7: ("zero1", "fsdp")}  # by number of workers
_FORMATS = {2: ("zero1", "zero2"), 4: ("ddp", "fsdp", "tensor"), 7: ("ddp", "fsdp")}
_COMPRESSED = {2: ("fp16",), 4: ("bf16", "powersgd"), 7: ("bf16", "fp16", "powersgd")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a case."""

    name: str
    kind: str  # a key of LIMITS, or "control"
    difference: float
    failure: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it is as it should be; a control must differ."""
        if self.kind == "control":
            return self.difference > CONTROL_LIMIT
        return self.difference <= LIMITS[self.kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A case and what is compared."""

    case: Case
    kind: str = "fp64"

    @property
    def name(self) -> str:
        """In words."""
        setup = self.case.setup
        return f"{setup.text}, {self.case.task}, {setup.num_workers} workers, {self.case.optimizer}"


def checks(sizes: Sequence[int], device: str = "cuda") -> list[Checked]:
    """All cases, by number of workers as given; without TF32, which only GPUs have, on CPUs."""
    every = [one for size in sizes for one in (*_special(size), *_plain(size))]
    return [one for one in every if device == "cuda" or one.kind != "tf32"]


def quick_checks(size: int) -> list[Checked]:
    """Two cases that stand for all, to try the benchmark itself."""
    chosen = [setup for setup in setups(size) if setup.text in ("ddp", "fsdp")]
    return [Checked(case=Case(setup=setup, task="GPT", optimizer="lamb")) for setup in chosen]


def _plain(size: int) -> Iterator[Checked]:
    for setup in setups(size):
        if setup.control:
            continue
        for task in setup.tasks:
            every = task == "GPT" and setup.text in _EVERY_OPTIMIZER.get(size, ())
            for optimizer in OPTIMIZERS if every else ("lamb",):
                yield Checked(case=Case(setup=setup, task=task, optimizer=optimizer))


def _special(size: int) -> Iterator[Checked]:
    """Ghost batch norm, averaged weights, other number formats, compressed gradients, controls."""
    make = partial(_setup, size)
    even = {"global_batch_size": 4 * size, "num_samples": 8 * size}
    ghosts = {"ghost_batch_size": 2, "sync_batch_norm": False}
    for strategy in ("ddp", "fsdp"):
        own = {"strategy": strategy, **ghosts}
        yield _checked(make(f"{strategy}, ghosts of 2", RESNET, own, ghosts, even), "sgd")
    plain = {"momentum": 0.0, "nesterov": False, "clip_norm": None}
    local = {"strategy": "local", "average_every": "1", **plain}
    yield _checked(make("local, averaged in every step", GPT, local, plain, even), "sgd")
    for setup in CONTROL_SETUPS if size == 2 else ():
        optimizer = "sgd" if setup.control == "clipping" else "lamb"
        yield Checked(case=Case(setup=setup, task="GPT", optimizer=optimizer), kind="control")
    for strategy in _FORMATS[size]:
        for kind in ("fp32", *_ROUNDED):
            own = {"strategy": strategy, "precision": kind}
            yield _checked(make(f"{strategy}, {kind}", GPT, own, {"precision": kind}), "sgd", kind)
    for method in _COMPRESSED[size]:
        kind = "low-rank gradients" if method == "powersgd" else "16-bit gradients"
        yield _checked(make(f"ddp, compress {method}", GPT, {"compress": method}, {}), "sgd", kind)


def _setup(
    size: int,
    text: str,
    tasks: Sequence[str],
    flags: Mapping[str, Any],
    reference_flags: Mapping[str, Any],
    data: Mapping[str, int] | None = None,
) -> Setup:
    named = {"strategy": "ddp", **flags}
    more = {} if data is None else {"data": data}
    return Setup(
        strategy="ddp",
        text=text,
        num_workers=size,
        tasks=tasks,
        flags=named,
        reference_flags=reference_flags,
        **more,  # type: ignore[arg-type]
    )


def _checked(setup: Setup, optimizer: str, kind: str = "fp64") -> Checked:
    return Checked(case=Case(setup=setup, task=setup.tasks[0], optimizer=optimizer), kind=kind)


class Comparer:
    """Trains cases on some devices; references are trained on the first of them when they are first needed."""

    def __init__(self, devices: Devices, deadline_s: float) -> None:
        environments = [] if devices.device == "cpu" else [devices.of_rank(rank) for rank in range(len(devices))]
        self._pool = RankPool(_CASE_S, environments)
        self._deadline_s = deadline_s  # on the clock time.monotonic()
        self._references: dict[Any, Trained] = {}
        self._spreads: dict[Any, float] = {}  # by reference

    def run(self, wanted: Sequence[Checked]) -> list[Outcome]:
        """Compare one after the other, until the time is over."""
        with self._pool:
            outcomes = []
            for one in wanted:
                began_s = time.monotonic()
                if began_s > self._deadline_s:
                    late = "--budget-s was over before it began"
                    outcomes.append(Outcome(name=one.name, kind=one.kind, difference=math.nan, failure=late))
                else:
                    outcomes.append(self._compare(one))
                _tell(outcomes[-1], time.monotonic() - began_s)
            return outcomes

    def _compare(self, one: Checked) -> Outcome:
        try:
            found = self._difference(one)
        except RankFailedError as error:
            return Outcome(name=one.name, kind=one.kind, difference=math.nan, failure=str(error))
        return Outcome(name=one.name, kind=one.kind, difference=found)

    def _difference(self, one: Checked) -> float:
        case = one.case
        if case.reference not in self._references:
            self._references[case.reference] = self._pool.run(train_rank, 1, case, True)[0]
        reference = self._references[case.reference]
        ranks: list[Trained] = self._pool.run(train_rank, case.setup.num_workers, case, False)
        if one.kind.endswith("gradients"):
            return loss_difference(ranks, reference)
        if "ghost_batch_size" in case.setup.flags:  # each worker's running statistics are of its own ghosts
            ranks, reference = [_without_buffers(rank) for rank in ranks], _without_buffers(reference)
        found = difference(ranks, reference)
        return found / self._spread(case, reference) if one.kind in _ROUNDED else found

    def _spread(self, case: Case, reference: Trained) -> float:
        """The largest difference between single processes that sum the batch whole and in several numbers of parts."""
        if case.reference not in self._spreads:
            singles = [reference]
            for count in _PARTS:
                parts = {**case.setup.reference_flags, "accumulate": count}
                setup = _setup(1, "one process", case.setup.tasks, case.setup.flags, parts, case.setup.data)
                in_parts = Case(setup=setup, task=case.task, optimizer=case.optimizer)
                singles += self._pool.run(train_rank, 1, in_parts, True)
            self._spreads[case.reference] = max(difference([a], b) for a, b in combinations(singles, 2))
        return self._spreads[case.reference]


def loss_difference(ranks: Sequence[Trained], reference: Trained) -> float:
    """How far the last losses are from the reference's; infinite where the workers' weights differ in a bit."""
    first = {chunk.name: chunk.values for chunk in ranks[0].chunks if "/" not in chunk.name}
    for rank in ranks[1:]:
        if any((chunk.values != first[chunk.name]).any() for chunk in rank.chunks if chunk.name in first):
            return math.inf
    ours, theirs = (float(one.others["losses"][-5:].mean()) for one in (ranks[0], reference))
    return abs(ours - theirs) / theirs


def _without_buffers(trained: Trained) -> Trained:
    return Trained(chunks=trained.chunks, others={"losses": trained.others["losses"]})


def _tell(outcome: Outcome, took_s: float) -> None:
    text = f"failed: {outcome.failure}" if outcome.failure else f"{outcome.difference:.1e}"
    unit = {"fp64": "", **dict.fromkeys(_ROUNDED, " of its spread")}.get(outcome.kind, f" ({outcome.kind})")
    mark = "" if outcome.is_good else "  <-- not as it should be"
    print(f"{outcome.name}: {text}{unit} ({took_s:.1f} s){mark}", file=sys.stderr, flush=True)


# --- the real command, killed and resumed -----------------------------------------------------------------------------

_COMMON = (
    *("--precision", "fp64", "--nesterov", "--optimizer", "sgd", "--weight-decay", "0.0005", "--clip-norm", "1"),
    *("--base-lr", "0.05", "--warmup-epochs", "1", "--decay", "cosine", "--target-accuracy", "1.1"),
    *("--checkpoint-every", "3", "--no-tensorboard"),
)
_IMAGES = (
    *("fashion-mnist", "--task.width", "0.25", "--task.dropout", "0", "--task.augment", "--sync-batch-norm"),
    *("--task.train-samples", "103", "--task.validation-samples", "100", "--global-batch-size", "25"),
    *("--epochs", "4"),
)
_TEXT = (
    *("language-model", "--task.block", "32", "--task.train-bytes", "3168", "--task.validation-bytes", "660"),
    *("--global-batch-size", "24", "--epochs", "8"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """A training that is killed, and what it is resumed on: numbers of workers with their flags."""

    task: Sequence[str]
    killed: tuple[int, str]
    resumes: Sequence[tuple[int, str]]


CHAINS = (
    Chain(task=_IMAGES, killed=(4, "--strategy ddp"), resumes=((2, "--strategy fsdp"), (1, "--strategy single"))),
    Chain(
        task=_TEXT,
        killed=(4, "--mesh shard=2,tensor=2"),
        resumes=((4, "--mesh pipeline=2,replicate=2"), (2, "--strategy tensor")),
    ),
    Chain(
        task=_TEXT,
        killed=(7, "--strategy fsdp"),
        resumes=((4, "--mesh pipeline=2,shard=2"), (2, "--strategy zero1"), (7, "--strategy ddp")),
    ),
)


class Resumed:
    """A run that is killed once it has saved, resumed on other devices, and compared with one that was left alone."""

    def __init__(self, devices: Devices, folder: Path, data_folder: Path, chain: Chain) -> None:
        self._devices, self._folder, self._chain = devices, folder, chain
        self._data = ("--task.data-folder", str(data_folder)) if chain.task is _IMAGES else ()

    def run(self) -> list[Outcome]:
        """Train, kill, resume, compare."""
        failure = self._kill(self._start("killed", 0, *self._chain.killed))
        jobs = [("alone", 1, "--strategy single")]
        jobs += [(f"{pluralize(count, 'worker')}, {flags}", count, flags) for count, flags in self._chain.resumes]
        running: dict[str, subprocess.Popen[str]] = {}
        failures: dict[str, str] = {}
        first = 0
        for name, count, flags in jobs if not failure else ():
            if first + count > len(self._devices):
                failures |= {one: _ended(process) for one, process in running.items()}
                running, first = {}, 0
            if name != "alone":
                shutil.copytree(self._folder / "killed", self._folder / name)
            resumes = "" if name == "alone" else " --resume"
            running[name] = self._start(name, first, count, flags + resumes)
            first += count
        failures |= {name: _ended(process) for name, process in running.items()}
        return [self._outcome(name, failure or failures[name] or failures["alone"]) for name, *_ in jobs[1:]]

    def _start(self, name: str, first: int, count: int, flags: str) -> subprocess.Popen[str]:
        devices = self._devices.take(first, count)
        command = train_command(
            *(*self._chain.task, *self._data, *_COMMON, *flags.split()),
            *("--device", devices.device, "--num-gpus", count),
            *("--backend", "nccl" if devices.device == "cuda" else "gloo"),
            *("--runs-folder", str(self._folder), "--run-name", name),
        )
        return subprocess.Popen(
            command,
            env={**os.environ, **devices.of_command()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that all its processes are killed at once
        )

    def _kill(self, process: subprocess.Popen[str]) -> str:
        """Kill all its processes once a checkpoint is there; why that could not be done, or nothing."""
        checkpoints, deadline_s = self._folder / "killed" / "checkpoints", time.monotonic() + _CASE_S
        while not any(checkpoints.glob("step-*")) and process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if process.returncode == -signal.SIGKILL and any(checkpoints.glob("step-*")):
            return ""
        return f"it ended by itself or never saved; exit code {process.returncode}: {output[-2000:]}"

    def _outcome(self, name: str, failure: str) -> Outcome:
        from stormo import checkpoint

        count, flags = self._chain.killed
        text = f"killed on {count} workers, {flags}; resumed on {name}"
        if failure:
            return Outcome(name=text, kind="fp64", difference=math.nan, failure=failure)
        states = []
        for run in (name, "alone"):
            snapshot = checkpoint.load(checkpoint.find(self._folder / run / "checkpoints")[0].path)
            states.append(
                {**snapshot.model, **{f"optimizer/{key}": value for key, value in snapshot.optimizer.items()}}
            )
        return Outcome(name=text, kind="fp64", difference=relative_difference(*states))


def _ended(process: subprocess.Popen[str]) -> str:
    """Empty, or why it failed."""
    try:
        output, _ = process.communicate(timeout=2 * _CASE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return f"exit code {process.returncode}: {output[-2000:]}" if process.returncode else ""


# --- the stage --------------------------------------------------------------------------------------------------------


def run_stage(devices: Devices, data_folder: Path, *, budget_s: float, quick: bool) -> list[Outcome]:
    """All cases, those of 2 workers beside those of 4 where there are devices for both."""
    deadline_s = time.monotonic() + budget_s
    if quick:
        return Comparer(devices, deadline_s).run(quick_checks(len(devices)))
    outcomes: list[Outcome] = []
    for chain in CHAINS:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            resumed = Resumed(devices, Path(folder), data_folder, chain).run()
        for one in resumed:
            _tell(one, time.monotonic() - began_s)
        outcomes += resumed
    outcomes += Comparer(devices, deadline_s).run(checks([len(devices)], devices.device))
    sides = ((devices.take(0, 4), checks([4], devices.device)), (devices.take(4, 2), checks([2], devices.device)))
    with ThreadPoolExecutor() as threads:
        running = [threads.submit(Comparer(some, deadline_s).run, wanted) for some, wanted in sides]
        return outcomes + [outcome for side in running for outcome in side.result()]
