"""Findings as text, as JSON and as an exit code."""

from __future__ import annotations

import io
import json
import os

import pytest

from stormo.doctor.finding import Finding, as_json, exit_code, show

FINE = Finding(check="gpus", level="ok", text="8 × NVIDIA H200, 150 GB each", group="devices", facts={"num_gpus": 8})
HOT = Finding(
    check="gpu-throttle",
    level="warning",
    text="its clocks are throttled by heat, at 91 °C, while the seven other GPUs of this node stay below 60 °C",
    fix="look at the node's cooling and power supply, or choose another node: all workers wait for this one",
    where="GPU 3",
    group="devices",
)
FULL = Finding(check="storage-runs", level="error", text="no room", fix="make room", group="storage")
NOTE = Finding(check="cores", level="note", text="2 of 2 cores", fix="ask for more", group="limits")


def shown(findings: list[Finding], stream: io.StringIO | None = None) -> str:
    stream = stream or io.StringIO()
    show(findings, stream)
    return stream.getvalue()


def test_the_exit_code_is_that_of_the_worst() -> None:
    assert [exit_code(each) for each in ([], [FINE], [FINE, HOT, NOTE], [FULL, FINE])] == [0, 0, 0, 1]


def test_a_warning_or_an_error_has_a_fix_and_a_level_is_one_of_four() -> None:
    with pytest.raises(AssertionError, match="without a fix"):
        Finding(check="x", level="error", text="bad")
    with pytest.raises(AssertionError):
        Finding(check="x", level="fatal", text="bad", fix="none")  # type: ignore[arg-type]


def test_json_holds_everything_and_is_strict() -> None:
    odd = Finding(check="odd", level="note", text="x", facts={"rate": float("inf"), "seen": True, "name": None})
    document = json.loads(as_json([FINE, HOT, FULL, odd]))
    assert document["exit_code"] == 1
    assert document["counts"] == {"ok": 1, "note": 1, "warning": 1, "error": 1}
    assert document["findings"][1] == {
        "group": "devices",
        "check": "gpu-throttle",
        "level": "warning",
        "where": "GPU 3",
        "text": HOT.text,
        "fix": HOT.fix,
        "facts": {},
    }
    assert document["findings"][3]["facts"] == {"rate": None, "seen": True, "name": None}


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_the_text_keeps_to_the_screen(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = shown([FINE, HOT, FULL, NOTE]).splitlines()
    assert max(map(len, lines)) <= min(columns, 120)
    assert [line for line in lines if line and not line.startswith(" ")] == [
        *("devices", "storage", "limits", "to fix", "1 error, 1 warning, 1 note, 1 ok")
    ]
    column = lines[1].index("8 ×")
    rest = [line for line in lines[3 : lines.index("storage") - 1] if line]
    assert all(line.startswith(" " * column) and line[column] != " " for line in rest)


def test_what_to_fix_is_at_the_end_errors_first() -> None:
    text = " ".join(shown([FINE, HOT, FULL, NOTE]).partition("to fix\n")[2].split())
    assert text.startswith("error storage-runs: no room → make room warning gpu-throttle (GPU 3): its clocks")
    assert HOT.fix in text
    assert "ask for more" not in text  # a note's fix is with the note
    assert "to fix" not in shown([FINE, NOTE])
    assert "→ ask for more" in shown([FINE, NOTE])


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31merror  \x1b[0m" in shown([FULL], Screen())
    assert "\x1b" not in shown([FULL])
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown([FULL], Screen())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in shown([FULL], Screen())


def test_a_number_keeps_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for length in range(20, 60):
        text = shown([Finding(check="speed", level="ok", text=f"{'x' * length} writes 991 MB/s")])
        assert "991 MB/s" in text


def test_a_stream_without_unicode_gets_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    show([FINE, HOT], stream)
    assert b"8 x NVIDIA" in raw.getvalue()
    assert b"-> look at" in raw.getvalue()


def test_a_closed_pipe_is_no_error() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with os.fdopen(write_fd, "w") as stream:
        show([FINE], stream)
