"""The comparison of every parallel setup with one process."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks import strategy_exactness
from benchmarks.strategy_cases import NAMES, OPTIMIZERS, Case, Setup, batch_norms, cases, new_shapes, setups
from benchmarks.strategy_exactness import CONTROL_LIMIT, LIMIT, Compared, Trained, difference, train_rank
from benchmarks.strategy_worker import Chunk

WHOLE = np.arange(1.0, 9.0).reshape(4, 2)  # of which the largest is 8


def chunk(start: int, stop: int, values: Any = None, *, is_saved: bool = True) -> Chunk:
    values = WHOLE[start:stop] if values is None else values
    return Chunk(name="w", whole_shape=(4, 2), offset=(start, 0), values=values, is_saved=is_saved)


def trained(*chunks: Chunk, losses: float = 2.0) -> Trained:
    return Trained(chunks=list(chunks), others={"losses": np.array([losses])})


REFERENCE = trained(chunk(0, 4))


def test_parts_that_make_up_the_whole_are_equal() -> None:
    assert difference([trained(chunk(0, 3)), trained(chunk(3, 4))], REFERENCE) == 0
    assert difference([trained(chunk(0, 4)), trained(chunk(0, 4, is_saved=False))], REFERENCE) == 0


def test_a_difference_is_told_by_the_largest_value_also_in_copies_that_nobody_saves() -> None:
    spoiled = WHOLE[2:] + np.array([[0, 0], [1e-9, 0]])
    assert difference([trained(chunk(0, 2)), trained(chunk(2, 4, spoiled))], REFERENCE) == pytest.approx(1e-9 / 8)
    copied = trained(chunk(2, 4, spoiled, is_saved=False))
    assert difference([trained(chunk(0, 4)), copied], REFERENCE) == pytest.approx(1e-9 / 8)
    assert math.isnan(difference([trained(chunk(0, 4, WHOLE * math.nan))], REFERENCE))
    assert difference([trained(chunk(0, 4), losses=2.2)], REFERENCE) == pytest.approx(0.1)


def test_what_is_missing_twice_there_or_of_another_shape_is_no_small_difference() -> None:
    assert difference([trained(chunk(0, 3))], REFERENCE) == math.inf
    assert difference([trained(chunk(0, 3)), trained(chunk(2, 4))], REFERENCE) == math.inf
    assert difference([trained()], REFERENCE) == math.inf
    assert difference([trained(chunk(0, 4, WHOLE.astype(np.float32)))], REFERENCE) == math.inf
    without_losses = Trained(chunks=[chunk(0, 4)], others={})
    assert difference([without_losses], REFERENCE) == math.inf


def compared(difference: float, control: str = "") -> Compared:
    setup = Setup(strategy="fsdp", text="fsdp", num_workers=2, tasks=("GPT",), flags={}, control=control)
    return Compared(case=Case(setup=setup, task="GPT", optimizer="sgd"), difference=difference)


def test_equal_is_good_and_a_control_must_differ() -> None:
    assert compared(LIMIT).is_good
    assert not compared(2 * LIMIT).is_good
    assert not compared(math.nan).is_good
    assert compared(2 * CONTROL_LIMIT, control="clipping").is_good
    assert not compared(LIMIT, control="clipping").is_good


def test_every_preset_and_optimizer_is_compared_and_controls_come_with_any_choice() -> None:
    every = cases(NAMES, quick=False)
    assert {case.setup.strategy for case in every} == set(NAMES)
    assert {case.optimizer for case in every} == set(OPTIMIZERS)
    assert {case.setup.num_workers for case in every} == {2, 3, 4, 8}
    chosen = cases(["tensor"], quick=True)
    assert {case.setup.strategy for case in chosen if not case.setup.control} == {"tensor"}
    assert {case.setup.control for case in chosen} == {"", *strategy_exactness.CONTROLS}


def test_names_are_checked() -> None:
    assert strategy_exactness.names("all") == NAMES
    assert strategy_exactness.names("fsdp,mesh") == ("fsdp", "mesh")
    with pytest.raises(argparse.ArgumentTypeError, match="'fdsp' is none of all, ddp, zero1"):
        strategy_exactness.names("fdsp")


@pytest.mark.parametrize(
    "setup", [*batch_norms(4), *new_shapes(4)], ids=lambda setup: f"{setup.text}, {setup.tasks[0]}"
)
def test_batch_norm_and_new_shapes_in_meshes_equal_one_process(
    setup: Setup, run_ranks: Callable[..., list[Any]]
) -> None:
    case = Case(setup=setup, task=setup.tasks[0], optimizer="lamb")
    reference = run_ranks(train_rank, 1, case, True)[0]
    assert difference(run_ranks(train_rank, 4, case, False), reference) <= LIMIT


def test_fsdp_equals_one_process_and_its_control_does_not(run_ranks: Callable[..., list[Any]]) -> None:
    fsdp, control = (setup for setup in setups(2) if setup.strategy == "fsdp" and setup.flags == {"strategy": "fsdp"})
    assert (fsdp.control, control.control) == ("", "layer norms")
    case = Case(setup=fsdp, task="GPT", optimizer="lamb")
    reference = run_ranks(train_rank, 1, case, True)[0]
    assert difference(run_ranks(train_rank, 2, case, False), reference) <= LIMIT
    spoiled = Case(setup=control, task="GPT", optimizer="lamb")
    assert difference(run_ranks(train_rank, 2, spoiled, False), reference) > CONTROL_LIMIT


def test_muon_steps_matrices_that_are_cut_in_two_directions_as_one_process(run_ranks: Callable[..., list[Any]]) -> None:
    (setup,) = (one for one in setups(4) if one.flags == {"mesh": "shard=2,tensor=2", "zero": 3})
    case = Case(setup=setup, task="GPT", optimizer="muon")
    reference = run_ranks(train_rank, 1, case, True)[0]
    assert difference(run_ranks(train_rank, 4, case, False), reference) <= LIMIT
