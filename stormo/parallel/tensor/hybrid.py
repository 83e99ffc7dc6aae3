"""Krizhevsky's hybrid (arXiv 1404.5997): feature layers are replicated, and the classifier is sharded.

Each worker runs its own samples through the feature layers. Then there are as many rounds as workers. In each round,
the features of one worker go to all, and all compute the classifier on them together. Its weights are never sent.

A worker's loss has its own samples, and the feature layers' gradients are averaged over all workers. The factors in
`_ToAll` and `_ToOwner` make the classifier's gradients that same mean: a sharded parameter's gradient is final, and a
whole one's is equal on all workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stormo.data.order import derive_seed
from stormo.distributed.parallel_dims import SubGroup
from stormo.errors import SettingError
from stormo.layers.sync_batch_norm import variant
from stormo.parallel.tensor.layers import ShardSpec, drawing_from, draws_random, waiting_for
from stormo.parallel.tensor.plan import chain_of, chain_plan, is_chain, is_elementwise, matched
from stormo.parallel.tensor.split import split_tensor
from stormo.tasks.task import Task


def split_classifier(task: Task, model: nn.Module, group: SubGroup) -> dict[str, ShardSpec]:
    """Shard the model's classifier over workers with different samples; the shards by parameter name.

    All workers call the model equally often; their numbers of samples may differ. The gradients of sharded parameters
    must not be averaged over this group.
    """
    found = find_classifier(task, model, group.size)
    if group.size == 1:
        return {}
    asked = f"--strategy hybrid was set with {group.size} workers"
    specs = split_tensor(model, found.plan, group, asked=asked, remedy="start {} workers")
    module: Any = model.get_submodule(found.path)
    kind: Any = type(module)
    module.__class__ = _in_rounds(kind)
    module.exchange, module.first = _Exchange(group, is_random=draws_random(module)), found.first
    return specs


@functools.cache
def _in_rounds(plain: type[nn.Module]) -> type[Any]:
    return variant("Hybrid", _InRounds, plain)


class _InRounds(nn.Module):
    """A classifier that computes on the features of one worker after the other."""

    exchange: _Exchange
    first: int | None  # first child of the classifier in a chain; None for the whole module

    # The rounds depend on the other workers' sizes, so they are not compiled.
    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def forward(self, features: Tensor) -> Tensor:
        """This worker's features -> its scores."""
        if self.first is None:
            return self.exchange.in_rounds(features, super().forward, is_training=self.training)
        layers: list[Any] = list(self._modules.values())
        feature_layers, classifier = layers[: self.first], layers[self.first :]
        return self.exchange.in_rounds(
            _run_all(feature_layers, features),
            functools.partial(_run_all, classifier),
            is_training=self.training,
        )


def _run_all(layers: Sequence[Callable[[Tensor], Tensor]], features: Tensor) -> Tensor:
    for layer in layers:
        features = layer(features)
    return features


class _Exchange:
    """The rounds among the workers."""

    def __init__(self, group: SubGroup, *, is_random: bool) -> None:
        self._group = group
        self._is_random = is_random

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copy of the model has the same workers

    def in_rounds(self, features: Tensor, compute: Callable[[Tensor], Tensor], *, is_training: bool) -> Tensor:
        """This worker's part of the result of all rounds."""
        is_random = self._is_random and is_training
        sizes, seed = self._announce(len(features), is_random)
        arrivals: list[dist.Work | None] = []
        outputs = []
        batches: tuple[Tensor, ...] = _ToAll.apply(features, self._group, sizes, arrivals)  # type: ignore[no-untyped-call]
        for number, (batch, arrival) in enumerate(zip(batches, arrivals, strict=True)):
            if arrival is not None:
                with self._waiting():
                    arrival.wait()  # the next ones are received while this one is computed
            # Whole layers must drop the same units on all workers.
            with drawing_from(derive_seed(seed, "round", number), features.device) if is_random else nullcontext():
                outputs.append(compute(batch))
        mine: Tensor = _ToOwner.apply(self._group, *outputs)  # type: ignore[no-untyped-call]
        return mine

    def _waiting(self) -> AbstractContextManager[object]:
        assert self._group.group is not None, "a classifier is split over several workers"
        return waiting_for(self._group.group.group_name)

    def _announce(self, num_samples: int, is_random: bool) -> tuple[list[int], int]:
        """The number of samples of each worker, and a seed of the first."""
        mine = torch.tensor([num_samples, int(torch.randint(2**62, ())) if is_random else 0])
        gathered = [torch.empty_like(mine) for _ in range(self._group.size)]
        with self._waiting():
            dist.all_gather(gathered, mine, group=self._group.group)
        return [int(one[0]) for one in gathered], int(gathered[0][1])


class _ToAll(torch.autograd.Function):
    """Start to send every worker's features to all; each gets the gradients of its own."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, group: SubGroup, sizes: list[int], arrivals: list[dist.Work | None]
    ) -> tuple[Tensor, ...]:
        ctx.group = group
        batches = []
        for owner, size in enumerate(sizes):
            if owner == group.rank:
                batch = features.clone(memory_format=torch.contiguous_format)
            else:
                batch = features.new_empty((size, *features.shape[1:]))
            arrivals.append(dist.broadcast(batch, group=group.group, group_src=owner, async_op=True) if size else None)
            batches.append(batch)
        return tuple(batches)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Already whole on every worker; times the size, by which `_ToOwner` has divided.
        return grads[ctx.group.rank] * ctx.group.size, None, None, None


class _ToOwner(torch.autograd.Function):
    """This worker's scores of all rounds; each owner's gradients go to all, divided by the number of workers."""

    @staticmethod
    def forward(ctx: Any, group: SubGroup, *outputs: Tensor) -> Tensor:
        ctx.group = group
        ctx.like = [(output.shape, output.dtype) for output in outputs]
        return outputs[group.rank].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, grads, arrivals = ctx.group, [], []
        for owner, (shape, dtype) in enumerate(ctx.like):
            sent = grad.new_empty(shape, dtype=dtype)
            if owner == group.rank:
                torch.div(grad, group.size, out=sent)
            if sent.numel():
                arrivals.append(dist.broadcast(sent, group=group.group, group_src=owner, async_op=True))
            grads.append(sent)
        with waiting_for(group.group.group_name):
            for arrival in arrivals:
                arrival.wait()
        return None, *grads


_ASKED = "--strategy hybrid was set"


@dataclass(frozen=True, slots=True)
class Classifier:
    """The module of the classifier, its first child, and its tensor plan."""

    path: str
    first: int | None  # None: the whole module
    plan: dict[str, str]


def find_classifier(task: Task, model: nn.Module, size: int) -> Classifier:
    """The classifier of a model for this many workers."""
    given = task.classifier(model)
    path = _climb(model, _last_linear(task, model)) if given is None else _path_of(task, model, given)
    module = model.get_submodule(path)
    layers, first = chain_of(module, path), None
    if is_chain(module):
        children = chain_of(module, path, is_deep=False)
        first = _beginning([child for _, child in children], is_whole=given is not None)
        layers = [layer for name, child in children[first:] for layer in chain_of(child, name)]
    plan = _own_plan(task, model, path) or chain_plan(layers, size)
    name = type(task).__name__
    if not plan:
        raise SettingError(
            _ASKED,
            f"it is not known how to shard the layers of {path or type(model).__name__} over {size} workers",
            f"say so in {name}, as in def tensor_plan(self, model): return "
            f'{{"{path or "classifier"}.up": "column", "{path or "classifier"}.down": "row"}}',
        )
    inside = {id(parameter) for _, layer in layers for parameter in layer.parameters()}
    if all(id(parameter) in inside for parameter in model.parameters()):
        raise SettingError(
            _ASKED,
            f"all layers of {type(model).__name__} are its classifier, and none is left to replicate",
            "set --strategy tensor or ddp",
        )
    for layer_path, layer in layers:
        for buffer, _ in layer.named_buffers():
            raise SettingError(
                _ASKED,
                f"{layer_path} keeps {buffer} of its batches, and a classifier gets every worker's batch in turn",
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
    """The outermost chain around a layer in which all that follows is fully connected."""
    parent = path.rpartition(".")[0]
    while path and is_chain(model.get_submodule(parent)):
        module = model.get_submodule(path)
        if not all(_is_connected(layer) for _, layer in chain_of(module)):
            break
        path, parent = parent, parent.rpartition(".")[0]
    return path


def _beginning(children: Sequence[nn.Module], *, is_whole: bool) -> int:
    """The first child with weights of the classifier: the fully connected end, unless the whole chain is it."""
    first = 0 if is_whole else len(children)
    while first and all(_is_connected(layer) for _, layer in chain_of(children[first - 1])):
        first -= 1
    while first < len(children) and next(children[first].parameters(), None) is None:
        first += 1
    return first


def _is_connected(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or is_elementwise(layer)


def _path_of(task: Task, model: nn.Module, given: nn.Module | str) -> str:
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for path, module in modules.items():
        if module is given or path == given:
            return path
    shown = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
    children = ", ".join(name for name, _ in model.named_children())
    raise SettingError(
        f"{type(task).__name__}.classifier() returned {shown}",
        f"it is no module of {type(model).__name__}",
        f"return one of its modules or that one's path: {children} or what is inside them",
    )


def _own_plan(task: Task, model: nn.Module, path: str) -> dict[str, str]:
    """The task's plan for the classifier's layers."""
    given = task.tensor_plan(model)
    if given is None:
        return {}
    styles = matched(model, given, f"{type(task).__name__}.tensor_plan()")
    inside = {name for name, _ in model.get_submodule(path).named_modules(prefix=path)}
    return {name: style.text for name, style in styles.items() if name in inside}
