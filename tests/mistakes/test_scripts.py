"""Every mistake in a script gets its answer, word for word, on all of its workers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stormo
from stormo.distributed.world import World as Workers
from stormo.errors import SettingError
from stormo.script import world as script_world
from tests.mistakes.mistake import Mistake
from tests.mistakes.scripts import GOOD_SCRIPT, SCRIPT_KINDS
from tests.script.loops import world_of

SCRIPTS = [mistake for mistakes in SCRIPT_KINDS.values() for mistake in mistakes]


def _say(workers: Workers, text: str) -> str:
    """What a script ends with, whose world is these workers."""

    def world() -> script_world.World:
        if script_world._the_world is None:
            script_world._the_world = world_of(workers)
            return script_world._the_world
        return script_world.World()

    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        setattr(stormo, "World", world)  # noqa: B010 - it is found lazily otherwise
        try:
            exec(compile(text, "my_script.py", "exec"), {"__name__": "__main__"})
        except SettingError as error:
            return str(error)
        finally:
            delattr(stormo, "World")
            script_world._the_world = None
            os.chdir(before)
    return ""


@pytest.mark.parametrize("mistake", SCRIPTS, ids=lambda mistake: mistake.name)
def test_a_mistake_in_a_script_gets_its_answer(run_ranks: Callable[..., list[Any]], mistake: Mistake) -> None:
    assert run_ranks(_say, mistake.num_workers, mistake.text) == [mistake.says] * mistake.num_workers


def test_the_script_that_all_rows_change_makes_no_mistake(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(_say, 2, GOOD_SCRIPT) == ["", ""]
