"""Krizhevsky's hybrid (arXiv 1404.5997): all workers have the trunk, and the classifier is cut over them.

Each worker takes its own samples through the trunk. Then there are as many rounds as workers: in each, the features of
one worker's samples go to all, and all compute the classifier on them together, so that it sees one worker's batch at
a time and its weights never travel.

A worker's loss counts its own samples, and the trunk's gradients are averaged over the workers. Those of the
classifier come out as that very mean, by the factors in `_ToAll` and `_ToOwner`: a cut parameter's gradient is ready as
it is, and one that is whole is equal on all workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stormo.data.order import derive_seed
from stormo.distributed.parallel_dims import SubGroup
from stormo.errors import SettingError
from stormo.layers.sync_batch_norm import variant
from stormo.parallel.tensor.layers import ShardSpec, drawing_from, draws_random
from stormo.parallel.tensor.plan import chain_of, chain_plan, is_chain, is_elementwise, matched
from stormo.parallel.tensor.split import split_tensor
from stormo.tasks.task import Task


def split_classifier(task: Task, model: nn.Module, line: SubGroup) -> dict[str, ShardSpec]:
    """Cut the model's classifier over the line, whose workers take different samples; the cuts by parameter name.

    The model is called as before, on this worker's samples, and by all workers equally often; how many samples each
    has may differ. Parameters in the cuts are left out of the averaging of gradients over this line; all others take
    part in it.
    """
    found = find_classifier(task, model, line.size)
    if line.size == 1:
        return {}
    asked = f"--strategy hybrid was set with {line.size} workers"
    cuts = split_tensor(model, found.plan, line, asked=asked, remedy="start {} workers")
    module: Any = model.get_submodule(found.path)
    kind: Any = type(module)
    module.__class__ = _in_rounds(kind)
    module.exchange, module.first = _Exchange(line, is_random=draws_random(module)), found.first
    return cuts


@functools.cache
def _in_rounds(plain: type[nn.Module]) -> type[Any]:
    return variant("Hybrid", _InRounds, plain)


class _InRounds(nn.Module):
    """What a classifier becomes: its own computation on one worker's features after the other's."""

    exchange: _Exchange
    first: int | None  # child of a chain with which the classifier begins; None for the whole module

    # The rounds depend on the other workers' sizes: compiled code ends before them and goes on after them.
    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def forward(self, features: Tensor) -> Tensor:
        """This worker's features -> this worker's scores."""
        if self.first is None:
            return self.exchange.in_rounds(features, super().forward, is_training=self.training)
        layers: list[Any] = list(self._modules.values())
        trunk, classifier = layers[: self.first], layers[self.first :]
        return self.exchange.in_rounds(
            _one_after_another(trunk, features),
            functools.partial(_one_after_another, classifier),
            is_training=self.training,
        )


def _one_after_another(layers: Sequence[Callable[[Tensor], Tensor]], features: Tensor) -> Tensor:
    for layer in layers:
        features = layer(features)
    return features


class _Exchange:
    """The rounds among the workers of a line."""

    def __init__(self, line: SubGroup, *, is_random: bool) -> None:
        self._line = line
        self._is_random = is_random

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copy of the model has the same workers

    def in_rounds(self, features: Tensor, compute: Callable[[Tensor], Tensor], *, is_training: bool) -> Tensor:
        """This worker's part of what all compute together."""
        is_random = self._is_random and is_training
        sizes, seed = self._announce(len(features), is_random)
        arrivals: list[dist.Work | None] = []
        outputs = []
        batches: tuple[Tensor, ...] = _ToAll.apply(features, self._line, sizes, arrivals)  # type: ignore[no-untyped-call]
        for number, (batch, arrival) in enumerate(zip(batches, arrivals, strict=True)):
            if arrival is not None:
                arrival.wait()  # the next ones travel while this one is computed
            if is_random:  # what all workers compute alike must leave out the same units on all of them
                with drawing_from(derive_seed(seed, "round", number), features.device):
                    outputs.append(compute(batch))
            else:
                outputs.append(compute(batch))
        mine: Tensor = _ToOwner.apply(self._line, *outputs)  # type: ignore[no-untyped-call]
        return mine

    def _announce(self, num_samples: int, is_random: bool) -> tuple[list[int], int]:
        """How many samples each worker has, and the first one's draw."""
        mine = torch.tensor([num_samples, int(torch.randint(2**62, ())) if is_random else 0])
        said = [torch.empty_like(mine) for _ in range(self._line.size)]
        dist.all_gather(said, mine, group=self._line.group)
        return [int(one[0]) for one in said], int(said[0][1])


class _ToAll(torch.autograd.Function):
    """Every worker's features on all workers, on their way; the gradients of its own come back to each."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, line: SubGroup, sizes: list[int], arrivals: list[dist.Work | None]
    ) -> tuple[Tensor, ...]:
        ctx.line = line
        batches = []
        for owner, size in enumerate(sizes):
            if owner == line.rank:
                batch = features.clone(memory_format=torch.contiguous_format)
            else:
                batch = features.new_empty((size, *features.shape[1:]))
            arrivals.append(dist.broadcast(batch, group=line.group, group_src=owner, async_op=True) if size else None)
            batches.append(batch)
        return tuple(batches)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Whole on every worker already; times the size, which `_ToOwner` has taken out of it.
        return grads[ctx.line.rank] * ctx.line.size, None, None, None


class _ToOwner(torch.autograd.Function):
    """Of the scores of all rounds this worker's; each owner's gradients go to all, as a mean over the workers."""

    @staticmethod
    def forward(ctx: Any, line: SubGroup, *outputs: Tensor) -> Tensor:
        ctx.line = line
        ctx.like = [(output.shape, output.dtype) for output in outputs]
        return outputs[line.rank].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        line, grads, arrivals = ctx.line, [], []
        for owner, (shape, dtype) in enumerate(ctx.like):
            sent = grad.new_empty(shape, dtype=dtype)
            if owner == line.rank:
                torch.div(grad, line.size, out=sent)
            if sent.numel():
                arrivals.append(dist.broadcast(sent, group=line.group, group_src=owner, async_op=True))
            grads.append(sent)
        for arrival in arrivals:
            arrival.wait()
        return None, *grads


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
    styles = matched(model, said, f"{type(task).__name__}.tensor_plan()")
    inside = {name for name, _ in model.get_submodule(path).named_modules(prefix=path)}
    return {name: style.text for name, style in styles.items() if name in inside}
