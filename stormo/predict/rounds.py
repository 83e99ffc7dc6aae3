"""The hybrid's classifier as one of several workers has it: a part of every layer, and the features of all workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stormo.errors import SettingError
from stormo.parallel.tensor.hybrid import find_classifier
from stormo.parallel.tensor.plan import GATHERED, WHOLE_ROW, matched
from stormo.parallel.tensor.split import KINDS
from stormo.tasks.task import Task


def cut_by_hybrid(task: Task, model: nn.Module, num_workers: int) -> frozenset[str]:
    """The parameters of the classifier that are cut; a sentence where they cannot be."""
    found = set()
    for path, wish in matched(model, find_classifier(task, model, num_workers).plan).items():
        layer = model.get_submodule(path)
        count = wish.num_groups or getattr(layer, KINDS[wish.kind].size)
        if count % num_workers:
            raise SettingError(
                f"--strategy hybrid was set with {num_workers} workers",
                f"{path} has {count} parts to deal out",
                "start fewer workers",
            )
        names = KINDS[wish.kind].dims
        found |= {f"{path}.{name}" for name in names if getattr(layer, name, None) is not None}
    return frozenset(found)


@torch.no_grad()
def keep_one_round(task: Task, model: nn.Module, num_workers: int) -> None:
    """Leave one worker's part of the classifier, and let it compute on the features of all workers, in place."""
    found = find_classifier(task, model, num_workers)
    for path, wish in matched(model, found.plan).items():
        layer = model.get_submodule(path)
        for name, dim in KINDS[wish.kind].dims.items():
            whole = getattr(layer, name, None)
            if whole is not None:
                part = whole.narrow(dim, 0, whole.shape[dim] // num_workers).clone()
                setattr(layer, name, nn.Parameter(part, whole.requires_grad))
        if wish.kind in _WHOLE:
            layer.forward = functools.partial(_WHOLE[wish.kind], layer, num_workers)
    module: Any = model.get_submodule(found.path)
    if found.first is None:
        module.forward = functools.partial(_in_rounds, (), module.forward, num_workers)
        return
    layers: list[Any] = list(module._modules.values())
    classifier = functools.partial(_one_after_another, layers[found.first :])
    module.forward = functools.partial(_in_rounds, layers[: found.first], classifier, num_workers)


def _gathered(layer: nn.Linear, num_workers: int, features: Tensor) -> Tensor:
    part = F.linear(features, layer.weight, layer.bias)
    return torch.cat([part] * num_workers, dim=-1)


def _from_whole(layer: nn.Linear, num_workers: int, features: Tensor) -> Tensor:
    part = features.narrow(-1, 0, layer.weight.shape[1]).clone(memory_format=torch.contiguous_format)
    return F.linear(part, layer.weight, layer.bias)


# Layers that take and give whole activations; the others compute as they are, with less of each.
_WHOLE: dict[str, Callable[..., Tensor]] = {GATHERED: _gathered, WHOLE_ROW: _from_whole}


def _in_rounds(
    trunk: Sequence[Callable[[Tensor], Tensor]], classifier: Callable[[Tensor], Tensor], num_workers: int, x: Tensor
) -> Tensor:
    every: tuple[Tensor, ...] = _ToAll.apply(_one_after_another(trunk, x), num_workers)  # type: ignore[no-untyped-call]
    mine: Tensor = _ToOwner.apply(*map(classifier, every))  # type: ignore[no-untyped-call]
    return mine


def _one_after_another(layers: Sequence[Callable[[Tensor], Tensor]], features: Tensor) -> Tensor:
    for layer in layers:
        features = layer(features)
    return features


class _ToAll(torch.autograd.Function):
    """As many features as there are workers."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, num_workers: int) -> tuple[Tensor, ...]:
        """Copies, as what comes from others has the size of its own."""
        return tuple(features.clone(memory_format=torch.contiguous_format) for _ in range(num_workers))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Of its own."""
        return gradients[0] * len(gradients), None


class _ToOwner(torch.autograd.Function):
    """Its own scores of those of all workers."""

    @staticmethod
    def forward(ctx: Any, *scores: Tensor) -> Tensor:
        """A copy."""
        ctx.num_workers = len(scores)
        return scores[0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """One from every worker."""
        return tuple(torch.empty_like(gradients[0]) for _ in range(ctx.num_workers))
