"""Every parallel setup against one process, to the last digits: weights, optimizer state, statistics, losses.

    python -m benchmarks.exactness --strategies all [--quick]
    python -m benchmarks.exactness --strategies fsdp,tensor

20 optimizer steps in float64 with momentum, Nesterov, weight decay, clipping and a rate that falls, on 2, 3, 4 and 8
ranks over Gloo. A GPT under everything; a WideResNet with synchronised batch norm where that applies: tensor cuts no
convolutions, so that it has linear layers with a batch norm between them, and a pipeline takes statistics of
micro-batches, so that its reference is one process that accumulates these. Rows with `ema` compare the moving average
of weights and running statistics as well; a GAN has two optimizers in turn. Batches do not divide by the workers,
except in pipelines. The ranks hold strategies as a worker makes them: there is no launcher, no run folder and no
validation: those are in `benchmarks.exactness` without `--strategies`. Every chunk of every tensor on every rank is
compared: max |a - b| / max |b| over the whole tensor b of one process. All chunks that would be saved must make up each
tensor exactly once. Controls, in which norms are those of parts, must differ. The command fails above 1e-10.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.command import aligned, largest, result_line
from benchmarks.rank_pool import RankFailedError, RankPool
from benchmarks.strategy_cases import NAMES, OPTIMIZERS, Case, cases

if TYPE_CHECKING:
    import numpy

    from benchmarks.strategy_worker import Chunk
    from stormo.distributed.world import World
    from stormo.parallel.base import Strategy

    Arrays = Mapping[str, numpy.ndarray[Any, Any]]

LIMIT = 1e-10
CONTROL_LIMIT = 1e-6
NUM_STEPS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a rank has after its steps."""

    chunks: list[Chunk]
    others: Arrays  # buffers, and the losses


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """How a case compares with one process; a failure in place of a difference where it did not run."""

    case: Case
    difference: float
    failure: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it is as it should be: equal, or, for a control, clearly not."""
        if self.case.setup.control:
            return self.difference > CONTROL_LIMIT
        return self.difference <= LIMIT


def _parts_alone(strategy: Strategy) -> None:
    """Let a layer-wise optimizer take parts for whole layers."""
    strategy.optimizer.global_squares = strategy.optimizer.exchange = None  # type: ignore[attr-defined]


def _clip_alone(strategy: Strategy) -> None:
    """Clip by the norm of what this rank holds."""
    from stormo.parallel.gradient_noise import total_norm

    strategy._gradient_norm = lambda: total_norm(strategy._gradients())  # type: ignore[method-assign]


CONTROLS: Mapping[str, Callable[[Any], None]] = {"layer norms": _parts_alone, "clipping": _clip_alone}


def train_rank(world: World, case: Case, is_reference: bool) -> Trained:
    """In a rank: train, and return what it holds."""
    import numpy as np

    from benchmarks.strategy_tasks import make_task
    from benchmarks.strategy_worker import buffers, build, chunks, train

    own = case.setup.reference_flags if is_reference else case.setup.flags
    change = None if is_reference else CONTROLS.get(case.setup.control)
    built = build(world, make_task(case.task, case.num_samples), case.flags(own), change)
    losses = train(world, built, NUM_STEPS, case.learning_rate)
    return Trained(chunks=chunks(built.strategy), others={**buffers(built.strategy), "losses": np.array(losses)})


def difference(ranks: Sequence[Trained], reference: Trained) -> float:
    """The largest relative difference of all chunks; infinite where a value is missing or saved twice."""
    import numpy as np

    wholes = {chunk.name: chunk for chunk in reference.chunks}
    counts = {name: np.zeros(chunk.values.shape, int) for name, chunk in wholes.items()}
    quotients = [0.0]
    for rank in ranks:
        for chunk in rank.chunks:
            whole = wholes.get(chunk.name)
            if whole is None or chunk.whole_shape != whole.values.shape:
                return math.inf
            quotients.append(_quotient(chunk.values, whole.values[chunk.slices], whole.values))
            if chunk.is_saved or not chunk.whole_shape:
                counts[chunk.name][chunk.slices] += 1
        if not rank.others.keys() <= reference.others.keys():
            return math.inf
        quotients += [_quotient(values, reference.others[name]) for name, values in rank.others.items()]
    whole_once = all((count == 1).all() if count.shape else count >= 1 for count in counts.values())
    has_others = set().union(*(rank.others for rank in ranks)) == set(reference.others)
    return largest(quotients) if whole_once and has_others else math.inf


def _quotient(ours: Any, theirs: Any, whole: Any = None) -> float:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    if not ours.size or (ours == theirs).all():
        return 0.0
    scale = float(abs(theirs if whole is None else whole).max())
    return float(abs(ours - theirs).max()) / scale if scale else math.inf


def compare(pool: RankPool, case: Case, references: dict[Any, Trained]) -> Compared:
    """Train one case; its reference is trained when it is first needed."""
    try:
        if case.reference not in references:
            references[case.reference] = pool.run(train_rank, 1, case, True)[0]
        ranks = pool.run(train_rank, case.setup.num_workers, case, False)
    except RankFailedError as error:
        return Compared(case=case, difference=math.nan, failure=str(error))
    return Compared(case=case, difference=difference(ranks, references[case.reference]))


def lines(compared: Sequence[Compared]) -> list[str]:
    """The table: a row for a setup and a task, a column for an optimizer."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for one in compared:
        setup = one.case.setup
        row = rows.setdefault((setup.text, one.case.task, str(setup.num_workers)), {})
        row[one.case.optimizer] = "failed" if one.failure else f"{one.difference:.1e}"
    used = [name for name in OPTIMIZERS if any(name in row for row in rows.values())]
    head = ["strategy", "task", "workers", *used]
    return aligned([head, *([*key, *(row.get(name, "") for name in used)] for key, row in rows.items())])


def main(strategies: Sequence[str], *, quick: bool = False) -> int:
    """Train and compare everything, print a table and the result."""
    began_s = time.perf_counter()
    compared: list[Compared] = []
    references: dict[Any, Trained] = {}
    with RankPool() as pool:
        for case in cases(strategies, quick=quick):
            case_began_s = time.perf_counter()
            one = compare(pool, case, references)
            compared.append(one)
            took_s, text = time.perf_counter() - case_began_s, f"{one.difference:.1e}"
            name = f"{case.setup.text}, {case.task}, {case.setup.num_workers} workers, {case.optimizer}"
            if one.failure:
                text = f"failed: {one.failure}"
            print(f"{name}: {text} ({took_s:.1f} s)", file=sys.stderr, flush=True)
    print("\n".join(lines(compared)))
    print(f"{time.perf_counter() - began_s:.0f} s in all; {NUM_STEPS} steps each, in float64")
    checked = [one for one in compared if not one.case.setup.control]
    figures = {
        "configurations": len(checked),
        "max_relative_difference": largest(one.difference for one in checked),
        "min_control_difference": min(one.difference for one in compared if one.case.setup.control),
    }
    print(result_line(figures))
    return 0 if all(one.is_good for one in compared) else 1


def names(text: str) -> tuple[str, ...]:
    """`all`, or names of strategies, for argparse; `mesh` is every product of axes."""
    chosen = NAMES if text == "all" else tuple(text.split(","))
    unknown = [name for name in chosen if name not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of all, {', '.join(NAMES)}")
    return chosen
