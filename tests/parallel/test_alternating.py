"""Several optimizers: they step in turn, as in a loop by hand, and survive a resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.strategy_tasks import Gan
from stormo.cli import main
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.optim.task_optimizer import make_task_optimizers
from stormo.tasks.check import check_task
from stormo.tasks.task import Task
from tests.tiny_run import assert_same_bits, build, save, steps, whole_state

Ranks = Callable[..., list[Any]]
FLAGS: dict[str, Any] = {"precision": "fp64", "global_batch_size": 10, "base_lr": 0.002}


def _gan(options: Any) -> Task:
    return Gan(25)


def _alone() -> World:
    return World(alone(), torch.device("cpu"))


def test_they_step_in_turn_as_a_loop_by_hand() -> None:
    parts = build(_alone(), task_class=_gan, **FLAGS)  # type: ignore[arg-type]
    task = _gan(None)
    torch.set_default_dtype(torch.float64)
    model = task.model()
    model.load_state_dict(parts.strategy.module.state_dict())
    optimizers = dict(task.optimizers(model) or {})
    for batch in parts.loader.epoch(1):
        for name, optimizer in optimizers.items():
            loss = task.loss(model, batch.data, name)  # type: ignore[call-arg]
            model.zero_grad()
            loss.backward()
            optimizer.step()
    steps(parts, 3)
    for name, value in parts.strategy.module.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert all(parameter.requires_grad for parameter in parts.strategy.module.parameters())


def _whole_and_resumed(world: World, folder: str) -> tuple[Any, Any]:
    whole = build(world, task_class=_gan, ema=0.9, **FLAGS)  # type: ignore[arg-type]
    steps(whole, 2)
    path = save(whole, folder)
    steps(whole, 3)
    resumed = build(world, task_class=_gan, ema=0.9, **FLAGS)  # type: ignore[arg-type]
    resumed.strategy.warm_up(resumed.loader)
    resumed.state.restore(world, Path(path), 0)
    steps(resumed, 3)
    return whole_state(whole), whole_state(resumed)


def test_a_resumed_run_has_the_same_bits(run_ranks: Ranks, tmp_path: Path) -> None:
    first, second = run_ranks(_whole_and_resumed, 2, str(tmp_path))
    for whole, resumed in (first, second):
        assert any("exp_avg" in name for name in whole)
        assert_same_bits(whole, resumed)
    for name, value in first[0].items():
        if "weight" in name or "bias" in name:
            assert np.array_equal(value, second[0][name]), name


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"strategy": "fsdp"}, "strategy fsdp was set, but Gan has several optimizers, which step whole replicas in "),
        ({"batch_size": "auto", "global_batch_size": None}, "--batch-size auto was set, but the task has several "),
        ({"compile": True}, "--compile was set, but the task has several optimizers, whose losses call parts of the "),
        ({"gradient_noise": 0.1}, "--gradient-noise 0.1 was set, but the task has several optimizers, and it is for "),
    ],
)
def test_what_is_for_one_gradient_is_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError) as refused:
        build(_alone(), task_class=_gan, **FLAGS | flags)  # type: ignore[arg-type]
    assert str(refused.value).startswith(said)


class Overflowing(Gan):
    """From the third step on, the loss of the generator is infinite; that of the critic stays finite for a step."""

    def __init__(self, options: Any) -> None:
        super().__init__(25)
        self.num_calls = 0

    def loss(self, model: nn.Module, batch: Any, optimizer: str = "critic") -> torch.Tensor:
        self.num_calls += optimizer == "generator"
        loss = super().loss(model, batch, optimizer)
        return loss * float("inf") if optimizer == "generator" and self.num_calls > 2 else loss


def test_the_loss_of_every_optimizer_is_watched() -> None:
    usual = steps(build(_alone(), task_class=_gan, **FLAGS), 3)  # type: ignore[arg-type]
    watched = steps(build(_alone(), task_class=Overflowing, **FLAGS), 3)
    assert watched[:2] == usual[:2]
    assert not math.isfinite(watched[2])


class Spare(Gan):
    """A layer of the generator that its loss does not use."""

    def __init__(self, options: Any) -> None:
        super().__init__(25)

    def model(self) -> nn.Module:
        model = super().model()
        model.get_submodule("generator").register_module("spare", nn.Linear(1, 1))
        model.get_submodule("generator").forward = lambda noise: noise[:, :2] * 0  # type: ignore[method-assign]
        return model

    def loss(self, model: nn.Module, batch: Any, optimizer: str = "critic") -> torch.Tensor:
        loss = super().loss(model, batch, optimizer)
        used = [p for n, p in model.named_parameters() if "generator" in n and "spare" not in n]
        return loss + sum(parameter.sum() for parameter in used) * 0


def test_a_loss_that_does_not_reach_its_parameters_is_refused() -> None:
    parts = build(_alone(), task_class=Spare, **FLAGS)
    parts.strategy.micro_step(next(parts.loader.epoch(1)))
    with pytest.raises(SettingError) as refused:
        parts.strategy.step(0.1)
    assert str(refused.value).startswith(
        "Spare.model() has the parameters generator.spare.weight, generator.spare.bias, but Spare.loss() gave them no "
        "gradient in the turn of generator; "
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda model: torch.optim.SGD(model.parameters()), "optimizers() returned a SGD, but it maps names to "),
        (
            lambda model: {"a": torch.optim.SGD(model.parameters()), "b": torch.optim.SGD([model.bias])},
            "optimizers() returned a, b, but more than one of them has bias; give every parameter to one",
        ),
        (lambda model: {"a": model}, "optimizers() returned a Linear as a, but a torch.optim.Optimizer is stepped"),
    ],
)
def test_what_is_no_set_of_optimizers_is_refused(make: Any, said: str) -> None:
    with pytest.raises(SettingError) as refused:
        make_task_optimizers(make, nn.Linear(2, 2))
    assert str(refused.value).startswith(said)


def test_the_class_is_checked_before_anything_starts() -> None:
    check_task(Gan)
    with_both = type("Both", (Gan,), {"optimizer": lambda self, model: None})
    without_metrics = type("Bare", (Gan,), {"metrics": Task.metrics})
    plain_loss = type("Plain", (Gan,), {"loss": lambda self, model, batch: None})
    for wrong, said in (
        (with_both, "class Both has optimizers(), but it has optimizer() as well; leave out one of them."),
        (without_metrics, "class Bare has optimizers(), but it has no metrics(), and there is no one loss to "),
        (plain_loss, "Plain.loss(self, model, batch) was written, but it is called as loss(model, batch, optimizer); "),
    ):
        with pytest.raises(SettingError) as refused:
            check_task(wrong)
        assert str(refused.value).startswith(said)


class TwoEnds(Gan):
    """The generator's loss takes one end of the critic, or none; each end has a batch norm."""

    def __init__(self, options: Any) -> None:
        super().__init__(25)
        self.place: int | None = 0

    def model(self) -> nn.Module:
        model = super().model()
        ends = [nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)) for _ in range(2)]
        cast(nn.Sequential, model.get_submodule("critic")).append(nn.ModuleList(ends))
        return model

    def loss(self, model: nn.Module, batch: Any, optimizer: str = "critic") -> torch.Tensor:
        points, noise = (tensor.to(torch.get_default_dtype()) for tensor in batch)
        critic = cast(nn.Sequential, model.get_submodule("critic"))
        score = critic[:-1](model.get_submodule("generator")(noise))
        ends = list(cast(nn.ModuleList, critic[-1]))
        if optimizer == "generator":
            ends = [] if self.place is None else [ends[self.place]]
        for end in ends:
            score = end(score)
        return (score - critic[:-1](points)).abs().mean()


def _different_ends(world: World, places: list[int | None]) -> str:
    parts = build(world, task_class=TwoEnds, sync_batch_norm=True, **FLAGS)
    parts.strategy.task.place = places[world.rank]  # type: ignore[attr-defined]
    with pytest.raises(SettingError) as refused:
        steps(parts, 1)
    return refused.value.why


@pytest.mark.parametrize(("place", "said"), [(1, "the batch norm critic.5.1.1"), (None, "the end of its micro-batch")])
def test_workers_at_different_batch_norms_in_a_later_turn_are_refused(
    run_ranks: Ranks, place: int | None, said: str
) -> None:
    said = f"rank 0 is at the batch norm critic.5.0.1 and rank 1 at {said}"
    assert run_ranks(_different_ends, 2, [0, place]) == [said] * 2


@pytest.mark.gpu
def test_a_gpu_steps_as_a_cpu() -> None:
    trained = []
    for device in (torch.device("cuda", 0), torch.device("cpu")):
        parts = build(World(alone(), device), task_class=_gan, ema=0.9, device=device.type, **FLAGS)  # type: ignore[arg-type]
        parts.strategy.warm_up(parts.loader)
        steps(parts, 5)
        trained.append(whole_state(parts))
    for name, value in trained[1].items():
        if name.endswith(("weight", "bias", "ema", "exp_avg")):
            np.testing.assert_allclose(trained[0][name], value, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("flags", [["--strategy", "fsdp", "--num-gpus", "2"], ["--compile"]])
def test_a_dry_run_refuses_what_training_would(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "examples/gan.py", "--device", "cpu", "--dry-run", *flags]) == 2
    assert "several optimizers" in capsys.readouterr().err
