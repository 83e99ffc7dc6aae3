"""The comparison with a hand-written loop, from made-up times."""

from __future__ import annotations

import pytest

from benchmarks import overhead
from benchmarks.paired_timing import Times, ratios


def test_ratio_is_above_one_when_stormo_takes_less_time() -> None:
    median, lower, upper = ratios([[1.0, 2.0], [1.0, 3.0], [1.0, 4.0]], 1)
    assert (median, lower, upper) == (3.0, 2.5, 3.5)


@pytest.mark.parametrize(("hand_written_s", "code"), [(1.0, 0), (0.97, 1)])
def test_the_exit_code_says_whether_the_promise_was_kept(
    hand_written_s: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = [[1.0, hand_written_s, hand_written_s]] * 2
    monkeypatch.setattr(overhead, "data_folder", str)
    monkeypatch.setattr(overhead, "times_of_workers", lambda *_: Times(wall_s=times, cpu_s=times))
    assert overhead.main([]) == code
    last = capsys.readouterr().out.splitlines()[-1]
    ratio = f"{hand_written_s:g}"
    assert last == (
        f"RESULT median_ratio={ratio} q25={ratio} q75={ratio} pairs=2 same_ddp_median_ratio={ratio} "
        f"cpu_median_ratio={ratio}"
    )
