"""The child that trains: how it ends, and that nothing of it stays."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from stormo.errors import EXIT_USAGE
from stormo.study import children
from stormo.study.children import last_words, run_child


def is_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def sleeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of Python: a program that ignores Ctrl-C, has a child of its own, and never ends."""
    program, pids = tmp_path / "sleeper", tmp_path / "pids"
    program.write_text(f"#!/bin/sh\ntrap '' INT\nsleep 600 &\necho $$ $! > {pids}.new\nmv {pids}.new {pids}\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(children, "_ENOUGH_S", 0.0)
    monkeypatch.setattr(children, "_WAIT_S", 0.3)
    return pids


def test_an_interrupt_leaves_no_process(tmp_path: Path, sleeper: Path) -> None:
    def interrupt() -> bool:
        if sleeper.exists():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        run_child([], tmp_path / "log", interrupt)
    assert all(is_gone(int(pid)) for pid in sleeper.read_text(encoding="ascii").split())


def test_a_run_that_was_measured_for_long_enough_is_ended(tmp_path: Path, sleeper: Path) -> None:
    assert run_child([], tmp_path / "log", sleeper.exists) == -15
    assert all(is_gone(int(pid)) for pid in sleeper.read_text(encoding="ascii").split())


def test_what_a_refused_run_said_is_found(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run_child(["fashion-mnist", "--num-gpus", "none"], log, lambda: False) == EXIT_USAGE
    assert last_words(log).startswith("--num-gpus was set to 'none'")


def test_last_words_without_a_sentence_of_stormo(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_words(log) == "it left no output"
    log.write_text("Traceback\n\nValueError: no\n\n", encoding="utf-8")
    assert last_words(log) == "ValueError: no"
    log.write_text("", encoding="utf-8")
    assert last_words(log) == "it said nothing"
