"""The task's model on the meta device, and its initial values; memory for a model, for good or for a trial run.

Rank 0 builds the model in host memory and all others on the meta device. Rank 0 then broadcasts one tensor at a time.
So every worker starts with the values and the random state of a single process.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from stormo.data.batches import move
from stormo.data.generators import host_states, set_host_states
from stormo.data.reading import is_stream, read
from stormo.data.tensors import TensorData
from stormo.distributed.world import World
from stormo.errors import StormoError
from stormo.tasks.returned import check_model, make_model
from stormo.tasks.task import Task

_Described = list[list[Any]]  # of each tensor: all its names, its type, its shape
_TRIAL_STD = 0.02  # about the size of a weight: neither denormal nor overflowing


Values = Iterable[tuple[list[str], Tensor]]  # all names of a tensor, and its values


def meta_model(world: World, task: Task, notices: list[str]) -> tuple[nn.Module, Values]:
    """The model on meta, and the values that a single process would start with. All workers call it.

    The values are those of every parameter and buffer, whole, one at a time. All workers iterate together.
    """
    before = host_states()
    built: list[nn.Module] = []
    described, is_plain, states = world.from_rank_0(lambda: _build_in_memory(task, built))
    own = None
    if world.is_main:
        model, own = built[0], {name: tensor.detach() for name, tensor in _named_tensors(built[0])}
        to_meta(model)
    else:
        found = _try_on_meta(task, described) if is_plain else None
        if found is None:
            set_host_states(before)
            found = check_model(task, task.model())
            if _describe(found) != described:
                raise StormoError(f"{type(task).__name__}.model() returned another model on rank {world.rank}.")
            to_meta(found)
            notices.append("The model is built in the host memory of every worker, as it keeps or reads values there.")
        model = found
        _set_states(states)
    return model, _values(world, described, own)


def _values(world: World, described: _Described, own: Mapping[str, Tensor] | None) -> Values:
    for names, dtype, shape in described:
        if own is not None:
            tensor = own[names[0]].to(world.device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
        if tensor.numel():
            world.broadcast(tensor.view(-1).view(torch.uint8))
        yield names, tensor


def _build_in_memory(task: Task, built: list[nn.Module]) -> list[Any]:
    """Build the model: its names and shapes, whether it has no other tensors, and the random state afterwards."""
    older = _tensors()
    built.append(make_model(task))
    gc.collect()
    known = {id(tensor) for tensor in (*older, *built[0].parameters(), *built[0].buffers())}
    # Any other tensor, in an attribute or a cache, would have no values on the meta device.
    is_plain = all(id(tensor) in known for tensor in _tensors())
    torch_state, python, (kind, keys, *rest) = host_states()
    return [_describe(built[0]), is_plain, [torch_state.tolist(), python, [kind, keys.tolist(), *rest]]]


def _try_on_meta(task: Task, described: _Described) -> nn.Module | None:
    """The model on meta; None if it cannot be built there or differs from rank 0's."""
    try:
        with torch.device("meta"):
            model = check_model(task, task.model(), may_be_meta=True)
    except Exception:  # building it in memory shows any other error
        return None
    if _describe(model) != described:
        return None
    to_meta(model)  # what was made on another device by name
    return model


def _tensors() -> list[Tensor]:
    """All tensors that Python knows."""
    return [one for one in gc.get_objects() if issubclass(type(one), Tensor)]


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers under all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _describe(model: nn.Module) -> _Described:
    found: dict[int, list[Any]] = {}
    for name, tensor in _named_tensors(model):
        found.setdefault(id(tensor), [[], str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])[0].append(name)
    return list(found.values())


def _set_states(states: list[Any]) -> None:
    torch_state, (version, python, gauss), (kind, keys, *rest) = states
    torch.set_rng_state(torch.tensor(torch_state, dtype=torch.uint8))
    random.setstate((version, tuple(python), gauss))
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))


def direct_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module without those of its children."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def to_meta(model: nn.Module) -> None:
    """Move a model to meta. Unlike torch's `to`, it keeps ties and the attributes of parameters."""
    attributes = {id(tensor): tensor.__dict__ for _, tensor in _named_tensors(model)}
    for tensor, old in _replaced(model, lambda: model.to("meta")):
        tensor.__dict__.update(attributes[old])


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a model on meta memory for its values. Unlike torch's `to_empty`, it keeps ties."""
    _replaced(model, lambda: model.to_empty(device=device))


def _replaced(model: nn.Module, replace: Callable[[], object]) -> list[tuple[Tensor, int]]:
    """Run `replace`, which replaces the model's tensors, and tie them again. Returns (new tensor, id of the old)."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, tensor in direct_tensors(module):
            owners.setdefault(id(tensor), []).append((module, name))
    replace()
    for (first, first_name), *others in owners.values():
        for module, name in others:
            setattr(module, name, getattr(first, first_name))
    return [(getattr(first, name), old) for old, ((first, name), *_) in owners.items()]


@contextmanager
def temporary_weights(
    modules: Iterable[nn.Module], device: torch.device, direct: Iterable[tuple[nn.Module, str]] = ()
) -> Iterator[None]:
    """Inside it, tensors of these modules that are on meta have random values on a device.

    `direct` names single parameters and buffers of other modules.
    """
    owners = [(module, name, getattr(module, name)) for module, name in direct]
    for module in {id(child): child for root in modules for child in root.modules()}.values():
        owners += [(module, name, tensor) for name, tensor in direct_tensors(module)]
    values: dict[int, Tensor] = {}
    for module, name, tensor in owners:
        if tensor.is_meta:
            if id(tensor) not in values:
                values[id(tensor)] = _random_like(tensor, device)
            setattr(module, name, values[id(tensor)])
    try:
        yield
    finally:
        for module, name, tensor in owners:
            setattr(module, name, tensor)


def _random_like(tensor: Tensor, device: torch.device) -> Tensor:
    value = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    if value.is_floating_point():
        value.normal_(std=_TRIAL_STD).abs_()  # one of them may be a variance, under a root
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


@contextmanager
def no_side_effects(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Afterwards buffers, gradients, the random state and the training flags are what they were."""
    listed = list(modules)
    buffers = [(buffer, buffer.clone()) for module in listed for buffer in module.buffers()]
    gradients = [(parameter, parameter.grad) for module in listed for parameter in module.parameters()]
    flags = [(child, child.training) for module in listed for child in module.modules()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for child, was_training in flags:
            child.training = was_training
        # A weight that was cast without gradients would be taken from the cache, and get none.
        torch.clear_autocast_cache()


def sample_batch(task: Task, num_samples: int, device: torch.device) -> Any:
    """The first samples, collated and augmented as in training; fewer where there are fewer."""
    data: Any = task.datasets()[0]
    batch: Any
    if isinstance(data, TensorData):
        num_found, batch = min(num_samples, len(data)), tuple(tensor[:num_samples] for tensor in data.tensors)
    else:
        if is_stream(data):
            samples = list(itertools.islice(data, num_samples))
        else:
            samples = read(data, list(range(min(num_samples, len(data)))))
        num_found, batch = len(samples), task.collate(samples)
    batch = move(batch, device)
    if task.num_draws:
        batch = task.augment(batch, torch.full((num_found, task.num_draws), 0.5, device=device))
    return batch
