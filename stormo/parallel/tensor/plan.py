"""Which layers of a model the axis tensor shards: by the task, for the built-in GPT, or derived for an MLP.

A plan maps patterns of layer paths to kinds of layers. `column` makes sharded activations from whole ones, and `row`
whole ones from sharded ones. The other kinds have whole inputs and outputs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules import activation

from stormo.errors import SettingError, unknown_name
from stormo.tasks.gpt import Gpt
from stormo.tasks.task import Task

COLUMN, ROW, GATHERED, WHOLE_ROW = "column", "row", "column-gathered", "row-from-whole"
VOCABULARY = "vocabulary"
_KINDS = (COLUMN, ROW, GATHERED, WHOLE_ROW, VOCABULARY)
_GPT = {
    "blocks.*.attention.qkv": COLUMN,
    "blocks.*.attention.out": ROW,
    "blocks.*.up": COLUMN,
    "blocks.*.down": ROW,
}
# Elementwise layers, which may stand between a column and a row.
_ELEMENTWISE = (
    *(activation.CELU, activation.ELU, activation.GELU, activation.Hardshrink, activation.Hardsigmoid),
    *(activation.Hardswish, activation.Hardtanh, activation.LeakyReLU, activation.LogSigmoid, activation.Mish),
    *(activation.ReLU, activation.SELU, activation.SiLU, activation.Sigmoid, activation.Softplus),
    *(activation.Softshrink, activation.Softsign, activation.Tanh, activation.Tanhshrink, activation.Threshold),
    *(nn.Identity, nn.Dropout, nn.AlphaDropout),
)
Chain = Sequence[tuple[str, nn.Module]]  # consecutive layers by path


@dataclass(frozen=True, slots=True)
class ParallelStyle:
    """How a plan shards a layer."""

    kind: str
    num_groups: int | None = None  # indivisible groups of equal size, such as heads

    @property
    def text(self) -> str:
        """As written in a plan."""
        return self.kind if self.num_groups is None else f"{self.kind}:{self.num_groups}"


def derive_plan(task: Task, model: nn.Module, size: int) -> dict[str, str]:
    """The task's own plan, or one for the built-in GPT or a chain of layers."""
    own = task.tensor_plan(model)
    if own is not None:
        matched(model, own, f"{type(task).__name__}.tensor_plan()")
        return dict(own)
    if isinstance(model, Gpt) and type(model).forward is Gpt.forward:
        ends = {"tokens": VOCABULARY, "head": GATHERED} if model.head.out_features % size == 0 else {}
        return {**_GPT, **ends}
    plan = chain_plan(chain_of(model), size) if is_chain(model) else {}
    if not plan:
        raise SettingError(
            f"tensor={size} was set",
            f"it is not known how to shard the layers of {type(model).__name__}",
            f"say so in {type(task).__name__}, as in def tensor_plan(self, model): return "
            '{"up": "column", "down": "row"}',
        )
    return plan


def matched(model: nn.Module, plan: Any, origin: str = "tensor_plan") -> dict[str, ParallelStyle]:
    """The layers that a plan names, by path. Raises SettingError for a plan that cannot be right."""
    if not isinstance(plan, Mapping) or not all(isinstance(text, str) for item in plan.items() for text in item):
        raise SettingError(
            f"{origin} is {plan!r}",
            "it maps layer paths to kinds, both as text",
            'return something like {"up": "column", "down": "row"}',
        )
    styles: dict[str, ParallelStyle] = {}
    for pattern, value in plan.items():
        paths = [path for path, _ in model.named_modules() if path and fnmatchcase(path, pattern)]
        if not paths:
            raise _no_such_layer(model, pattern, origin)
        for path in paths:
            style = _parse(value, origin)
            if styles.setdefault(path, style) != style:
                raise SettingError(
                    f"{origin} names {path} as {styles[path].kind} and as {style.kind}",
                    "a layer is sharded in one way",
                    "make the patterns narrower",
                )
    kinds = {style.kind for style in styles.values()}
    for kind, other in ((COLUMN, ROW), (ROW, COLUMN)):
        if kind in kinds and other not in kinds:
            path = next(path for path, style in styles.items() if style.kind == kind)
            does = "leaves its outputs sharded" if kind == COLUMN else "takes sharded inputs"
            raise SettingError(
                f"{origin} names {path} as {kind}",
                f"that {does}, and no layer is named as {other}",
                f"name one as {other}, or this one as {GATHERED if kind == COLUMN else WHOLE_ROW}",
            )
    return styles


def _parse(value: str, origin: str) -> ParallelStyle:
    kind, colon, number = value.partition(":")
    if kind not in _KINDS:
        raise unknown_name(f"in {origin} the kind", value, _KINDS)
    if not colon:
        return ParallelStyle(kind)
    if not number.isdecimal() or int(number) < 1:
        raise SettingError(
            f"{origin} has {value!r}", f"{number!r} is no number of groups", f"set something like {kind}:8"
        )
    return ParallelStyle(kind, int(number))


def _no_such_layer(model: nn.Module, pattern: str, origin: str) -> SettingError:
    layers = (path for path, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Embedding))
    # The numbers of repeated blocks make one pattern of a hundred layers.
    patterns = sorted({re.sub(r"(?<![^.])\d+(?=\.)", "*", path) for path in layers})
    close = difflib.get_close_matches(pattern, patterns, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return SettingError(
        f"{origin} names {pattern!r}",
        f"no layer of {type(model).__name__} has such a path",
        f"{hint}it can shard: {', '.join(patterns) or 'nothing'}",
    )


def is_chain(module: nn.Module) -> bool:
    """Whether a module only runs its children one after the other."""
    return type(module).forward is nn.Sequential.forward and "forward" not in vars(module)


def chain_of(module: nn.Module, path: str = "", *, is_deep: bool = True) -> list[tuple[str, nn.Module]]:
    """The layers of a chain by path, with those of chains inside it unless `is_deep` is False."""
    if not is_chain(module):
        return [(path, module)]
    # Not `named_children`, which drops a repeated layer.
    own = [(f"{path}.{name}" if path else name, child) for name, child in module._modules.items() if child is not None]
    return [layer for name, child in own for layer in chain_of(child, name)] if is_deep else own


def is_elementwise(layer: nn.Module) -> bool:
    """Whether a layer may stand between a column and a row."""
    return type(layer) in _ELEMENTWISE


def chain_plan(chain: Chain, size: int) -> dict[str, str]:
    """Pairs of column and row; a layer without a partner is sharded alone if its sizes allow it."""
    plan: dict[str, str] = {}
    layers = [layer for _, layer in chain]
    # A repeated layer stays whole: it could be in different pairs.
    linears = [n for n, layer in enumerate(layers) if type(layer) is nn.Linear and layers.count(layer) == 1]
    while linears:
        first = linears.pop(0)
        path: str = chain[first][0]
        layer: Any = chain[first][1]
        between = chain[first + 1 : linears[0]] if linears else []
        if linears and all(is_elementwise(other) for _, other in between):
            plan[path], plan[chain[linears.pop(0)][0]] = COLUMN, ROW
        elif layer.out_features % size == 0:
            plan[path] = GATHERED
        elif layer.in_features % size == 0:
            plan[path] = WHOLE_ROW
    return plan
