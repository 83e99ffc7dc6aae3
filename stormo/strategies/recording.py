"""Records how a model's tensors come to their values, without giving them memory.

`Recorder` sees every tensor operation: it runs it on the meta device for the shapes and writes it on the tape. Random
operations are also run for real on memory that is freed at once, which moves the generator as it would have moved.
Tensors that come from outside (numpy, a file) stay real, and are copied onto the tape where the model takes them over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from stormo.strategies.tape import CannotDeferError, OwnGenerator, Place, Step, Tape, leaves, mapped

_META, _CPU = torch.device("meta"), torch.device("cpu")
_RANDOM = torch.Tag.nondeterministic_seeded
# What these write does not depend on what was there before.
_RANDOM_FILLS = ("normal_", "uniform_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_")
_FILLS = {f"aten::{name}" for name in (*_RANDOM_FILLS, "bernoulli_", "zero_", "fill_", "copy_")}


class Recorder(TorchDispatchMode):
    """Meanwhile tensors are made on the meta device, and what is done to them is written on the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.failure: CannotDeferError | None = None  # the model's own code may catch the error
        self._frozen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            try:
                return self._run(func, args, kwargs or {})
            except CannotDeferError as error:
                self.failure = self.failure or error
                raise

    def real(self, tree: Any) -> Any:
        """The same nesting with tensors that hold their values; writing to them does not change the tape."""
        deferred = [tensor for tensor in leaves(tree, Tensor) if tensor.is_meta]
        places = [self.tape.place(tensor) for tensor in deferred]
        with _disable_current_modes():
            values = self.tape.values(places) if places else []
            for place, value in zip(places, values, strict=True):
                self.tape.keep(place, value)
        found = {id(tensor): value for tensor, value in zip(deferred, values, strict=True)}
        return mapped(tree, lambda leaf: _CPU if isinstance(leaf, torch.device) else found.get(id(leaf), leaf))

    def freeze(self, tensor: Tensor) -> None:
        """From now on nothing may write to the tensor's storage: somebody has its values outside of torch."""
        self._frozen.add(self.tape.place(tensor).slot)

    def lift(self, tensor: Tensor) -> Tensor:
        """A tensor of the tape that begins with the values of a real one."""
        with _disable_current_modes():
            like, value = without_memory(tensor), tensor.detach().clone()
        place = self.tape.add(like)
        slots = frozenset({place.slot})
        self.tape.record(Step(operation=torch.clone, args=(value,), writes=slots, renews=slots, results=(place,)))
        return like

    def _run(self, func: OpOverload[..., Any], args: Any, kwargs: Any) -> Any:
        tensors = list(leaves((args, kwargs), Tensor))
        _check(func, tensors, args, kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            # What numpy's or a file's memory is, stays that.
            is_own = not tensors[0].is_meta and tensors[0].untyped_storage().resizable()
            return self.lift(tensors[0]) if is_own and tensors[0].numel() else tensors[0]
        written = list(_written(func, args, kwargs))
        is_real = bool(tensors) and not any(tensor.is_meta for tensor in tensors)
        if is_real or not all(tensor.is_meta for tensor in written) or not _gives_tensors(func):
            args, kwargs = self.real((args, kwargs))
            return func(*args, **kwargs)
        return self._record(func, args, kwargs, written)

    def _record(self, func: OpOverload[..., Any], args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        state = _generator(args, kwargs).get_state() if _RANDOM in func.tags else None
        step_args, step_kwargs = mapped((args, kwargs), self._as_recorded)  # before the operation changes any
        places = [self.tape.place(tensor) for tensor in written]
        if any(place.slot in self._frozen for place in places):
            raise CannotDeferError("it changes a tensor after numpy was given the values")
        if state is None:
            returned = self._without_values(func, args, kwargs)
        elif func._schema.name in _FILLS and len(list(leaves((args, kwargs), Tensor))) == 1:
            place = places[0]
            scratch = torch.empty_strided(place.size, place.stride, dtype=place.dtype)
            func(scratch, *args[1:], **kwargs)
            returned = args[0]
        else:
            returned = self._with_values(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            return returned
        outputs = list(leaves(returned, Tensor))
        if not written and outputs and all(output.is_cpu for output in outputs):
            return returned
        results = tuple(None if self.tape.knows(output) else self.tape.add(output) for output in outputs)
        fresh = {place.slot for place in results if place is not None}
        if not fresh and not written:
            return returned  # a view
        renews = fresh | (_renewed(places[0], step_args) if func._schema.name in _FILLS else set())
        self.tape.record(
            Step(
                operation=func,
                args=step_args,
                kwargs=step_kwargs,
                writes=frozenset(fresh | {place.slot for place in places}),
                renews=frozenset(renews),
                results=results,
                default_dtype=torch.get_default_dtype(),
                random_state=state,
            )
        )
        return returned

    def _as_recorded(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.tape.place(leaf) if leaf.is_meta else leaf.detach().clone()
        if isinstance(leaf, torch.Generator):
            return OwnGenerator()
        return _CPU if isinstance(leaf, torch.device) else leaf

    def _without_values(self, func: OpOverload[..., Any], args: Any, kwargs: Any) -> Any:
        """What the operation returns, on the meta device where it can run there."""

        def on_meta(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                return without_memory(leaf)
            return _META if isinstance(leaf, torch.device) else leaf

        meta_args, meta_kwargs = mapped((args, kwargs), on_meta)
        if any(argument.name == "device" for argument in func._schema.arguments):
            meta_kwargs["device"] = _META
        try:
            returned = func(*meta_args, **meta_kwargs)
        except Exception:
            # No shapes without values (a mask's, say), or an operation unknown there.
            return self._with_values(func, args, kwargs)
        is_new = next(leaves((args, kwargs), Tensor), None) is None
        if is_new and not any(output.numel() for output in leaves(returned, Tensor)):
            return func(*args, **{**kwargs, **({"device": _CPU} if "device" in meta_kwargs else {})})  # no memory
        return returned

    def _with_values(self, func: OpOverload[..., Any], args: Any, kwargs: Any) -> Any:
        """What the operation returns after it was run for real, again without memory."""
        if any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns):
            raise CannotDeferError(f"{func} is not known on the device meta")
        real_args, real_kwargs = self.real((args, kwargs))
        result = func(*real_args, **real_kwargs)
        for tensor in leaves(result, Tensor):
            _check_plain(tensor)
        if not func._schema.is_mutable:
            return mapped(result, lambda leaf: without_memory(leaf) if isinstance(leaf, Tensor) else leaf)
        written = list(_written(func, args, kwargs))
        if len(written) != len(list(leaves(result, Tensor))):
            raise CannotDeferError(f"{func} is not known on the device meta")
        return written[0] if isinstance(result, Tensor) else type(result)(written)


def _check(func: OpOverload[..., Any], tensors: list[Tensor], args: Any, kwargs: Any) -> None:
    """Refuse what cannot be recorded."""
    if func.namespace not in ("aten", "prims"):
        raise CannotDeferError(f"it uses the operation {func}, which is not torch's own")
    for tensor in tensors:
        _check_plain(tensor)
    devices = {tensor.device for tensor in tensors} | set(leaves((args, kwargs), torch.device))
    for device in devices - {_CPU, _META}:
        raise CannotDeferError(f"it makes tensors on the device {device}")


def _check_plain(tensor: Tensor) -> None:
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise CannotDeferError(f"it uses a tensor of the class {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CannotDeferError("it uses a tensor that is not a plain array (sparse, quantized)")


def _written(func: OpOverload[..., Any], args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an operation changes."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from leaves(value, Tensor)
        elif func._schema.name == "aten::native_batch_norm" and argument.name.startswith("running") and args[5]:
            yield from leaves(value, Tensor)  # whose schema does not say so


def _gives_tensors(func: OpOverload[..., Any]) -> bool:
    returns = func._schema.returns
    return not returns or any("Tensor" in str(one.type) for one in returns)


def _renewed(target: Place, args: Any) -> set[int]:
    """The slot of the first argument, where the operation writes the whole of it and reads none of it."""
    itemsize = torch.empty(0, dtype=target.dtype).element_size()
    covers = target.offset == 0 and torch.Size(target.size).numel() * itemsize == target.num_bytes
    is_read = any(place.slot == target.slot for place in leaves(args[1:], Place))
    return {target.slot} if covers and not is_read else set()


def _generator(args: Any, kwargs: Any) -> torch.Generator:
    for generator in leaves((args, kwargs), torch.Generator):
        return generator  # type: ignore[no-any-return]
    return torch.default_generator


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, layout and dtype on the meta device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
