"""Programs of torch.export and ONNX compute what the model computes, for batches of any size."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stormo.cli import main
from stormo.data import TensorData
from stormo.errors import EXIT_USAGE, SettingError, StormoError
from stormo.tasks.language_model import LanguageModel, LanguageModelOptions
from stormo.tasks.task import NoOptions, Task
from stormo.tasks.wide_resnet import WideResNet
from stormo.training.model_export import export_model
from tests import programs
from tests.tiny_task import Tiny

TASK = str(Path(__file__).parents[1] / "tiny_task.py")
HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
FORMATS = [
    "torch-export",
    pytest.param("onnx", marks=pytest.mark.skipif(not HAS_ONNX, reason="needs onnx, onnxscript and onnxruntime")),
]
SUFFIXES = {"torch-export": ".pt2", "onnx": ".onnx"}


@pytest.fixture(autouse=True)
def _fresh_precision() -> Iterator[None]:
    """Number formats as a new process has them: a training in this one has set some, and torch.export reads all."""
    conv = torch.backends.cudnn.conv
    before = conv.fp32_precision
    conv.fp32_precision = torch.backends.cudnn.rnn.fp32_precision
    yield
    conv.fp32_precision = before


class Made(Task):
    """A task of random images or rows."""

    def __init__(self, model: nn.Module, *tensors: Tensor, call: Callable[..., Any] | None = None) -> None:
        super().__init__(NoOptions())
        self._model, self._data = model.eval(), TensorData(*tensors)
        self._call = call or (lambda model, x: model(x))

    def model(self) -> nn.Module:
        return self._model

    def train_data(self) -> Any:
        return self._data

    def validation_data(self) -> Any:
        return self._data

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = self._call(model, *batch).sum()
        return found


class TwoInputs(nn.Module):
    """Takes a nested input and a keyword, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: Tensor) -> dict[str, Tensor]:
        return {"out": self.layer(pair[0]) * scale + pair[1].sum(1, keepdim=True)}


class Branching(nn.Module):
    """Looks at its data, which no trace can."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Drawing(nn.Module):
    """Computes something else in every call."""

    def forward(self, x: Tensor) -> Tensor:
        return x + random.random()


class SevenOnly(nn.Module):
    """Takes batches of seven samples."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(7, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def _language_model(folder: Path) -> Task:
    for number in range(20):
        (folder / f"{number}.py").write_text("\n".join(f"x{i} = {i * number}" for i in range(2000)))
    options = LanguageModelOptions(block=16, data_folder=str(folder), train_bytes=4096, validation_bytes=2048)
    task = LanguageModel(options)
    task.fetch()
    return task


def _task(name: str, folder: Path) -> Task:
    torch.manual_seed(0)
    if name == "gpt":
        return _language_model(folder)
    if name == "wide resnet":
        return Made(WideResNet(width=0.5), torch.rand(20, 1, 28, 28))
    if name == "two inputs":
        rows = torch.rand(20, 4), torch.rand(20, 3), torch.rand(20, 1)
        return Made(TwoInputs(), *rows, call=lambda model, a, b, c: model((a, b), scale=c)["out"])
    return Tiny()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", ["tiny", "wide resnet", "gpt", "two inputs"])
def test_a_program_computes_what_the_model_computes(kind: str, name: str, tmp_path: Path) -> None:
    task = _task(name, tmp_path)
    model = task.model().eval()
    made = export_model(task, model, kind, tmp_path / f"model{SUFFIXES[kind]}")
    assert made.fixed_batch is None
    assert made.difference <= made.tolerance
    assert made.tolerance < 0.1


def test_a_program_runs_without_the_task_and_holds_no_sample(tmp_path: Path) -> None:
    task, file = _task("tiny", tmp_path), tmp_path / "model.pt2"
    model = task.model().eval()
    export_model(task, model, "torch-export", file)
    program = torch.export.load(file)
    assert program.example_inputs is None
    x = torch.rand(11, 8)
    assert torch.equal(program.module()(x), model(x))


def test_a_batch_that_is_fixed_by_the_model_is_reported(tmp_path: Path) -> None:
    task = Made(SevenOnly(), torch.rand(20, 4))
    assert export_model(task, task.model(), "torch-export", tmp_path / "model.pt2").fixed_batch == 7


def test_a_model_that_cannot_be_traced_is_one_sentence(tmp_path: Path) -> None:
    task = Made(Branching(), torch.rand(20, 4))
    with pytest.raises(SettingError, match=r"torch.export cannot take Branching \(") as raised:
        export_model(task, task.model(), "torch-export", tmp_path / "model.pt2")
    assert "\n" not in str(raised.value)


def test_a_program_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    task = Made(Drawing(), torch.rand(20, 4))
    with pytest.raises(StormoError, match="differ from the model's by"):
        export_model(task, task.model(), "torch-export", tmp_path / "model.pt2")
    task = Made(nn.Linear(4, 4), torch.full((20, 4), torch.nan))
    with pytest.raises(StormoError, match="differ from the model's by inf"):
        export_model(task, task.model(), "torch-export", tmp_path / "model2.pt2")


def test_a_loss_that_calls_no_model_is_refused(tmp_path: Path) -> None:
    task = Made(nn.Linear(4, 4), torch.rand(20, 4), call=lambda model, x: model.weight * x.sum())
    with pytest.raises(SettingError, match="was called for an export, but it does not call the model"):
        export_model(task, task.model(), "torch-export", tmp_path / "model.pt2")


@pytest.fixture
def _demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the tiny task, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the folder of the task is put first
    words = ["--device", "cpu", "--epochs", "1", "--run-name", "demo", "--no-tensorboard", "--no-energy"]
    assert programs.run(["-m", "stormo", "train", TASK, *words], tmp_path).returncode == 0


@pytest.mark.usefixtures("_demo")
def test_the_command_writes_a_program_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "demo", "--format", "torch-export", "--task.num-validation", "5"]) == 0
    said = capsys.readouterr().out
    assert "demo-step-00000032.pt2  (" in said
    assert "torch-export, batches of any size, step 32)" in said
    assert "differ from the model's by at most " in said
    assert torch.export.load("demo-step-00000032.pt2").module()(torch.rand(2, 8)).shape == (2, 3)
    assert main(["export", "demo", "--format", "torch-export"]) == EXIT_USAGE  # it is there already
    assert main(["export", "demo", "x", "--format", "torch-export", "--task.width", "3"]) == EXIT_USAGE
    assert main(["export", "demo", "missing/x", "--format", "torch-export"]) == EXIT_USAGE
    assert "missing/x was to be written, but it cannot be (No such file or directory)" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo-step-00000032.pt2", "runs"]


@pytest.mark.skipif(HAS_ONNX, reason="the packages are installed")
@pytest.mark.usefixtures("_demo")
def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "demo", "--format", "onnx"]) == EXIT_USAGE
    assert "pip install 'stormo[onnx]'" in capsys.readouterr().err
