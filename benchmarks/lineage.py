"""What a run was really trained on, from the logs that the witness task wrote in each attempt.

A step is known by the digests of the parameters before and after it. Going back from the last parameters gives the
one chain of steps that the result is made of; what an attempt did after its last checkpoint, and lost in a kill, is
not in it. Nothing of stormo's own records is read here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One optimizer step of all workers; its samples are in the order of ranks."""

    attempt: int
    before: str
    after: str
    samples: tuple[int, ...]


class BrokenLineageError(Exception):
    """The logs contradict themselves."""


def read_log(path: Path) -> list[dict[str, Any]]:
    """The complete lines of one rank's log; none while there is no file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def read_attempt(folder: Path, attempt: int) -> list[Step]:
    """The steps that every worker of an attempt has made; the last may be missing in some and is left out then."""
    logs = [
        [event for event in read_log(path) if event["event"] == "step"]
        for path in sorted(folder.glob("rank-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
    ]
    if not logs or not logs[0] or len(logs) < logs[0][0]["world_size"]:
        return []
    steps = []
    for events in zip(*logs, strict=False):
        first = events[0]
        if any((event["before"], event["after"]) != (first["before"], first["after"]) for event in events):
            raise BrokenLineageError(f"the workers of attempt {attempt} differ in their parameters")
        if first["before"] == first["after"]:
            raise BrokenLineageError(f"a step of attempt {attempt} changed nothing, so steps cannot be distinguished")
        samples = tuple(sample for event in events for sample in event["samples"])
        steps.append(Step(attempt=attempt, before=first["before"], after=first["after"], samples=samples))
    return steps


def trace(attempts: Sequence[Sequence[Step]]) -> list[Step]:
    """The steps that led to the parameters after the last step of the last attempt, in order."""
    if not attempts or not attempts[-1]:
        return []
    by_after: dict[str, Step] = {}
    for steps in attempts:  # a step done again replaces the earlier one, which it must equal
        for step in steps:
            earlier = by_after.get(step.after)
            if earlier is not None and (earlier.before, earlier.samples) != (step.before, step.samples):
                raise BrokenLineageError(f"attempts {earlier.attempt} and {step.attempt} reached one state differently")
            by_after[step.after] = step
    chain: list[Step] = []
    seen: set[str] = set()
    wanted: str | None = attempts[-1][-1].after
    while wanted is not None and wanted in by_after:
        if wanted in seen:
            raise BrokenLineageError("the parameters came back to what they had been before")
        seen.add(wanted)
        chain.append(by_after[wanted])
        wanted = chain[-1].before
    return chain[::-1]


def lost_and_repeated(chain: Sequence[Step], num_samples: int, steps_per_epoch: int, epochs: int) -> tuple[int, int]:
    """How often a sample is missing from an epoch of the chain, and how often one comes more than once."""
    lost = repeated = 0
    num_epochs = max(epochs, -(-len(chain) // steps_per_epoch))
    for epoch in range(num_epochs):
        steps = chain[epoch * steps_per_epoch : (epoch + 1) * steps_per_epoch]
        samples = [sample for step in steps for sample in step.samples]
        distinct = len(set(samples))
        repeated += len(samples) - distinct
        lost += num_samples - distinct if epoch < epochs else 0
    return lost, repeated
