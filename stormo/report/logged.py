"""The panel of what the user's code logged: a chart for each number, the pictures, and a list of their files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from stormo.report.charts import Chart, Panel, Picture, Series, Table, make_line
from stormo.report.history import History, Line

_MOST_PICTURES = 24  # inside the page; the folder has all
_LARGEST_PICTURE_BYTES = 2**21


def logged_panels(histories: Sequence[History]) -> list[Panel]:
    """One panel, or none where nothing was logged."""
    events = [(run, event) for run, history in enumerate(histories) for event in history.of("value_logged")]
    if not events:
        return []
    names = dict.fromkeys(str(event["name"]) for _, event in events if event.get("file") is None)
    charts = [Chart(f"logged-{index}", name, name, _lines(histories, name)) for index, name in enumerate(names)]
    files = [(run, event) for run, event in events if event.get("file") is not None]
    rows = [[histories[run].label, str(event["name"]), str(event["step"]), str(event["file"])] for run, event in files]
    newest = {(run, event["name"]): (run, event) for run, event in files}
    pictures = [found for run, event in newest.values() if (found := _picture(histories[run], event)) is not None]
    notes = []
    if len(pictures) > _MOST_PICTURES:
        notes.append(f"{_MOST_PICTURES} of {len(pictures)} pictures are shown; the run folder has all.")
    table = Table("media", "Pictures in the run folder", ["run", "name", "step", "file"], rows, first_figure=99)
    return [
        Panel(
            "logged",
            "Logged",
            "What the training's own code logged; of pictures the newest of each name.",
            charts=charts,
            pictures=pictures[:_MOST_PICTURES],
            tables=[table] if rows else [],
            notes=notes,
        )
    ]


def _lines(histories: Sequence[History], name: str) -> list[Series]:
    lines: list[Series] = []
    for run, history in enumerate(histories):
        points = [
            ({**position, "epoch": round(history.epoch_at(int(event["step"])), 4)}, event["value"])
            for position, event in history.positioned("value_logged")
            if event["name"] == name and event.get("file") is None
        ]
        lines += make_line(run, name, points)
    return lines


def _picture(history: History, event: Line) -> Picture | None:
    """The picture inside of the page; None where the file is gone, too large or outside of the run folder."""
    path = history.path / Path(str(event["file"]))
    try:
        if not path.resolve().is_relative_to(history.path.resolve()) or path.stat().st_size > _LARGEST_PICTURE_BYTES:
            return None
        data = path.read_bytes()
    except OSError:
        return None
    address = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return Picture(f"{event['name']}, step {event['step']}", address)
