from __future__ import annotations

from stormo.report.charts import MAX_LINES, MAX_POINTS, Series, make_line, merge_lines, thin


def line(run: int, name: str, values: list[float | None]) -> Series:
    positions = [float(index) for index in range(len(values))]
    return Series(run=run, name=name, at={"epoch": positions, "time_s": positions}, y=values)


def test_a_thinned_line_keeps_its_ends_and_its_peaks() -> None:
    values: list[float | None] = [1.0] * 50_000
    values[12_345], values[40_000] = 9.0, -3.0
    thinned = line(0, "loss", values).thinned()
    assert len(thinned.y) <= MAX_POINTS
    assert len(thinned.at["epoch"]) == len(thinned.at["time_s"]) == len(thinned.y)
    assert dict(zip(thinned.at["epoch"], thinned.y, strict=True)).items() >= {12_345.0: 9.0, 40_000.0: -3.0}.items()
    assert (thinned.at["epoch"][0], thinned.at["epoch"][-1]) == (0.0, 49_999.0)


def test_a_short_line_is_left_as_it_is_and_a_gap_stays_a_gap() -> None:
    short = line(0, "loss", [1.0, None, 2.0])
    assert short.thinned() is short
    values: list[float | None] = [*[1.0] * 400, *[None] * 400, *[2.0] * 400]
    kept = [values[index] for index in thin(values, 30)]
    assert None in kept
    assert kept.index(None) > kept.index(1.0)


def test_a_line_without_a_known_value_is_none() -> None:
    assert make_line(0, "noise", [({"step": 1.0}, None), ({"step": 2.0}, float("nan"))]) == []
    [found] = make_line(0, "noise", [({"step": 1.0}, None), ({"step": 2.0}, 3)])
    assert found.y == [None, 3.0]


def test_many_lines_are_drawn_as_lowest_mean_and_highest() -> None:
    few = [line(0, f"worker {rank}", [float(rank)] * 4) for rank in range(MAX_LINES)]
    assert merge_lines(few, "workers") == (few, "")
    many = [*few, line(0, "worker 12", [12.0] * 4)]
    drawn, note = merge_lines(many, "workers")
    assert [one.y for one in drawn] == [[0.0] * 4, [6.0] * 4, [12.0] * 4]
    assert [one.name for one in drawn] == ["lowest of 13 workers", "mean of 13 workers", "highest of 13 workers"]
    assert "13 workers" in note


def test_many_lines_of_several_runs_are_merged_per_run() -> None:
    many = [line(run, f"worker {rank}", [10.0 * run + rank] * 2) for run in (0, 1) for rank in range(4)]
    drawn, _ = merge_lines(many, "workers")
    assert [(one.run, one.y[0]) for one in drawn] == [(0, 0.0), (0, 1.5), (0, 3.0), (1, 10.0), (1, 11.5), (1, 13.0)]
