from __future__ import annotations

import io
import re

import pytest

from stormo.commands.monitor.lines import plain_lines, rate, share, used_of
from stormo.commands.monitor.view import PlainView, TerminalView, bar, make_view
from tests.commands.monitor.fakes import gpu, sample


class Terminal(io.StringIO):
    """A terminal that keeps what it is sent."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return True


def drawn(columns: int, monkeypatch: pytest.MonkeyPatch, encoding: str = "utf-8", **changes: object) -> list[str]:
    """What the terminal shows of one sample, without colours."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "30")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal(encoding)
    view = TerminalView(terminal, 1.0, ["CPU power: n/a: root alone may read it"])
    assert view.show(sample(gpu(0, throttled=["power limit", "heat"]), gpu(1), **changes))
    view.close()
    view.close()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).splitlines()


def test_the_terminal_shows_every_figure_in_120_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(120, monkeypatch)
    assert re.fullmatch(r"n1 · \d\d:\d\d:\d\d · every 1 s · Ctrl-C ends", lines[0].strip())
    text = "\n".join(lines)
    assert re.search(r"gpu0 +H200 +█████████▊ +97 % +20\.0/140\.0 GiB +512/700 W +61 °C +1980/3201", text)
    assert "gpu0 is slowed by power limit and heat" in text
    assert "gpu1 is slowed" not in text
    assert re.search(r"CPU +█████····· +50 % +16 CPUs, load 8\.0, 2900 MHz, 55 °C, 120 W", text)
    assert re.search(r"memory +██▌······· +25 % +32\.0/128\.0 GiB", text)
    assert re.search(r"disk +read 1\.5 MB/s, written 250 B/s", text)
    assert re.search(r"network +in 3\.0 GB/s, out 4\.0 kB/s", text)
    assert "CPU power: n/a: root alone may read it" in text


@pytest.mark.parametrize(
    ("columns", "shown", "dropped"),
    [
        (80, ("name", "busy", "use", "memory", "power", "temp", "SM/mem MHz"), ()),
        (72, ("name", "use", "memory", "power", "temp", "SM/mem MHz"), ("busy",)),
        (60, ("use", "memory", "power", "temp", "SM/mem MHz"), ("busy", "name")),
        (46, ("use", "memory", "power", "temp"), ("busy", "name", "SM/mem MHz")),
        (20, ("GPU", "use"), ("busy", "name", "SM/mem MHz", "temp", "power", "memory")),
    ],
)
def test_a_narrow_terminal_loses_the_least_important_columns(
    monkeypatch: pytest.MonkeyPatch, columns: int, shown: tuple[str, ...], dropped: tuple[str, ...]
) -> None:
    lines = drawn(columns, monkeypatch)
    assert all(len(line.rstrip()) <= columns for line in lines)
    header = next(line for line in lines if line.startswith("GPU"))
    assert all(title in header for title in shown)
    assert not any(title in header for title in dropped)


def test_a_terminal_without_unicode_gets_plain_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(drawn(120, monkeypatch, "ascii"))
    assert text.isascii()
    assert "?" not in text
    assert re.search(r"CPU +#####----- +50 %", text)
    assert re.search(r"gpu0 +H200 +########## +97 % .* 61 C ", text)


def test_unknown_figures_are_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(120, monkeypatch, cpu_fraction=None, cpu_power_w=None, disk_read_bytes_per_s=None)
    text = "\n".join(lines)
    assert re.search(r"CPU +n/a +16 CPUs, load 8\.0, 2900 MHz, 55 °C\s", text)
    assert "read n/a, written 250 B/s" in text


def test_a_pipe_gets_a_line_for_each_device() -> None:
    stream = io.StringIO()
    view = make_view(stream, 1.0, ["GPU: n/a: no driver"])
    assert isinstance(view, PlainView)
    assert view.show(sample(gpu(0, throttled=["power limit", "heat"]), gpu(1, utilisation=None, throttled=None)))
    reason, node, first, second = stream.getvalue().splitlines()
    assert reason == "GPU: n/a: no driver"
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d n1: CPU 50 %, 16 CPUs, load 8\.0, 2900 MHz, 55 °C, 120 W, memory 32\.0/128\.0 GiB, "
        r"disk read 1\.5 MB/s, written 250 B/s, network in 3\.0 GB/s, out 4\.0 kB/s",
        node,
    )
    assert first[9:] == (
        "gpu0 H200: 97 %, memory 20.0/140.0 GiB, power 512/700 W, 61 °C, 1980/3201 MHz, slowed by power limit and heat"
    )
    assert second[9:].startswith("gpu1 H200: n/a, memory")
    assert second.endswith("slowed by n/a")


@pytest.mark.parametrize("kind", ["dumb", "unknown"])
def test_a_dumb_terminal_is_treated_as_a_pipe(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("TERM", kind)
    assert isinstance(make_view(Terminal(), 1.0, []), PlainView)


def test_a_zero_is_a_figure() -> None:
    (line,) = plain_lines(sample(cpu_power_w=0.0))
    assert ", 0 W," in line


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [
        (None, "n/a"),
        (0.0, "0 B/s"),
        (999.4, "999 B/s"),
        (999.9, "1.0 kB/s"),
        (12_345_678.0, "12.3 MB/s"),
        (4e10, "40.0 GB/s"),
    ],
)
def test_rates_are_said_in_their_own_unit(bytes_per_s: float | None, text: str) -> None:
    assert rate(bytes_per_s) == text


def test_figures() -> None:
    assert share(None) == "n/a"
    assert used_of(5.0, None, "W") == "5 W"
    assert used_of(None, 5.0, "W") == "n/a"
    assert [bar(fraction) for fraction in (0.0, 0.05, 1.0, 7.0)] == ["·" * 10, "▌" + "·" * 9, "█" * 10, "█" * 10]
