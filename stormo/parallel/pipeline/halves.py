"""A backward pass in two halves: first the gradients of the inputs, for which another worker waits, later those of the
weights.

The way from the outputs to the inputs is the trunk of the graph; a weight hangs on it at joints, such as a matrix
product. The first half runs the trunk and keeps what arrives at every joint; the second goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass(eq=False, slots=True)
class _Group:
    """Weights that share joints, and what has arrived at each joint."""

    weights: list[Tensor]
    joints: list[Node]
    arrived: list[tuple[Tensor | None, ...] | None]


def inputs_first(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None] | None,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[tuple[Tensor | None, ...], list[_Group]]:
    """The gradients of the inputs, and what `weights_later` needs; the outputs lose their graph."""
    ends = [(out, None if gradients is None else gradients[i]) for i, out in enumerate(outputs) if out.requires_grad]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    roots = [get_gradient_edge(out).node for out, _ in ends]
    parents = _parents(roots)
    trunk = _above([get_gradient_edge(tensor).node for tensor in wanted], parents, stop=set())[0] | set(roots)
    groups = _grouped([weight for weight in weights if weight.requires_grad], parents, trunk)
    hooks = [
        joint.register_prehook(_keeper(group, place)) for group in groups for place, joint in enumerate(group.joints)
    ]
    try:
        found = torch.autograd.grad(
            [out for out, _ in ends],
            wanted,
            [torch.ones_like(out) if given is None else given for out, given in ends],
            retain_graph=True,
            allow_unused=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    for out, _ in ends:
        out.detach_()  # what lies above the last joint can go
    by_input = dict(zip(map(id, wanted), found, strict=True))
    return tuple(by_input.get(id(tensor)) for tensor in inputs), groups


def weights_later(groups: Iterable[_Group]) -> None:
    """Add the gradients of the weights to their `.grad`."""
    for group in groups:
        edges, gradients, hooks = [], [], []
        for joint, arrived in zip(group.joints, group.arrived, strict=True):
            assert arrived is not None, "a joint on the trunk was not passed"
            if len(group.joints) > 1:
                # A joint above sends its own part down the trunk, which is in what has arrived here already.
                hooks.append(joint.register_prehook(_giver(arrived)))
            for index, gradient in enumerate(arrived):
                if gradient is not None:
                    edges.append(GradientEdge(joint, index))
                    gradients.append(gradient)
        try:
            # Between two joints lie nodes of the trunk that other groups still need.
            torch.autograd.backward(edges, gradients, retain_graph=len(group.joints) > 1, inputs=group.weights)
        finally:
            for hook in hooks:
                hook.remove()
        group.joints.clear()
        group.arrived.clear()


def _parents(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """Of every node below the roots, the nodes that lead to it."""
    waiting = list(dict.fromkeys(roots))
    parents: dict[Node, list[Node]] = {root: [] for root in waiting}
    while waiting:
        node = waiting.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child not in parents:
                parents[child] = []
                waiting.append(child)
            parents[child].append(node)
    return parents


def _above(starts: Iterable[Node], parents: dict[Node, list[Node]], stop: set[Node]) -> tuple[set[Node], set[Node]]:
    """The nodes from which one can come to a start, and those of `stop` at which the way up ended."""
    waiting = [node for node in starts if node in parents]
    seen, ended = set(waiting), set()
    while waiting:
        for parent in parents[waiting.pop()]:
            if parent in stop:
                ended.add(parent)
            elif parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return seen, ended


def _grouped(weights: Sequence[Tensor], parents: dict[Node, list[Node]], trunk: set[Node]) -> list[_Group]:
    """Every weight in one group; weights with a joint in common are in the same."""
    groups: list[_Group] = []
    by_joint: dict[Node, _Group] = {}
    for weight in weights:
        joints = _above([get_gradient_edge(weight).node], parents, trunk)[1]
        if not joints:
            continue  # not in this graph
        merged = _Group([weight], list(joints), [])
        for group in {id(by_joint[joint]): by_joint[joint] for joint in joints if joint in by_joint}.values():
            groups.remove(group)
            merged.weights += group.weights
            merged.joints += [joint for joint in group.joints if joint not in joints]
        groups.append(merged)
        by_joint |= dict.fromkeys(merged.joints, merged)
    for group in groups:
        group.arrived = [None] * len(group.joints)
    return groups


def _keeper(group: _Group, place: int) -> Callable[..., None]:
    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        group.arrived[place] = gradients

    return keep


def _giver(gradients: tuple[Tensor | None, ...]) -> Callable[..., Any]:
    return lambda _arrived: gradients
