"""A task's `loss(model, batch)`, unchanged, around a model that runs elsewhere.

It is called once with a stand-in that notes what the model would be called with and stops there, and once with a
stand-in that returns what the pipeline gave. A stand-in is an instance of the model's own class that shares all
attributes with it, but for the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_leaves

from stormo.errors import SettingError

_CALLED = "stand_in_call"


class _ReachedError(BaseException):
    """The model was called; no `except Exception` of a task may hold it back."""


def model_inputs(
    call: Callable[[nn.Module], Any], model: nn.Module, method: str
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The positional and keyword arguments with which a method of the task calls the model.

    Args:
        call: calls the method with the model that it is given, `lambda model: task.loss(model, batch)`.
        model: that the stand-in looks like.
        method: its name for sentences, such as `MyTask.loss`.
    """
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        found.append((args, kwargs))
        raise _ReachedError

    try:
        call(_stand_in(model, note))
    except _ReachedError:
        return found[0]
    raise _never(method)


def with_output(call: Callable[[nn.Module], Any], output: Any, model: nn.Module, method: str) -> Any:
    """What a method of the task returns where the model gives `output`; see `model_inputs`."""
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

    result = call(_stand_in(model, give))
    if not num_calls:
        raise _never(method)
    _check_weights(result, output, model, method)
    return result


def _never(method: str) -> SettingError:
    return SettingError(
        f"{method} was called in a pipeline",
        "it does not call the model, whose layers are on several workers",
        "call model(…) in it, not single layers of the model",
    )


def _stand_in(model: nn.Module, called: Callable[..., Any]) -> nn.Module:
    found: nn.Module = object.__new__(_kind(type(model)))  # type: ignore[arg-type]
    object.__setattr__(found, "__dict__", model.__dict__)
    object.__setattr__(found, _CALLED, called)
    return found


@functools.cache
def _kind(kind: type[nn.Module]) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, _CALLED)(*args, **kwargs)

    # In a slot, beside the attributes that it shares: it ends with the stand-in, and with it the output that it holds.
    made = {"__slots__": (_CALLED,), "__call__": call, "forward": call, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), made)


def _check_weights(result: Any, output: Any, model: nn.Module, method: str) -> None:
    """Raise a sentence where the result takes a parameter past the output: other workers' parameters are not here."""
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
    leaves: Iterable[Any] = tree_leaves(value)
    return [get_gradient_edge(leaf).node for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
