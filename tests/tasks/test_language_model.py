"""The language model task: windows, loss, metrics, facts, and what cannot hold."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stormo.config import options
from stormo.errors import SettingError
from stormo.tasks.language_model import LanguageModel, LanguageModelOptions
from stormo.tasks.python_source import read_corpus
from stormo.telemetry.events import read_events
from stormo.training.settings import read_settings
from tests import programs
from tests.commands.test_train import summary, wait_until


def _task(**options: Any) -> LanguageModel:
    return LanguageModel(LanguageModelOptions(**options))


def test_windows_overlap_by_one_byte_so_that_every_byte_is_predicted_once() -> None:
    task = _task(preset="small", block=1000)
    (windows,) = task.train_data().tensors
    text = read_corpus().train
    num_windows = (len(text) - 1) // 1000
    assert (windows.shape, windows.dtype) == ((num_windows, 1001), torch.uint8)
    assert windows.is_contiguous()
    assert windows[:, 1:].flatten().numpy().tobytes() == text[1 : num_windows * 1000 + 1]
    assert windows[:, 0].numpy().tobytes() == text[: num_windows * 1000 : 1000]


def test_fewer_bytes_are_taken_evenly_from_all() -> None:
    text = read_corpus().train
    (windows,) = _task(block=10, train_bytes=101).train_data().tensors
    assert windows.shape == (10, 11)
    starts = [number * ((len(text) - 1) // 10) // 10 * 10 for number in range(10)]
    assert [window.numpy().tobytes() for window in windows] == [text[start : start + 11] for start in starts]
    (every,) = _task(block=10, train_bytes=10**9).train_data().tensors
    assert len(every) == (len(text) - 1) // 10


def test_facts_are_those_of_the_data() -> None:
    task = _task(block=64, train_bytes=2**14, validation_bytes=2**12)
    facts = task.facts()
    train, validation = task.datasets()
    assert (facts.num_train, facts.num_validation) == (len(train), len(validation))  # type: ignore[arg-type]
    assert facts.train_bytes == train.num_bytes  # type: ignore[attr-defined]
    assert (facts.unit, facts.units_per_sample, facts.has_accuracy) == ("tokens", 64, False)
    assert facts.data.startswith(f"{facts.num_train * 64} bytes of the ")
    assert facts.data_sha256 == read_corpus().sha256
    large = _task(preset="125m").facts()
    assert (large.units_per_sample, large.num_train) == (1024, (len(read_corpus().train) - 1) // 1024)
    assert large.flops_per_sample == (6 * (12 * 10 * 1024**2 + 256 * 1024) + 12 * 10 * 1024 * 1024) * 1024


def test_a_fresh_model_is_about_as_good_as_a_guess() -> None:
    torch.manual_seed(0)
    task = _task(train_bytes=2**12)
    model, batch = task.model().eval(), task.train_data()[0:4]  # type: ignore[index]
    with torch.no_grad():
        assert float(task.loss(model, batch)) == pytest.approx(math.log(256), abs=0.1)


def test_loss_and_metrics_agree() -> None:
    torch.manual_seed(0)
    task = _task(block=16, train_bytes=2**10)
    model, batch = task.model().eval(), (task.train_data().tensors[0][:5],)
    assert task.loss(model, batch).requires_grad
    with torch.no_grad():
        loss, metrics = task.loss(model, batch), task.metrics(model, batch)
    assert loss.shape == ()
    assert float(metrics["loss"]) / 5 == pytest.approx(float(loss), rel=1e-5)
    assert float(metrics["bits_per_byte"]) / 5 == pytest.approx(float(loss) / math.log(2), rel=1e-5)
    assert "accuracy" not in metrics  # which is what --target-accuracy stops at


def test_the_model_is_asked_for_the_byte_that_follows() -> None:
    class Successor(nn.Module):
        """Certain that 7 follows 6, and so on."""

        def forward(self, tokens: Tensor) -> Tensor:
            return 50.0 * nn.functional.one_hot((tokens + 1) % 256, 256).to(torch.get_default_dtype())

    task = _task(block=4, train_bytes=100)
    rising = torch.arange(15, dtype=torch.uint8).unfold(0, 5, 4)
    metrics = task.metrics(Successor(), (rising,))
    assert float(metrics["loss"]) == pytest.approx(0.0, abs=1e-6)
    assert float(metrics["next_byte_accuracy"]) == len(rising)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_the_softmax_is_taken_in_fp32_at_least(dtype: torch.dtype, expected: torch.dtype) -> None:
    class Undecided(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return torch.zeros(*tokens.shape, 256, dtype=dtype)

    task = _task(block=16, train_bytes=2**10)
    loss = task.loss(Undecided(), (task.train_data().tensors[0][:2],))
    assert loss.dtype == expected
    assert float(loss) == pytest.approx(math.log(256))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"preset": "smal"},
            "--task.preset 'smal' was asked for, but there is none of that name; did you mean small? "
            "choose one of: 125m, 13b, 1b, 2.7b, 350m, 6.7b, medium, small, tiny.",
        ),
        ({"dropout": 1.0}, "--task.dropout 1 was set, but it must lie in [0, 1); set --task.dropout 0.1."),
        ({"block": 0}, "--task.block 0 was set, but it must be at least 1; set --task.block 1024."),
        ({"train_bytes": 0}, "--task.train-bytes 0 was set, but it must be at least 1; set --task.train-bytes 1024."),
    ],
)
def test_options_that_cannot_hold_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingError) as caught:
        _task(**options)
    assert str(caught.value) == sentence


def test_too_few_bytes_for_a_window_are_refused_before_anything_starts() -> None:
    with pytest.raises(SettingError, match=r"windows of 128 \+ 1 bytes were asked for, but the train part has 100 b"):
        _task(train_bytes=100).facts()
    with pytest.raises(SettingError, match=r"but the validation part has 128 bytes; set a smaller --task\.block"):
        _task(validation_bytes=128).facts()


def test_its_own_defaults_are_effective() -> None:
    config, task_class = read_settings(["language-model"])
    assert task_class is LanguageModel
    assert (config.optimizer.optimizer, config.optimizer.clip_norm, config.stop.target_loss) == ("adamw", 1.0, None)
    assert config.given == {"task"}
    names = {option.name for option in options.train_options()}
    assert set(LanguageModel.defaults) <= names


# Stops for good in a pass of the training where HOLD_AT says so, until it is killed.
_HELD = """
import os, time
from stormo.tasks.language_model import LanguageModel

class LocalParameter(LanguageModel):
    num_calls = 0

    def loss(self, model, batch):
        self.num_calls += 1
        while self.num_calls == int(os.environ.get("HOLD_AT", 0)):
            time.sleep(0.1)
        return super().loss(model, batch)
"""


def _start(folder: Path, *arguments: str, hold_at: int = 0) -> programs.Program:
    (folder / "held.py").write_text(_HELD, encoding="utf-8")
    words = ["-m", "stormo", "train", "held.py", "--num-gpus", "2", *arguments]
    return programs.Program(words, folder, 2, HOLD_AT=str(hold_at))


def _run(folder: Path, *arguments: str) -> str:
    done = _start(folder, *arguments).wait()
    assert done.returncode == 0, done.stderr
    return done.stdout


def _write_folder(folder: Path) -> Path:
    folder.mkdir()
    for number in range(100):
        (folder / f"{number}.txt").write_text("the same line over and over\n" * 20, encoding="utf-8")
    return folder


def test_killed_and_resumed_it_ends_with_the_same_weights(tmp_path: Path) -> None:
    # 320 bytes in windows of 8: 10 steps an epoch with batches of 4.
    settings = ["--task.block", "8", "--task.train-bytes", "321", "--task.validation-bytes", "200"]
    settings += ["--batch-size", "2", "--epochs", "2", "--deterministic", "--run-name", "one"]
    settings += ["--checkpoint-every", "5", "--no-tensorboard"]
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    output = _run(tmp_path / "whole", *settings)
    expected = summary(tmp_path / "whole" / "runs" / "one")
    assert expected["tokens_per_s"] == pytest.approx(8 * expected["samples_per_s"])
    assert (expected["unit"], expected["mfu"]) == ("tokens", None)
    assert expected["mfu_reason"] == "the peak of the CPUs is not known"
    assert expected["validation_loss"] == expected["validation"]["loss"] < math.log(256)
    assert re.search(
        r"^Epoch = 2: Cumulative Time = [\d.]+, Epoch Time = [\d.]+, Tokens/sec = [\d.]+, Validation Loss = [\d.]+, "
        r"Validation Bits Per Byte = [\d.]+, Validation Next Byte Accuracy = [\d.]+$",
        output,
        re.MULTILINE,
    )
    assert re.search(rf"^data .* SHA-256 {read_corpus().sha256}$", output, re.MULTILINE)
    run = tmp_path / "killed" / "runs" / "one"
    killed = _start(tmp_path / "killed", *settings, hold_at=19)  # in the second epoch
    was_saved = wait_until((run / "checkpoints" / "step-00000015").exists, timeout_s=120)
    killed.kill()
    assert was_saved
    assert not (run / "summary.json").exists()
    other = _write_folder(tmp_path / "other")
    refused = _start(tmp_path / "killed", "--resume", "one", "--task.data-folder", str(other)).wait()
    assert refused.returncode == 2
    assert f"trained on data of SHA-256 {read_corpus().sha256} was to resume, but the data here" in refused.stderr
    _run(tmp_path / "killed", "--resume", "one")  # every other setting comes from the run
    result = summary(run)
    assert result["num_resumes"] == 1
    for key in ("weights_sha256", "sample_order_sha256", "steps", "samples_seen", "validation"):
        assert result[key] == expected[key], key
    events = [read_events(path / "events.jsonl") for path in (run, tmp_path / "whole" / "runs" / "one")]
    losses = [{e["epoch"]: e["train_loss"] for e in one if e["event"] == "epoch_done"} for one in events]
    assert losses[0] == losses[1]
