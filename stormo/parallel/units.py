"""The units of a model: modules that are sharded, recomputed or compiled one by one; and activation checkpointing.

By default the units are the repeated blocks in a ModuleList or a Sequential. Everything else belongs to the root. No
unit is inside another, and no parameter is in two.

A recomputed module frees its activations and computes them again in backward (Chen et al., arXiv 1604.06174). torch
restores the random state; the buffers of the first computation are restored here, and changes by the second one are
dropped. Collectives are repeated, on all workers in the same order.
"""

from __future__ import annotations

import difflib
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stormo.errors import SettingError
from stormo.layers.norm_act import NormAct
from stormo.layers.sync_batch_norm import BatchNormBase

_UNEQUAL = 2  # times as many parameters: such neighbours are stages of a network, not its blocks
_NUM_NEAR = 5
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def units_of(model: nn.Module, asked: str | None = None) -> list[str]:
    """Paths of the units, in the model's order.

    Args:
        model: real or on the meta device.
        asked: paths, class names, or patterns of either (`blocks.*`), separated by commas. Of nested ones the outermost
            are used.
    """
    if asked is None:
        paths = list(_elements(model, "", are_layers=False)) or list(_elements(model, "", are_layers=True))
    else:
        paths = _asked(model, [name.strip() for name in asked.split(",") if name.strip()])
    return _without_ties(model, paths)


def _elements(module: nn.Module, path: str, *, are_layers: bool) -> Iterator[str]:
    """Elements of the outermost containers with repeated elements: modules with children, or single layers."""
    children = {name: child for name, child in module.named_children() if _size(child)}
    units = {name: child for name, child in children.items() if _may_be_unit(child, are_layers)}
    repeats = max(Counter(map(type, units.values())).values(), default=0) > 1
    if not isinstance(module, nn.ModuleList | nn.Sequential) or not repeats:
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


def _is_stage(module: nn.Module, neighbours: list[nn.Module]) -> bool:
    """Whether it mostly consists of blocks: a Sequential of them, or one of several unequal stages."""
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
        matches = [
            path
            for path, module in units.items()
            if fnmatchcase(path, pattern) or fnmatchcase(type(module).__name__, pattern)
        ]
        if not matches:
            raise _unknown(pattern, units)
        found.update(matches)
    outermost = [path for path in units if path in found and not any(outer in found for outer in _outer(path))]
    return [unit for path in outermost for unit in _callable(units[path], path)]


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
    """The units that share no parameter with anything outside."""
    units = set(paths)
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((outer for outer in _outer(name) if outer in units), "")
        owners.setdefault(id(parameter), set()).add(owner)
    tied = {owner for names in owners.values() if len(names) > 1 for owner in names}
    return [path for path in paths if path not in tied]


_Buffer = tuple[nn.Module, str]  # a module, and the name of one of its buffers


def recompute(model: nn.Module, paths: Sequence[str]) -> None:
    """Let the modules at these paths recompute their activations, in place; the empty path is the model."""
    modules = {path: model.get_submodule(path) for path in paths}
    for path, module in modules.items():
        if "forward" in vars(module):
            raise SettingError(
                "--checkpoint-activations was set",
                f"the forward of {path or 'the model'} ({type(module).__name__}) was replaced on the instance",
                "write it as a method of its class, or name other modules with --shard-modules",
            )
    for module in modules.values():
        if not isinstance(module, Recomputed):
            kind: Any = type(module)
            module.__class__ = _recomputed(kind)
            if not _buffers(module):
                module._changing_buffers = []  # type: ignore[assignment]


class Recomputed:
    """A base class that a recomputed module gets before its own; all names stay."""

    training: bool
    _own_class: type[Any]
    _changing_buffers: list[_Buffer] | None = None  # None until a first forward has shown them

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, without keeping activations for backward."""
        own = super().forward  # type: ignore[misc]
        if not (self.training and torch.is_grad_enabled()):
            return own(*args, **kwargs)
        names = tuple(kwargs)

        def run(*values: Any) -> Any:
            count = len(values) - len(names)
            return own(*values[:count], **dict(zip(names, values[count:], strict=True)))

        # All by position: torch restores the random state only of devices that it finds there.
        values = (*args, *kwargs.values())
        if self._changing_buffers == []:
            return checkpoint(run, *values, use_reentrant=False)
        return self._run_with_buffers(run, values)

    # The compiler would change a buffer once that changes twice. What `run` calls is compiled.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, unused-ignore]
    def _run_with_buffers(self, run: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        before = _SavedBuffers(_buffers(self) if self._changing_buffers is None else self._changing_buffers)
        result = checkpoint(run, *values, use_reentrant=False, context_fn=lambda: (nullcontext(), before))
        if self._changing_buffers is None:
            self._changing_buffers = before.keep_changing()
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copied and pickled by its own class: pickle cannot find the one made here."""
        parts: Any = super().__reduce_ex__(2)
        _, arguments, *rest = parts
        return _new_recomputed, (self._own_class, arguments[1:]), *rest


class _SavedBuffers(AbstractContextManager[None]):
    """The buffers as they are now. Inside it, modules use copies of these."""

    def __init__(self, owners: list[_Buffer]) -> None:
        self._copies = [_clone(getattr(module, name, None)) for module, name in owners]
        self._owners = owners
        self._versions = [_version(module, name) for module, name in owners]
        self._now: list[Tensor | None] = []

    def keep_changing(self) -> list[_Buffer]:
        """Drop the buffers that the forward has not changed, and return the others.

        Running statistics stay: a worker whose first micro-batch has no samples does not change them.
        """
        kept = [
            (owner, copy)
            for owner, copy, version in zip(self._owners, self._copies, self._versions, strict=True)
            if isinstance(owner[0], BatchNormBase | NormAct)
            or owner[1] in _STATISTICS
            or version != _version(*owner)
            or not _are_equal(getattr(*owner, None), copy)  # written as `.data`
        ]
        self._owners, self._copies = [owner for owner, _ in kept], [copy for _, copy in kept]
        return self._owners

    def __enter__(self) -> None:
        self._now = [getattr(module, name, None) for module, name in self._owners]
        self._set([_clone(copy) for copy in self._copies])

    def __exit__(self, *_: object) -> None:
        self._set(self._now)

    def _set(self, buffers: list[Tensor | None]) -> None:
        for (module, name), buffer in zip(self._owners, buffers, strict=True):
            setattr(module, name, buffer)


def _buffers(module: Any) -> list[_Buffer]:
    return [(part, name) for part in module.modules() for name in part._buffers]


def _version(module: nn.Module, name: str) -> tuple[int, int] | None:
    buffer = getattr(module, name, None)
    return None if buffer is None else (id(buffer), buffer._version)


def _clone(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


@functools.cache
def _recomputed(own: type[Any]) -> type[Any]:
    body = {"_own_class": own, "__module__": own.__module__, "__doc__": own.__doc__}
    return types.new_class(own.__name__, (Recomputed, own), exec_body=lambda names: names.update(body))


def _new_recomputed(own: Any, arguments: tuple[Any, ...]) -> Any:
    kind = _recomputed(own)
    return kind.__new__(kind, *arguments)
