"""A task's own defaults: weaker than everything a user sets, shown, checked, written down and kept by a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stormo.config import toml
from stormo.config.schema import ResolvedBatch
from stormo.errors import SettingError
from stormo.tasks.find import find_task
from stormo.training.settings import read_settings

_FILE = """
from stormo.tasks.task import Task

class {name}(Task):
    name = "{name}"
    defaults = {defaults!r}

    def model(self): ...
    def train_data(self): ...
    def validation_data(self): ...
    def loss(self, model, batch): ...
"""


def _task(folder: Path, name: str, defaults: dict[str, Any]) -> str:
    path = folder / f"with_defaults_{name.lower()}.py"
    path.write_text(_FILE.format(name=name, defaults=defaults), encoding="utf-8")
    return str(path)


def test_they_stand_in_for_the_usual_ones_and_are_not_given(tmp_path: Path) -> None:
    task = _task(tmp_path, "Own", {"optimizer": "adamw", "base_lr": 1, "clip_norm": 1.0, "batch_size": 4})
    config, _ = read_settings([task])
    assert (config.optimizer.optimizer, config.optimizer.clip_norm, config.batch.batch_size) == ("adamw", 1.0, 4)
    assert isinstance(config.optimizer.base_lr, float)  # converted as a file's value is
    assert config.optimizer.specific_options()["momentum"] == 0.9
    assert config.given == {"task"}


def test_files_and_flags_win_over_them(tmp_path: Path) -> None:
    task = _task(tmp_path, "Weak", {"base_lr": 0.5, "epochs": 7, "patience": 3})
    file = tmp_path / "my.toml"
    file.write_text("[stop]\nepochs = 8\n[optimizer]\nbase_lr = 0.25\n", encoding="utf-8")
    config, _ = read_settings([task, "--config", str(file), "--base-lr", "0.125"])
    assert (config.optimizer.base_lr, config.stop.epochs, config.stop.patience) == (0.125, 8, 3)
    assert {"base_lr", "epochs"} <= config.given
    assert "patience" not in config.given


def test_a_batch_size_that_was_set_wins_over_a_default_for_the_global_one(tmp_path: Path) -> None:
    task = _task(tmp_path, "Whole", {"global_batch_size": 512})
    assert read_settings([task])[0].batch.global_batch_size == 512
    assert read_settings([task, "--batch-size", "8"])[0].batch.global_batch_size is None


def test_help_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = _task(tmp_path, "Shown", {"optimizer": "adamw", "epochs": 7})
    with pytest.raises(SystemExit):
        read_settings([task, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "the update rule (default: adamw)" in text
    assert "at most this many epochs (default: 7)" in text


@pytest.mark.parametrize(
    ("defaults", "sentence"),
    [
        (
            {"base_rl": 0.1},
            r"^'base_rl' is in the defaults of task \w+, but there is no setting of that name; did you mean base_lr\? "
            r"stormo train --help all lists them\.$",
        ),
        ({"qqqq": 1}, r"but there is no setting of that name; stormo train --help all lists them\.$"),
        ({"run_name": "x"}, r"^'run_name' is in the defaults of task \w+, but a task cannot set a default for it"),
        ({"num_gpus": 2}, r"^'num_gpus' is in the defaults of task \w+, but a task cannot set a default for it"),
        ({"epochs": 1.5}, r"epochs in the defaults of task \w+ was set to 1\.5, but it takes a whole number; "),
        ({"decay": "cosin"}, r"decay in the defaults of task \w+ 'cosin' was asked for, .* did you mean cosine\?"),
    ],
)
def test_a_mistake_in_them_names_the_task(tmp_path: Path, defaults: dict[str, Any], sentence: str) -> None:
    task = _task(tmp_path, f"Wrong{abs(hash(sentence)) % 10**6}", defaults)
    with pytest.raises(SettingError, match=sentence):
        read_settings([task])


def test_a_resume_keeps_those_of_its_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task = _task(tmp_path, "Changing", {"optimizer": "adamw", "epochs": 7, "base_lr": 0.5})
    config, _ = read_settings([task])
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    effective = ResolvedBatch(global_batch_size=32, learning_rate=0.5, warmup_start=0.5)
    (folder / "config.toml").write_text(toml.to_toml(config, effective), encoding="utf-8")
    task_class = find_task(task)
    monkeypatch.setattr(task_class, "defaults", {"optimizer": "sgd", "epochs": 9, "clip_norm": 1.0})
    monkeypatch.setattr("stormo.training.settings.find_task", lambda name: task_class)
    resumed, _ = read_settings(["--resume", "one"])
    assert (resumed.optimizer.optimizer, resumed.stop.epochs, resumed.optimizer.base_lr) == ("adamw", 7, 0.5)
    assert resumed.optimizer.clip_norm is None  # it was not clipped before
    assert read_settings(["--resume", "one", "--epochs", "8"])[0].stop.epochs == 8


def test_only_the_reference_job_ends_at_an_accuracy_by_itself(tmp_path: Path) -> None:
    assert read_settings(["fashion-mnist"])[0].stop.target_accuracy == 0.85
    assert read_settings([_task(tmp_path, "Long", {})])[0].stop.target_accuracy is None
