"""The task's model without memory for its weights, and the values that it begins with.

Rank 0 builds the model in host memory, all others on torch's meta device, and the values are broadcast one tensor at a
time: every worker begins with what one process begins with, and has its generators where that one has them.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from stormo.data.batches import move
from stormo.data.generators import host_states, set_host_states
from stormo.data.reading import is_stream
from stormo.data.streaming import read
from stormo.data.tensors import TensorData
from stormo.distributed.world import World
from stormo.errors import StormoError
from stormo.tasks.returned import check_model
from stormo.tasks.task import Task

_Described = list[list[Any]]  # of each tensor: all its names, its type, its shape


class Values:
    """Every parameter and buffer once, whole, on the device of each worker: iterated by all of them together."""

    def __init__(self, world: World, described: _Described, own: Mapping[str, Tensor] | None) -> None:
        self._world, self._described, self._own = world, described, own

    def __iter__(self) -> Iterator[tuple[list[str], Tensor]]:
        """All names of a tensor, and its values."""
        for names, dtype, shape in self._described:
            if self._own is not None:
                tensor = self._own[names[0]].to(self._world.device).contiguous()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._world.device)
            if tensor.numel():
                self._world.broadcast(tensor.view(-1).view(torch.uint8))
            yield names, tensor


def meta_model(world: World, task: Task, notices: list[str]) -> tuple[nn.Module, Values]:
    """The model on meta, and the values that one process would begin with. Every worker calls it."""
    before = host_states()
    built: list[nn.Module] = []
    described, is_plain, states = world.from_rank_0(lambda: _build_in_memory(task, built))
    own = None
    if world.is_main:
        model, own = built[0], dict(_named_tensors(built[0]))
        to_meta(model)
    else:
        found = _try_on_meta(task, described) if is_plain else None
        if found is None:
            set_host_states(before)
            found = _built(task)
            if _describe(found) != described:
                raise StormoError(f"{type(task).__name__}.model() returned another model on rank {world.rank}.")
            to_meta(found)
            notices.append("The model is built in the host memory of every worker, as it keeps or reads values there.")
        model = found
        _set_states(states)
    return model, Values(world, described, own)


def _build_in_memory(task: Task, built: list[nn.Module]) -> list[Any]:
    """Build the model; tell how it looks, whether all its tensors are parameters and buffers, and the generators."""
    older = _tensors()
    built.append(_built(task))
    gc.collect()
    known = {id(tensor) for tensor in (*older, *built[0].parameters(), *built[0].buffers())}
    # Any other tensor, in an attribute or a cache, would be left without values on the meta device.
    is_plain = all(id(tensor) in known for tensor in _tensors())
    words, python, (kind, keys, *rest) = host_states()
    return [_describe(built[0]), is_plain, [words.tolist(), python, [kind, keys.tolist(), *rest]]]


def _built(task: Task) -> nn.Module:
    return check_model(task, task.model())


def _try_on_meta(task: Task, described: _Described) -> nn.Module | None:
    """The model on meta, or None where it cannot be built so or comes out another one."""
    try:
        with torch.device("meta"):
            model = check_model(task, task.model(), may_be_meta=True)
    except Exception:  # it asks for values, say; whatever it is, building it in memory shows it
        return None
    if _describe(model) != described:
        return None
    to_meta(model)  # what was made on another device by name
    return model


def _tensors() -> list[Tensor]:
    """All tensors of this process that Python knows."""
    return [one for one in gc.get_objects() if issubclass(type(one), Tensor)]


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        yield name, tensor.detach()


def _describe(model: nn.Module) -> _Described:
    found: dict[int, list[Any]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        found.setdefault(id(tensor), [[], str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])[0].append(name)
    return list(found.values())


def _set_states(states: list[Any]) -> None:
    words, (version, python, gauss), (kind, keys, *rest) = states
    torch.set_rng_state(torch.tensor(words, dtype=torch.uint8))
    random.setstate((version, tuple(python), gauss))
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))


def to_meta(model: nn.Module) -> None:
    """Move a model to meta; unlike torch's `to`, it leaves tied what is tied, and attributes of parameters there."""
    kept = {id(tensor): tensor.__dict__ for tensor in (*model.parameters(), *model.buffers())}
    for tensor, old in _replaced(model, lambda: model.to("meta")):
        tensor.__dict__.update(kept[old])


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a model on meta memory for its values; unlike torch's `to_empty`, it leaves tied what is tied."""
    _replaced(model, lambda: model.to_empty(device=device))


def _replaced(model: nn.Module, replace: Callable[[], object]) -> list[tuple[Tensor, int]]:
    """Replace the tensors of a model, of which tied ones stay tied: the new ones, and the old ones' identities."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((table, name))
    replace()
    for (first, first_name), *others in places.values():
        for table, name in others:
            table[name] = first[first_name]
    return [(first[name], old) for old, ((first, name), *_) in places.items()]


def sample_batch(task: Task, num_samples: int, device: torch.device) -> Any:
    """The first samples, collated and augmented as in training; fewer where there are fewer."""
    data = task.datasets()[0]
    if isinstance(data, TensorData):
        batch: Any = tuple(tensor[:num_samples] for tensor in data.tensors)
    else:
        some = itertools.islice(iter(data), num_samples) if is_stream(data) else _first(data, num_samples)
        batch = task.collate(list(some))
    batch = move(batch, device)
    if task.num_draws:
        batch = task.augment(batch, torch.full((num_samples, task.num_draws), 0.5, device=device))
    return batch


def _first(data: Any, num_samples: int) -> list[Any]:
    return read(data, list(range(min(num_samples, len(data)))))
