"""Which way to take, by the numbers alone: one pure function, whose every answer has a test.

A smaller pass (`--accumulate`) costs next to nothing, computing activations again a third more arithmetic, sharding
traffic, offloading copies in every pass: that is the order in which they are tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    asked: str | None = None  # the way that was set, where one was
    gpus_needed: int | None = 0  # under fsdp, where nothing fits; None where no number would do, 0 if not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """The way to take, the passes into which its batch is cut, and why."""

    key: str | None
    accumulate: int
    text: str


_FULL, _SMALLER = "full", "smaller"
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
    """The way that was set, if it fits; else the first way of the order that does."""
    if question.asked is not None and question.outcomes[question.asked].fits:
        return Advice(key=question.asked, accumulate=1, text="it fits as set.")
    for key, how in _order(question):
        outcome = question.outcomes.get(key)
        if outcome is None:
            continue
        if how == _FULL and outcome.fits:
            return Advice(key=key, accumulate=1, text=f"{_WHY[key]}.")
        if how == _SMALLER and not outcome.fits and outcome.largest_pass and outcome.batch > 1:
            accumulate = _passes(outcome.batch, outcome.largest_pass)
            size = outcome.batch // accumulate
            text = f"{_WHY[key]} in passes of {counted(size, 'sample')}, {accumulate} in place of one."
            return Advice(key=key, accumulate=accumulate, text=text)
    return Advice(key=None, accumulate=1, text=_nothing(question))


def _passes(batch: int, largest: int) -> int:
    """The fewest equal passes that fit: the step stays what it was."""
    return next(count for count in range(2, batch + 1) if batch % count == 0 and batch // count <= largest)


def _order(question: Question) -> Sequence[tuple[str, str]]:
    if question.num_gpus * question.num_nodes == 1:
        plain = _both("single", "single, recomputed")
        return [*plain, *_both("offload", "offload, recomputed")]
    copies = [("ddp", _FULL), ("zero2", _FULL), ("ddp", _SMALLER)]
    if question.num_nodes == 1:
        others = ["tensor", "pipeline"] if question.has_nvlink else ["pipeline", "tensor"]
        sharded = _both("fsdp", "fsdp, recomputed")
        return [*copies, *sharded, ("zero2", _SMALLER), *_both(*others, "offload", "offload, recomputed")]
    if question.is_fast:
        names = ("hsdp", "hsdp, recomputed", "fsdp", "fsdp, recomputed", "pipeline", "tensor")
        return [*copies, *_both(*names, "offload", "offload, recomputed")]
    copies = [("ddp", _FULL), ("ddp", _SMALLER), ("zero1", _FULL), ("zero1", _SMALLER)]
    names = ("hsdp", "hsdp, recomputed", "pipeline", "tensor", "fsdp", "fsdp, recomputed")
    return [*copies, *_both(*names, "offload", "offload, recomputed")]


def _both(*keys: str) -> list[tuple[str, str]]:
    return [(key, how) for key in keys for how in (_FULL, _SMALLER)]


def _nothing(question: Question) -> str:
    if question.gpus_needed is None:
        return (
            "nothing fits, and more GPUs of this kind would not help: what a GPU must hold of one block and its "
            "activations is too much; take GPUs with more memory, smaller samples, or smaller blocks (--shard-modules)."
        )
    if not question.gpus_needed:
        return "nothing fits."
    return (
        f"nothing fits; by the arithmetic of fsdp with --checkpoint-activations it takes "
        f"{counted(question.gpus_needed, 'GPU')} of this kind."
    )
