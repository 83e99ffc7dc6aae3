"""Every mistake of the table gets its answer, word for word; the page in docs/ says the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stormo.cli import main
from tests import forked, programs
from tests.mistakes.mistake import GOOD_TASK, Mistake
from tests.mistakes.page import PAGE, page
from tests.mistakes.table import MISTAKES

_SETTINGS = ["--epochs", "1", "--no-tensorboard", "--device", "cpu"]
_HERE = [mistake for mistake in MISTAKES if mistake.before_workers or mistake.num_workers == 1]
_WITH_WORKERS = [mistake for mistake in MISTAKES if mistake not in _HERE]


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own, and no module of a user's that a later test would find."""
    monkeypatch.chdir(tmp_path)
    modules, path = set(sys.modules), list(sys.path)
    yield
    torch.set_default_dtype(torch.float32)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name in ("my_task", "my_script"):
            del sys.modules[name]


def _write(mistake: Mistake, folder: Path) -> None:
    folder.joinpath(mistake.file).write_text(mistake.text, encoding="utf-8")


def _answer(mistake: Mistake, folder: Path) -> str:
    return f"stormo: {mistake.says}\n".replace("{folder}", str(folder))


@pytest.mark.parametrize("mistake", _HERE, ids=lambda mistake: mistake.name)
def test_a_mistake_gets_its_answer(mistake: Mistake, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _write(mistake, tmp_path)
    code = main([*mistake.command, *_SETTINGS])
    out, err = capfd.readouterr()
    assert err == _answer(mistake, tmp_path)
    assert out == ""
    assert code == mistake.exit_code
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("mistake", _WITH_WORKERS, ids=lambda mistake: mistake.name)
def test_several_workers_give_one_answer(mistake: Mistake, tmp_path: Path) -> None:
    _write(mistake, tmp_path)
    words = ["-m", "stormo", *mistake.command, *_SETTINGS]
    done = programs.run(words, tmp_path, mistake.num_workers)
    assert done.stderr == _answer(mistake, tmp_path)
    assert done.stdout == ""
    assert done.returncode == mistake.exit_code
    assert not (tmp_path / "runs").exists()


def test_an_agent_gives_one_answer_too(tmp_path: Path) -> None:
    (mistake,) = (one for one in _WITH_WORKERS if one.name == "fewer samples than workers")
    _write(mistake, tmp_path)
    command = [sys.executable, "-m", "stormo", *mistake.command, *_SETTINGS]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = forked.run(command, cwd=tmp_path, env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (mistake.exit_code, "", _answer(mistake, tmp_path))
    assert not (tmp_path / "runs").exists()


def test_what_is_known_before_workers_needs_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*_: object, **__: object) -> int:
        raise AssertionError("workers were started")

    monkeypatch.setattr("stormo.commands.train.run_node", never)
    monkeypatch.setattr("stormo.commands.train.work", never)
    for mistake in MISTAKES:
        if mistake.before_workers:
            _write(mistake, tmp_path)
            workers = [] if mistake.num_workers > 1 else ["--num-gpus", "2"]
            assert main([*mistake.command, *_SETTINGS, *workers]) == mistake.exit_code, mistake.name


def test_the_file_that_all_rows_change_makes_no_mistake(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tmp_path.joinpath("my_task.py").write_text(GOOD_TASK, encoding="utf-8")
    assert main(["train", "my_task.py", *_SETTINGS]) == 0
    assert capfd.readouterr().err == ""


def test_an_error_of_the_users_own_keeps_its_traceback(tmp_path: Path) -> None:
    text = GOOD_TASK.replace("x, y = batch", "x, y, weights = batch")
    tmp_path.joinpath("my_task.py").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="not enough values to unpack"):
        main(["train", "my_task.py", *_SETTINGS])
    assert not (tmp_path / "runs").exists()


def test_every_mistake_has_a_name_of_its_own() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 16


def test_the_page_is_what_the_table_makes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: python -m tests.mistakes"
