"""A batch that grows: what is read, how it is cut, and that the samples of every epoch stay what they are."""

from __future__ import annotations

import pytest

from stormo.config.plan.stages import Stage, describe, make_stages, num_steps, read_growth, recut, stage_of
from stormo.data.order import passes
from stormo.errors import SettingError

FIRST = Stage(1, 64, 1, 1000)


def test_what_is_read() -> None:
    assert read_growth(None) == ()
    assert read_growth("30:2x") == ((30, 2.0),)
    assert read_growth("3:2x, 7:1.5x") == ((3, 2.0), (7, 1.5))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "an empty entry is not of the form"),
        ("30", "30 is not of the form"),
        ("30:2", "30:2 is not of the form"),
        ("30:2x,", "an empty entry"),
        ("30:1x", "a factor of 1 does not"),
        ("30:0.5x", "a factor of 0.5 does not"),
        ("0:2x", "before the first epoch"),
        ("30:2x,30:2x", "30 does not follow on 30"),
        ("30:2x,20:2x", "20 does not follow on 30"),
        ("-1:2x", "not of the form"),
        ("١:2x", "not of the form"),
    ],
)
def test_what_cannot_be_read(text: str, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        read_growth(text)


def test_growth_is_by_passes_unless_a_worker_may_take_more() -> None:
    growth = read_growth("2:2x,4:4x")
    by_passes = make_stages(FIRST, growth, num_workers=2, most_per_pass=32)
    assert [(s.first_epoch, s.global_batch_size, s.accumulate) for s in by_passes] == [
        (1, 64, 1),
        (3, 128, 2),
        (5, 512, 8),
    ]
    by_both = make_stages(FIRST, growth, num_workers=2, most_per_pass=100)
    assert [s.accumulate for s in by_both] == [1, 1, 3]
    whole = make_stages(FIRST, read_growth("1:100x"), num_workers=2, most_per_pass=100)
    assert (whole[1].global_batch_size, whole[1].accumulate, whole[1].steps_per_epoch) == (1000, 5, 1)
    assert "then 1000 after 1 epoch = 5 passes of up to 100 × 2 workers, which are all samples" in describe(whole, 2, 9)
    larger = make_stages(Stage(1, 4000, 1, 1000), read_growth("1:2x"), num_workers=2, most_per_pass=500)
    assert (larger[1].global_batch_size, larger[1].steps_per_epoch) == (4000, 1)


def test_fractions_do_not_add_up_their_rounding() -> None:
    stages = make_stages(FIRST, read_growth("1:1.5x,2:1.5x,3:1.5x"), num_workers=1, most_per_pass=64)
    assert [s.global_batch_size for s in stages] == [64, 96, 144, 216]


def test_steps_are_counted_over_the_stages() -> None:
    stages = make_stages(FIRST, read_growth("2:2x,4:4x"), num_workers=2, most_per_pass=32)
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
            len(list(passes(1000, stage_of(stages, e).global_batch_size, 1, 0, 1))) for e in range(1, epochs + 1)
        )
        assert every == num_steps(stages, epochs)


def test_another_cut_keeps_the_batches() -> None:
    stages = make_stages(FIRST, read_growth("2:2x,4:4x"), num_workers=2, most_per_pass=32)
    cut = recut(stages, 4, 2)
    assert [s.global_batch_size for s in cut] == [64, 128, 512]
    assert [s.accumulate for s in cut] == [4, 8, 32]
    assert [s.first_step for s in cut] == [0, 32, 48]


def test_the_words() -> None:
    stages = make_stages(FIRST, read_growth("2:2x,9:2x"), num_workers=2, most_per_pass=32)
    assert describe(stages, 2, 5) == (
        "64, then 128 after 2 epochs = 2 passes of up to 32 × 2 workers, then 256 after 9 epochs = 4 passes of up to "
        "32 × 2 workers (never, as training ends before); the rate stays as it is"
    )
