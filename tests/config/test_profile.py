"""`--profile SPEC`: what it means, and what it cannot."""

from __future__ import annotations

import pytest

from stormo.config.plan.profile import ProfileSpec, check_profile, parse_profile
from stormo.errors import SettingError


def test_what_specs_mean() -> None:
    assert parse_profile("10:20") == ProfileSpec(first=10, num_steps=10)
    assert parse_profile("10:20").window(1) == parse_profile("10:20").window(15) == range(10, 20)
    assert parse_profile("10") == ProfileSpec(num_steps=10)
    assert parse_profile("10").window(1) == range(7, 17)  # the first step, five of warm-up, ten
    assert parse_profile("3").window(101) == range(107, 110)  # of a run that goes on
    assert parse_profile("nvtx") == ProfileSpec(nvtx=True)
    assert parse_profile("1:1001").num_steps == 1000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "that names no steps"),
        ("ten", "that names no steps"),
        ("-3", "that names no steps"),
        ("1:2:3", "that names no steps"),
        (":5", "that names no steps"),
        ("1.5", "that names no steps"),
        ("²", "that names no steps"),
        ("0", "no step would be recorded"),
        ("0:5", "steps are counted from 1; set --profile 1:5"),
        ("20:10", "it stops before step 10 and would start with step 20"),
        ("5:5", "it stops before step 5 and would start with step 5"),
        ("1:1002", "that is 1001 steps"),
        ("100000000000", "that is 100000000000 steps"),
    ],
)
def test_specs_that_name_no_window(text: str, why: str) -> None:
    with pytest.raises(SettingError) as raised:
        parse_profile(text)
    assert str(raised.value).startswith(f"--profile {text} was set, but {why}")


def test_a_window_after_the_end_of_the_run_is_refused() -> None:
    assert check_profile("40:60", 40) == ProfileSpec(first=40, num_steps=20)
    assert check_profile("5", 7) == ProfileSpec(num_steps=5)
    assert check_profile("nvtx", 1).nvtx
    with pytest.raises(SettingError, match="it begins with step 41, and the run has 40 steps; set --profile 1:41 or"):
        check_profile("41:60", 40)
    with pytest.raises(SettingError, match="begins with step 7, after a warm-up of 5, and the run has 6 steps"):
        check_profile("5", 6)
