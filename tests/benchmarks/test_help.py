"""The help of every benchmark, which argparse reads anew whenever it is shown."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
# A module that reads a command line itself, and not one that hands a parser to others.
WITH_HELP = sorted(
    path.stem
    for path in FOLDER.glob("*.py")
    if re.search(r"\.parse_(known_)?args\(|read_options\(", text := path.read_text(encoding="utf-8"))
    and "__main__" in text
)


@pytest.mark.parametrize("name", WITH_HELP)
def test_the_help_of_a_benchmark_can_be_shown(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "--help" in shown
    assert "%" not in re.sub(r"\d+ %", "", shown)  # a specifier that was left, or one that took what follows for itself
    assert "{'" not in shown
