"""Which way to take, by the numbers alone: one pure function, whose every answer has a test.

A smaller pass (`--accumulate`) costs next to nothing, computing activations again a third more arithmetic, sharding
traffic, offloading copies in every pass: that is the order in which they are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stormo.errors import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What was forecast of a way."""

    fits: bool  # with the batch as it is
    batch: int  # samples of one worker in one pass
    largest_pass: int  # samples of one of several passes


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """All that an advice rests on; ways that cannot be had are not in `outcomes`."""

    num_gpus: int
    num_nodes: int
    has_nvlink: bool
    is_fast: bool  # the network between nodes
    outcomes: Mapping[str, Outcome]
    asked: str | None = None  # the way that was set, where one was; it may be none of those that can be had
    gpus_needed: int | None = 0  # under fsdp, where nothing fits; None where no number would do, 0 if not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """The way to take, the passes into which its batch is cut, and why."""

    key: str | None
    accumulate: int
    text: str


_AS_SET = "it fits as set"
_WHY = {
    "single": "it fits on one GPU",
    "single, recomputed": "it fits on one GPU once activations are computed again",
    "ddp": "every GPU can hold a copy",
    "ddp, recomputed": "every GPU can hold a copy once activations are computed again",
    "zero1": "the optimizer's state is what does not fit",
    "zero2": "the optimizer's state and the gradients are what does not fit, and zero2 sends no more than ddp",
    "fsdp": "a copy does not fit on a GPU, its parts do",
    "fsdp, recomputed": "the parts fit once activations are computed again",
    "hsdp": "a copy fits on the GPUs of a node, and only gradients travel between nodes",
    "hsdp, recomputed": "a copy fits on the GPUs of a node once activations are computed again",
    "tensor": "parts of every layer fit, over the fast links between the GPUs of a node",
    "pipeline": "the layers fit in stages, which send little",
    "offload": "weights and state can live in host memory (the column host, for a node), at a price in every pass",
    "offload, recomputed": "weights and state can live in host memory (the column host, for a node) while activations "
    "are computed again",
}


def advise(question: Question) -> Advice:
    """The way that was set, if it fits, also in smaller passes; else the first way of the order that does."""
    if question.asked is None:
        return _first(question)
    asked = question.outcomes.get(question.asked)
    if asked is not None:
        taken = _whole(question.asked, asked, _AS_SET) or _cut(question.asked, asked, _AS_SET)
        if taken is not None:
            return taken
    found = _first(question)
    if found.key is None:
        return found
    return replace(found, text=f"as set it {'is not possible' if asked is None else 'does not fit'}; {found.text}")


def _first(question: Question) -> Advice:
    for key, take in _order(question):
        outcome = question.outcomes.get(key)
        found = None if outcome is None else take(key, outcome, _WHY[key])
        if found is not None:
            return found
    return Advice(key=None, accumulate=1, text=_nothing(question))


def _whole(key: str, outcome: Outcome, why: str) -> Advice | None:
    return Advice(key=key, accumulate=1, text=f"{why}.") if outcome.fits else None


def _cut(key: str, outcome: Outcome, why: str) -> Advice | None:
    """In smaller passes, where there are any."""
    if outcome.fits or not outcome.largest_pass or outcome.batch == 1:
        return None
    accumulate = _passes(outcome.batch, outcome.largest_pass)
    size = outcome.batch // accumulate
    text = f"{why} in passes of {counted(size, 'sample')}, {accumulate} in place of one."
    return Advice(key=key, accumulate=accumulate, text=text)


def _passes(batch: int, largest: int) -> int:
    """The fewest equal passes that fit: the step stays what it was."""
    return next(count for count in range(2, batch + 1) if batch % count == 0 and batch // count <= largest)


_Take = Callable[[str, Outcome, str], Advice | None]


def _order(question: Question) -> Sequence[tuple[str, _Take]]:
    last = _both("offload", "offload, recomputed")
    if question.num_gpus * question.num_nodes == 1:
        return [*_both("single", "single, recomputed"), *last]
    if question.num_nodes > 1 and not question.is_fast:
        copies = _both("ddp", "zero1", "ddp, recomputed")
        spread = _both("hsdp", "hsdp, recomputed", "pipeline", "tensor", "fsdp", "fsdp, recomputed")
        return [*copies, *spread, *last]
    copies = [("ddp", _whole), ("zero2", _whole), ("ddp", _cut)]
    if question.num_nodes > 1:
        sharded = _both("hsdp", "ddp, recomputed", "hsdp, recomputed", "fsdp", "fsdp, recomputed")
        return [*copies, *sharded, *_both("pipeline", "tensor"), *last]
    sharded = _both("fsdp", "ddp, recomputed", "fsdp, recomputed")
    others = ("tensor", "pipeline") if question.has_nvlink else ("pipeline", "tensor")
    return [*copies, *sharded, ("zero2", _cut), *_both(*others), *last]


def _both(*keys: str) -> list[tuple[str, _Take]]:
    return [(key, take) for key in keys for take in (_whole, _cut)]


def _nothing(question: Question) -> str:
    if question.gpus_needed is None:
        return (
            "nothing fits, and more GPUs of this kind would not help: what each must hold by itself (CUDA, one block "
            "and its activations) is too much; take GPUs with more memory, smaller samples, or smaller blocks "
            "(--shard-modules)."
        )
    if not question.gpus_needed:
        return "nothing fits."
    return (
        f"nothing fits; by the arithmetic of fsdp with --checkpoint-activations it takes "
        f"{counted(question.gpus_needed, 'GPU')} of this kind."
    )
