"""docs/scaling-study.md shows what `stormo scale` prints for the table that it names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from stormo.study import main
from stormo.study.settings import read_arguments, read_study

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scaling-study.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"\$ stormo scale (.*)\n", PAGE.replace("\\\n", ""))


def test_the_table_from_elsewhere_gives_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = [command for command in COMMANDS if "--from" in command]
    shown = PAGE.split(f"$ stormo scale {command}\n```\n\n```\n")[1].split("\n```")[0]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stormo.study.results.draw", lambda path, results: None)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out.strip("\n") == shown


def test_every_other_command_can_be_read() -> None:
    others = [command for command in COMMANDS if "--from" not in command]
    assert len(others) == 3
    for command in others:
        assert len(read_study(*read_arguments(shlex.split(command))).workers) > 1
