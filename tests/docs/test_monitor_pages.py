"""docs/monitor.md and docs/prometheus.md, held against the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stormo.commands.monitor import COLUMNS, main, make_parser
from stormo.errors import SettingError
from stormo.telemetry.prometheus import METRICS

DOCS = Path(__file__).parents[2] / "docs"
MONITOR = (DOCS / "monitor.md").read_text(encoding="utf-8")
PROMETHEUS = (DOCS / "prometheus.md").read_text(encoding="utf-8")


def test_every_column_is_explained_in_its_order() -> None:
    (table,) = re.findall(r"\| column \|.*?\n\|[-|]+\n(.*?)\n\n", MONITOR, re.DOTALL)
    first_cells = [line.split("|")[1] for line in table.splitlines()]
    assert re.findall(r"`(\w+)`", " ".join(first_cells)) == list(COLUMNS)
    assert ",".join(COLUMNS) in MONITOR.splitlines()


def test_every_option_is_explained() -> None:
    asked = set(re.findall(r"--[a-z]+", make_parser().format_help())) - {"--help"}
    assert set(re.findall(r"^\| `(--[a-z]+)", MONITOR, re.MULTILINE)) == asked


def test_the_refusal_is_the_one_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("results.csv").write_text("epoch,loss\n")
    with pytest.raises(SettingError) as caught:
        main(["--csv", "results.csv"])
    assert f"stormo: {caught.value}" in MONITOR.splitlines()


def test_every_metric_is_explained_as_prometheus_is_told() -> None:
    rows = re.findall(r"^\| `(stormo_\w+)` \| (.*?) ?\| (.*) \|$", PROMETHEUS, re.MULTILINE)
    assert rows == [
        (name, ", ".join(f"`{label}`" for label in metric.labels), metric.help) for name, metric in METRICS.items()
    ]


def test_the_questions_ask_for_metrics_there_are() -> None:
    for name in re.findall(r"\bstormo_[a-z0-9_]+", PROMETHEUS):
        assert name in METRICS or any(metric.startswith(name) for metric in METRICS), name
