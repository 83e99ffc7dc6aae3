"""Makes tensors that have no memory look to Python as if they were on the CPU.

A model's code asks where a tensor is, moves it to where it is already, or wants numbers out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stormo.strategies.recording import Recorder
from stormo.strategies.tape import CannotDeferError

_META, _CPU = torch.device("meta"), torch.device("cpu")


class Disguise(TorchFunctionMode):
    """Meanwhile a tensor without memory says that it is on the CPU, and gives its values where they are asked for."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        instead = _INSTEAD.get(func)
        if instead is None or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        return instead(self._recorder, func, args, kwargs)


def _to(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """To the CPU means to where it is; as another tensor means of its dtype."""
    if not args[0].is_meta:
        return func(*args, **kwargs)

    def here(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype
        return _META if isinstance(value, str | torch.device) and torch.device(value) == _CPU else value

    kwargs = {key: here(value) for key, value in kwargs.items()}
    if "other" in kwargs:
        kwargs["dtype"] = kwargs.pop("other")
    return func(args[0], *map(here, args[1:]), **kwargs)


def _cpu(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].to(_META, **kwargs) if args[0].is_meta else func(*args, **kwargs)


def _read(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    return func(recorder.real(args[0]), *args[1:], **kwargs)


def _array(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """An array that shares no memory with the tensor: neither may be written to any more."""
    array = _read(recorder, func, args, kwargs)
    if args[0].is_meta:
        recorder.freeze(args[0])
        array.flags.writeable = False
    return array


def _set_data(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """A tensor's memory is replaced by another's: both real, or neither."""
    tensor, data = args
    if tensor.is_meta and not data.is_meta:
        data = recorder.lift(data)
    elif data.is_meta and not tensor.is_meta:
        data = recorder.real(data)
    return func(tensor, data)


def _refused(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    if not args[0].is_meta:
        return func(*args, **kwargs)
    error = CannotDeferError(f"it asks for the memory of a tensor (Tensor.{func.__name__})")
    recorder.failure = recorder.failure or error
    raise error


def _always(answer: Any) -> Callable[..., Any]:
    def instead(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        return answer if args[0].is_meta else func(*args, **kwargs)

    return instead


_INSTEAD: dict[Any, Callable[[Recorder, Any, Any, Any], Any]] = {
    Tensor.device.__get__: _always(_CPU),
    Tensor.is_meta.__get__: _always(False),  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: _always(True),  # type: ignore[attr-defined]
    Tensor.to: _to,
    Tensor.cpu: _cpu,
    Tensor.tolist: _read,
    Tensor.__repr__: _read,
    Tensor.__format__: _read,
    Tensor.numpy: _array,
    Tensor.__array__: _array,
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.data_ptr: _refused,
    Tensor.storage: _refused,
    Tensor.untyped_storage: _refused,
}
