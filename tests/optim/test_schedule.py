"""The learning rate of every step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stormo.config.options import options_of
from stormo.config.schema import Optimizer
from stormo.optim.schedule import DECAYS, Schedule


def _schedule(**changes: Any) -> Schedule:
    values: dict[str, Any] = {
        "peak": 0.4,
        "start": 0.1,
        "warmup_steps": 10,
        "total_steps": 110,
        "decay": "none",
        "steps_per_epoch": 20,
        "decay_every": 2.0,
        "decay_factor": 0.1,
    }
    return Schedule(**(values | changes))


def test_warm_up_is_a_straight_line_from_start_to_peak() -> None:
    schedule = _schedule()
    assert schedule(0) == 0.1
    assert schedule(5) == pytest.approx(0.25)
    assert schedule(9) == pytest.approx(0.37)
    assert schedule(10) == 0.4
    steps = [schedule(step + 1) - schedule(step) for step in range(10)]
    assert steps == pytest.approx([0.03] * 10)


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert _schedule(warmup_steps=0)(0) == 0.4


def test_without_decay_the_peak_stays_for_ever() -> None:
    assert {_schedule()(step) for step in (10, 11, 60, 109, 110, 10_000)} == {0.4}


@pytest.mark.parametrize(
    ("decay", "step", "factor"),
    [
        ("cosine", 10, 1.0),
        ("cosine", 35, (1 + math.cos(math.pi / 4)) / 2),
        ("cosine", 60, 0.5),
        ("cosine", 110, 0.0),
        ("cosine", 500, 0.0),
        ("linear", 10, 1.0),
        ("linear", 35, 0.75),
        ("linear", 60, 0.5),
        ("linear", 110, 0.0),
        ("linear", 500, 0.0),
        ("step", 10, 1.0),
        ("step", 49, 1.0),
        ("step", 50, 0.1),  # two epochs of 20 steps after warm-up
        ("step", 89, 0.1),
        ("step", 90, 0.01),
        ("wsd", 10, 1.0),
        ("wsd", 88, 1.0),  # the last fifth of 110 steps
        ("wsd", 99, 0.5),
        ("wsd", 500, 0.0),
        ("wsd-sqrt", 88, 1.0),
        ("wsd-sqrt", 99, 1 - math.sqrt(0.5)),
        ("wsd-sqrt", 110, 0.0),
    ],
)
def test_a_decay_starts_where_warm_up_ends(decay: str, step: int, factor: float) -> None:
    assert _schedule(decay=decay)(step) == pytest.approx(0.4 * factor, abs=1e-15)


def test_the_last_step_of_a_run_still_moves_the_weights() -> None:
    for decay in DECAYS:
        assert _schedule(decay=decay)(109) > 0


@given(st.sampled_from(sorted(DECAYS)), st.integers(0, 50), st.integers(1, 200), st.integers(0, 300))
def test_the_rate_stays_between_zero_and_the_peak_and_falls_after_warm_up(
    decay: str, warmup_steps: int, total_steps: int, step: int
) -> None:
    schedule = _schedule(decay=decay, warmup_steps=warmup_steps, total_steps=total_steps)
    assert 0 <= schedule(step) <= 0.4 + 1e-12
    if step >= warmup_steps and decay != "one-cycle":
        assert schedule(step + 1) <= schedule(step) + 1e-12


def test_the_share_of_the_last_phase_can_be_set() -> None:
    schedule = _schedule(decay="wsd", decay_share=0.5)
    assert [schedule(step) for step in (54, 55, 82.5, 110)] == pytest.approx([0.4, 0.4, 0.2, 0.0])
    assert _schedule(decay="wsd", decay_share=1.0)(60) == pytest.approx(0.2)  # it begins once warm-up has ended


@pytest.mark.parametrize("share", [None, 0.4])
@pytest.mark.parametrize("total_steps", [2, 7, 110])
def test_one_cycle_is_that_of_torch(share: float | None, total_steps: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    options = {} if share is None else {"pct_start": 1 - share}
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.4, total_steps, cycle_momentum=False, **options)
    ours = _schedule(decay="one-cycle", decay_share=share, warmup_steps=0, total_steps=total_steps)
    optimizer.step()
    for step in range(total_steps):
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        if step < total_steps - 1:
            theirs.step()
    assert ours(total_steps + 5) == ours(total_steps - 1)


def test_a_warm_up_longer_than_the_run_is_cut_off() -> None:
    schedule = _schedule(warmup_steps=100, total_steps=50, decay="cosine")
    assert schedule(49) == pytest.approx(0.1 + 0.3 * 0.49)


def test_every_decay_that_can_be_set_has_its_row() -> None:
    (declared,) = (option for option in options_of("optimizer", Optimizer) if option.name == "decay")
    assert set(declared.choices) == set(DECAYS)
