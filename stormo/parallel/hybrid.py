"""Krizhevsky's hybrid (arXiv 1404.5997): the trunk is copied to every worker, the classifier is cut over them.

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
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stormo.data.order import derive_seed
from stormo.distributed.parallel_dims import Line
from stormo.layers.sync_batch_norm import variant
from stormo.parallel.classifier import find_classifier
from stormo.parallel.masks import drawing_from, draws_random
from stormo.parallel.split_layers import Cut
from stormo.parallel.tensor import split_tensor
from stormo.tasks.task import Task


def split_classifier(task: Task, model: nn.Module, line: Line) -> dict[str, Cut]:
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

    def __init__(self, line: Line, *, is_random: bool) -> None:
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
        ctx: Any, features: Tensor, line: Line, sizes: list[int], arrivals: list[dist.Work | None]
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
    def forward(ctx: Any, line: Line, *outputs: Tensor) -> Tensor:
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
