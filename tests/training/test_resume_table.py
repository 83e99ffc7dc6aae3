"""What a resume does with every setting: each has one row, does what its row says, and is in the documents."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from stormo.config import options
from stormo.config.schema import SECTIONS, Effective
from stormo.errors import SettingError
from stormo.tasks.find import find_task
from stormo.training.resume import FREE, REFUSED, SAID
from stormo.training.settings import read_settings

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
EVERY = options.train_options()
_PLACE = ("run_name", "runs_folder", "resume", "config")  # they say which run, and what is read besides it


def test_every_setting_has_one_row() -> None:
    declared = {field.name for section in SECTIONS.values() for field in dataclasses.fields(section)}
    rows = [*REFUSED, *SAID, *FREE]
    assert len(rows) == len(set(rows))
    assert set(rows) == declared | {"task"}


def _another(one: options.Option) -> Any:
    """A value that is not the default."""
    if one.choices:
        return next(choice for choice in one.choices if choice != one.default)
    if one.kind is bool:
        return not one.default
    return {int: (one.default or 0) + 1 if one.kind is int else 0, float: 0.125, str: "text"}[one.kind]


def _words(one: options.Option, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [one.flag if value else one.flag.replace("--", "--no-", 1)]
    return [one.flag, str(value)]


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run named old, all by default, in the runs of the working folder."""
    monkeypatch.chdir(tmp_path)
    config = options.make_config({}, find_task("fashion-mnist").Options)
    effect = Effective(global_batch_size=64, learning_rate=0.02, warmup_start=0.01, num_workers=2, batch_per_pass=32)
    run = tmp_path / "runs" / "old"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(options.to_toml(config, effect), encoding="utf-8")
    return run


def test_every_setting_does_what_its_row_says(old_run: Path) -> None:
    for one in EVERY:
        if one.name in _PLACE:
            continue
        value = _another(one)
        words = ["--resume", "old", *_words(one, value)]
        if one.name in REFUSED:
            with pytest.raises(SettingError) as refused:
                read_settings(words)
            said = f"{' '.join(_words(one, value))} was set with --resume, but run old was started "
            assert str(refused.value).startswith(said)
            assert str(refused.value).endswith(f", and {REFUSED[one.name]}; leave it out, or start a new run.")
            continue
        config, _ = read_settings(words)
        assert getattr(getattr(config, one.section), one.name) == value
        assert [change.key for change in config.changed] == ([one.name] if one.name in SAID else [])


def test_what_the_run_has_already_is_no_change(old_run: Path) -> None:
    same = [one for one in EVERY if one.default is not None and one.name not in _PLACE]
    words = [word for one in same for word in _words(one, one.default)]
    assert read_settings(["--resume", "old", *words])[0].changed == ()


def test_the_page_lists_what_is_refused_and_what_is_said() -> None:
    text = PAGE.read_text(encoding="utf-8")
    flags = {one.name: one.flag for one in EVERY}
    for row, names in (("refused", REFUSED), ("taken, and said", SAID)):
        (cells,) = re.findall(rf"^\| {row} \|(.*)$", text, re.MULTILINE)
        listed = set(re.findall(r"`(--[\w-]+)[`.]", cells))
        others = {"--task", "--precision"} if row == "refused" else set()  # of which a part is refused
        assert listed - others == {flags[name] for name in names if name != "task"}, row
