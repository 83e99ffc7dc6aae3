"""The units of a model: modules that are sharded, recomputed or compiled as one each; and activation checkpointing.

By default the units are the repeated blocks: what a ModuleList or a Sequential is made of. All else belongs to the
root. No unit lies in another, and no parameter in two.

A recomputed module keeps none of its activations and computes them again in backward (Chen et al., arXiv 1604.06174),
with the same random numbers, which is torch's own care, and with the buffers that the first computation began with.
What the second one does to buffers is thrown away. Collectives are repeated, on all workers in the same order.
"""

from __future__ import annotations

import difflib
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from stormo.errors import SettingError
from stormo.layers.norm_act import NormAct

_UNEQUAL = 2  # times as many parameters: such neighbours are stages of a network rather than its blocks
_NUM_NEAR = 5


def units_of(model: nn.Module, asked: str | Sequence[str] | None = None) -> list[str]:
    """Paths of the units, in the model's order.

    Args:
        model: real or on the meta device.
        asked: paths, names of classes, or patterns of either (`blocks.*`), in a sequence or with commas between them;
            of those that lie in one another the outermost are taken.
    """
    if isinstance(asked, str):
        asked = [name.strip() for name in asked.split(",") if name.strip()]
    paths = _repeated(model) if asked is None else _asked(model, asked)
    return _without_ties(model, paths)


def _repeated(model: nn.Module) -> list[str]:
    blocks = list(_elements(model, "", are_layers=False))
    return blocks or list(_elements(model, "", are_layers=True))


def _elements(module: nn.Module, path: str, *, are_layers: bool) -> Iterator[str]:
    """Elements of the outermost containers that repeat something: modules with parts of their own, or single layers."""
    children = {name: child for name, child in module.named_children() if _size(child)}
    units = {name: child for name, child in children.items() if _may_be_unit(child, are_layers)}
    if not isinstance(module, nn.ModuleList | nn.Sequential) or not _repeats(units.values()):
        units = {}
    for name, child in children.items():
        inner = f"{path}.{name}" if path else name
        if name in units and not _is_stage(child, list(units.values())):
            yield inner
        else:
            yield from _elements(child, inner, are_layers=are_layers)


def _may_be_unit(module: nn.Module, are_layers: bool) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False  # it is never called
    if any(True for _ in module.children()):
        return True
    return are_layers and any(parameter.ndim > 1 for parameter in module.parameters())


def _repeats(modules: Iterable[nn.Module]) -> bool:
    return any(count > 1 for count in Counter(type(module) for module in modules).values())


def _is_stage(module: nn.Module, neighbours: list[nn.Module]) -> bool:
    """Whether it is mostly blocks itself: a Sequential of them, or one of several unequal stages that hold some."""
    blocks = list(_elements(module, "", are_layers=False))
    if isinstance(module, nn.Sequential):
        return bool(blocks)
    sizes = [_size(neighbour) for neighbour in neighbours]
    in_blocks = sum(_size(module.get_submodule(path)) for path in blocks)
    return max(sizes) > _UNEQUAL * min(sizes) and 2 * in_blocks > _size(module)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _asked(model: nn.Module, asked: Sequence[str]) -> list[str]:
    units = {path: module for path, module in model.named_modules() if path and _size(module)}
    found: set[str] = set()
    for pattern in asked:
        matches = [path for path, module in units.items() if _matches(path, module, pattern)]
        if not matches:
            raise _unknown(pattern, units)
        found.update(matches)
    outermost = [path for path in units if path in found and not any(outer in found for outer in _outer(path))]
    return [unit for path in outermost for unit in _callable(units[path], path)]


def _matches(path: str, module: nn.Module, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(type(module).__name__, pattern)


def _outer(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _callable(module: nn.Module, path: str) -> Iterator[str]:
    """The module itself, or the elements of a list, which is never called."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        yield path
        return
    for name, child in module.named_children():
        if _size(child):
            yield from _callable(child, f"{path}.{name}")


def _unknown(pattern: str, units: dict[str, nn.Module]) -> SettingError:
    names = [*units, *sorted({type(module).__name__ for module in units.values()})]
    near = difflib.get_close_matches(pattern.strip("*."), names, n=_NUM_NEAR, cutoff=0.4)
    near += [path for path in units if "." not in path and path not in near]
    examples = ", ".join(near[:_NUM_NEAR])
    return SettingError(
        f"--shard-modules {pattern!r} was set",
        "no module with parameters has a path or a class of that name",
        f"name one, for example {examples}" if near else "leave it out: this model has no modules within",
    )


def _without_ties(model: nn.Module, paths: list[str]) -> list[str]:
    """Those that share no parameter with anything outside."""
    units = set(paths)
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((outer for outer in _outer(name) if outer in units), "")
        owners.setdefault(id(parameter), set()).add(owner)
    tied = {owner for names in owners.values() if len(names) > 1 for owner in names}
    return [path for path in paths if path not in tied]


_Place = tuple[nn.Module, str]  # a module, and the name of a buffer of its own


def recompute(model: nn.Module, paths: Sequence[str]) -> None:
    """Let the modules at these paths compute their activations again, in place; the empty path is the model."""
    modules = {path: model.get_submodule(path) for path in paths}
    for path, module in modules.items():
        if "forward" in vars(module):
            raise SettingError(
                "--checkpoint-activations was set",
                f"the forward of {path or 'the model'} ({type(module).__name__}) was replaced on the object itself",
                "write it as a method of its class, or name other modules with --shard-modules",
            )
    for module in modules.values():
        if not isinstance(module, Recomputed):
            kind: Any = type(module)
            module.__class__ = _recomputed(kind)
            if not _buffers(module):
                module._changing_buffers = []  # type: ignore[assignment]


class Recomputed:
    """What stands before the class of a module that is computed again; its names and those of its parts stay."""

    training: bool
    _own_class: type[Any]
    _changing_buffers: list[_Place] | None = None  # None until a first pass has shown them

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, which forgets its activations where a backward pass is to come."""
        own = super().forward  # type: ignore[misc]
        if not (self.training and torch.is_grad_enabled()):
            return own(*args, **kwargs)
        names = tuple(kwargs)

        def run(*values: Any) -> Any:
            count = len(values) - len(names)
            return own(*values[:count], **dict(zip(names, values[count:], strict=True)))

        # All by position: torch keeps the random numbers of those devices alone that it sees there.
        values = (*args, *kwargs.values())
        if self._changing_buffers == []:
            return checkpoint(run, *values, use_reentrant=False)
        return self._run_with_buffers(run, values)

    # The compiler would see a buffer change once where it changes twice. What `run` calls is compiled.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, unused-ignore]
    def _run_with_buffers(self, run: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        before = _AsBefore(_buffers(self) if self._changing_buffers is None else self._changing_buffers)
        result = checkpoint(run, *values, use_reentrant=False, context_fn=lambda: (nullcontext(), before))
        if self._changing_buffers is None:
            self._changing_buffers = before.keep_changing()
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copied and pickled by its own class: the one made here has no name to be found by."""
        parts: Any = super().__reduce_ex__(2)
        _, arguments, *rest = parts
        return _made_again, (self._own_class, arguments[1:]), *rest


class _AsBefore(AbstractContextManager[None]):
    """The buffers as they are now; within it modules work on copies of these."""

    def __init__(self, places: list[_Place]) -> None:
        self._copies = [_clone(module._buffers.get(name)) for module, name in places]
        self._places = places
        self._versions = [_version(module, name) for module, name in places]
        self._now: list[Tensor | None] = []

    def keep_changing(self) -> list[_Place]:
        """Forget those that the pass has neither written nor changed, and return the others.

        Those of batch norms always count: a worker whose first pass has no samples does not move them.
        """
        kept = [
            (place, copy)
            for place, copy, version in zip(self._places, self._copies, self._versions, strict=True)
            if isinstance(place[0], _NormBase | NormAct)
            or version != _version(*place)
            or not _are_equal(place[0]._buffers.get(place[1]), copy)  # written as `.data`
        ]
        self._places, self._copies = [place for place, _ in kept], [copy for _, copy in kept]
        return self._places

    def __enter__(self) -> None:
        self._now = [module._buffers.get(name) for module, name in self._places]
        self._set([_clone(copy) for copy in self._copies])

    def __exit__(self, *_: object) -> None:
        self._set(self._now)

    def _set(self, buffers: list[Tensor | None]) -> None:
        for (module, name), buffer in zip(self._places, buffers, strict=True):
            module._buffers[name] = buffer


def _buffers(module: Any) -> list[_Place]:
    return [(part, name) for part in module.modules() for name in part._buffers]


def _version(module: nn.Module, name: str) -> tuple[int, int] | None:
    buffer = module._buffers.get(name)
    return None if buffer is None else (id(buffer), buffer._version)


def _clone(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


@functools.cache
def _recomputed(own: type[Any]) -> type[Any]:
    body = {"_own_class": own, "__module__": own.__module__, "__doc__": own.__doc__}
    return types.new_class(own.__name__, (Recomputed, own), exec_body=lambda names: names.update(body))


def _made_again(own: Any, arguments: tuple[Any, ...]) -> Any:
    kind = _recomputed(own)
    return kind.__new__(kind, *arguments)
