"""Schedule-free AdamW: the steps of its paper, averages where they count, and a resume on other workers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from stormo.cli import main
from stormo.config import schema
from stormo.config.options import make_config
from stormo.config.plan.checks import check_numbers
from stormo.config.precedence import drop_incompatible, drop_overridden
from stormo.distributed.world import World
from stormo.errors import MissingPackageError, SettingError
from stormo.optim.schedule_free import averaged, schedule_free_adamw
from stormo.optim.table import make_optimizer
from stormo.telemetry.events import read_events
from tests.tiny_run import build, save, steps

OPTIONS: dict[str, Any] = {"num_train": 40, "dropout": 0.0, "norm": False}
FLAGS: dict[str, Any] = {
    "global_batch_size": 16,
    "weight_decay": 0.01,
    "precision": "fp64",
    "base_lr": 0.01,
    "eps": 1e-6,
}
NAME: Any = "schedule-free-adamw"


def test_steps_and_averages_are_those_of_the_paper() -> None:
    """Algorithm 1 of arXiv 2405.15682, with a rate that rises: an average is weighed by the square of the highest."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False).double()
    optimizer: Any = make_optimizer(model, schema.Optimizer(optimizer=NAME, weight_decay=0.1))
    optimizer.train()
    x = z = model.weight.detach().clone()
    v, total = torch.zeros_like(x), 0.0
    for step in range(1, 6):
        lr = 0.01 * min(step, 3)
        y = 0.1 * z + 0.9 * x
        torch.testing.assert_close(model.weight.detach(), y, rtol=1e-12, atol=1e-14)
        gradient = torch.randn(2, 3, dtype=torch.float64)
        model.weight.grad, optimizer.param_groups[0]["lr"] = gradient.clone(), lr
        optimizer.step()
        v = 0.999 * v + 0.001 * gradient**2
        z = z - lr * (gradient / ((v / (1 - 0.999**step)).sqrt() + 1e-8) + 0.1 * y)
        total += lr**2
        x = x + lr**2 / total * (z - x)
    with averaged(optimizer):
        torch.testing.assert_close(model.weight.detach(), x, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(model.weight.detach(), 0.1 * z + 0.9 * x, rtol=1e-12, atol=1e-14)


def _train(world: World, flags: dict[str, Any], num_steps: int, folder: str, source: str | None) -> tuple[Any, str]:
    """The averages of the whole model after some steps, and a checkpoint of them."""
    parts = build(world, OPTIONS, optimizer=NAME, **FLAGS, **flags)
    if source is not None:
        parts.state.restore(world, Path(source), 0)
    steps(parts, num_steps)
    with parts.strategy.averaged_weights():
        found = [(shard.name, shard.offset, shard.local.detach().numpy().copy()) for shard in parts.strategy.shards()]
        return found, save(parts, folder)


def test_workers_train_as_one_does_and_resume_what_others_have_saved(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    ((whole, _),) = run_ranks(_train, 1, {}, 7, str(tmp_path / "whole"), None)
    expected = {name: values for name, _, values in whole}
    _, path = run_ranks(_train, 2, {"strategy": "ddp"}, 2, str(tmp_path / "ddp"), None)[0]
    _, path = run_ranks(_train, 2, {"strategy": "fsdp"}, 2, str(tmp_path / "fsdp"), path)[0]
    ((resumed, _),) = run_ranks(_train, 1, {}, 3, str(tmp_path / "one"), path)
    for name, _, values in resumed:
        np.testing.assert_allclose(values, expected[name], rtol=1e-10, atol=1e-12, err_msg=name)


def _validated(world: World, flags: dict[str, Any]) -> list[Any]:
    """The output of the model at its averages and at its weights, twice each."""
    parts = build(world, OPTIONS, optimizer=NAME, **FLAGS, **flags)
    steps(parts, 3)
    data, found = parts.task.train_data().tensors[0][:4].double(), []  # type: ignore[attr-defined]
    parts.strategy.module.eval()
    for _ in range(2):
        with torch.no_grad(), parts.strategy.averaged_weights():
            found.append(parts.strategy.validated(data).numpy().copy())
        with torch.no_grad():
            found.append(parts.strategy.validated(data).numpy().copy())
    return found


def test_gathered_weights_follow_the_change(run_ranks: Callable[..., list[Any]]) -> None:
    ((average, current, *_),) = run_ranks(_validated, 1, {})
    assert not np.allclose(average, current, rtol=1e-3)
    for found in run_ranks(_validated, 2, {"strategy": "zero1"}):
        for ours, theirs in zip(found, [average, current] * 2, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


TASK = str(Path(__file__).parent.with_name("tiny_task.py"))
_RUN = (
    "--device cpu --precision fp64 --deterministic --task.num-train 64 --task.dropout 0 --no-energy --no-tensorboard "
)
_RUN += f"--warmup-epochs 0.5 --warmup-from 0.1 --base-lr 0.01 --target-accuracy 2 --optimizer {NAME}"


@pytest.mark.parametrize("flag", ["--no-async-checkpoint", "--async-checkpoint"])
def test_a_checkpoint_holds_what_was_validated_and_a_resume_goes_on_from_it(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def train(name: str, *words: str) -> list[Any]:
        torch.set_default_dtype(torch.float32)  # as in a process of its own
        assert main(["train", *words, "--run-name", name, flag]) == 0
        events = list(read_events(Path("runs", name, "events.jsonl")))
        return [event["validation"]["loss"] for event in events if event["event"] == "epoch_done"]

    losses = train("whole", TASK, *_RUN.split(), "--epochs", "3")
    assert "The statistics of batch norm are those of the weights that are trained" in capsys.readouterr().out
    train("parts", TASK, *_RUN.split(), "--epochs", "2")
    assert train("parts", "--resume", "--epochs", "3") == losses
    ours, theirs = (max(Path("runs", name, "checkpoints").glob("step-*")) for name in ("parts", "whole"))
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    capsys.readouterr()
    torch.set_default_dtype(torch.float32)
    assert main(["evaluate", "whole", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["validation"]["loss"] == pytest.approx(losses[-1], rel=1e-12)


@pytest.mark.parametrize(("flag", "value"), [("decay", "cosine"), ("strategy", "local"), ("strategy", "server")])
def test_what_cannot_hold_is_refused(flag: str, value: str) -> None:
    with pytest.raises(SettingError, match=rf"--{flag} {value} was set.*--optimizer.* schedule-free-adamw"):
        check_numbers(make_config({"optimizer": NAME, flag: value}, None))


def test_the_decay_of_a_task_gives_way() -> None:
    assert drop_overridden({"decay": "cosine", "base_lr": 0.1}, {"optimizer": NAME}) == {"base_lr": 0.1}
    assert drop_incompatible({"decay": "cosine", "base_lr": 0.1}, {"optimizer": NAME}) == {"base_lr": 0.1}


def test_without_the_package_its_extra_is_named() -> None:
    schedule_free_adamw.cache_clear()
    with (
        mock.patch.dict(sys.modules, {"schedulefree": None}),
        pytest.raises(MissingPackageError, match=r"\[schedule-f"),
    ):
        make_optimizer(nn.Linear(2, 2), schema.Optimizer(optimizer=NAME))
