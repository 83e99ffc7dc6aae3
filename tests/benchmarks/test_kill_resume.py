"""What the benchmark counts as kept; tests/commands/test_train.py kills and resumes a real run."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.kill_resume import ROUNDING, is_kept

GOOD: dict[str, Any] = {
    "kills": 2,
    "equal_digests": 2,
    "samples_lost": 0,
    "samples_repeated": 0,
    "same_order": True,
    "final_digest_equal": True,
    "orphans": 0,
}


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("kills", 1),
        ("equal_digests", 1),
        ("samples_lost", 1),
        ("samples_repeated", 1),
        ("same_order", False),
        ("final_digest_equal", False),
        ("orphans", 1),
    ],
)
def test_any_broken_promise_fails(figure: str, value: object) -> None:
    assert is_kept(GOOD, 2, same_world_size=True)
    assert not is_kept(GOOD | {figure: value}, 2, same_world_size=True)


def test_other_world_sizes_need_weights_within_rounding() -> None:
    digests = ("equal_digests", "final_digest_equal")
    other = {name: value for name, value in GOOD.items() if name not in digests}
    other["max_relative_difference"] = ROUNDING
    assert is_kept(other, 2, same_world_size=False)
    assert not is_kept(other | {"max_relative_difference": 2 * ROUNDING}, 2, same_world_size=False)
    assert not is_kept(other | {"max_relative_difference": float("nan")}, 2, same_world_size=False)
