"""What a loss is a mean over, read from its autograd graph: a sum over the batch must not be taken for a mean.

The walk starts at the loss and goes through additions and constant factors to the operations that reduced a tensor to
one number. Only what is certain counts: a sum is one over the batch where its input, followed down through operations
that keep the rows, comes from a layer of the model and has the batch's number of rows.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_MOST_NODES = 500  # of one walk; what is not found by then is not certain
_SUM, _MEAN, _NONE = 2, 1, 0  # reductions as torch saves them in its losses

# Keep one number one number, apart from a constant.
_LINEAR = re.compile("Alias|Clone|Neg|Reshape(Alias)?|Squeeze|ToCopy|Unsqueeze|View")
# Keep the rows of a tensor apart.
_ROW_BY_ROW = re.compile(
    "Abs|Add|Clamp(Max|Min)?|Cos|Div|Elu|Exp|Expand|Expm1|Gather|Gelu|Hardtanh|LeakyRelu|Lerp|Log|Log1P|Log2|LogSigmoid|"
    "LogSoftmax|MaskedFill|Maximum|Minimum|Mul|NativeDropout|Pow|Reciprocal|Relu|Rsqrt|Rsub|Sigmoid|Silu|Sin|Slice|"
    f"Softmax|Softplus|Split|Sqrt|Sub|Tanh|UnsafeView|Where|Xlogy|{_LINEAR.pattern}"
)
_ALONG_A_DIMENSION = re.compile("LinalgVectorNorm|Logsumexp|Mean|Norm|Permute|Select|Sum|Transpose")
# Layers whose output has a row for each row of their input, or a loss for each.
_LAYER = re.compile(
    "Adaptive(Avg|Max)Pool2D|AvgPool2D|(Cudnn|Mkldnn|)Convolution|CtcLoss|(Cudnn|Native)BatchNorm|Embedding(Bag)?|"
    "MaxPool2DWithIndices|Native(Group|Layer)Norm|SyncNorm"
)
_OF_A_WEIGHT = {"Permute", "T", "ToCopy", "Transpose"}


@dataclass(frozen=True, slots=True)
class Look:
    """What a loss shows: whether a part of it is a sum over the batch, and what the other parts are divided by."""

    is_sum: bool
    divisors: list[float]


def look(loss: Tensor, num_samples: int, step_samples: int | None) -> Look:
    """Read the graph of a loss of so many samples, of a step with so many on all workers and micro-batches."""
    is_sum, divisors = False, []
    for node, factors in _terms(loss.grad_fn):
        sizes, reduction = _reduced(node)
        if reduction == _MEAN:
            divisors.append(_mean_over(node, sizes))
        elif reduction == _SUM and _is_over_batch(node, sizes, num_samples):
            divided_by = [factor for factor in factors if factor >= 1]
            known = {num_samples, *_products(sizes, num_samples)}
            own = [each for each in divided_by if any(math.isclose(each, one, rel_tol=1e-6) for one in known)]
            is_of_step = step_samples is not None and any(each == step_samples for each in divided_by)
            unknown = [factor for factor, is_division in factors.items() if is_division]
            if own:
                divisors.append(own[0])
            elif unknown and not is_of_step:
                divisors.append(math.prod(unknown))
            else:
                is_sum = True
    return Look(is_sum, divisors)


def differ(looks: list[tuple[bool, int, list[float]]]) -> bool:
    """Whether workers divide by numbers of other things than samples: (is a sum, samples, divisors) of each.

    The mean over the elements of one sample is that sample's own, however many they are.
    """
    found = [(num_samples, divisors) for _, num_samples, divisors in looks if num_samples]
    if any(num_samples == 1 or len(divisors) != len(found[0][1]) for num_samples, divisors in found):
        return False
    for term in zip(*(divisors for _, divisors in found), strict=True):
        shares = [divisor / num_samples for divisor, (num_samples, _) in zip(term, found, strict=True)]
        if max(term) > min(term) and max(shares) > min(shares) * (1 + 1e-6):
            return True
    return False


def _terms(root: Any) -> Iterator[tuple[Any, dict[float, bool]]]:
    """The operations that made one number of a tensor, each with what it is divided by, and whether by a division."""
    waiting: list[tuple[Any, dict[float, bool]]] = [(root, {})]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node, factors = waiting.pop()
        kind, inputs = _kind(node), [each for each, _ in node.next_functions if each is not None]
        if kind in ("Add", "Sub") or _LINEAR.fullmatch(kind):
            waiting += [(each, factors) for each in inputs]
        elif kind in ("Mul", "Div") and len(inputs) == 1 and node.next_functions[0][0] is not None:
            constant = abs(float(node._saved_other)) if node._saved_other.numel() == 1 else math.nan
            if math.isfinite(constant) and constant > 0:
                divisor = constant if kind == "Div" else 1 / constant
                waiting.append((inputs[0], factors | {divisor: kind == "Div"}))
        elif kind == "Mul" and len(inputs) == 1:
            constant = abs(float(node._saved_self)) if node._saved_self.numel() == 1 else math.nan
            if math.isfinite(constant) and constant > 0:
                waiting.append((inputs[0], factors | {1 / constant: False}))
        else:
            yield node, factors


def _reduced(node: Any) -> tuple[tuple[int, ...], int | None]:
    """The sizes of what a node has made one number of, and how."""
    kind, name = _kind(node), node.name()
    if name == "SumBackward0":
        return tuple(node._saved_self_sym_sizes), _SUM
    if name == "MeanBackward0":
        return tuple(node._saved_self_sym_sizes), _MEAN
    if kind and hasattr(node, "_saved_reduction") and hasattr(node, "_saved_target"):
        return tuple(node._saved_target.shape), int(node._saved_reduction)
    return (), None


def _mean_over(node: Any, sizes: tuple[int, ...]) -> float:
    weight = getattr(node, "_saved_total_weight", None)  # of classes, without those that are ignored
    return float(weight) if isinstance(weight, Tensor) and weight.numel() == 1 else float(math.prod(sizes))


def _products(sizes: tuple[int, ...], num_samples: int) -> Iterator[int]:
    """What a mean over samples and some of their dimensions may be divided by."""
    for count in range(1, len(sizes) + 1):
        for some in itertools.combinations(sizes, count):
            if math.prod(some) % num_samples == 0:
                yield math.prod(some)


def _is_over_batch(node: Any, sizes: tuple[int, ...], num_samples: int) -> bool:
    """Whether the first dimension of a node's input is certainly that of the batch."""
    if not sizes or sizes[0] == 0 or sizes[0] % num_samples:
        return False
    waiting = [each for each, _ in node.next_functions if each is not None]
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST_NODES:
        here = waiting.pop()
        if here in seen:
            continue
        seen.add(here)
        kind = _kind(here)
        if _LAYER.fullmatch(kind) or _is_linear_layer(here) or getattr(here, "_saved_reduction", None) == _NONE:
            return True
        if _ROW_BY_ROW.fullmatch(kind) or (_ALONG_A_DIMENSION.fullmatch(kind) and _keeps_rows(here)):
            waiting += [each for each, _ in here.next_functions if each is not None]
    return False


def _is_linear_layer(node: Any) -> bool:
    """Whether a product is one with a weight, and not of two results."""
    if _kind(node) not in ("Addmm", "Mm"):
        return False
    weight = node.next_functions[-1][0]
    while weight is not None and _kind(weight) in _OF_A_WEIGHT:
        weight = weight.next_functions[0][0]
    return weight is not None and weight.name() == "torch::autograd::AccumulateGrad"


def _keeps_rows(node: Any) -> bool:
    """Whether an operation along some dimensions leaves the first one alone."""
    if node.name().startswith("Permute"):
        return bool(node._saved_dims[0] == 0)
    if node.name().startswith("Transpose"):  # a negative dimension is saved as if it had no sign: not certain
        return all(0 < dim < 2**63 for dim in (node._saved_dim0, node._saved_dim1))
    dims: Any = getattr(node, "_saved_dim", None)
    sizes = node._saved_self_sym_sizes if hasattr(node, "_saved_self_sym_sizes") else node._saved_self.shape
    given: list[int] = list(dims) if isinstance(dims, list | tuple) else [] if dims is None else [dims]
    signed = [dim - 2**64 if dim >= 2**63 else dim for dim in given]
    return bool(signed) and all(dim % len(sizes) for dim in signed)


def _kind(node: Any) -> str:
    found = re.fullmatch(r"(\w+?)Backward\d*", node.name())
    return found[1] if found else ""
