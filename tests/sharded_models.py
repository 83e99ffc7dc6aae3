"""A small GPT and other tasks for tests of sharded models; full tensors put together from the shards of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stormo.data import TensorData
from stormo.distributed.world import World
from stormo.tasks.gpt import Gpt
from stormo.tasks.language_model import LanguageModel, Size
from stormo.tasks.task import Task
from stormo.tasks.wide_resnet import Block
from tests.tiny_run import Parts, build, steps
from tests.tiny_task import Tiny, TinyOptions

VOCABULARY, LENGTH = 12, 6


class Words(Task):
    """Predicts the next of twelve words."""

    name = "words"
    Options = TinyOptions

    def model(self) -> nn.Module:
        return Gpt(Size(3, 16, 4, LENGTH), block=LENGTH, vocabulary=VOCABULARY)

    def pieces(self, model: nn.Module) -> Sequence[Any] | None:
        return LanguageModel.pieces(self, model)  # type: ignore[arg-type]

    def train_data(self) -> TensorData:
        return _words(40, 0)

    def validation_data(self) -> TensorData:
        return _words(13, 1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        (words,) = batch
        return cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        return {"loss": self.loss(model, batch) * len(batch[0])}


def _words(num_samples: int, seed: int) -> TensorData:
    generator = torch.Generator().manual_seed(seed)
    return TensorData(torch.randint(VOCABULARY, (num_samples, LENGTH + 1), generator=generator))


class Plain(Tiny):
    """The tiny task without what a pipeline or sharding would change: batch norm and dropout."""

    def model(self) -> nn.Module:
        width = self.options.width
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


class Images(Tiny):
    """Two blocks of the reference network on made-up images."""

    def model(self) -> nn.Module:
        return nn.Sequential(Block(1, 4, 0.0), Block(4, 4, 0.0), nn.AvgPool2d(7), nn.Flatten(), nn.Linear(4, 10))

    def train_data(self) -> TensorData:
        return _images(48)

    def validation_data(self) -> TensorData:
        return _images(8)


def _images(num_samples: int) -> TensorData:
    images = torch.randn(num_samples, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    return TensorData(images, torch.arange(num_samples) % 10)


def trained(world: World, task: type[Task], flags: Mapping[str, Any], num_steps: int = 4) -> dict[str, Any]:
    """Train some steps in double precision; the losses, and every chunk that this worker would save."""
    recipe = {"clip_norm": 0.5, "weight_decay": 0.05, "precision": "fp64", "global_batch_size": 12}
    parts = build(world, task_class=task, **{**recipe, **flags})
    losses = steps(parts, num_steps)
    return {"losses": losses, "chunks": chunks(parts), "notices": parts.strategy.notices}


def chunks(parts: Parts) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Any]]:
    """Name, whole shape, offset and values of what this worker saves, with the optimizer's state of it."""
    found = []
    for shard in parts.strategy.shards():
        if shard.is_saved:
            found.append((shard.name, shard.whole_shape, shard.offset, _array(shard.local)))
            for key, value in parts.strategy.optimizer.state.get(shard.local, {}).items():
                if isinstance(value, Tensor) and value.shape == shard.local.shape and value.ndim:
                    found.append((f"{shard.name}|{key}", shard.whole_shape, shard.offset, _array(value)))
    return found


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().numpy().copy()


def whole(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whole tensors from the chunks of all workers; each element is there exactly once."""
    found: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    for result in results:
        for name, shape, offset, values in result["chunks"]:
            place = tuple(slice(start, start + size) for start, size in zip(offset, values.shape, strict=True))
            found.setdefault(name, np.full(shape, np.nan))[place] = values
            counts.setdefault(name, np.zeros(shape))[place] += 1
    assert all((count == 1).all() for count in counts.values())
    return found


def assert_close(results: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]], limit: float) -> None:
    """The same tensors, to so many digits of the largest value of each, and the same losses on all workers."""
    ours, theirs = whole(results), whole(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        difference = np.abs(ours[name] - value).max() / max(np.abs(value).max(), 1e-300)
        assert difference <= limit, f"{name} differs by {difference:.1e}"
    for result in results:
        np.testing.assert_allclose(result["losses"], expected[0]["losses"], rtol=1e-11)
