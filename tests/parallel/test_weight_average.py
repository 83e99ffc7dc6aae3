"""The moving average of the weights is that of one process, under every strategy, and survives a resume."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from stormo.config import options
from stormo.config.layout import resolve_layout
from stormo.config.plan import resolve
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.parallel.weight_average import WeightAverage
from stormo.training.trained_model import read_weights
from tests.sharded_models import Plain, Words
from tests.tiny_run import Parts, arrays, build, save, steps
from tests.tiny_task import Tiny

Ranks = Callable[..., list[Any]]
DECAY = 0.8
FLAGS: dict[str, Any] = {"precision": "fp64", "ema": DECAY, "global_batch_size": 12}


class NoDropout(Tiny):
    """Batch norm alone."""

    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, nn.Sequential)
        model[3] = nn.Identity()
        return model


class Tied(Plain):
    """Two layers with one weight, and a constant that has no average."""

    def model(self) -> nn.Module:
        model = super().model()
        model.insert(3, nn.Linear(16, 16))
        model[3].weight = model[2].weight
        model.register_buffer("mask", torch.full((2,), -torch.inf))
        return model


def _average(parts: Parts) -> WeightAverage:
    assert parts.strategy.average is not None
    return parts.strategy.average


def _of_torch(world: World) -> tuple[Any, Any]:
    """The same steps with torch's own average beside them."""
    parts = build(world, {"num_train": 40, "dropout": 0.0}, **FLAGS)
    theirs = AveragedModel(parts.strategy.module, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    for _ in range(4):
        steps(parts, 1)
        theirs.update_parameters(parts.strategy.module)
    named = dict(theirs.module.state_dict())
    with _average(parts).swapped_in():
        ours = arrays(parts.strategy.module.state_dict().items())
    return {name: ours[name] for name in ours if "num_batches" not in name}, arrays(named.items())


def test_it_is_the_average_of_torch() -> None:
    ours, theirs = _of_torch(World(alone(), torch.device("cpu")))
    assert "1.running_mean" in ours
    for name, value in ours.items():
        assert np.array_equal(value, theirs[name]), name


def _trained(world: World, task: Any, flags: dict[str, Any]) -> tuple[Any, Any]:
    """The chunks of the average that this worker saves, and the weights in its use: swapped in, and back."""
    parts = build(world, task_class=task, **FLAGS, **flags)
    steps(parts, 4)
    average = _average(parts)
    before = [shard.local.detach().clone() for shard in parts.strategy.shards()]
    with average.swapped_in():
        kept = [(s.name, s.whole_shape, s.offset, s.local.detach().numpy().copy(), s.is_saved) for s in _shards(parts)]
        parts.strategy.module.eval()
        with torch.no_grad():
            loss = float(parts.task.loss(parts.strategy.validated, next(parts.loader.first_and_last()).data))
    total = float(world.sum(torch.tensor(loss, dtype=torch.float64))) / world.size
    assert all(torch.equal(old, shard.local) for old, shard in zip(before, parts.strategy.shards(), strict=True))
    return kept, {**arrays(average.buffers.items()), "validated": total}


def _shards(parts: Parts) -> list[Any]:
    return [shard for shard in parts.strategy.shards() if shard.local.requires_grad]


@cache
def _expected(task: Any) -> tuple[Any, Any]:
    return _trained(World(alone(), torch.device("cpu")), task, {})


@pytest.mark.parametrize(
    ("size", "task", "flags"),
    [
        (3, NoDropout, {"strategy": "ddp", "sync_batch_norm": True}),
        (2, Words, {"strategy": "zero1"}),
        (2, Words, {"strategy": "fsdp"}),
        (2, Words, {"strategy": "tensor"}),
        (2, Words, {"strategy": "pipeline"}),
        (2, Plain, {"strategy": "server", "servers": 2}),
    ],
    ids=str,
)
def test_every_strategy_averages_as_one_process(run_ranks: Ranks, size: int, task: Any, flags: dict[str, Any]) -> None:
    (whole, buffers), ranks = _expected(task), run_ranks(_trained, size, task, flags)
    expected = {name: values for name, _, _, values, _ in whole}
    counts = {name: np.zeros(shape) for name, shape, _, _, _ in whole}
    for kept, own in ranks:
        for name, _, offset, values, is_saved in kept:
            place = tuple(slice(at, at + size) for at, size in zip(offset, values.shape, strict=True))
            np.testing.assert_allclose(values, expected[name][place], rtol=1e-10, atol=1e-13)
            counts[name][place] += is_saved
        for name, value in own.items():
            np.testing.assert_allclose(value, buffers[name], rtol=1e-10, atol=1e-13)
    assert all((count == 1).all() for count in counts.values())


def _saved(world: World, folder: str, task: Any, flags: dict[str, Any], num: int) -> tuple[str, Any]:
    parts = build(world, task_class=task, **FLAGS | flags)
    steps(parts, num)
    path = save(parts, folder)
    steps(parts, 2)
    return path, _all(parts)


def _resumed(world: World, path: str, task: Any, flags: dict[str, Any], num: int = 2) -> Any:
    parts = build(world, task_class=task, **FLAGS | flags)
    parts.state.restore(world, Path(path), 0)
    steps(parts, num)
    return _all(parts)


def _all(parts: Parts) -> Any:
    average = _average(parts)
    named = [(f"{part.name} at {part.offset}", tensor) for part, tensor in average.shards]
    return arrays([*named, *average.buffers.items()])


@pytest.mark.parametrize(("task", "flags"), [(Tiny, {}), (Tied, {"strategy": "fsdp"})])
def test_a_resumed_average_has_the_same_bits(run_ranks: Ranks, tmp_path: Path, task: Any, flags: Any) -> None:
    before = run_ranks(_saved, 2, str(tmp_path), task, flags, 3)
    after = run_ranks(_resumed, 2, before[0][0], task, flags)
    for (_, expected), found in zip(before, after, strict=True):
        assert expected.keys() == found.keys()
        assert "mask" not in found
        assert all(np.array_equal(value, found[name]) for name, value in expected.items())


@pytest.mark.parametrize("saved", [{"strategy": "ddp"}, {"strategy": "fsdp"}])
def test_another_mesh_takes_the_average_and_an_export_has_it(run_ranks: Ranks, tmp_path: Path, saved: Any) -> None:
    path = run_ranks(_saved, 2, str(tmp_path), Tied, saved, 3)[0][0]
    step, weights = read_weights(Path(path))
    (found,) = run_ranks(_resumed, 1, path, Tied, {}, 0)
    expected = {name.partition(" ")[0]: value for name, value in found.items()}
    assert step == 3
    assert torch.equal(weights["3.weight"], weights["2.weight"])  # tied
    for name, value in expected.items():
        assert np.array_equal(value, weights[name].numpy()), name
    (plain,) = run_ranks(_raw, 1, path)
    assert not np.array_equal(plain, weights["0.weight"].numpy())


def _raw(world: World, path: str) -> Any:
    """A resume without --ema: the weights themselves."""
    parts = build(world, task_class=Tied, **FLAGS | {"ema": None})
    parts.state.restore(world, Path(path), 0)
    return dict(parts.strategy.module.named_parameters())["0.weight"].detach().numpy().copy()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"strategy": "local", "average_every": "4"}, "--ema 0.9 was set with strategy local, but each worker steps "),
        ({"strategy": "server", "staleness": 2}, "--ema 0.9 was set with --staleness 2, but each worker's gradient "),
    ],
)
def test_it_is_refused_where_no_step_has_the_weights_of_all(flags: dict[str, Any], said: str) -> None:
    config = options.make_config({"num_gpus": 2, "device": "cpu", "ema": 0.9, **flags}, None)
    with pytest.raises(SettingError) as refused:
        resolve(config, resolve_layout(config, ()), Tiny().facts())
    assert str(refused.value).startswith(said)
