"""Pipelines have the weights of one process with the same micro-batches, for every schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stormo.data.tensors import TensorData
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.tasks.task import Task
from tests.sharded_models import Plain, Words, assert_close, trained
from tests.tiny_run import build, steps
from tests.tiny_task import Tiny, points

Ranks = Callable[..., list[Any]]
SGD = {"momentum": 0.9, "nesterov": True}
LIMIT = 1e-12


def _expected(task: type[Task], flags: dict[str, Any]) -> list[dict[str, Any]]:
    return [trained(World(alone(), torch.device("cpu")), task, flags)]


@pytest.mark.parametrize(
    ("size", "mesh"),
    [
        (2, {"strategy": "naive"}),
        (2, {"strategy": "pipeline", "schedule": "1f1b"}),
        (2, {"strategy": "pipeline", "schedule": "zero-bubble"}),
        (4, {"mesh": "pipeline=2,replicate=2"}),
        (4, {"mesh": "pipeline=2,shard=2", "zero": 1}),
        (4, {"mesh": "pipeline=2,shard=2", "zero": 2, "schedule": "interleaved"}),
        (4, {"mesh": "pipeline=2,shard=2"}),
        (4, {"mesh": "pipeline=2,tensor=2"}),
    ],
    ids=str,
)
def test_every_schedule_trains_as_one_process(run_ranks: Ranks, size: int, mesh: dict[str, Any]) -> None:
    assert_close(run_ranks(trained, size, Words, {**SGD, **mesh}), _expected(Words, SGD), LIMIT)


def test_norms_are_of_whole_layers_over_stages(run_ranks: Ranks) -> None:
    flags = {"optimizer": "lamb", "base_lr": 0.02}
    found = run_ranks(trained, 4, Words, {**flags, "mesh": "pipeline=2,shard=2"})
    assert_close(found, _expected(Words, flags), LIMIT)


@pytest.mark.parametrize(
    "more", [{"accumulate": 2, "checkpoint_activations": True}, {"global_batch_size": 10}], ids=str
)
def test_settings_hold_in_a_pipeline(run_ranks: Ranks, more: dict[str, Any]) -> None:
    flags = {**SGD, **{key: value for key, value in more.items() if key != "checkpoint_activations"}}
    mesh = {"mesh": "pipeline=2,shard=2", **more}
    assert_close(run_ranks(trained, 4, Words, {**flags, **mesh}), _expected(Words, flags), LIMIT)


class Skips(Plain):
    """Not a Sequential: the model is traced, and one tensor goes past a layer."""

    def model(self) -> nn.Module:
        return _Skips(self.options.width)


class _Skips(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(hidden + self.second(hidden).tanh())  # type: ignore[no-any-return]


class Centred(Plain):
    """Takes buffers of its own in forward, before the first layer and after the last."""

    def model(self) -> nn.Module:
        return _Centred(self.options.width)


class _Centred(_Skips):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("mean", torch.full((8,), 0.25))
        self.register_buffer("gain", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - self.mean) * self.gain


def test_buffers_of_the_model_itself_are_where_they_are_used(run_ranks: Ranks) -> None:
    found = run_ranks(trained, 4, Centred, {**SGD, "mesh": "pipeline=2,shard=2"})
    assert_close(found, _expected(Centred, SGD), LIMIT)


class Masked(Plain):
    """Calls the model with a mask of 8 by 8, which a batch of 8 samples must not cut, in one order or the other."""

    num_calls = 0

    def train_data(self) -> TensorData:
        return points(72, seed=0)

    def model(self) -> nn.Module:
        return _Masked(self.options.width)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        named = [("x", inputs.double()), ("mask", torch.ones(8, 8).tril())]
        self.num_calls += 1
        return cross_entropy(model(**dict(named[:: 1 if self.num_calls % 3 else -1])), labels)


class _Masked(_Skips):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward((x[:, None] + mask).tanh().mean(1)) + mask.sum(1)[:3]


@pytest.mark.parametrize("global_batch_size", [8, 16, 64])  # the last batch of 64 has 8 samples, as a micro-batch
def test_a_mask_that_is_as_long_as_the_batch_goes_whole_to_every_micro_batch(
    run_ranks: Ranks, global_batch_size: int
) -> None:
    flags = {**SGD, "global_batch_size": global_batch_size}
    assert_close(run_ranks(trained, 2, Masked, {**flags, "strategy": "pipeline"}), _expected(Masked, flags), LIMIT)


def test_a_plain_model_is_traced(run_ranks: Ranks) -> None:
    assert_close(run_ranks(trained, 2, Skips, {**SGD, "strategy": "pipeline"}), _expected(Skips, SGD), LIMIT)


def _trace(world: World) -> Any:
    parts = build(world, task_class=Words, strategy="pipeline", micro_batches=4, global_batch_size=12)
    steps(parts, 4)
    return parts.strategy.pipeline_trace()


def test_the_trace_has_the_idle_share(run_ranks: Ranks) -> None:
    first, second = run_ranks(_trace, 2)
    assert first == second
    assert (first["schedule"], first["num_stages"], first["micro_batches"]) == ("1f1b", 2, 4)
    assert first["predicted_bubble"] == pytest.approx(1 / 5)
    assert 0 <= first["measured_bubble"] < 1
    kinds = sorted((worker, kind, micro) for worker, _, _, kind, micro, _ in first["spans"])
    assert kinds == sorted((worker, kind, micro) for worker in (0, 1) for kind in "BF" for micro in range(4))


def _refused(world: World, task: type[Task], flags: dict[str, Any]) -> str:
    try:
        steps(build(world, task_class=task, **flags), 1)
    except SettingError as error:
        return str(error)
    return "nothing"


def test_too_many_stages_are_refused_with_the_arithmetic(run_ranks: Ranks) -> None:
    for said in run_ranks(_refused, 3, Words, {"strategy": "pipeline", "schedule": "interleaved", "batch_size": 6}):
        assert "a pipeline of 6 stages was set, but the model has 5 pieces (Words.pieces(model))" in said


def test_micro_batches_of_a_single_sample_are_refused_with_batch_norm(run_ranks: Ranks) -> None:
    for said in run_ranks(_refused, 2, Tiny, {"strategy": "pipeline", "global_batch_size": 6}):
        assert said.startswith(
            "a global batch of 6 was set for 1 group, but the pipeline cuts the 6 samples of each into 6 "
            "micro-batches of a single sample, and batch norm needs two; set fewer --micro-batches than 6"
        )


def _short_step(world: World, flags: dict[str, Any]) -> tuple[float, list[int], str]:
    parts = build(world, {"num_train": 21, "dropout": 0.0}, strategy="pipeline", global_batch_size=16, **flags)
    counts = [parts.strategy._engine.num_micro_batches(size) for size in (16, 6, 5, 1)]  # type: ignore[attr-defined]
    return steps(parts, 2)[1], counts, " ".join(parts.strategy.notices)  # the last step has 5 samples


@pytest.mark.parametrize("flags", [{}, {"ghost_batch_size": 2}], ids=str)
def test_a_short_batch_is_not_cut_into_single_samples_for_batch_norm(run_ranks: Ranks, flags: dict[str, Any]) -> None:
    for loss, counts, said in run_ranks(_short_step, 2, flags):
        assert 0.0 < loss < 5.0
        assert counts == [8, 3, 1, 1]
        assert "takes its statistics over micro-batches, here of 2 samples" in said


class Noisy(Plain):
    """Draws in its loss what the model is called with."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        noise = torch.randn_like(inputs)
        return super().loss(model, (inputs + noise, labels))


def test_a_loss_that_draws_before_the_model_is_refused(run_ranks: Ranks) -> None:
    for said in run_ranks(_refused, 2, Noisy, {"strategy": "pipeline"}):
        assert "Noisy.loss draws random numbers before it calls the model" in said


class Sometimes(Plain):
    """Has a parameter that micro-batches of odd length do not use."""

    find_unused = True

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), _Gate(), nn.Linear(6, 3))


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(6))

    def forward(self, values: Tensor) -> Tensor:
        return values if len(values) % 2 else values * self.shift


def test_micro_batches_without_some_gradients_are_averaged_with_others(run_ranks: Ranks) -> None:
    # Of 7 samples one worker has 3, which leave out the gate, and the other 4.
    flags = {**SGD, "global_batch_size": 7, "clip_norm": None}
    expected = run_ranks(trained, 2, Sometimes, {**flags, "strategy": "ddp"})
    found = run_ranks(trained, 4, Sometimes, {**flags, "mesh": "pipeline=2,replicate=2", "micro_batches": 1})
    assert_close(found, expected, LIMIT)


def test_sharded_weights_and_unused_parameters_are_refused_together(run_ranks: Ranks) -> None:
    for said in run_ranks(_refused, 2, Sometimes, {"strategy": "fsdp"}):
        assert "Sometimes.find_unused is True and the weights are sharded" in said


def test_shard_modules_names_modules_of_the_whole_model(run_ranks: Ranks) -> None:
    mesh = {"mesh": "pipeline=2,shard=2", "shard_modules": "blocks.0"}
    assert_close(run_ranks(trained, 4, Words, {**SGD, **mesh}), _expected(Words, SGD), LIMIT)
