"""A model that is built without memory, and gives the value of each parameter on demand.

Every worker of a large model holds a part of each parameter; none may be asked to hold the whole model, not even at
the start. So the model is built on torch's meta device while all that would have given its tensors their values is
recorded (`recording`), and each value is computed alone (`tape`): bit for bit that of a model built in memory.
"""

from __future__ import annotations

import gc
import random
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stormo.strategies.disguise import Disguise
from stormo.strategies.recording import Recorder, without_memory
from stormo.strategies.tape import CannotDeferError, Place, Tape


class Deferred:
    """A model whose parameters and buffers are on the meta device, and where their values come from."""

    def __init__(self, module: nn.Module, tape: Tape, origins: dict[str, Place | Tensor]) -> None:
        self.module = module
        self._tape, self._origins = tape, origins

    @property
    def names(self) -> list[str]:
        """The names of all parameters and buffers; one that is tied has several."""
        return list(self._origins)

    def value(self, name: str) -> Tensor:
        """The whole value of one parameter or buffer, in CPU memory."""
        return self.values([name])[name]

    def values(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The same of several at once, which share memory where they are tied."""
        origins = {name: self._origins[name] for name in names}
        places = [origin for origin in origins.values() if isinstance(origin, Place)]
        computed = iter(self._tape.values(places))
        return {name: next(computed) if isinstance(one, Place) else one.detach() for name, one in origins.items()}


def deferred_model(make: Callable[[], nn.Module]) -> Deferred:
    """Call `make` and get its model without memory; torch's generator is left as plain construction leaves it.

    Raises CannotDeferError where that cannot be, after putting the generators back to where they were.
    """
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    tape = Tape()
    try:
        module = _recorded(make, tape)
        origins = {name: _origin(name, tensor, tape) for name, tensor in _named_tensors(module)}
        _stand_alone(module)
        _give_memory_to_others(module, tape)
        return Deferred(module, tape, origins)
    except Exception as error:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        # What the failed attempt has left in caches of the model's code, the next one will find there.
        traceback.clear_frames(error.__traceback__)
        with suppress(Exception):
            _give_memory_to_others(nn.Module(), tape)
        if isinstance(error, CannotDeferError):
            raise
        # It may be the model's own, which building it in memory will show.
        raise CannotDeferError(f"without memory it ended in {type(error).__name__} ({error})") from error


def _recorded(make: Callable[[], nn.Module], tape: Tape) -> nn.Module:
    recorder = Recorder(tape)
    with Disguise(recorder), recorder:
        module = make()
    if recorder.failure is not None:
        raise recorder.failure
    if not isinstance(module, nn.Module):
        raise CannotDeferError(f"it is a {type(module).__name__}, not a torch.nn.Module")
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise CannotDeferError("a part of it is a torch.jit.ScriptModule")
    return module


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _origin(name: str, tensor: Tensor, tape: Tape) -> Place | Tensor:
    if is_lazy(tensor):
        raise CannotDeferError(f"{name} gets its shape only when the model is first used")
    return tape.place(tensor) if tensor.is_meta else tensor


def _stand_alone(module: nn.Module) -> None:
    """Take the memory of tensors that came from outside, and the bases of those that are views; ties stay."""
    stand_ins: dict[Tensor, Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None or (tensor.is_meta and not tensor._is_view()):
                    continue
                if tensor not in stand_ins:
                    like = tensor.data if tensor.is_meta else without_memory(tensor)
                    stand_ins[tensor] = _as(tensor, like)
                tensors[name] = stand_ins[tensor]  # type: ignore[assignment]


def _give_memory_to_others(module: nn.Module, tape: Tape) -> None:
    """Tensors that are neither parameters nor buffers (attributes, caches) are real in a plain model: so here.

    Whoever refers to them must see it, wherever they are kept; so all tensors of this process are looked through.
    """
    named = {id(tensor): name for name, tensor in _named_tensors(module)}
    slots = {tape.place(tensor).slot: name for name, tensor in _named_tensors(module) if tape.knows(tensor)}
    gc.collect()  # those that nobody refers to any more
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor) and id(one) not in named]
    others = [tensor for tensor in tensors if tensor.is_meta and tape.knows(tensor)]
    places = [tape.place(tensor) for tensor in others]
    for place in places:
        if place.slot in slots:
            raise CannotDeferError(f"it keeps a tensor beside {slots[place.slot]} that shares its memory")
    pending = list(zip(others, tape.values(places), strict=True))
    while pending:
        held = []
        for tensor, value in pending:
            try:
                torch.utils.swap_tensors(tensor, _as(tensor, value))
            except RuntimeError:
                held.append((tensor, value))  # by a view of it or a graph, which may be among the others
        if len(held) == len(pending):
            raise CannotDeferError(f"it keeps a tensor of shape {tuple(held[0][0].shape)} that torch refers to as well")
        pending = held


def _as(tensor: Tensor, value: Tensor) -> Tensor:
    """The value with the class, the attributes and the need for a gradient of a tensor."""
    twin = value if type(tensor) is Tensor else value.as_subclass(type(tensor))
    twin.__dict__.update(tensor.__dict__)
    return twin.requires_grad_(tensor.requires_grad and tensor.is_leaf)
