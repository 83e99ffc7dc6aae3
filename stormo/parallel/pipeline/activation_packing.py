"""What one stage sends to the next: any nested value, as a flat list of dense float tensors.

torch's stages send tensors of fixed shapes and expect a gradient for each. So every tensor travels as a wire tensor:
contiguous, of a float type (integers by their bits), with a gradient that is zero where there is none. Everything else
in the value must be the same in every micro-batch. The ranks exchange the structure as JSON, so that nothing that
arrives from the network is executed.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from stormo.errors import SettingError
from stormo.parallel.pytree import SUPPORTED_NODES, tree_flatten, tree_leaves, tree_map, tree_tensors, tree_unflatten

# By their bits; smaller ones by value, which fp16 has exactly.
_BITS = {torch.int64: torch.float64, torch.int32: torch.float32, torch.int16: torch.float16}
_VALUES = (torch.bool, torch.uint8, torch.int8)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_JSON = (bool, int, float, str, type(None))
_CONSTANTS = (*_JSON, bytes, torch.Size, torch.dtype, torch.device, slice, type(Ellipsis))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Stands for one tensor in a nested value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]  # its dimensions by their strides, so that channels_last stays so

    @property
    def wire(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of the wire tensor."""
        shape = tuple(self.shape[dim] for dim in self.order)
        if self.dtype in _FLOATS:
            return shape, self.dtype
        return shape, torch.float16 if self.dtype in _VALUES else _BITS[self.dtype]

    def to_wire(self, tensor: Tensor) -> Tensor:
        """The wire tensor, without a gradient."""
        dense = tensor.detach().permute(self.order).contiguous()
        if self.dtype in _BITS:
            return dense.view(_BITS[self.dtype])
        return dense.to(torch.float16) if self.dtype in _VALUES else dense

    def from_wire(self, wire: Tensor) -> Tensor:
        """The tensor that a wire tensor stands for."""
        value = wire.detach()
        if self.dtype in _BITS:
            value = value.view(self.dtype)
        elif self.dtype in _VALUES:
            value = value.to(self.dtype)
        return value.permute(self._inverse)

    def zeros(self, device: torch.device) -> Tensor:
        """A tensor of zeros like it."""
        return torch.zeros(self.wire[0], dtype=self.dtype, device=device).permute(self._inverse)

    @property
    def _inverse(self) -> list[int]:
        return sorted(range(len(self.order)), key=self.order.__getitem__)


class ModelCall:
    """The arguments of a call of the model: which tensors are cut into micro-batches, and a spec for each of them."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], example: ModelCall | None = None) -> None:
        """`example` is a call with another number of samples: a mask may be as long as one of them, not as both."""
        known = () if example is None else example._names
        self._names: list[str] = [
            *(name for name in known if name in kwargs),
            *(name for name in kwargs if name not in known),
        ]
        leaves, self._tree = tree_flatten((tuple(args), {name: kwargs[name] for name in self._names}))
        self._lengths = [len(leaf) if isinstance(leaf, Tensor) and leaf.ndim else None for leaf in leaves]
        self.num_samples = next((length for length in self._lengths if length is not None), 0)
        if not self.num_samples:
            raise SettingError(
                "the model was called in a pipeline",
                "none of its arguments is a tensor with samples in it",
                "call it with a tensor that has one row for each sample",
            )
        are_cut = [length == self.num_samples for length in self._lengths]
        if example is not None and example._tree == self._tree:
            pairs = zip(are_cut, example._lengths, strict=True)
            are_cut = [is_cut and length in (None, example.num_samples) for is_cut, length in pairs]
        self.tensors = [leaf for leaf, is_cut in zip(leaves, are_cut, strict=True) if is_cut]
        specs = [
            TensorSpec(tuple(leaf.shape), leaf.dtype, ()) if is_cut else leaf
            for leaf, is_cut in zip(leaves, are_cut, strict=True)
        ]
        self.specs = tree_unflatten(specs, self._tree)
        # Everything that a shape between stages may depend on.
        shapes = tree_map(lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf, self.specs)
        self.key = repr((shapes, [tensor.stride() for tensor in self.tensors]))


def specs_of(value: Any, where: str) -> Any:
    """The value with a spec in place of every tensor."""

    def spec_of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.dtype not in (*_FLOATS, *_VALUES, *_BITS):
                raise SettingError(
                    f"a tensor of type {leaf.dtype} is in {where}",
                    "it cannot be sent from one worker to the next",
                    "convert it to a float or an integer type, or cut the model elsewhere",
                )
            strides = leaf.stride()
            order = sorted(range(leaf.ndim), key=lambda dim: (-strides[dim], dim))
            return TensorSpec(tuple(leaf.shape), leaf.dtype, tuple(order))
        if not isinstance(leaf, _CONSTANTS):
            raise SettingError(
                f"a {type(leaf).__name__} is in {where}",
                "only tensors and plain values can be sent from one worker to the next",
                "cut the model elsewhere with the task's pieces(model)",
            )
        return leaf

    return tree_map(spec_of, value)


def list_specs(specs: Any) -> list[TensorSpec]:
    """All specs in their order."""
    return [leaf for leaf in tree_leaves(specs) if isinstance(leaf, TensorSpec)]


def fill(specs: Any, tensors: Sequence[Tensor]) -> Any:
    """The value with these tensors in place of its specs."""
    remaining = iter(tensors)
    return tree_map(lambda leaf: next(remaining) if isinstance(leaf, TensorSpec) else leaf, specs)


def pack(specs: Any, value: Any, anchor: Tensor, where: str) -> tuple[Tensor, ...]:
    """The wire tensors of a value, which must match its specs."""
    found = specs_of(value, where)
    if _without_order(found) != _without_order(specs):
        raise SettingError(
            f"{where} was {_without_order(specs)}",
            f"in another micro-batch of the same shape it is {_without_order(found)}",
            "cut the model elsewhere with the task's pieces(model)",
        )
    pairs = zip(list_specs(specs), tree_tensors(value), strict=True)
    return tuple(_Pack.apply(spec, anchor, tensor) for spec, tensor in pairs)  # type: ignore[no-untyped-call]


def unpack(specs: Any, wires: Sequence[Tensor]) -> tuple[Tensor, Any]:
    """The value of wire tensors, and an autograd anchor: an empty tensor that depends on all of them.

    Whatever the stage sends depends on the anchor, so every wire tensor gets a gradient, also one that is not used.
    """
    anchor, *tensors = _Unpack.apply(list_specs(specs), *wires)  # type: ignore[no-untyped-call]
    return anchor, fill(specs, tensors)


def _without_order(specs: Any) -> Any:
    return tree_map(lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, TensorSpec) else leaf, specs)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory as a new tensor for autograd, which the next operation may change in place."""
    found = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return found.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


class _Unpack(Function):
    @staticmethod
    def forward(ctx: Any, specs: Sequence[TensorSpec], *wires: Tensor) -> tuple[Tensor, ...]:
        ctx.specs, ctx.device = specs, wires[0].device
        ctx.set_materialize_grads(False)
        tensors = tuple(_alias(spec.from_wire(wire)) for spec, wire in zip(specs, wires, strict=True))
        ctx.mark_non_differentiable(*(tensor for tensor in tensors if not tensor.is_floating_point()))
        return torch.zeros(0, device=ctx.device), *tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        found: list[Tensor | None] = [None]
        for spec, gradient in zip(ctx.specs, gradients[1:], strict=True):
            shape, dtype = spec.wire
            is_none = gradient is None or spec.dtype not in _FLOATS
            found.append(torch.zeros(shape, dtype=dtype, device=ctx.device) if is_none else spec.to_wire(gradient))
        return tuple(found)


class _Pack(Function):
    @staticmethod
    def forward(ctx: Any, spec: TensorSpec, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.spec = spec
        return _alias(spec.to_wire(tensor))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        needs_gradient = ctx.needs_input_grad[2] and ctx.spec.dtype in _FLOATS
        gradient = ctx.spec.from_wire(gradients[0]) if needs_gradient else None
        return None, torch.zeros(0, device=gradients[0].device), gradient


# Specs as JSON


def specs_to_json(specs: Any) -> list[Any]:
    """Specs and plain values, in any container that torch flattens. Of a class only the name is sent."""
    kind = type(specs)
    if kind in _JSON:
        return ["value", specs]
    if kind in _LEAVES:
        name, encode, _ = _LEAVES[kind]
        return [name, encode(specs)]
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class(name) is not kind:
        raise SettingError(
            f"a {kind.__name__} is in what one stage sends to the next",
            "other workers cannot find a class of that name among the containers that torch flattens",
            "send tensors in tuples, lists and dicts, or cut the model elsewhere with the task's pieces(model)",
        )
    children, context = (specs, None) if _is_named_tuple(kind) else SUPPORTED_NODES[kind].flatten_fn(specs)
    return ["node", name, _context_to_json(context), [specs_to_json(child) for child in children]]


def _context_to_json(context: Any) -> list[Any]:
    """What torch needs to build a container again, such as the keys of a dict."""
    if type(context) in (list, tuple):
        return [type(context).__name__, [_context_to_json(part) for part in context]]
    return specs_to_json(context)


def specs_from_json(data: Any) -> Any:
    """What `specs_to_json` was given; raises ValueError or TypeError for anything else."""
    match data:
        case ["value", value] if type(value) in _JSON:
            return value
        case ["list" | "tuple" as kind, [*parts]]:
            return (list if kind == "list" else tuple)(specs_from_json(part) for part in parts)
        case ["node", str(name), context, [*parts]]:
            return _container(name, specs_from_json(context), [specs_from_json(part) for part in parts])
        case [str(name), leaf] if name in _DECODERS:
            return _DECODERS[name](leaf)
    raise ValueError(f"no specs of a stage: {str(data)[:200]}")


def _container(name: str, context: Any, children: list[Any]) -> Any:
    kind = _class(name)
    if kind is None:
        raise ValueError(f"{name[:200]} is no container that torch flattens")
    return kind(*children) if _is_named_tuple(kind) else SUPPORTED_NODES[kind].unflatten_fn(children, context)


def _class(name: str) -> Any:
    """The class of this name, if it is loaded and torch flattens it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    is_known = isinstance(found, type) and (found in SUPPORTED_NODES or _is_named_tuple(found))
    return found if is_known and found is not namedtuple else None


def _is_named_tuple(kind: Any) -> bool:
    return issubclass(kind, tuple) and kind.__bases__ == (tuple,) and hasattr(kind, "_fields")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype: {name[:200]}")
    return found


def _spec(data: Any) -> TensorSpec:
    shape, dtype, order = data
    are_sizes = all(type(size) is int and 0 <= size < 2**62 for size in shape)
    if not are_sizes or sorted(order) != [*range(len(shape))]:
        raise ValueError(f"no spec of a tensor: {str(data)[:200]}")
    return TensorSpec(tuple(shape), _dtype(dtype), tuple(order))


# Of each kind of leaf: its name, its encoder and its decoder.
_LEAVES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    TensorSpec: ("tensor", lambda spec: [list(spec.shape), str(spec.dtype), list(spec.order)], _spec),
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    torch.Size: ("size", list, torch.Size),
    torch.dtype: ("dtype", str, _dtype),
    torch.device: ("device", str, torch.device),
    slice: (
        "slice",
        lambda cut: [specs_to_json(part) for part in (cut.start, cut.stop, cut.step)],
        lambda parts: slice(*map(specs_from_json, parts)),
    ),
    type(Ellipsis): ("ellipsis", lambda _: None, lambda _: Ellipsis),
}
_DECODERS = {name: decode for name, _, decode in _LEAVES.values()}
