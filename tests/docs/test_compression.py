"""docs/compression.md: its commands can be read, and the plan says what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.docs.test_strategies import answer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compression.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ stormo (train .*)$", PAGE, re.MULTILINE)
(SHOWN,) = re.findall(r"```\n(compression .*)\n```", PAGE)


def test_commands_can_be_read_and_say_what_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    plans = []
    for command in COMMANDS:
        code, said = answer(shlex.split(command), capsys)
        assert code == 0, said
        plans.append(said)
    assert SHOWN in plans[0].split("\n")
    assert "two matrices of rank 2" in plans[1]
