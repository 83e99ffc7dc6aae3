"""The killed and resumed run against the undisturbed one, in a tiny setting."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import kill_resume
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


def test_one_kill_and_another_number_of_workers_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    # tests/commands/test_train.py kills a run that goes on with as many.
    assert kill_resume.main(["--kills", "1", "--seed", "3", "--world-sizes", "2,1"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    figures = dict(word.split("=") for word in last.removeprefix("RESULT ").split())
    assert (figures["kills"], figures["samples_lost"], figures["samples_repeated"]) == ("1", "0", "0")
    assert (figures["same_order"], figures["orphans"]) == ("1", "0")
