"""What --dry-run shows of the schedule: in the terminal, in a file, and that it is what training does."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from stormo.cli import main
from stormo.commands.dry_run import draw, planned_steps
from stormo.config.layout import resolve_layout
from stormo.config.plan import resolve
from stormo.tasks.find import find_task
from stormo.training.settings import read_settings

FLAGS = ["--device", "cpu", "--num-gpus", "2", "--epochs", "6", "--warmup-epochs", "2", "--decay", "cosine"]
GROWS = ["--grow-batch", "2:2x,4:4x", "--max-batch-size", "64"]


def test_the_curve_is_drawn_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--plot-schedule", *FLAGS]) == 0
    lines = capsys.readouterr().out.split("\nlearning rate\n")[1].splitlines()
    assert lines[0].startswith("0.02 │")
    assert lines[9].startswith("   0 │███")
    assert lines[10] == f"     epoch 0{'6':>66}"
    assert len(lines) == 11


def test_a_terminal_without_blocks_gets_signs_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    monkeypatch.setattr("sys.stdout", out)
    assert main(["train", "--dry-run", "--plot-schedule", *FLAGS, *GROWS]) == 0
    out.seek(0)
    text = out.read()
    assert "\nglobal batch\n" in text
    assert "512 |" in text
    assert "?" not in text.split("\nlearning rate\n")[1]


def test_a_file_has_every_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "curve.csv"
    assert main(["train", "--dry-run", "--plot-schedule", str(file), *FLAGS, *GROWS]) == 0
    assert f"drawn in {file}" in capsys.readouterr().out
    rows = list(csv.DictReader(file.read_text().splitlines()))
    config, _ = read_settings([*FLAGS, *GROWS])
    plan = resolve(config, resolve_layout(config, [], None), find_task("fashion-mnist")(config.task_options).facts())
    assert len(rows) == plan.total_steps == len(list(planned_steps(config, plan)))
    assert [int(row["step"]) for row in rows] == list(range(len(rows)))
    assert float(rows[0]["learning_rate"]) == 0.01
    assert max(float(row["learning_rate"]) for row in rows) == 0.02
    assert {row["global_batch_size"] for row in rows} == {"64", "128", "512"}


@pytest.mark.parametrize("name", ["curve.png", "curve.svg"])
def test_a_picture_is_drawn(name: str, tmp_path: Path) -> None:
    assert main(["train", "--dry-run", "--plot-schedule", str(tmp_path / name), *FLAGS, *GROWS]) == 0
    assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--plot-schedule"], "--plot-schedule was set without --dry-run"),
        (["--dry-run", "--plot-schedule", "curve.gif"], "its ending is none of .png, .svg, .csv"),
        (["--dry-run", "--plot-schedule", "nowhere/curve.png"], "there is no folder nowhere"),
        (["--dry-run", "--plot-schedule", "/proc/curve.csv"], "it cannot be written"),
    ],
)
def test_what_cannot_be_drawn(flags: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *flags, *FLAGS]) == 2
    assert why in capsys.readouterr().err


def test_weights_to_start_from_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tensor = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    header = json.dumps(tensor).encode()
    Path("good.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    Path("cut.safetensors").write_bytes(len(header).to_bytes(8, "little") + header[:9])
    Path("state.pt").write_bytes(b"torch alone can tell")
    Path("empty").mkdir()
    Path("runs/old/checkpoints/step-00000010").mkdir(parents=True)
    for source in ("good.safetensors", "state.pt", "old"):
        assert main(["train", "--dry-run", "--init-from", source, *FLAGS]) == 0
    for source, why in (
        ("cut.safetensors", "it cannot be read (Error while deserializing header"),
        ("missing.safetensors", "there is no such file or run"),
        ("empty", "it has no checkpoint"),
    ):
        assert main(["train", "--dry-run", "--init-from", source, *FLAGS]) == 2
        assert f"--init-from {source} was set, but {why}" in capsys.readouterr().err


def test_a_task_that_may_bring_an_optimizer_is_not_said_to_be_stepped_by_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    task = str(Path(__file__).parent.with_name("stream_task.py"))
    assert main(["train", task, "--dry-run", "--epoch-samples", "150", "--device", "cpu"]) == 0
    values = "(momentum 0.9, weight decay 0)"
    said = f"\noptimizer      the task's own, or sgd where its optimizer() returns None {values}\n"
    said += "learning rate  of the task's optimizer(), or --base-lr 0.01 where it returns None, × 1;"
    assert said in capsys.readouterr().out


def test_a_picture_needs_a_package_and_says_so_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["train", "--dry-run", "--plot-schedule", "curve.png", *FLAGS]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("install it with: pip install 'stormo[plot]'.\n")


def test_a_drawing_of_a_long_run_takes_no_longer(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--epochs", "1000000", "--batch-size", "1", "--decay", "linear", "--warmup-epochs", "0"]
    assert main(["train", "--dry-run", "--plot-schedule", "--device", "cpu", *flags]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("epoch 0" + "1e+06".rjust(66))


def test_fewer_steps_than_columns_leave_no_gap() -> None:
    lines = draw([1.0, 0.5], [0.0, 0.5], 1.0)
    assert lines[0] == "1 │" + "█" * 36
    assert lines[9] == "0 │" + "█" * 72
    assert draw([0.0], [0.0], 1.0)[0] == "0 │"
