"""Where a model's classifier begins: said by the task, or the fully connected layers at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from stormo.errors import SettingError
from stormo.parallel.tensor_plan import chain_of, chain_plan, is_chain, is_elementwise, matched
from stormo.tasks.task import Task

_ASKED = "--strategy hybrid was set"


@dataclass(frozen=True, slots=True)
class Classifier:
    """The module that holds it, the child with which it begins, and how its layers are cut."""

    path: str
    first: int | None  # None: the whole module
    plan: dict[str, str]


def find_classifier(task: Task, model: nn.Module, size: int) -> Classifier:
    """The classifier of a model for so many workers, or a sentence that says what is missing."""
    said = task.classifier(model)
    path = _last_linear(task, model) if said is None else _path_of(task, model, said)
    if said is None:
        path = _climb(model, path)
    module = model.get_submodule(path)
    layers, first = chain_of(module, path), None
    if is_chain(module):
        children = chain_of(module, path, is_deep=False)
        first = _beginning([child for _, child in children], is_whole=said is not None)
        layers = [layer for name, child in children[first:] for layer in chain_of(child, name)]
    plan = _own_plan(task, model, path) or chain_plan(layers, size)
    name = type(task).__name__
    if not plan:
        raise SettingError(
            _ASKED,
            f"it is not known how the layers of {path or type(model).__name__} can be cut over {size} workers",
            f"say so in {name}, as in def tensor_plan(self, model): return "
            f'{{"{path or "classifier"}.up": "column", "{path or "classifier"}.down": "row"}}',
        )
    inside = {id(parameter) for _, layer in layers for parameter in layer.parameters()}
    if all(id(parameter) in inside for parameter in model.parameters()):
        raise SettingError(
            _ASKED,
            f"all layers of {type(model).__name__} are its classifier, and none is left to be copied",
            "set --strategy tensor or ddp",
        )
    for layer_path, layer in layers:
        for buffer, _ in layer.named_buffers():
            raise SettingError(
                _ASKED,
                f"{layer_path} keeps {buffer} of the batches it sees, and a classifier sees every worker's in turn",
                f"say in {name} that the classifier begins after it: def classifier(self, model)",
            )
    return Classifier(path, first, plan)


def _last_linear(task: Task, model: nn.Module) -> str:
    own: list[tuple[str, nn.Module]] = [
        (path, layer)
        for path, layer in model.named_modules()
        if next(layer.parameters(recurse=False), None) is not None
    ]
    if own and type(own[-1][1]) is nn.Linear:
        return own[-1][0]
    raise SettingError(
        _ASKED,
        f"{type(model).__name__} does not end with a fully connected layer",
        f"say in {type(task).__name__} which module the classifier is: def classifier(self, model)",
    )


def _climb(model: nn.Module, path: str) -> str:
    """The chain that a layer is in, and further up as long as all of the lower one is fully connected."""
    parent = path.rpartition(".")[0]
    while path and is_chain(model.get_submodule(parent)):
        module = model.get_submodule(path)
        if not all(_is_connected(layer) for _, layer in chain_of(module)):
            break
        path, parent = parent, parent.rpartition(".")[0]
    return path


def _beginning(children: Sequence[nn.Module], *, is_whole: bool) -> int:
    """The first child of the classifier that has weights: what has none before it stays with the trunk.

    Unless the whole chain is the classifier, that is its fully connected end.
    """
    first = 0 if is_whole else len(children)
    while first and all(_is_connected(layer) for _, layer in chain_of(children[first - 1])):
        first -= 1
    while first < len(children) and next(children[first].parameters(), None) is None:
        first += 1
    return first


def _is_connected(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or is_elementwise(layer)


def _path_of(task: Task, model: nn.Module, said: nn.Module | str) -> str:
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for path, module in modules.items():
        if module is said or path == said:
            return path
    shown = repr(said) if isinstance(said, str) else f"a {type(said).__name__}"
    children = ", ".join(name for name, _ in model.named_children())
    raise SettingError(
        f"{type(task).__name__}.classifier() returned {shown}",
        f"it is no module of {type(model).__name__}",
        f"return one of its modules or that one's path: {children} or what is inside them",
    )


def _own_plan(task: Task, model: nn.Module, path: str) -> dict[str, str]:
    """What the task's plan says of the classifier's layers."""
    said = task.tensor_plan(model)
    if said is None:
        return {}
    wishes = matched(model, said, f"{type(task).__name__}.tensor_plan()")
    inside = {name for name, _ in model.get_submodule(path).named_modules(prefix=path)}
    return {name: wish.text for name, wish in wishes.items() if name in inside}
