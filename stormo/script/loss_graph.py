"""Reads from the autograd graph what a loss is a mean over: a sum over the batch must not be taken for a mean.

The walk starts at the loss and goes through additions and constant factors to the operations that made one number of a
tensor. Only what is certain counts: a sum is one over the batch if its input, followed down through operations that
work row by row, comes from a layer of the model. The nodes' `_saved_…` attributes are torch's documented way to look
into a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

_MOST_NODES = 5000  # of one walk; what is not found by then is not certain
_NONE, _MEAN, _SUM = 0, 1, 2  # reductions as torch saves them in its losses


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SAME_NUMBER = _names("Alias Clone Neg Reshape ReshapeAlias Squeeze ToCopy Unsqueeze UnsafeView View")
# Operations that work row by row,
_ROW_BY_ROW = _SAME_NUMBER | _names(
    "Abs Add Clamp ClampMin Div Exp Log LogSigmoid MaskedFill Mul Pow Relu Sigmoid Softplus Sqrt Sub Tanh Where"
)
# and those that do if they work along other dimensions.
_ALONG = _names("Gather LinalgVectorNorm LogSoftmax Logsumexp Mean Select Slice Softmax Sum Transpose")
# Layers whose output has a row for each row of their input.
_LAYERS = _names("Convolution CudnnConvolution Embedding MkldnnConvolution NativeBatchNorm NativeLayerNorm")


class LossTerms(NamedTuple):
    """Whether a part of a loss is a sum over the batch, and what the other parts are divided by."""

    has_sum: bool
    divisors: list[float]


def read_terms(loss: Tensor, num_samples: int, step_samples: int | None) -> LossTerms:
    """Read the graph of a loss of so many samples; `step_samples` are those of all workers and micro-batches."""
    has_sum, divisors = False, list[float]()
    for node, factors in _terms(loss.grad_fn):
        sizes, reduction = _reduced(node)
        if reduction == _MEAN:
            weight = _number(getattr(node, "_saved_total_weight", None))  # of classes, without ignored targets
            divisors.append(math.prod(sizes) if weight is None else weight)
        elif reduction == _SUM and _is_over_batch(node, sizes, num_samples):
            counts = (num_samples, sizes[0], math.prod(sizes))
            known = [factor for factor, _ in factors if any(math.isclose(factor, one, rel_tol=1e-6) for one in counts)]
            divided_by = [factor for factor, is_division in factors if is_division]
            if known:
                divisors.append(known[0])
            elif divided_by and step_samples not in divided_by:
                divisors.append(math.prod(divided_by))
            else:
                has_sum = True
    return LossTerms(has_sum, divisors)


def item_counts_differ(num_samples: list[int], divisors: list[list[float]]) -> bool:
    """Whether the ranks' losses are means over items other than samples, of which a sample has more on one rank.

    The mean over the elements of a single sample is that sample's loss, however many elements there are.
    """
    ranks = [(number, terms) for number, terms in zip(num_samples, divisors, strict=True) if number]
    if any(number == 1 or len(terms) != len(ranks[0][1]) for number, terms in ranks):
        return False
    for term in zip(*(terms for _, terms in ranks), strict=True):
        items_per_sample = [divisor / number for divisor, (number, _) in zip(term, ranks, strict=True)]
        if max(term) > min(term) and max(items_per_sample) > min(items_per_sample) * (1 + 1e-6):
            return True
    return False


def _terms(root: Any) -> Iterator[tuple[Any, list[tuple[float, bool]]]]:
    """The operations that made one number of a tensor, each with what it is divided by, and whether by a division."""
    waiting: list[tuple[Any, list[tuple[float, bool]]]] = [(root, [])]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node, factors = waiting.pop()
        kind, inputs = _kind(node), _inputs(node)
        if kind in _SAME_NUMBER or kind in ("Add", "Sub"):
            waiting += [(each, factors) for each in inputs]
        elif kind in ("Mul", "Div") and len(inputs) == 1:
            is_division, is_first = kind == "Div", node.next_functions[0][0] is not None
            constant = abs(_number(getattr(node, "_saved_other" if is_first else "_saved_self", None)) or 0.0)
            if 0 < constant < math.inf and (is_first or not is_division):
                waiting.append((inputs[0], [*factors, (constant if is_division else 1 / constant, is_division)]))
        else:
            yield node, factors


def _reduced(node: Any) -> tuple[tuple[int, ...], int | None]:
    """The sizes of what a node has reduced to one number, and how."""
    name = node.name()
    if name in ("SumBackward0", "MeanBackward0"):
        return tuple(node._saved_self_sym_sizes), _SUM if name == "SumBackward0" else _MEAN
    target = getattr(node, "_saved_target", None)
    if isinstance(target, Tensor) and hasattr(node, "_saved_reduction"):
        return tuple(target.shape), node._saved_reduction
    return (), None


def _is_over_batch(node: Any, sizes: tuple[int, ...], num_samples: int) -> bool:
    """Whether the first dimension of a node's input is certainly that of the batch."""
    if not sizes or sizes[0] == 0 or sizes[0] % num_samples:
        return False
    inputs = _inputs(node)
    if _kind(inputs[0]) == "Stack":  # of one number for each sample, made of its row
        rows = [each for each in _below(inputs[0], lambda one: not _takes_rows(one)) if _takes_rows(each)]
        has_all = sum(len(_outputs(each)) for each in rows) >= num_samples == sizes[0]
        return has_all and _is_over_batch(rows[0], _input_sizes(rows[0]), num_samples)
    return any(_is_layer(each) for each in _below(node, _keeps_rows))


def _below(node: Any, descends: Callable[[Any], bool]) -> Iterator[Any]:
    waiting, seen = _inputs(node), {node}
    while waiting and len(seen) < _MOST_NODES:
        here = waiting.pop()
        if here not in seen:
            seen.add(here)
            yield here
            waiting += _inputs(here) if descends(here) else []


def _is_layer(node: Any) -> bool:
    """Whether a node has made one row, or one loss, of each row: a product must be one with a weight."""
    if _kind(node) not in ("Addmm", "Mm"):
        return _kind(node) in _LAYERS or getattr(node, "_saved_reduction", None) == _NONE
    weight = node.next_functions[-1][0]
    while weight is not None and _kind(weight) in ("T", "ToCopy"):
        weight = weight.next_functions[0][0]
    return weight is not None and weight.name() == "torch::autograd::AccumulateGrad"


def _takes_rows(node: Any) -> bool:
    return _kind(node) in ("Select", "Unbind") and bool(node._saved_dim == 0)


def _keeps_rows(node: Any) -> bool:
    """Whether an operation works row by row."""
    dims: list[int] = []
    for name in ("_saved_dim", "_saved_dim0", "_saved_dim1"):
        dim = getattr(node, name, None)
        dims += dim if isinstance(dim, list | tuple) else [] if dim is None else [dim]
    if not dims:
        return _kind(node) in _ROW_BY_ROW
    length = len(_input_sizes(node))
    signed = [dim - 2**64 if dim >= 2**63 else dim for dim in dims]  # a negative one is saved without its sign
    return _kind(node) in _ROW_BY_ROW | _ALONG and length > 0 and all(dim % length for dim in signed)


def _input_sizes(node: Any) -> tuple[int, ...]:
    before, number = next(each for each in node.next_functions if each[0] is not None)
    return tuple(_outputs(before)[number].shape)


def _outputs(node: Any) -> Any:
    """Types and shapes of what an operation returned, whose gradients are the inputs of its node."""
    return node._input_metadata


def _number(value: Any) -> float | None:
    """A number that a node has saved, as it is or in a tensor."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def _inputs(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]


def _kind(node: Any) -> str:
    """The operation of one of torch's own nodes, whose names end with a digit."""
    name: str = node.name()
    return name[:-1].removesuffix("Backward") if name[-1:].isdigit() else ""
