"""The main worker builds the model and the others receive its values: bit for bit those of one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import IterableDataset

from stormo.data.generators import host_states, seed_host
from stormo.distributed.store import PeerFailedError
from stormo.distributed.world import World
from stormo.errors import StormoError
from stormo.parallel.meta_init import materialize, meta_model, sample_batch, to_meta
from stormo.tasks.gpt import Gpt
from stormo.tasks.language_model import Size
from stormo.tasks.task import NoOptions, Task
from tests.tiny_task import Tiny, TinyOptions

Ranks = Callable[..., list[Any]]
CACHE: dict[int, Tensor] = {}


class Tied(nn.Module):
    """A tied weight, a view as a parameter, a parameter with an attribute, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.turned = nn.Parameter(torch.randn(3, 5).T)
        self.turned.is_special = True
        self.register_buffer("noise", torch.randn(6), persistent=False)
        self.register_buffer("wave", torch.randn(3, dtype=torch.cfloat))
        self.register_buffer("nothing", torch.zeros(0, 4, dtype=torch.bool))


class Reads(nn.Linear):
    """It draws elsewhere too, and asks for its own values."""

    def __init__(self) -> None:
        super().__init__(int(torch.randint(3, 9, ()).item()), 2 + random.randrange(2))
        with torch.no_grad():
            self.weight.mul_(float(np.random.rand()) / float(self.weight.abs().max()))


class Keeps(nn.Linear):
    """It keeps tensors that are neither parameters nor buffers: in an attribute, and in a cache."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = torch.rand(3)
        CACHE.setdefault(3, torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.sum() * CACHE[3].sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "reads": Reads,
    "keeps": Keeps,
    "gpt": lambda: Gpt(Size(2, 16, 2, 8), block=8, vocabulary=11),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
}


class Of(Task):
    """A task with one of these models."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(NoOptions())
        self._make = make

    def model(self) -> nn.Module:
        return self._make()


def _digest(states: Any) -> str:
    words, python, (_, keys, *rest) = states
    return repr((words.tolist(), python, keys.tolist(), rest))


def _built(world: World, name: str) -> tuple[dict[str, Any], str, list[list[str]], list[str]]:
    CACHE.clear()
    seed_host(5)
    notices: list[str] = []
    model, values = meta_model(world, Of(MODELS[name]), notices)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    states = _digest(host_states())
    materialize(model, torch.device("cpu"))
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tied = []
    with torch.no_grad():
        for names, value in values:
            held[names[0]].copy_(value)
            tied += [names] if len(names) > 1 else []
    if name == "keeps":
        assert model(torch.ones(1, 4)).isfinite().all()
    return {n: t.detach().numpy().copy() for n, t in held.items()}, states, tied, notices


@pytest.mark.parametrize("name", MODELS)
def test_every_worker_starts_with_the_values_and_random_state_of_one_process(run_ranks: Ranks, name: str) -> None:
    seed_host(5)
    CACHE.clear()
    plain = MODELS[name]()
    states = _digest(host_states())
    expected = {n: t.detach().numpy() for n, t in (*plain.named_parameters(), *plain.named_buffers())}
    results = run_ranks(_built, 3, name)
    for values, there, tied, *_ in results:
        assert values.keys() == expected.keys()
        for key, value in values.items():
            assert value.dtype == expected[key].dtype
            assert np.array_equal(value, expected[key]), key
        assert there == states
        assert tied == ([["embedding.weight", "head.weight"]] if name == "tied" else [])
    # Only where it must be is a model built in the memory of the others.
    assert [len(notices) for *_, notices in results] == ([0, 1, 1] if name in ("reads", "keeps") else [0] * 3)


def test_to_meta_keeps_attributes_of_parameters() -> None:
    model = Tied()
    to_meta(model)
    assert model.turned.is_special
    assert model.head.weight is model.embedding.weight
    assert model.turned.stride() == (1, 5)


class Drawn(nn.Linear):
    """It tells where its weights were drawn."""

    def __init__(self) -> None:
        super().__init__(300, 300)
        self.is_drawn = self.weight.device.type == "cpu"


def _where(world: World) -> bool:
    model, _ = meta_model(world, Of(Drawn), [])
    return bool(model.is_drawn)


def test_only_rank_0_draws_the_model(run_ranks: Ranks) -> None:
    assert run_ranks(_where, 3) == [True, False, False]


def _wrong(world: World) -> tuple[str, bool, int]:
    num_built = 0

    def broken() -> nn.Module:
        nonlocal num_built
        num_built += 1
        return nn.ReLU()

    with pytest.raises(StormoError) as caught:
        meta_model(world, Of(broken), [])
    return str(caught.value), isinstance(caught.value, PeerFailedError), num_built


def test_rank_0_refuses_a_wrong_model_before_others_build_it(run_ranks: Ranks) -> None:
    first, *others = run_ranks(_wrong, 3)
    assert "without parameters" in first[0]
    assert first[1:] == (False, 1)
    assert others == [(first[0], False, 0)] * 2


class Short(Tiny):
    """A stream of three samples."""

    def train_data(self) -> Any:
        return _Stream()


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.ones(8), 0)] * 3)


@pytest.mark.parametrize(("task", "noisy"), [(Tiny, False), (Tiny, True), (Short, False)])
def test_a_sample_batch_has_draws_for_the_samples_that_there_are(task: type[Tiny], noisy: bool) -> None:
    short = task(TinyOptions(num_train=3, jitter=True, noisy=noisy))
    inputs, labels = sample_batch(short, 32, torch.device("cpu"))
    assert (len(inputs), len(labels)) == (3, 3)
