"""The plan that README.md shows is what its command gives, as far as it does not depend on the device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stormo.cli import main

PAGE = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
OF_THE_DEVICE = ("workers", "precision")


def test_the_plan_that_is_shown_is_what_comes(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.search(r"\$ stormo (train .*?) \| cat\n(.*?)\n\.\.\.\n", PAGE, re.DOTALL)
    assert shown is not None
    assert main([*shown[1].replace("\\\n", "").split(), "--device", "cpu", "--dry-run"]) == 0
    lines, came = shown[2].splitlines(), capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [line.split("  ")[0] for line in came[: len(lines)]]
    for line, other in zip(lines, came, strict=False):
        assert line == other or line.startswith(OF_THE_DEVICE)
