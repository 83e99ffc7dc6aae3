"""Sharded models have the weights, the optimizer state and the losses of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.parallel.fsdp import _joined
from stormo.parallel.parameter_shards import chunk_range
from stormo.tasks.task import Task
from stormo.training.validation import Validation
from tests.sharded_models import Images, Plain, Words, assert_close, trained
from tests.tiny_run import build, steps
from tests.tiny_task import Tiny

Ranks = Callable[..., list[Any]]
SGD = {"momentum": 0.9, "nesterov": True}
LIMIT = 1e-12


@cache
def _expected(task: type[Task], flags: tuple[tuple[str, Any], ...]) -> list[dict[str, Any]]:
    return [trained(World(alone(), torch.device("cpu")), task, dict(flags))]


def _check(run_ranks: Ranks, size: int, task: type[Task], flags: dict[str, Any], mesh: dict[str, Any]) -> None:
    expected = _expected(task, tuple(flags.items()))
    assert_close(run_ranks(trained, size, task, {**flags, **mesh}), expected, LIMIT)


@pytest.mark.parametrize(
    ("size", "mesh"),
    [
        (2, {"strategy": "zero1"}),
        (2, {"strategy": "zero2"}),
        (3, {"strategy": "fsdp"}),
        (2, {"strategy": "tensor"}),
        (4, {"mesh": "replicate=2,shard=2", "zero": 1}),
        (4, {"mesh": "replicate=2,shard=2", "zero": 2}),
        (4, {"mesh": "replicate=2,shard=2"}),
        (4, {"mesh": "shard=2,tensor=2"}),
        (4, {"mesh": "replicate=2,tensor=2"}),
    ],
    ids=str,
)
def test_every_mesh_trains_as_one_process(run_ranks: Ranks, size: int, mesh: dict[str, Any]) -> None:
    _check(run_ranks, size, Words, SGD, mesh)


@pytest.mark.parametrize(
    ("optimizer", "mesh"),
    [
        ("lars", {"mesh": "shard=2,tensor=2"}),
        ("lamb", {"mesh": "shard=2,tensor=2"}),
        ("larc", {"mesh": "replicate=2,shard=2", "zero": 2}),
        ("novograd", {"mesh": "replicate=2,shard=2", "zero": 2}),
    ],
    ids=str,
)
def test_norms_are_of_whole_layers(run_ranks: Ranks, optimizer: str, mesh: dict[str, Any]) -> None:
    _check(run_ranks, 4, Words, {"optimizer": optimizer, "base_lr": 0.02}, mesh)


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("zero1", {"accumulate": 2, "gradient_noise_batch": 4}),
        ("zero1", {"offload": True}),
        ("zero2", {"accumulate": 2, "global_batch_size": 7}),
        ("zero2", {"checkpoint_activations": True}),
        ("fsdp", {"accumulate": 2, "shard_modules": "Block"}),
        ("fsdp", {"offload": True, "gradient_noise": 0.01}),
        ("fsdp", {"checkpoint_activations": True, "global_batch_size": 7}),
        ("fsdp", {"gradient_noise_batch": 4}),
    ],
    ids=str,
)
def test_settings_hold_under_sharding(run_ranks: Ranks, strategy: str, more: dict[str, Any]) -> None:
    own = {key: value for key, value in more.items() if key in ("offload", "shard_modules", "checkpoint_activations")}
    shared = {key: value for key, value in more.items() if key not in own}
    _check(run_ranks, 2, Words, {**SGD, **shared}, {"strategy": strategy, **own})


class Conv(Plain):
    """A trunk of convolutions before a classifier."""

    def model(self) -> nn.Module:
        trunk = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten())
        return nn.Sequential(trunk, nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 3))


def test_the_hybrid_trains_as_one_process(run_ranks: Ranks) -> None:
    _check(run_ranks, 3, Conv, {**SGD, "global_batch_size": 10}, {"strategy": "hybrid"})


def _norms(world: World, flags: dict[str, Any]) -> tuple[list[float], list[Any]]:
    parts = build(world, {"dropout": 0.0}, precision="fp64", global_batch_size=16, sync_batch_norm=True, **flags)
    losses = steps(parts, 4)
    return losses, [buffer.numpy().copy() for _, buffer in parts.strategy.named_buffers()]


def test_synchronised_batch_norm_sees_all_samples(run_ranks: Ranks) -> None:
    losses, buffers = _norms(World(alone(), torch.device("cpu")), {"num_gpus": 1})
    for found, statistics in run_ranks(_norms, 2, {"strategy": "fsdp"}):
        np.testing.assert_allclose(found, losses, rtol=1e-12)
        for own, expected in zip(statistics, buffers, strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-12)


def _half(world: World, flags: dict[str, Any], task_class: type[Task] = Tiny) -> list[float]:
    options = {"dropout": 0.0}
    parts = build(world, options, task_class=task_class, precision="bf16", global_batch_size=16, **flags)
    losses = steps(parts, 3)
    validation = Validation(parts.task, parts.task.datasets()[1], 8, world, is_sharded=parts.strategy.is_sharded)
    *_, found = validation.run(parts.strategy.validated, parts.strategy.autocast)
    assert found is not None
    return [*losses, found["loss"]]


@pytest.mark.parametrize(("more", "task"), [({"sync_batch_norm": True}, Tiny), ({}, Images)], ids=["plain", "fused"])
def test_batch_norms_are_sharded_in_half_precision(run_ranks: Ranks, more: dict[str, Any], task: type[Task]) -> None:
    gathered, sharded = (run_ranks(_half, 2, {"strategy": name, **more}, task)[0] for name in ("zero1", "fsdp"))
    np.testing.assert_allclose(sharded, gathered, rtol=0.03)


def _statistics(world: World, strategy: str) -> list[Any]:
    parts = build(world, {}, strategy=strategy, precision="bf16", global_batch_size=16, sync_batch_norm=True)
    steps(parts, 3)
    return [buffer.numpy().copy() for _, buffer in parts.strategy.named_buffers()]


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_batch_norms_that_are_units_of_their_own_stay_synchronised(run_ranks: Ranks, strategy: str) -> None:
    first, second = run_ranks(_statistics, 2, strategy)
    replicas, _ = run_ranks(_statistics, 2, "ddp")
    for own, other, expected in zip(first, second, replicas, strict=True):
        np.testing.assert_array_equal(own, other)
        np.testing.assert_allclose(own, expected, rtol=0.05, atol=0.02)


class OwnSgd(Words):
    """Brings an optimizer by the names of its layers; the positions stay as they are."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        blocks, head = model.get_submodule("blocks"), model.get_submodule("head")
        tokens, norm = model.get_submodule("tokens"), model.get_submodule("norm")
        first = [*blocks.parameters(), *tokens.parameters(), *norm.parameters()]
        return torch.optim.SGD(
            [{"params": first}, {"params": list(head.parameters()), "lr": 0.3}], lr=0.1, momentum=0.9
        )


@pytest.mark.parametrize("mesh", [{"strategy": "fsdp"}, {"strategy": "pipeline"}], ids=str)
def test_a_tasks_own_optimizer_steps_shards(run_ranks: Ranks, mesh: dict[str, Any]) -> None:
    _check(run_ranks, 2, OwnSgd, {}, mesh)


class Tied(Plain):
    """Two layers with one weight, which the model is built with; the last one is apart."""

    def model(self) -> nn.Module:
        width = self.options.width
        model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        model[3].weight = model[1].weight
        return nn.Sequential(model, nn.ReLU(), nn.Linear(width, 3))


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_tied_weights_stay_tied(run_ranks: Ranks, strategy: str) -> None:
    _check(run_ranks, 2, Tied, SGD, {"strategy": strategy})


class Unfit(Words):
    """Brings an optimizer that looks at whole layers."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        return torch.optim.Adafactor(model.parameters(), lr=0.1)


def _refused(world: World, task: type[Task], flags: dict[str, Any]) -> str:
    try:
        parts = build(world, task_class=task, **flags)
        steps(parts, 1)
    except SettingError as error:
        return str(error)
    return "nothing"


def test_an_optimizer_of_whole_layers_is_refused(run_ranks: Ranks) -> None:
    for said in run_ranks(_refused, 2, Unfit, {"strategy": "fsdp"}):
        assert said.startswith("the optimizer is Adafactor, but workers would each step a part of a layer")


class Number(Words):
    """A parameter that is a single number."""

    def model(self) -> nn.Module:
        model = super().model()
        model.temperature = nn.Parameter(torch.tensor(0.5))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1 + model.temperature**2)  # type: ignore[operator]


class NumberAtTheEnd(Plain):
    """A parameter that is a single number, in the last stage of a pipeline alone."""

    def model(self) -> nn.Module:
        model = super().model()
        model[-1].bias = nn.Parameter(torch.tensor(0.5))
        return model


def test_a_parameter_without_dimensions_is_refused_by_all_workers(run_ranks: Ranks) -> None:
    for said in run_ranks(_refused, 2, Number, {"strategy": "fsdp"}):
        assert said.startswith("the parameter temperature is a single number")
    for said in run_ranks(_refused, 4, NumberAtTheEnd, {"mesh": "pipeline=2,shard=2"}):
        assert said.startswith("the parameter 4.bias is a single number")


class Wrong(Plain):
    """A plan that leaves a layer whole between two sharded ones."""

    def tensor_plan(self, model: nn.Module) -> dict[str, str]:
        return {"0": "column", "4": "row"}

    def model(self) -> nn.Module:
        width = self.options.width
        return nn.Sequential(nn.Linear(8, width), nn.PReLU(), nn.Identity(), nn.Identity(), nn.Linear(width, 3))


def _first_gradients(world: World, mesh: dict[str, Any]) -> str:
    parts = build(world, task_class=Wrong, **mesh)
    parts.strategy.micro_step(next(parts.loader.epoch(1)))
    try:
        parts.strategy.check_first_gradients()
    except SettingError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("size", "mesh"), [(2, {"strategy": "tensor"}), (4, {"mesh": "shard=2,tensor=2", "zero": 2})], ids=str
)
def test_a_plan_with_different_gradients_is_refused(run_ranks: Ranks, size: int, mesh: dict[str, Any]) -> None:
    said = run_ranks(_first_gradients, size, mesh)[0]  # of a single number the first one holds all rows
    assert "the gradients of 1.weight, which it leaves whole, differ between workers" in said


def _validated(world: World, flags: dict[str, Any]) -> dict[str, float]:
    parts = build(world, task_class=Words, precision="fp64", global_batch_size=12, **flags)
    steps(parts, 2)
    strategy, task = parts.strategy, parts.task
    validation = Validation(task, task.datasets()[1], 3, world, is_sharded=strategy.is_sharded)
    *_, found = validation.run(strategy.validated, strategy.autocast)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("size", "mesh"),
    [(3, {"strategy": "fsdp"}), (4, {"mesh": "pipeline=2,shard=2"})],
    ids=str,
)
def test_every_validation_sample_counts_once(run_ranks: Ranks, size: int, mesh: dict[str, Any]) -> None:
    expected = _validated(World(alone(), torch.device("cpu")), {})
    for found in run_ranks(_validated, size, mesh):
        assert found == pytest.approx(expected, rel=1e-12)


def test_one_worker_can_be_sharded() -> None:
    world = World(alone(), torch.device("cpu"), needs_group=True)
    try:
        found = [trained(world, Words, {**SGD, "strategy": "fsdp", "num_gpus": 1})]
    finally:
        world.close()
    assert_close(found, _expected(Words, tuple(SGD.items())), LIMIT)


def test_rows_are_cut_as_torch_cuts_them() -> None:
    for size, count in ((10, 4), (3, 4), (8, 2), (0, 3), (1, 1)):
        lengths = [chunk_range(size, index, count) for index in range(count)]
        expected = [len(part) for part in torch.arange(size).chunk(count)] if size else []
        assert [length for _, length in lengths] == expected + [0] * (count - len(expected))
        assert all(start == sum(n for _, n in lengths[:index]) for index, (start, _) in enumerate(lengths))


def _restored_after_warm_up(world: World, mesh: dict[str, Any]) -> list[float]:
    parts = build(world, task_class=Plain, precision="fp64", global_batch_size=12, **mesh)
    parts.strategy.warm_up(parts.loader)
    with torch.no_grad():
        for part in parts.strategy.shards():
            part.local.fill_(0.25)
    parts.strategy.shards_changed()
    return steps(parts, 2)


@pytest.mark.parametrize(
    ("size", "mesh"),
    [(2, {"strategy": "zero2"}), (4, {"mesh": "pipeline=2,shard=2"})],
    ids=str,
)
def test_weights_restored_after_warm_up_are_trained(run_ranks: Ranks, size: int, mesh: dict[str, Any]) -> None:
    # Three rows over two workers, which torch may allocate again in the first forward.
    expected = _restored_after_warm_up(World(alone(), torch.device("cpu")), {})
    for losses in run_ranks(_restored_after_warm_up, size, mesh):
        np.testing.assert_allclose(losses, expected, rtol=1e-11)


def _loss_of_zeros(world: World, strategy: str) -> float:
    parts = build(world, {"dropout": 0.0}, precision="fp64", global_batch_size=16, strategy=strategy)
    batch, model = next(parts.loader.first_and_last()), parts.strategy.validated.eval()
    with torch.no_grad():
        parts.task.loss(model, batch.data)
        for part in parts.strategy.shards():
            part.local.zero_()
        parts.strategy.shards_changed()
        return float(parts.task.loss(model, batch.data))


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_gathered_weights_are_not_used_after_a_restore(run_ranks: Ranks, strategy: str) -> None:
    assert run_ranks(_loss_of_zeros, 2, strategy) == pytest.approx([np.log(3)] * 2)


def test_small_neighbours_are_gathered_together_up_to_the_size_of_the_largest_block() -> None:
    widths = [(2, 4), (4, 4), (4, 16), (16, 16), (16, 16), (16, 2)]
    model = nn.Sequential(*(nn.Linear(*width, bias=False) for width in widths))
    assert _joined(model, list("012345")) == [["0", "1", "2"], ["3"], ["4"], ["5"]]  # 8 + 16 + 64, 256, 256, 32
    assert _joined(model, []) == []
