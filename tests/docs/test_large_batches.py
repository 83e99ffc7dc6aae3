"""Every command and every block of code of docs/large-batches.md is run, and the lines it shows are what comes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stormo.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "large-batches.md").read_text(encoding="utf-8")
# A command, and the lines of the plan that the page shows after it, where it does.
COMMANDS = re.findall(r"```console\n\$ stormo (train .*?)\n```\n(?:\n```\n(.*?)\n```)?", PAGE)
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_has_what_is_run_here() -> None:
    assert len(COMMANDS) == PAGE.count("```console") == 5
    assert len(CODE) == PAGE.count("```python") == 1
    assert sum(bool(shown) for _, shown in COMMANDS) == 3


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_command_gives_the_lines_that_are_shown(command: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--dry-run" in command
    assert main([*command.split(), "--device", "cpu"]) == 0
    out = [re.sub(r" +", " ", line) for line in capsys.readouterr().out.splitlines()]
    for line in shown.splitlines():
        assert any(found.startswith(re.sub(r" +", " ", line).removesuffix("…")) for found in out), out


def test_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for code in CODE:
        exec(compile(code, "docs/large-batches.md", "exec"), {})
    assert capsys.readouterr().out == "tensor(4)\n"
