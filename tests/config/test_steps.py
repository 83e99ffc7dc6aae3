"""Stages of a growing batch, and the steps of a profile."""

from __future__ import annotations

import pytest

from stormo.config.plan.steps import (
    ProfileSpec,
    Stage,
    check_profile,
    describe,
    make_stages,
    num_steps,
    parse_growth,
    parse_profile,
    recut,
    stage_of,
)
from stormo.data.order import micro_batches
from stormo.errors import SettingError

FIRST = Stage(1, 64, 1, 1000)


def test_parse_growth() -> None:
    assert parse_growth(None) == ()
    assert parse_growth("30:2x") == ((30, 2.0),)
    assert parse_growth("3:2x, 7:1.5x") == ((3, 2.0), (7, 1.5))


def test_growth_adds_micro_batches_unless_they_may_be_larger() -> None:
    growth = parse_growth("2:2x,4:4x")
    by_count = make_stages(FIRST, growth, num_workers=2, max_micro_batch=32)
    assert [(s.first_epoch, s.global_batch_size, s.accumulate) for s in by_count] == [
        (1, 64, 1),
        (3, 128, 2),
        (5, 512, 8),
    ]
    by_both = make_stages(FIRST, growth, num_workers=2, max_micro_batch=100)
    assert [s.accumulate for s in by_both] == [1, 1, 3]
    whole = make_stages(FIRST, parse_growth("1:100x"), num_workers=2, max_micro_batch=100)
    assert (whole[1].global_batch_size, whole[1].accumulate, whole[1].steps_per_epoch) == (1000, 5, 1)
    assert "then 1000 after 1 epoch = 5 micro-batches of up to 100 × 2 workers, which are all samples" in describe(
        whole, 2, 9
    )
    larger = make_stages(Stage(1, 4000, 1, 1000), parse_growth("1:2x"), num_workers=2, max_micro_batch=500)
    assert (larger[1].global_batch_size, larger[1].steps_per_epoch) == (4000, 1)


def test_fractions_do_not_add_up_their_rounding() -> None:
    stages = make_stages(FIRST, parse_growth("1:1.5x,2:1.5x,3:1.5x"), num_workers=1, max_micro_batch=64)
    assert [s.global_batch_size for s in stages] == [64, 96, 144, 216]


def test_a_factor_beyond_all_numbers_grows_to_all_samples() -> None:
    stages = make_stages(FIRST, parse_growth(f"1:{'9' * 400}x"), num_workers=1, max_micro_batch=64)
    assert stages[1].global_batch_size == 1000


def test_steps_are_counted_over_the_stages() -> None:
    stages = make_stages(FIRST, parse_growth("2:2x,4:4x"), num_workers=2, max_micro_batch=32)
    assert [s.steps_per_epoch for s in stages] == [16, 8, 2]
    assert [s.first_step for s in stages] == [0, 32, 48]
    assert [num_steps(stages, epochs) for epochs in (1, 2, 3, 4, 5, 6)] == [16, 32, 40, 48, 50, 52]
    assert [stage_of(stages, epoch).global_batch_size for epoch in (0, 1, 2, 3, 4, 5, 99)] == [
        64,
        64,
        64,
        128,
        128,
        512,
        512,
    ]
    for epochs in range(1, 7):
        every = sum(
            len(list(micro_batches(1000, stage_of(stages, e).global_batch_size, 1, 0, 1))) for e in range(1, epochs + 1)
        )
        assert every == num_steps(stages, epochs)


def test_another_cut_keeps_the_batches() -> None:
    stages = make_stages(FIRST, parse_growth("2:2x,4:4x"), num_workers=2, max_micro_batch=32)
    cut = recut(stages, 4, 2)
    assert [s.global_batch_size for s in cut] == [64, 128, 512]
    assert [s.accumulate for s in cut] == [4, 8, 32]
    assert [s.first_step for s in cut] == [0, 32, 48]


def test_parse_profile() -> None:
    assert parse_profile("10:20") == ProfileSpec(first=10, num_steps=10)
    assert parse_profile("10:20").window(1) == parse_profile("10:20").window(15) == range(10, 20)
    assert parse_profile("10") == ProfileSpec(num_steps=10)
    assert parse_profile("10").window(1) == range(7, 17)  # the first step, five of warm-up, ten
    assert parse_profile("3").window(101) == range(107, 110)  # of a resumed run
    assert parse_profile("nvtx") == ProfileSpec(nvtx=True)
    assert parse_profile("1:1001").num_steps == 1000


def test_a_window_after_the_end_of_the_run_is_refused() -> None:
    assert check_profile("40:60", 40) == ProfileSpec(first=40, num_steps=20)
    assert check_profile("5", 7) == ProfileSpec(num_steps=5)
    assert check_profile("nvtx", 1).nvtx
    with pytest.raises(SettingError, match="it begins with step 41, and the run has 40 steps; set --profile 1:41 or"):
        check_profile("41:60", 40)
    with pytest.raises(SettingError, match="begins with step 7, after a warm-up of 5, and the run has 6 steps"):
        check_profile("5", 6)
