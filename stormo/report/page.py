"""The page: all panels as a JSON document, in one HTML file that loads nothing from outside."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.util
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from stormo.errors import MissingPackageError
from stormo.report.charts import MAX_POINTS, STYLE, Chart, Lanes, LineStyle, Panel, Series, line_styles
from stormo.report.history import History
from stormo.report.logged import logged_panels
from stormo.report.machines import ledger_panel, machine_panels, power_panel
from stormo.report.overview import MAX_TIMELINE_ROWS, fact_panels, summary_figures, timeline, timeline_panel
from stormo.report.training import pipeline_panel, training_panels
from stormo.telemetry.folder import to_json

_TIME_UNITS = (("s", 1, 180), ("min", 60, 180 * 60), ("h", 3600, 72 * 3600), ("d", 86400, math.inf))
_MAX_CHART_POINTS = 6000  # over all its lines
_MAX_CHECKPOINTS_DRAWN = 60  # more of them would hide the curves


def make_panels(histories: Sequence[History]) -> list[Panel]:
    """Every panel, in the order of the page."""
    return [
        *training_panels(histories),
        *logged_panels(histories),
        pipeline_panel(histories),
        power_panel(histories),
        ledger_panel(histories),
        *machine_panels(histories),
        timeline_panel(histories),
        *fact_panels(histories),
    ]


def make_document(histories: Sequence[History]) -> dict[str, Any]:
    """The document of these runs, thinned to what can be seen."""
    longest_s = max((history.clock.total_s for history in histories), default=0.0)
    unit, seconds, _ = next(row for row in _TIME_UNITS if longest_s < row[2])
    happened = [one for run, history in enumerate(histories) for one in _timeline(run, history)]
    return {
        "title": " · ".join(history.label for history in histories),
        "made_unix_s": time.time(),
        "time_unit": {"name": unit, "seconds": seconds},
        "runs": [
            {
                "name": history.label,
                "task": history.started.get("task") or history.summary.get("task"),
                "state": history.state,
                "figures": summary_figures(history),
                "notes": list(history.notes),
            }
            for history in histories
        ],
        "timeline": happened[:MAX_TIMELINE_ROWS],
        "draws_checkpoints": sum(one["kind"] == "checkpoint" for one in happened) <= _MAX_CHECKPOINTS_DRAWN,
        "style": STYLE,
        "panels": [_panel(panel, [history.label for history in histories]) for panel in make_panels(histories)],
    }


def _timeline(run: int, history: History) -> Iterator[dict[str, Any]]:
    """The timeline, with a position on every axis."""
    for step, event, kind, text in timeline(history):
        yield {
            "run": run,
            "kind": kind,
            "text": text,
            "step": step,
            "epoch": round(history.epoch_at(step), 4),
            "time_s": round(history.clock.running_s(event["time_unix_s"]), 2),
        }


def _panel(panel: Panel, runs: Sequence[str]) -> dict[str, Any]:
    charts = [_chart(chart, runs) for chart in panel.charts]
    reasons = {chart["why_empty"] for chart in charts}
    # A reason that all figures share is shown once.
    is_empty = len(charts) > 1 and len(reasons) == 1 and "" not in reasons
    return {
        **{key: getattr(panel, key) for key in ("id", "title", "about")},
        "why_empty": reasons.pop() if is_empty else panel.why_empty,
        "notes": list(panel.notes),
        "charts": [] if is_empty else charts,
        "stacks": [asdict(stack) for stack in panel.stacks],
        "lanes": [_lanes(lanes) for lanes in panel.lanes],
        "pictures": [picture._asdict() for picture in panel.pictures],
        "tables": [asdict(table) for table in panel.tables],
    }


def _chart(chart: Chart, runs: Sequence[str]) -> dict[str, Any]:
    most = min(MAX_POINTS, _MAX_CHART_POINTS // max(len(chart.series), 1))
    drawn = [line.thinned(most) for line in chart.series]
    num_points, num_drawn = (sum(len(line.y) for line in lines) for lines in (chart.series, drawn))
    thinned = (
        f"{num_points:,} points drawn as {num_drawn:,}: the lowest and the highest of each interval."
        if num_drawn < num_points
        else ""
    )
    return {
        **{key: getattr(chart, key) for key in ("id", "title", "y_title", "from_zero", "top")},
        "why_empty": "" if drawn else chart.why_empty or "There are no figures.",
        "note": " ".join(text for text in (chart.note, thinned) if text),
        "series": [_series(*both) for both in zip(drawn, line_styles(drawn, runs), strict=True)],
    }


def _lanes(lanes: Lanes) -> dict[str, Any]:
    kinds = [{"name": name, "colour": colour, "bars": bars} for name, colour, bars in lanes.kinds]
    return {**{key: getattr(lanes, key) for key in ("id", "title", "x_title", "rows", "note")}, "kinds": kinds}


def _series(line: Series, style: LineStyle) -> dict[str, Any]:
    return {
        **style._asdict(),
        "run": line.run,
        "name": line.name,
        "mode": line.mode,
        "at": line.at,
        # Six digits are enough for a screen and keep the page small.
        "y": [None if value is None else float(f"{value:.6g}") for value in line.y],
    }


_SCRIPTS = ("page.charts.js", "page.js")
_SLOT = re.compile(r"@([a-z]+)@")


def check_plotly() -> Path:
    """The script of plotly; an error where the package is missing."""
    # Importing the package would take a second.
    spec = importlib.util.find_spec("plotly")
    script = Path(spec.origin).parent / "package_data" / "plotly.min.js" if spec and spec.origin else None
    if script is None or not script.is_file():
        raise MissingPackageError("plotly", "the page of a run", "report")
    return script


def make_page(document: Mapping[str, Any], *, is_live: bool = False) -> str:
    """The HTML file; a live page may fetch newer data from its own server only."""
    plotly, script = _plotly(), _script()
    parts = {
        "csp": content_policy(plotly, script, is_live=is_live),
        "title": html.escape(str(document["title"])),
        "live": "1" if is_live else "",
        "css": _part("page.css"),
        # JSON has `<` only in strings, where this is the same sign; so the data cannot start a tag.
        "data": json.dumps(to_json(document), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "plotly": plotly,
        "script": script,
    }
    return _SLOT.sub(lambda match: parts[match[1]], _part("page.html"))


def content_policy(*scripts: str, is_live: bool) -> str:
    """What a browser may run and load: these scripts and pictures of the page, nothing from outside."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(f"'sha256-{digest}'" for digest in digests),
        "style-src": "'unsafe-inline'",  # plotly sets styles; none can load anything
        "img-src": "data: blob:",
        "connect-src": "'self'" if is_live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


@cache
def _part(name: str) -> str:
    return resources.files("stormo.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    """The page's own scripts in one scope, apart from plotly's names."""
    return '"use strict";\n(() => {\n' + "\n".join(map(_part, _SCRIPTS)) + "})();\n"


@cache
def _plotly() -> str:
    text = check_plotly().read_text(encoding="utf-8").replace("\r\n", "\n")  # as a browser reads it, for the hash
    return text.replace("</script", "<\\/script")
