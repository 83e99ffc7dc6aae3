"""How a model becomes pieces that run one after the other: by the task's `pieces(model)`, as nn.Sequential, or by
tracing it (`traced`).

The model itself stays what it is: a piece refers to the modules of the model, whose parameters keep their names. A
worker that runs some of the pieces lets go of the parameters of the others with `keep_only`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from stormo.errors import SettingError, counted
from stormo.parallel.pipeline.traced import Segment, trace

_EXAMPLE = (
    "give the task a method that names the pieces, such as\n"
    "    def pieces(self, model):\n"
    "        return [model.embed, *model.blocks, partial(score, model.norm, model.head)]\n"
    "where each takes what the one before returns, and a piece is a module or a function bound to its modules"
)


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """One of the pieces: what to call with the result of the one before, and the modules that it calls."""

    name: str
    run: Callable[..., Any]
    modules: tuple[nn.Module, ...]
    own: tuple[tuple[nn.Module, str], ...] = ()  # parameters and buffers that it takes without calling their module

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its parameters, each once."""
        seen: set[int] = set()
        direct = (module._parameters.get(name) for module, name in self.own)
        for parameter in (*direct, *(parameter for module in self.modules for parameter in module.parameters())):
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


@dataclass(frozen=True, slots=True)
class Pieces:
    """All pieces of a model in their order, and where they come from."""

    items: tuple[Piece, ...]
    origin: str
    marks: tuple[int, ...] | None = None  # pieces of each stage, where the task has grouped them
    tied: tuple[str, ...] = ()  # names of one parameter that several layers share and that keeps pieces together


class StageModule(nn.Module):
    """Pieces that follow each other, as one module."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self.pieces = tuple(pieces)
        unique = {id(module): module for piece in pieces for module in piece.modules}
        self.held = nn.ModuleList(unique.values())

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of its pieces, also those that belong to no module that it calls."""
        yield from {id(p): p for piece in self.pieces for p in piece.parameters()}.values()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the last piece makes of what the first one is given."""
        value = self.pieces[0].run(*args, **kwargs)
        for piece in self.pieces[1:]:
            value = piece.run(value)
        return value


def find_pieces(
    model: nn.Module,
    given: Sequence[Any] | None = None,
    *,
    name: str = "the task",
    call: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None,
) -> Pieces:
    """The pieces of a model.

    Args:
        model: with every parameter in place; layers that are to be replaced have been.
        given: what the task's `pieces(model)` returned, or None.
        name: of the task, for sentences.
        call: positional and keyword arguments of one call of the model; tracing takes from them which are tensors.
    """
    if given is not None:
        found = _given(model, given, name)
    elif type(model).forward is nn.Sequential.forward and isinstance(model, nn.Sequential):
        items = tuple(Piece(full, module, (module,)) for full, module in _flat(model, ""))
        found = Pieces(items, "the modules of nn.Sequential")
    else:
        try:
            segments = trace(model, call)
        except Exception as error:
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise SettingError(
                f"a pipeline was asked for {type(model).__name__}", f"it cannot be traced ({reason})", _EXAMPLE
            ) from error
        items = tuple(_of_segment(segment) for segment in segments)
        found = Pieces(items, "a trace of the model", tied=next(iter(_ties(model).values()), ()))
    _check(model, found, name)
    return found


def keep_only(model: nn.Module, kept: Iterable[Piece], pieces: Pieces) -> None:
    """Let go of the parameters and buffers of all other pieces: `model.named_parameters()` has what is left."""
    kept = list(kept)
    wanted = {id(tensor) for piece in kept for tensor in _tensors(piece)}
    dropped = {id(tensor) for piece in pieces.items for tensor in _tensors(piece)} - wanted
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if id(tensor) in dropped:
                    table[name] = None


def _tensors(piece: Piece) -> Iterator[Any]:
    yield from piece.parameters()
    yield from (module._buffers[name] for module, name in piece.own if name in module._buffers)
    for module in piece.modules:
        yield from module.buffers()


def _given(model: nn.Module, given: Sequence[Any], name: str) -> Pieces:
    what = f"{name}.pieces(model) was called"
    listed = list(given)
    nested = [isinstance(item, list | tuple) for item in listed]
    if not listed or any(nested) != all(nested) or (all(nested) and not all(listed)):
        raise SettingError(
            what,
            "it returned nothing" if not listed else "it returned an empty list, or lists beside pieces",
            "return a list of pieces, or a list of lists of them, one for each stage",
        )
    names = {id(module): full for full, module in model.named_modules()}
    flat = [piece for item in listed for piece in item] if nested[0] else listed
    for item in flat:
        if not callable(item):
            raise SettingError(
                what,
                f"it returned something of type {type(item).__name__}",
                "return modules, or functions bound to modules",
            )
    items = tuple(_piece(item, index, names) for index, item in enumerate(flat))
    return Pieces(items, f"{name}.pieces(model)", tuple(map(len, listed)) if nested[0] else None)


def _piece(item: Any, index: int, names: Mapping[int, str]) -> Piece:
    modules = tuple(_bound_modules(item))
    known = [names[id(module)] for module in modules if id(module) in names]
    return Piece(" + ".join(known) or getattr(item, "__name__", f"piece {index}"), item, modules)


def _bound_modules(item: Any) -> Iterator[nn.Module]:
    """The modules that a piece has at hand: itself, the arguments of a partial, the variables around a function."""
    if isinstance(item, nn.Module):
        yield item
    elif isinstance(item, list | tuple):
        for inner in item:
            yield from _bound_modules(inner)
    elif isinstance(item, partial):
        yield from _bound_modules([item.func, *item.args, *item.keywords.values()])
    elif callable(item):
        yield from _bound_modules([getattr(item, "__self__", None)])
        yield from _bound_modules([cell.cell_contents for cell in getattr(item, "__closure__", None) or ()])


def _flat(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        assert child is not None
        if isinstance(child, nn.Sequential) and type(child).forward is nn.Sequential.forward:
            yield from _flat(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _of_segment(segment: Segment) -> Piece:
    return Piece(segment.name, segment, tuple(segment.modules()), tuple(segment.own()))


def _ties(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """The names of every parameter that has several, by the parameter's id."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {number: tuple(found) for number, found in names.items() if len(found) > 1}


def _check(model: nn.Module, pieces: Pieces, name: str) -> None:
    """Every parameter belongs to exactly one piece."""
    owners: dict[int, list[int]] = {}
    for index, piece in enumerate(pieces.items):
        for parameter in piece.parameters():
            owners.setdefault(id(parameter), []).append(index)
    what = f"the model was cut into {counted(len(pieces.items), 'piece')} by {pieces.origin}"
    ties = _ties(model)
    for full, parameter in model.named_parameters():
        indices = owners.get(id(parameter), [])
        if not indices:
            raise SettingError(
                what,
                f"the parameter {full} is in none of them",
                f"return from {name}.pieces(model) a piece that has it, such as partial(function, module)",
            )
        tied = ties.get(id(parameter))
        if len(indices) > 1 and tied is not None:
            raise SettingError(
                what,
                f"{' and '.join(tied)} are one parameter (tied weights), and a parameter is in one piece alone",
                "give each layer a weight of its own, set another --strategy, or put all from the first of these to "
                f"the last into one piece of {name}.pieces(model)",
            )
        if len(indices) > 1:
            shown = " and ".join(f"{index} ({pieces.items[index].name})" for index in indices[:2])
            raise SettingError(
                what,
                f"the parameter {full} is in two of them, {shown}",
                f"put what shares it into one piece of {name}.pieces(model), and bind a function to the modules that "
                "it calls, not to the whole model",
            )
