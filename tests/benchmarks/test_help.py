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
WITH_DATA = sorted(
    name
    for name in set(WITH_HELP) - {"slices", "slice_peers", "fingerprint"}  # tested elsewhere, told it, or without it
    if '"--data-folder"' in (FOLDER / f"{name}.py").read_text(encoding="utf-8")
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


@pytest.mark.parametrize("name", WITH_DATA)
def test_a_benchmark_without_its_data_says_what_to_carry_and_asks_no_network(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--data-folder", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 2
    assert "carry its four files here and name their folder by --data-folder" in capsys.readouterr().err
