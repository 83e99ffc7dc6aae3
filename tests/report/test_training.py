from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from stormo.report import training
from stormo.report.charts import Panel
from stormo.report.command import write_csv, write_png
from stormo.report.history import read_history
from stormo.report.page import make_document, make_panels
from stormo.telemetry.folder import RunFolder
from tests.report.made_run import MadeRun, schedule_trace


def panel_of(*runs: Path) -> dict[str, Any]:
    document = make_document([read_history(RunFolder(run)) for run in runs])
    [found] = [panel for panel in document["panels"] if panel["id"] == "pipeline"]
    content: dict[str, Any] = found
    return content


def drawn_of(run: Path) -> list[Panel]:
    panels = make_panels([read_history(RunFolder(run))])
    return [panel for panel in panels if panel.id == "pipeline"]


def test_one_row_per_worker_with_the_times_of_every_micro_batch(tmp_path: Path) -> None:
    trace = schedule_trace("1f1b", num_workers=2, micro_batches=3)
    panel = panel_of(MadeRun(epochs=1, pipeline=trace).write(tmp_path))
    assert panel["why_empty"] == ""
    [lanes] = panel["lanes"]
    assert (lanes["rows"], lanes["x_title"]) == (["worker 0", "worker 1"], "ms")
    forward, backward = lanes["kinds"]
    assert (forward["name"], backward["name"]) == ("forward", "backward")
    assert forward["colour"] != backward["colour"]
    seen = sorted((bar.row, bar.label, bar.start) for kind in (forward, backward) for bar in kind["bars"])
    assert [(row, label) for row, label, _ in seen] == sorted(
        (row, str(k)) for row in (0, 1) for k in (0, 0, 1, 1, 2, 2)
    )
    # Of 132 ms: 10 a forward, 20 a backward, and 12 more for the first.
    assert forward["bars"][0].hover == "forward of micro-batch 0, stage 0: 0 to 22 ms (22 ms)"
    assert backward["bars"][-1][:4] == (0, pytest.approx(112.0), pytest.approx(20.0), "2")
    assert [row[1:] for row in panel["tables"][0]["rows"]] == [
        ["0", "0", "42.0 ms", "60.0 ms", "22.7 %"],
        ["1", "1", "30.0 ms", "60.0 ms", "31.8 %"],
    ]
    [note] = panel["notes"]
    assert re.findall(r"[\d.]+ %", note) == ["27.3 %", "25.0 %"]  # as measured, and by the schedule


def test_several_stages_of_a_worker_and_a_split_backward(tmp_path: Path) -> None:
    trace = schedule_trace("zero-bubble", num_workers=2, micro_batches=2, per_worker=2)
    [lanes] = panel_of(MadeRun(epochs=1, pipeline=trace).write(tmp_path))["lanes"]
    assert [kind["name"] for kind in lanes["kinds"]] == ["forward", "gradients of inputs", "gradients of weights"]
    assert {(bar.row, bar.shade) for bar in lanes["kinds"][0]["bars"]} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_runs_are_named_and_one_without_stages_is_left_out(tmp_path: Path) -> None:
    trace = schedule_trace("gpipe", num_workers=2, micro_batches=2)
    runs = [MadeRun(name="plain", epochs=1), MadeRun(name="staged", epochs=1, pipeline=trace)]
    panel = panel_of(*(run.write(tmp_path) for run in runs))
    assert [lanes["title"] for lanes in panel["lanes"]] == ["staged: One run of gpipe"]
    assert panel["notes"][0].startswith("staged: The workers were idle for ")


def test_an_empty_pipeline_panel_says_why(tmp_path: Path) -> None:
    plain = panel_of(MadeRun(name="plain", epochs=1).write(tmp_path))
    assert plain["why_empty"].startswith("The model was not split into stages")
    folder = MadeRun(name="running", epochs=1, has_ended=False).write(tmp_path)
    assert panel_of(folder)["why_empty"] == plain["why_empty"]
    (folder / "config.toml").write_text('[workers]\nstrategy = "auto"\nmesh = "pipeline=2,shard=2"\n')
    assert panel_of(folder)["why_empty"].endswith("when the run ends.")


def test_a_long_schedule_is_drawn_by_its_first_micro_batches_and_exported_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_MAX_BARS", 12)
    trace = schedule_trace("gpipe", num_workers=2, micro_batches=8)
    panels = drawn_of(MadeRun(epochs=1, pipeline=trace).write(tmp_path))
    [lanes] = panels[0].lanes
    assert sum(len(bars) for _, _, bars in lanes.kinds) == 12
    assert lanes.note.startswith("The first 3 of 8 micro-batches are drawn")
    written = write_csv(tmp_path / "figures", panels, ["made"])
    assert [path.name for path in written] == ["pass-0.csv", "table-pipeline.csv"]
    with written[0].open(newline="", encoding="utf-8") as file:
        head, *rows = list(csv.reader(file))
    assert head == ["worker", "start_s", "stop_s", "what", "micro_batch", "stage"]
    assert [float(row[1]) for row in rows] == [span[1] for span in trace["spans"]]
    [picture] = write_png(tmp_path / "figures", panels, ["made"])
    assert picture.read_bytes().startswith(b"\x89PNG")
