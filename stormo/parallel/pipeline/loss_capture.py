"""A task's `loss(model, batch)` around a model that runs elsewhere.

It is called once with a stand-in that records the model's arguments and stops there, and once with a stand-in that
returns the output of the pipeline. A stand-in is an instance of the model's class that shares all its attributes
except the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from stormo.errors import SettingError
from stormo.parallel.pytree import tree_tensors

_CALLED = "stand_in_call"


class _ReachedError(BaseException):
    """The model was called. Not an Exception, which a task may catch."""


def model_inputs(
    call: Callable[[nn.Module], Any], model: nn.Module, method: str, use: str = "in a pipeline"
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The positional and keyword arguments with which a method of the task calls the model.

    Args:
        call: calls the method with a model, as `lambda model: task.loss(model, batch)`.
        model: what the stand-in looks like.
        method: its name for messages, such as `MyTask.loss`.
        use: what it is called for.
    """
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        found.append((args, kwargs))
        raise _ReachedError

    try:
        call(stand_in(model, record))
    except _ReachedError:
        return found[0]
    raise _no_call(method, use)


def with_output(call: Callable[[nn.Module], Any], output: Any, model: nn.Module, method: str) -> Any:
    """What a method of the task returns if the model returns `output`; see `model_inputs`."""
    num_calls = 0

    def give(*_args: Any, **_kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:
            raise SettingError(
                f"{method} was called in a pipeline",
                "it calls the model more than once, and a batch goes through the stages once",
                "call the model once, with all samples in one batch",
            )
        return output

    result = call(stand_in(model, give))
    if not num_calls:
        raise _no_call(method, "in a pipeline")
    _check_weights(result, output, model, method)
    return result


def _no_call(method: str, use: str) -> SettingError:
    return SettingError(
        f"{method} was called {use}",
        "it does not call the model as a whole",
        "call model(…) in it, not single layers of the model",
    )


def stand_in(model: nn.Module, called: Callable[..., Any]) -> nn.Module:
    """An instance of the model's class that shares all its attributes; a call of it calls `called`."""
    found: nn.Module = object.__new__(_stand_in_class(type(model)))  # type: ignore[arg-type]
    object.__setattr__(found, "__dict__", model.__dict__)
    object.__setattr__(found, _CALLED, called)
    return found


@functools.cache
def _stand_in_class(kind: type[nn.Module]) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, _CALLED)(*args, **kwargs)

    # In a slot, not among the shared attributes: it is freed with the stand-in, and the output with it.
    made = {"__slots__": (_CALLED,), "__call__": call, "forward": call, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), made)


def _check_weights(result: Any, output: Any, model: nn.Module, method: str) -> None:
    """Refuse a result that uses a parameter beside the output: this worker does not have all parameters."""
    ends = set(_nodes(output))
    waiting = [node for node in _nodes(result) if node not in ends]
    seen = ends | set(waiting)
    variables: list[Any] = []
    while waiting:
        node = waiting.pop()
        variables.append(getattr(node, "variable", None))
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    taken = {id(variable) for variable in variables if variable is not None}
    for name, parameter in model.named_parameters() if taken else ():
        if id(parameter) in taken:
            raise SettingError(
                f"{method} was called in a pipeline",
                f"it uses {name} beside the model's output, and no worker has all parameters",
                "return all that the loss needs from the model's forward, or set --weight-decay",
            )


def _nodes(value: Any) -> list[Node]:
    return [get_gradient_edge(tensor).node for tensor in tree_tensors(value) if tensor.requires_grad]
