"""Where a model can be split into stages: the pieces between split points, which run one after the other.

They come from the task's `pieces(model)`, from nn.Sequential, or from a trace (`fx_trace`). A piece refers to modules
of the model, whose parameters keep their names. `keep_only` frees the parameters of other workers' pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from stormo.errors import SettingError, pluralize
from stormo.parallel.meta_init import direct_tensors
from stormo.parallel.pipeline.fx_trace import trace
from stormo.parallel.tensor.plan import chain_of, is_chain

_EXAMPLE = (
    "give the task a method that names the pieces, such as\n"
    "    def pieces(self, model):\n"
    "        return [model.embed, *model.blocks, partial(score, model.norm, model.head)]\n"
    "where each takes what the one before returns, and a piece is a module or a function bound to its modules"
)


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """A function of the previous piece's result, and the modules that it calls."""

    name: str
    run: Callable[..., Any]
    modules: tuple[nn.Module, ...]
    direct: tuple[tuple[nn.Module, str], ...] = ()  # parameters and buffers that it uses without calling their module

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its parameters, each once."""
        yield from {id(tensor): tensor for tensor in self.tensors() if isinstance(tensor, nn.Parameter)}.values()

    def tensors(self) -> Iterator[Tensor]:
        """Its parameters and buffers."""
        direct = (getattr(module, name) for module, name in self.direct)
        yield from (tensor for tensor in direct if tensor is not None)
        for module in self.modules:
            yield from module.parameters()
            yield from module.buffers()


@dataclass(frozen=True, slots=True)
class Pieces:
    """All pieces of a model in their order."""

    items: tuple[Piece, ...]
    origin: str  # where they come from, for messages
    stage_lengths: tuple[int, ...] | None = None  # pieces of each stage, if the task groups them
    tied: tuple[str, ...] = ()  # all names of a tied parameter, which no split point may separate


class StageModule(nn.Module):
    """Consecutive pieces as one module."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self.pieces = tuple(pieces)
        unique = {id(module): module for piece in pieces for module in piece.modules}
        self.held = nn.ModuleList(unique.values())

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of its pieces, also direct ones."""
        yield from {id(p): p for piece in self.pieces for p in piece.parameters()}.values()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all pieces."""
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
        model: with all its parameters, after layers were converted.
        given: what the task's `pieces(model)` returned, or None.
        name: of the task, for messages.
        call: positional and keyword arguments of one call of the model; a trace asks which of them are tensors.
    """
    if given is not None:
        found = _given(model, given, name)
    elif is_chain(model):
        items = tuple(Piece(full, module, (module,)) for full, module in chain_of(model))
        found = Pieces(items, "the modules of nn.Sequential")
    else:
        try:
            segments = trace(model, call)
        except Exception as error:
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise SettingError(
                f"a pipeline was asked for {type(model).__name__}", f"it cannot be traced ({reason})", _EXAMPLE
            ) from error
        items = tuple(Piece(one.name, one, tuple(one.modules()), tuple(one.direct())) for one in segments)
        found = Pieces(items, "a trace of the model", tied=next(iter(_ties(model).values()), ()))
    _check(model, found, name)
    return found


def keep_only(model: nn.Module, kept: Iterable[Piece], pieces: Pieces) -> None:
    """Set the parameters and buffers of all other pieces to None."""
    wanted = {id(tensor) for piece in kept for tensor in piece.tensors()}
    dropped = {id(tensor) for piece in pieces.items for tensor in piece.tensors()} - wanted
    for module in model.modules():
        for name, tensor in list(direct_tensors(module)):
            if id(tensor) in dropped:
                setattr(module, name, None)


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
    """The modules that a piece can call: itself, the arguments of a partial, the closure of a function."""
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


def _ties(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """All names of each tied parameter, by its id."""
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
    what = f"the model was cut into {pluralize(len(pieces.items), 'piece')} by {pieces.origin}"
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
                "untie these weights, set another --strategy, or put all from the first of these to "
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
