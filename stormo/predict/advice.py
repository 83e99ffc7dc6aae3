"""Chooses a candidate by the numbers alone: one pure function.

The cheapest remedies come first: smaller micro-batches (`--accumulate`) cost next to nothing, recomputing activations a
third more arithmetic, sharding traffic, offloading copies in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stormo.errors import pluralize


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The forecast of a candidate, as far as the advice needs it."""

    fits: bool  # with the batch as set
    batch: int  # samples of one worker in one micro-batch
    largest_micro_batch: int  # that fits where a step has several


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """All that the advice depends on; impossible candidates are not in `outcomes`."""

    num_gpus: int
    num_nodes: int
    has_nvlink: bool
    is_fast: bool  # the network between nodes
    outcomes: Mapping[str, Outcome]
    asked: str | None = None  # the candidate that was set, possible or not; None where none was
    gpus_needed: int | None = 0  # under fsdp, where nothing fits; None: no number would do, 0: not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """The candidate to take, the micro-batches that its batch is split into, and why."""

    key: str | None
    accumulate: int
    text: str


_AS_SET = "it fits as set"
_WHY = {
    "single": "it fits on one GPU",
    "single, recomputed": "it fits on one GPU if activations are recomputed",
    "ddp": "every GPU can hold a copy",
    "ddp, recomputed": "every GPU can hold a copy if activations are recomputed",
    "zero1": "the optimizer's state must be sharded to fit",
    "zero2": "the optimizer's state and the gradients must be sharded to fit, and zero2 sends no more than ddp",
    "fsdp": "a copy does not fit on a GPU, its shards do",
    "fsdp, recomputed": "the shards fit if activations are recomputed",
    "hsdp": "a copy fits on the GPUs of a node, and only gradients travel between nodes",
    "hsdp, recomputed": "a copy fits on the GPUs of a node if activations are recomputed",
    "tensor": "a shard of every layer fits, over the fast links within a node",
    "pipeline": "the layers fit in stages, which send little",
    "offload": "weights and state fit in host memory (column host, per node), with copies in every micro-batch",
    "offload, recomputed": "weights and state fit in host memory (column host, per node) if activations are recomputed",
}


def advise(question: Question) -> Advice:
    """The candidate that was set if it fits, perhaps in smaller micro-batches; else the first that fits."""
    if question.asked is None:
        return _first_that_fits(question)
    asked = question.outcomes.get(question.asked)
    if asked is not None:
        taken = _if_fits(question.asked, asked, _AS_SET) or _if_accumulated(question.asked, asked, _AS_SET)
        if taken is not None:
            return taken
    found = _first_that_fits(question)
    if found.key is None:
        return found
    return replace(
        found, text=f"the strategy set {'is not possible' if asked is None else 'does not fit'}; {found.text}"
    )


def _first_that_fits(question: Question) -> Advice:
    for key, take in _order(question):
        outcome = question.outcomes.get(key)
        found = None if outcome is None else take(key, outcome, _WHY[key])
        if found is not None:
            return found
    return Advice(key=None, accumulate=1, text=_nothing_fits(question))


def _if_fits(key: str, outcome: Outcome, why: str) -> Advice | None:
    return Advice(key=key, accumulate=1, text=f"{why}.") if outcome.fits else None


def _if_accumulated(key: str, outcome: Outcome, why: str) -> Advice | None:
    """With smaller micro-batches, if there are any."""
    if outcome.fits or not outcome.largest_micro_batch or outcome.batch == 1:
        return None
    accumulate = _fewest_micro_batches(outcome.batch, outcome.largest_micro_batch)
    size = outcome.batch // accumulate
    text = f"{why} in {accumulate} micro-batches of {pluralize(size, 'sample')}."
    return Advice(key=key, accumulate=accumulate, text=text)


def _fewest_micro_batches(batch: int, largest: int) -> int:
    """The fewest equal micro-batches that fit; the step stays the same."""
    return next(count for count in range(2, batch + 1) if batch % count == 0 and batch // count <= largest)


_Take = Callable[[str, Outcome, str], Advice | None]


def _order(question: Question) -> Sequence[tuple[str, _Take]]:
    last = _both("offload", "offload, recomputed")
    if question.num_gpus * question.num_nodes == 1:
        return [*_both("single", "single, recomputed"), *last]
    if question.num_nodes > 1 and not question.is_fast:
        copies = _both("ddp", "zero1", "ddp, recomputed")
        sharded = _both("hsdp", "hsdp, recomputed", "pipeline", "tensor", "fsdp", "fsdp, recomputed")
        return [*copies, *sharded, *last]
    copies = [("ddp", _if_fits), ("zero2", _if_fits), ("ddp", _if_accumulated)]
    if question.num_nodes > 1:
        sharded = _both("hsdp", "ddp, recomputed", "hsdp, recomputed", "fsdp", "fsdp, recomputed")
        return [*copies, *sharded, *_both("pipeline", "tensor"), *last]
    sharded = _both("fsdp", "ddp, recomputed", "fsdp, recomputed")
    others = ("tensor", "pipeline") if question.has_nvlink else ("pipeline", "tensor")
    return [*copies, *sharded, ("zero2", _if_accumulated), *_both(*others), *last]


def _both(*keys: str) -> list[tuple[str, _Take]]:
    return [(key, take) for key in keys for take in (_if_fits, _if_accumulated)]


def _nothing_fits(question: Question) -> str:
    if question.gpus_needed is None:
        return (
            "nothing fits, and more GPUs of this kind would not help: each must hold CUDA, one block and its "
            "activations, which is too much; take GPUs with more memory, smaller samples, or smaller blocks "
            "(--shard-modules)."
        )
    if not question.gpus_needed:
        return "nothing fits."
    return (
        f"nothing fits; fsdp with --checkpoint-activations needs {pluralize(question.gpus_needed, 'GPU')} of this kind."
    )
