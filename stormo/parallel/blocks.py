"""Which modules of a model are sharded, computed again or compiled as one unit each.

Without a wish these are the repeated blocks: what a ModuleList or a Sequential is made of. All else belongs to the
root. No unit lies in another, and no parameter in two.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from stormo.errors import SettingError

_UNEQUAL = 2  # times as many parameters: such neighbours are stages of a network rather than its blocks
_NUM_NEAR = 5


def blocks_of(model: nn.Module, asked: str | Sequence[str] | None = None) -> list[str]:
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
