"""What a stage gives, described, as JSON: it goes from worker to worker, and nothing that comes over a network is run.

Slots and plain values, in whatever torch takes apart: lists, tuples, dicts, named tuples, and registered classes. Of a
class only the name travels, of one that is loaded on both sides.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES

from stormo.errors import SettingError
from stormo.parallel.pipeline.handover import Slot

_JSON = (bool, int, float, str, type(None))


def to_words(described: Any) -> list[Any]:
    """As values that JSON has."""
    kind = type(described)
    if kind in _JSON:
        return ["value", described]
    if kind in _LEAVES:
        name, words, _ = _LEAVES[kind]
        return [name, words(described)]
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class(name) is not kind:
        raise SettingError(
            f"a {kind.__name__} is in what one stage hands to the next",
            "other workers cannot find a class of that name among those that torch takes apart",
            "hand over tensors in tuples, lists and dicts, or cut the model elsewhere with the task's pieces(model)",
        )
    children, context = (described, None) if _is_named_tuple(kind) else SUPPORTED_NODES[kind].flatten_fn(described)
    return ["node", name, _plain(context), [to_words(child) for child in children]]


def _plain(context: Any) -> list[Any]:
    """What a class needs to be put together again: names, mostly."""
    if type(context) in (list, tuple):
        return [type(context).__name__, [_plain(part) for part in context]]
    return to_words(context)


def from_words(words: Any) -> Any:
    """What was described; raises where these are no words of ours."""
    match words:
        case ["value", value] if type(value) in _JSON:
            return value
        case ["list" | "tuple" as kind, [*parts]]:
            return (list if kind == "list" else tuple)(from_words(part) for part in parts)
        case ["node", str(name), context, [*parts]]:
            return _made(name, from_words(context), [from_words(part) for part in parts])
        case [str(name), leaf] if name in _FROM_WORDS:
            return _FROM_WORDS[name](leaf)
    raise ValueError(f"no description of a stage: {str(words)[:200]}")


def _made(name: str, context: Any, children: list[Any]) -> Any:
    kind = _class(name)
    if kind is None:
        raise ValueError(f"{name[:200]} is no class that torch takes apart")
    return kind(*children) if _is_named_tuple(kind) else SUPPORTED_NODES[kind].unflatten_fn(children, context)


def _class(name: str) -> Any:
    """The class of this name, if it is loaded and torch takes it apart."""
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
        raise ValueError(f"no type of tensors: {name[:200]}")
    return found


def _are_sizes(values: Sequence[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 2**62 for value in values)


def _slot(words: Any) -> Slot:
    shape, dtype, order = words
    if not _are_sizes(shape) or sorted(order) != [*range(len(shape))]:
        raise ValueError(f"no place of a tensor: {str(words)[:200]}")
    return Slot(tuple(shape), _dtype(dtype), tuple(order))


# For each kind of leaf its name, how it becomes words, and how it comes back from them.
_LEAVES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    Slot: ("slot", lambda slot: [list(slot.shape), str(slot.dtype), list(slot.order)], _slot),
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    torch.Size: ("size", list, torch.Size),
    torch.dtype: ("dtype", str, _dtype),
    torch.device: ("device", str, torch.device),
    slice: (
        "slice",
        lambda cut: [to_words(part) for part in (cut.start, cut.stop, cut.step)],
        lambda parts: slice(*map(from_words, parts)),
    ),
    type(Ellipsis): ("ellipsis", lambda _: None, lambda _: Ellipsis),
}
_FROM_WORDS = {name: made for name, _, made in _LEAVES.values()}
