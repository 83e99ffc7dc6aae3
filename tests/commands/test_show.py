from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stormo.commands import show
from stormo.errors import SettingError, StormoError
from stormo.telemetry.folder import RunFolder, write_json
from stormo.telemetry.record import EpochDone, Notice, RunEnded, RunStarted, StepDone
from tests.commands import test_runs
from tests.commands.test_runs import make_run
from tests.golden import check_golden


def started(resumed_at_step: int | None = None) -> RunStarted:
    explanation = ("global batch 2048 = 512 per worker × 4 workers × 1 accumulation",)
    plain = test_runs.started(resumed_at_step)
    return replace(plain, run_name="heron", run_folder="runs/heron", explanation=explanation)


def step_done(step: int, loss: float) -> StepDone:
    plain, speed = test_runs.step_done(step), 1000.0
    return replace(
        plain, epoch=1, step_in_epoch=step, loss=loss, samples_per_s=speed, units_per_s=speed, train_time_s=1.0
    )


def epoch_done(epoch: int, **validation: float) -> EpochDone:
    metrics = validation or {"loss": 2.0 / epoch, "accuracy": 0.25 * epoch}
    return replace(test_runs.epoch_done(epoch), train_loss=3.0 - epoch, validation=metrics)


def add_checkpoint(run: RunFolder, step: int, size_bytes: int = 0) -> Path:
    path = run.checkpoints / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(bytes(size_bytes))
    return path


def shown(capsys: pytest.CaptureFixture[str], folder: Path, name: str = "heron") -> str:
    assert show.main([name, "--runs-folder", str(folder)]) == 0
    return capsys.readouterr().out


def test_the_whole_output_of_a_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first = {"scheduler": "Slurm", "id": "12", "restarts": 0, "nodes": "n[1-2]"}
    run = make_run(
        Path("runs/heron"),
        replace(started(), job=first),
        *(step_done(step, 3.0 - step / 30) for step in range(0, 30, 10)),
        epoch_done(1),
        replace(started(resumed_at_step=30), job=first | {"restarts": 1}),
        *(step_done(step, 3.0 - step / 30) for step in range(30, 60, 10)),
        epoch_done(2),
        Notice(kind="stop", text="Early stopping after epoch 2"),
        RunEnded(
            summary={
                "task": "fashion-mnist",
                "stopped_by": "target",
                "validation_accuracy": 0.5,
                "validation_loss": 1.0,
                "train_time_s": 48.0,
                "wall_time_s": 61.5,
                "unit": "images",
                "samples_per_s": 2500.0,
                "peak_memory_bytes": 3 * 2**30,
                "peak_reserved_memory_bytes": 4 * 2**30,
            }
        ),
    )
    environment = {"stormo": "0.1.0", "torch": "2.13.0", "host": "n1", "git_commit": "abc", "git_has_changes": True}
    write_json(run.environment, environment | {"command": ["stormo", "train", "--num-gpus", "4"]})
    add_checkpoint(run, 60, size_bytes=3 * 2**20)
    check_golden(Path(__file__).parent / "golden" / "show.txt", shown(capsys, Path("runs")))


def test_a_run_without_epochs_says_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "heron", started(), step_done(7, 1.25))
    text = shown(capsys, tmp_path)
    assert "No epoch is done yet; the last recorded step is 7 with a training loss of 1.2500." in text
    assert "Epochs\n" not in text
    assert "Curves\n" not in text


def test_a_run_with_nothing_but_its_configuration_shows_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "heron").mkdir()
    (tmp_path / "heron" / "config.toml").write_text('epochs = 3\n[data]\nfolder = "x"\n', encoding="utf-8")
    text = shown(capsys, tmp_path)
    assert "Configuration\n  epochs = 3\n  data.folder = x\n" in text
    assert "No epoch is done yet; no step was recorded." in text


def test_a_configuration_that_is_not_toml_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "heron").mkdir()
    (tmp_path / "heron" / "config.toml").write_text("epochs = \n", encoding="utf-8")
    with pytest.raises(StormoError, match=r"config\.toml: it is not valid TOML"):
        show.main(["heron", "--runs-folder", str(tmp_path)])


def test_epochs_that_a_resume_made_obsolete_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(
        tmp_path / "heron",
        started(),
        epoch_done(1),
        epoch_done(2, loss=7.7777),
        started(resumed_at_step=30),
        epoch_done(2, loss=0.5),
    )
    text = shown(capsys, tmp_path)
    assert "7.7777" not in text
    assert "0.5000" in text


def test_an_interrupted_run_with_checkpoints_says_how_to_resume_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "runs" / "heron", started(), epoch_done(1))
    add_checkpoint(run, 30)
    add_checkpoint(run, 60)
    command = f"stormo train --resume {tmp_path / 'runs' / 'heron'}"
    assert (f"Resume with\n  {command}\n  resumes from step-00000060; workers so far: 4\n") in shown(
        capsys, tmp_path / "runs"
    )
    monkeypatch.chdir(tmp_path)
    assert "Resume with\n  stormo train --resume heron\n" in shown(capsys, Path("runs"))


@pytest.mark.parametrize(
    ("stopped_by", "is_resumable"), [("signal", True), ("error", True), ("epochs", False), ("target", False)]
)
def test_only_a_run_that_did_not_finish_offers_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stopped_by: str, is_resumable: bool
) -> None:
    run = make_run(tmp_path / "heron", started(), RunEnded(summary={"stopped_by": stopped_by}))
    assert "Resume with" not in shown(capsys, tmp_path)  # nothing on disk to resume from
    add_checkpoint(run, 60)
    assert ("Resume with" in shown(capsys, tmp_path)) == is_resumable


def test_figures_that_were_not_finite_are_shown_as_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "heron", started(), epoch_done(1), epoch_done(2, loss=math.nan, accuracy=0.25), epoch_done(3))
    text = shown(capsys, tmp_path)
    assert "      2      1.0000       n/a    0.2500" in text
    assert "  validation loss  █ ▁  2.0000 to 0.6667" in text


def test_a_task_with_its_own_metrics_gets_their_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "heron", started(), epoch_done(1, loss=1.0), epoch_done(2, loss=1.0, top5=0.875))
    text = shown(capsys, tmp_path)
    assert "val loss    top5  images/s" in text
    assert "  1.0000     n/a     2,500" in text
    assert "  1.0000  0.8750     2,500" in text
    assert "accuracy" not in text


def test_an_output_without_unicode_gets_ascii_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "heron", started(), epoch_done(1), epoch_done(2))
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    show.main(["heron", "--runs-folder", str(tmp_path)])
    text = buffer.getvalue().decode("ascii")
    assert "  validation loss  #_  2.0000 to 1.0000\n" in text
    assert "512 per worker x 4 workers" in text


def test_json_holds_everything_the_text_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "heron", started(), step_done(3, math.inf), epoch_done(1))
    add_checkpoint(run, 30, size_bytes=10)
    assert show.main(["heron", "--runs-folder", str(tmp_path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["run"]["state"] == "interrupted"
    assert content["started"]["world_size"] == 4
    assert [epoch["epoch"] for epoch in content["epochs"]] == [1]
    assert content["last_step"]["loss"] is None
    assert content["checkpoints"] == [{"path": str(run.checkpoints / "step-00000030"), "size_bytes": 10}]
    assert "--resume" in content["resume_command"]
    assert content["summary"] is None


def test_an_unknown_name_is_answered_with_the_closest_one(tmp_path: Path) -> None:
    make_run(tmp_path / "heron", started())
    with pytest.raises(SettingError, match="did you mean heron"):
        show.main(["herno", "--runs-folder", str(tmp_path)])


@given(st.lists(st.none() | st.floats(), max_size=200))
@example([1.7e308, -1.7e308])
@example([1.7e308] * 100)
@example([5e-324, 0.0, math.nan, math.inf, None])
def test_a_sparkline_takes_any_series_and_never_gets_wider_than_asked(values: list[float | None]) -> None:
    line = show.sparkline(values, width=40)
    assert len(line) == min(len(values), 40)
    assert set(line) <= set(" ▁▂▃▄▅▆▇█")


def test_a_sparkline_averages_what_falls_into_one_sign() -> None:
    assert show.sparkline([0.0, 0.0, 7.0, 7.0, 3.0, 3.0], width=3) == "▁█▄"
    assert show.sparkline([5.0, 5.0, 5.0]) == "▄▄▄"
    assert show.sparkline([None, 1.0, 2.0]) == " ▁█"
    assert show.sparkline([]) == ""


def test_without_a_name_the_newest_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingError, match="there is no run"):
        show.main(["--runs-folder", str(tmp_path)])
    make_run(tmp_path / "older", started(), at_unix_s=1.0)
    make_run(tmp_path / "newer", started(), at_unix_s=2.0)
    make_run(tmp_path / "oldest", started(), at_unix_s=0.5)
    assert show.main(["--runs-folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("newer: ")
