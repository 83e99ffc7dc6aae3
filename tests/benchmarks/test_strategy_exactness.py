"""The comparison of every way to spread a model with one process."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks import strategy_exactness
from benchmarks.spread_worker import Box
from benchmarks.strategy_cases import NAMES, OPTIMIZERS, Case, Way, cases, ways
from benchmarks.strategy_exactness import CONTROL_LIMIT, LIMIT, Compared, Trained, difference, train_rank

WHOLE = np.arange(1.0, 9.0).reshape(4, 2)  # of which the largest is 8


def box(start: int, stop: int, values: Any = None, *, is_saved: bool = True) -> Box:
    values = WHOLE[start:stop] if values is None else values
    return Box(name="w", whole_shape=(4, 2), offset=(start, 0), values=values, is_saved=is_saved)


def trained(*boxes: Box, losses: float = 2.0) -> Trained:
    return Trained(boxes=list(boxes), others={"losses": np.array([losses])})


REFERENCE = trained(box(0, 4))


def test_parts_that_make_up_the_whole_are_equal() -> None:
    assert difference([trained(box(0, 3)), trained(box(3, 4))], REFERENCE) == 0
    assert difference([trained(box(0, 4)), trained(box(0, 4, is_saved=False))], REFERENCE) == 0


def test_a_difference_is_told_by_the_largest_value_also_in_copies_that_nobody_saves() -> None:
    spoiled = WHOLE[2:] + np.array([[0, 0], [1e-9, 0]])
    assert difference([trained(box(0, 2)), trained(box(2, 4, spoiled))], REFERENCE) == pytest.approx(1e-9 / 8)
    copied = trained(box(2, 4, spoiled, is_saved=False))
    assert difference([trained(box(0, 4)), copied], REFERENCE) == pytest.approx(1e-9 / 8)
    assert math.isnan(difference([trained(box(0, 4, WHOLE * math.nan))], REFERENCE))
    assert difference([trained(box(0, 4), losses=2.2)], REFERENCE) == pytest.approx(0.1)


def test_what_is_missing_twice_there_or_of_another_shape_is_no_small_difference() -> None:
    assert difference([trained(box(0, 3))], REFERENCE) == math.inf
    assert difference([trained(box(0, 3)), trained(box(2, 4))], REFERENCE) == math.inf
    assert difference([trained()], REFERENCE) == math.inf
    assert difference([trained(box(0, 4, WHOLE.astype(np.float32)))], REFERENCE) == math.inf
    without_losses = Trained(boxes=[box(0, 4)], others={})
    assert difference([without_losses], REFERENCE) == math.inf


def compared(difference: float, control: str = "") -> Compared:
    way = Way(strategy="fsdp", text="fsdp", num_workers=2, tasks=("GPT",), flags={}, control=control)
    return Compared(case=Case(way=way, task="GPT", optimizer="sgd"), difference=difference)


def test_equal_is_good_and_a_control_must_differ() -> None:
    assert compared(LIMIT).is_good
    assert not compared(2 * LIMIT).is_good
    assert not compared(math.nan).is_good
    assert compared(2 * CONTROL_LIMIT, control="clipping").is_good
    assert not compared(LIMIT, control="clipping").is_good


def test_every_preset_and_optimizer_is_compared_and_controls_come_with_any_choice() -> None:
    every = cases(NAMES, quick=False)
    assert {case.way.strategy for case in every} == set(NAMES)
    assert {case.optimizer for case in every} == set(OPTIMIZERS)
    assert {case.way.num_workers for case in every} == {2, 3, 4, 8}
    chosen = cases(["tensor"], quick=True)
    assert {case.way.strategy for case in chosen if not case.way.control} == {"tensor"}
    assert {case.way.control for case in chosen} == {"", *strategy_exactness.CONTROLS}


def test_names_are_checked() -> None:
    assert strategy_exactness.names("all") == NAMES
    assert strategy_exactness.names("fsdp,mesh") == ("fsdp", "mesh")
    with pytest.raises(argparse.ArgumentTypeError, match="'fdsp' is none of all, ddp, zero1"):
        strategy_exactness.names("fdsp")


def test_fsdp_equals_one_process_and_its_control_does_not(run_ranks: Callable[..., list[Any]]) -> None:
    fsdp, control = (way for way in ways(2) if way.strategy == "fsdp" and way.flags == {"strategy": "fsdp"})
    assert (fsdp.control, control.control) == ("", "layer norms")
    case = Case(way=fsdp, task="GPT", optimizer="lamb")
    reference = run_ranks(train_rank, 1, case, True)[0]
    assert difference(run_ranks(train_rank, 2, case, False), reference) <= LIMIT
    spoiled = Case(way=control, task="GPT", optimizer="lamb")
    assert difference(run_ranks(train_rank, 2, spoiled, False), reference) > CONTROL_LIMIT
