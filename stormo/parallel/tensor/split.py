"""Cuts the layers of a plain model over the workers of a line, in place; names of modules and parameters stay.

Which layers, and how, is said by a plan: patterns of layer paths -> a row of `KINDS`. Where the plan comes from is in
`tensor_plan.py`; how a cut layer computes in `split_layers.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stormo.distributed.parallel_dims import SubGroup
from stormo.errors import SettingError
from stormo.layers.sync_batch_norm import variant
from stormo.parallel.parameter_shards import plain
from stormo.parallel.tensor.layers import (
    ColumnParallelLinear,
    GatheredColumnLinear,
    RowParallelLinear,
    ShardSpec,
    TensorParallelRng,
    VocabParallelEmbedding,
    draws_random,
)
from stormo.parallel.tensor.plan import (
    COLUMN,
    GATHERED,
    ROW,
    VOCABULARY,
    WHOLE_ROW,
    ParallelStyle,
    matched,
)


@dataclass(frozen=True, slots=True)
class _Kind:
    layer: type[nn.Module]  # what is cut
    becomes: type[Any]
    dims: Mapping[str, int]  # parameter -> the dimension that is cut
    size: str  # attribute of the layer that counts what is cut
    noun: str


_ROWS, _COLUMNS = {"weight": 0, "bias": 0}, {"weight": 1}
KINDS: dict[str, _Kind] = {
    COLUMN: _Kind(nn.Linear, ColumnParallelLinear, _ROWS, "out_features", "outputs"),
    GATHERED: _Kind(nn.Linear, GatheredColumnLinear, _ROWS, "out_features", "outputs"),
    ROW: _Kind(nn.Linear, RowParallelLinear, _COLUMNS, "in_features", "inputs"),
    WHOLE_ROW: _Kind(nn.Linear, RowParallelLinear, _COLUMNS, "in_features", "inputs"),
    VOCABULARY: _Kind(nn.Embedding, VocabParallelEmbedding, {"weight": 0}, "num_embeddings", "entries"),
}


def split_tensor(
    model: nn.Module,
    plan: Mapping[str, str],
    line: SubGroup,
    *,
    asked: str | None = None,
    remedy: str = "set tensor={}",
) -> dict[str, ShardSpec]:
    """Cut the layers of a plan for this worker's place on the line; the cuts by the parameters' names.

    Weights that are there already are cut and the rest of them is freed; on the device meta only shapes change. All
    is checked before anything is changed.

    Args:
        model: whose layers are changed in place.
        plan: patterns of paths -> how those layers are cut; `Task.tensor_plan` describes it.
        line: the workers along the axis tensor.
        asked: what the user has set, as the beginning of an error; default the axis of the mesh.
        remedy: the end of that error, with a place for the numbers of workers that would do.
    """
    if line.size == 1:
        return {}
    styles = matched(model, plan)
    for path, style in styles.items():
        _check_layer(model, path, style)
        count, noun = _units(model, path, style)
        if count % line.size:
            raise SettingError(
                asked or f"--mesh tensor={line.size} was set",
                f"{path} has {count} {noun}, which {line.size} do not divide",
                remedy.format(_near_divisors(count, line.size)),
            )
    cuts = _cuts(model, styles, line)
    draws = TensorParallelRng(line.rank) if draws_random(model) else None
    with torch.no_grad():
        for parameter, cut in cuts.items():
            length = cut.whole_size // line.size
            parameter.data = parameter.data.narrow(cut.dim, cut.start, length).clone(
                memory_format=torch.contiguous_format
            )
    for path, style in styles.items():
        _change(model.get_submodule(path), KINDS[style.kind], line, draws)
        if style.kind == WHOLE_ROW:
            model.get_submodule(path).input_is_parallel = False  # type: ignore[assignment]
    return {name: cuts[parameter] for name, parameter in model.named_parameters() if parameter in cuts}


def _change(layer: Any, kind: _Kind, line: SubGroup, draws: TensorParallelRng | None) -> None:
    assert line.group is not None
    becomes: Any = kind.becomes
    plain: Any = type(layer)
    layer.__class__ = _class_of(becomes, plain)
    layer.group, layer.place, layer.num_parts, layer.draws = line.group.group_name, line.rank, line.size, draws
    local = getattr(layer, kind.size) // line.size
    setattr(layer, kind.size, local)
    if isinstance(layer, VocabParallelEmbedding) and layer.padding_idx is not None:
        padding = layer.padding_idx - line.rank * local
        layer.padding_idx = padding if 0 <= padding < local else None


@functools.cache
def _class_of(becomes: type[Any], plain: type[nn.Module]) -> type[Any]:
    """A layer of a user's own subclass stays an instance of it."""
    is_torch_own = plain in (nn.Linear, nn.Embedding)
    return becomes if is_torch_own else variant("TensorParallel", becomes, plain)


def _cuts(model: nn.Module, styles: Mapping[str, ParallelStyle], line: SubGroup) -> dict[nn.Parameter, ShardSpec]:
    """What becomes of each parameter; one that several layers share must be cut alike in all of them."""
    found: dict[nn.Parameter, tuple[str, ShardSpec | None]] = {}
    for path, layer in model.named_modules():
        dims = KINDS[styles[path].kind].dims if path in styles else {}
        for name, parameter in _own_parameters(layer):
            dim, cut = dims.get(name), None
            if dim is not None:
                size = parameter.shape[dim]
                cut = ShardSpec(dim, line.rank * (size // line.size), size)
            other, earlier = found.setdefault(parameter, (path, cut))
            if earlier != cut:
                raise SettingError(
                    f"tensor_plan cuts {path if earlier is None else other}",
                    f"it shares its {name} with {other if earlier is None else path}, which is not cut alike",
                    "name both in the plan, as vocabulary and column-gathered for an embedding tied to a head",
                )
    return {parameter: cut for parameter, (_, cut) in found.items() if cut is not None}


def _own_parameters(layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in layer._parameters.items() if parameter is not None)


def _check_layer(model: nn.Module, path: str, style: ParallelStyle) -> None:
    kind = KINDS[style.kind]
    why = _obstacle(model.get_submodule(path), kind)
    if why is not None:
        named = f"nn.{kind.layer.__name__}"
        raise SettingError(f"tensor_plan names {path} as {style.kind}", why, f"name a plain {named}, or leave it out")


def _units(model: nn.Module, path: str, style: ParallelStyle) -> tuple[int, str]:
    """How many equal pieces of a layer must stay whole, and what they are."""
    kind = KINDS[style.kind]
    whole: int = getattr(model.get_submodule(path), kind.size)
    if style.num_groups is not None:
        if whole % style.num_groups:
            raise SettingError(
                f"tensor_plan names {path} as {style.kind}:{style.num_groups}",
                f"its {whole} {kind.noun} are not {style.num_groups} equal groups",
                f"set a number that divides {whole}",
            )
        return style.num_groups, f"groups of {kind.noun}"
    heads = getattr(model.get_submodule(path.rpartition(".")[0]), "num_heads", None)
    if style.kind in (COLUMN, ROW) and isinstance(heads, int) and heads > 0 and whole % heads == 0:
        return heads, "heads"
    return whole, kind.noun


def _obstacle(layer: nn.Module, kind: _Kind) -> str | None:
    """Why a layer cannot be cut in this way."""
    if not isinstance(layer, kind.layer):
        return f"it is a {type(layer).__name__}"
    if type(layer).forward is not kind.layer.forward or "forward" in vars(layer):
        return f"its class {type(layer).__name__} has a forward pass of its own"
    if "weight" not in layer._parameters:
        return "its weight is computed from other parameters"
    if isinstance(layer, nn.Embedding):
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(layer, name):
                return f"it has {name}, which looks at the whole table"
    return None


def _near_divisors(count: int, size: int) -> str:
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    below, above = [n for n in divisors if n < size][-1:], [n for n in divisors if n > size][:1]
    return " or ".join(str(number) for number in below + above)


def unequal_gradients(
    gradients: Iterable[tuple[str, Tensor | None]], cuts: Mapping[str, ShardSpec], line: SubGroup
) -> list[str]:
    """The parameters that are whole but whose gradients differ between the workers of a line, after a pass of all.

    A right plan leaves none: such a parameter belongs to a layer that computes with cut activations. Rounding that
    differs from worker to worker, as some kernels of a GPU have it, is let pass.
    """
    named = [(name, gradient) for name, gradient in gradients if name not in cuts and gradient is not None]
    if line.size == 1 or not named:
        return []
    norms = torch.stack([plain(gradient).norm().double().cpu() for _, gradient in named])
    largest = line.max(torch.cat((norms, -norms)))
    high, low = largest[: len(named)], -largest[len(named) :]
    return [name for (name, _), differs in zip(named, high - low > 1e-3 * high, strict=True) if differs]
