"""`stormo export`: the weights of a checkpoint of any mesh as one file that other programs read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from stormo.checkpoint import CorruptCheckpointError, RetentionPolicy, load, save, weights_digest
from stormo.cli import main
from stormo.errors import EXIT_USAGE
from tests.checkpoint.conftest import make_snapshot
from tests.checkpoint.fake_sharded import Model, whole_values
from tests.checkpoint.test_ranks import _two_steps

Ranks = Callable[..., list[Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with three checkpoints, of which the one in the middle is the best."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "demo"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.toml").write_text("")
    for step, metric in ((10, 0.5), (20, 0.9), (30, None)):
        policy = RetentionPolicy(step=step, identity="demo", keep_last=9, metric=metric)
        save(folder / "checkpoints", make_snapshot(step), policy)
    return folder


def require_step(file: Path, step: int) -> None:
    exported, expected = safetensors.torch.load_file(file), make_snapshot(step).model
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(exported[name], tensor)


@pytest.mark.parametrize(
    ("words", "step"), [(["demo"], 30), (["runs/demo", "--best"], 20), (["demo", "--step", "10"], 10)]
)
def test_the_newest_the_best_or_a_step_is_exported_and_reported(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], step: int
) -> None:
    assert main(["export", *words]) == 0
    file = Path(f"demo-step-{step:08d}.safetensors")
    require_step(file, step)
    shown = capsys.readouterr().out
    assert f"{file}  ({file.stat().st_size / 1e3:.3g} kB, 7 tensors, step {step})" in shown
    assert weights_digest(make_snapshot(step).model) in shown
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "stormo_step": str(step)}
    assert [path.name for path in Path.cwd().iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("source", ["checkpoints/step-00000020", "checkpoints"])
def test_a_checkpoint_or_a_folder_of_them_can_be_named(run: Path, source: str) -> None:
    assert main(["export", str(run / source), "out.safetensors"]) == 0
    require_step(Path("out.safetensors"), 20 if source.endswith("20") else 30)


def test_the_file_may_be_named_after_an_option(run: Path) -> None:
    assert main(["export", "demo", "--step", "10", "out.safetensors"]) == 0
    require_step(Path("out.safetensors"), 10)


def test_a_sharded_model_is_exported_as_one_process_has_it(
    run_ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = run_ranks(_two_steps, 3, str(tmp_path / "saved"))[0]
    assert main(["export", path, "model.safetensors"]) == 0
    model = Model()
    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
    values = whole_values("adamw", 1)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name])
    assert weights_digest(load(path).model) in capsys.readouterr().out


def test_a_file_that_is_there_is_replaced_only_by_force(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").write_text("precious")
    assert main(["export", "demo", "mine"]) == EXIT_USAGE
    assert Path("mine").read_text() == "precious"
    assert "mine was to be written, but it is there already; name another file, or set --force." in (
        capsys.readouterr().err
    )
    assert main(["export", "demo", "mine", "--force"]) == 0
    require_step(Path("mine"), 30)
    assert main(["export", "demo", "runs", "--force"]) == EXIT_USAGE


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["other"], "run 'other' was asked for"),
        (["demo", "--step", "15"], "demo has no such checkpoint; choose one of: 10, 20, 30"),
        (["runs/demo/checkpoints/step-00000020", "--best"], "is one checkpoint"),
        (["demo", "runs/demo/checkpoints/step-00000020/manifest.json/out"], "it cannot be (Not a directory)"),
        (["demo", "nowhere/out"], "it cannot be (No such file or directory)"),
        (["demo", "out", "--best", "--step", "3"], "not allowed with"),
        (["demo", "--task.width", "3"], "--task.width was set, but a safetensors file holds the weights"),
        (["demo", "--format", "pickle"], "invalid choice"),
        ([], "required: RUN"),
    ],
)
def test_what_cannot_be_is_reported(run: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["export", *words]) == EXIT_USAGE
    assert said in capsys.readouterr().err


def test_damage_is_found_before_anything_is_written_and_the_good_one_offered(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "checkpoints" / "step-00000030" / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert main(["export", "demo", "out"]) == CorruptCheckpointError.exit_code
    said = capsys.readouterr().err
    assert "at least one byte changed" in said
    assert "the newest good checkpoint is that of step 20: runs/demo/checkpoints/step-00000020." in said
    assert not Path("out").exists()


def test_a_run_without_a_checkpoint_or_a_best_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run / "checkpoints").iterdir():
        if path.name != "step-00000030":
            path.rename(run / path.name)
    assert main(["export", "demo", "--best"]) == EXIT_USAGE
    (run / "checkpoints" / "step-00000030").rename(run / "gone")
    assert main(["export", "demo"]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert "the best checkpoint of demo was asked for, but none was saved with a validation" in said
    assert "the weights of run demo were asked for, but it has no checkpoint yet" in said
