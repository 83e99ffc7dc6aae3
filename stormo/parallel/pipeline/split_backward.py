"""A backward pass in two halves: gradients of the inputs, for which another worker waits; later those of the weights.

The input path is the part of the graph from the outputs to the inputs. A weight joins it at split nodes, such as a
matrix product. The first half runs the input path and keeps the gradients at every split node. The second half runs
from the split nodes to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass(eq=False, slots=True)
class _Group:
    """Weights that share split nodes, and the gradients that reached each of these nodes."""

    weights: list[Tensor]
    gradients: dict[Node, tuple[Tensor | None, ...] | None]


def backward_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None] | None,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[tuple[Tensor | None, ...], list[_Group]]:
    """The gradients of the inputs, and what `backward_weights` needs; the outputs lose their graph."""
    ends = [(out, None if gradients is None else gradients[i]) for i, out in enumerate(outputs) if out.requires_grad]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    roots = [get_gradient_edge(out).node for out, _ in ends]
    parents = _parents(roots)
    input_path = _above([get_gradient_edge(tensor).node for tensor in wanted], parents, stop=set())[0] | set(roots)
    groups = _grouped([weight for weight in weights if weight.requires_grad], parents, input_path)
    nodes = [(group.gradients, node) for group in groups for node in group.gradients]
    hooks = [node.register_prehook(partial(reached.__setitem__, node)) for reached, node in nodes]
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
        out.detach_()  # the graph above the last split node can go
    by_input = dict(zip(map(id, wanted), found, strict=True))
    return tuple(by_input.get(id(tensor)) for tensor in inputs), groups


def backward_weights(groups: Iterable[_Group]) -> None:
    """Add the gradients of the weights to their `.grad`."""
    for group in groups:
        edges, gradients, hooks = [], [], []
        has_several = len(group.gradients) > 1
        for node, reached in group.gradients.items():
            assert reached is not None, "the first half did not pass a split node"
            if has_several:
                # A split node above sends its part along the input path; it is already in what reached this node.
                hooks.append(node.register_prehook(_replace_by(reached)))
            for index, gradient in enumerate(reached):
                if gradient is not None:
                    edges.append(GradientEdge(node, index))
                    gradients.append(gradient)
        try:
            # Other groups still need the nodes of the input path between two split nodes.
            torch.autograd.backward(edges, gradients, retain_graph=has_several, inputs=group.weights)
        finally:
            for hook in hooks:
                hook.remove()
        group.gradients.clear()


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
    """The nodes above the starts, up to and without those of `stop`; and the nodes of `stop` that were reached."""
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


def _grouped(weights: Sequence[Tensor], parents: dict[Node, list[Node]], input_path: set[Node]) -> list[_Group]:
    """Every weight in one group; weights with a split node in common are in the same group."""
    groups: list[_Group] = []
    by_node: dict[Node, _Group] = {}
    for weight in weights:
        nodes = _above([get_gradient_edge(weight).node], parents, input_path)[1]
        if not nodes:
            continue  # not in this graph
        merged = _Group([weight], dict.fromkeys(nodes))
        for group in {id(by_node[node]): by_node[node] for node in nodes if node in by_node}.values():
            groups.remove(group)
            merged.weights += group.weights
            merged.gradients |= group.gradients
        groups.append(merged)
        by_node |= dict.fromkeys(merged.gradients, merged)
    return groups


def _replace_by(gradients: tuple[Tensor | None, ...]) -> Callable[..., Any]:
    return lambda _: gradients
