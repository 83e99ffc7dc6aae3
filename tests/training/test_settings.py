"""Settings are merged once, and handed to the ranks as they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stormo.config import toml
from stormo.config.schema import ResolvedBatch
from stormo.training.settings import inherited_settings, merged_settings

TASK = str(Path(__file__).parents[1] / "tiny_task.py")
FLAGS = ["--batch-size", "auto", "--base-lr", "0.1", "--task.dropout", "0.3", "--mesh", "replicate=2"]


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings, task_class = merged_settings([TASK])
    effect = ResolvedBatch(global_batch_size=64, learning_rate=0.02, warmup_start=0.01, num_workers=2)
    run = tmp_path / "runs" / "old"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(toml.to_toml(settings.config(task_class.Options), effect), encoding="utf-8")


@pytest.mark.parametrize("arguments", [["fashion-mnist"], [TASK, *FLAGS], ["--resume", "old", "--base-lr", "0.3"]])
@pytest.mark.usefixtures("old_run")
def test_a_rank_gets_the_very_settings_that_were_read_before_it_started(arguments: list[str]) -> None:
    settings, task_class = merged_settings(arguments)
    environ = {"HOME": "/root", **settings.to_environment()}
    Path("runs/old/config.toml").unlink()  # no rank reads it again
    inherited = inherited_settings(environ)
    assert inherited is not None
    config, again = inherited
    assert again.__name__ == task_class.__name__
    expected = settings.config(again.Options)
    assert config == expected
    assert repr(config) == repr(expected)
    assert (config.resumed is not None, bool(config.changed)) == ("--resume" in arguments,) * 2
    assert environ == {"HOME": "/root"}  # a process that the rank starts is no rank


def test_who_was_started_by_another_launcher_reads_for_itself() -> None:
    assert inherited_settings(dict(os.environ)) is None
