"""Shards the layers of a model over the axis tensor, in place. Names of modules and parameters stay.

A plan (`plan.py`) maps patterns of layer paths to rows of `KINDS`. How a sharded layer computes is in `layers.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
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
    layer: type[nn.Module]  # the plain layer
    becomes: type[Any]
    dims: Mapping[str, int]  # parameter -> its sharded dimension
    size: str  # attribute of the layer with the size of that dimension
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
    group: SubGroup,
    *,
    asked: str | None = None,
    remedy: str = "set tensor={}",
) -> dict[str, ShardSpec]:
    """Shard the layers of a plan for this worker; the shards by parameter name.

    Weights are cut and the rest is freed; on meta only shapes change. Everything is checked before anything changes.

    Args:
        model: whose layers are changed in place.
        plan: patterns of paths -> how those layers are sharded; see `Task.tensor_plan`.
        group: the workers along the axis tensor.
        asked: what the user has set, as the beginning of an error; default the axis of the mesh.
        remedy: the end of that error, with `{}` for possible numbers of workers.
    """
    if group.size == 1:
        return {}
    styles = matched(model, plan)
    for path, style in styles.items():
        _check_layer(model, path, style)
        count, noun = _units(model, path, style)
        if count % group.size:
            raise SettingError(
                asked or f"--mesh tensor={group.size} was set",
                f"{path} has {count} {noun}, which {group.size} do not divide",
                remedy.format(_near_divisors(count, group.size)),
            )
    specs = _shard_specs(model, styles, group)
    rng = TensorParallelRng(group.rank) if draws_random(model) else None
    with torch.no_grad():
        for parameter, spec in specs.items():
            length = spec.whole_size // group.size
            parameter.data = parameter.data.narrow(spec.dim, spec.start, length).clone(
                memory_format=torch.contiguous_format
            )
    for path, style in styles.items():
        _convert(model.get_submodule(path), KINDS[style.kind], group, rng)
        if style.kind == WHOLE_ROW:
            model.get_submodule(path).input_is_parallel = False  # type: ignore[assignment]
    return {name: specs[parameter] for name, parameter in model.named_parameters() if parameter in specs}


def _convert(layer: Any, kind: _Kind, group: SubGroup, rng: TensorParallelRng | None) -> None:
    assert group.group is not None
    becomes: Any = kind.becomes
    plain: Any = type(layer)
    layer.__class__ = _class_of(becomes, plain)
    layer.group, layer.tp_rank, layer.tp_size, layer.rng = group.group.group_name, group.rank, group.size, rng
    local = getattr(layer, kind.size) // group.size
    setattr(layer, kind.size, local)
    if isinstance(layer, VocabParallelEmbedding) and layer.padding_idx is not None:
        padding = layer.padding_idx - group.rank * local
        layer.padding_idx = padding if 0 <= padding < local else None


@functools.cache
def _class_of(becomes: type[Any], plain: type[nn.Module]) -> type[Any]:
    """An instance of a user's subclass stays one."""
    is_torch_own = plain in (nn.Linear, nn.Embedding)
    return becomes if is_torch_own else variant("TensorParallel", becomes, plain)


def _shard_specs(
    model: nn.Module, styles: Mapping[str, ParallelStyle], group: SubGroup
) -> dict[nn.Parameter, ShardSpec]:
    """The shard of each sharded parameter; layers that share one must shard it alike."""
    found: dict[nn.Parameter, tuple[str, ShardSpec | None]] = {}
    for path, layer in model.named_modules():
        dims = KINDS[styles[path].kind].dims if path in styles else {}
        for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            dim, spec = dims.get(name), None
            if dim is not None:
                size = parameter.shape[dim]
                spec = ShardSpec(dim, group.rank * (size // group.size), size)
            other, earlier = found.setdefault(parameter, (path, spec))
            if earlier != spec:
                raise SettingError(
                    f"tensor_plan shards {path if earlier is None else other}",
                    f"it shares its {name} with {other if earlier is None else path}, which is not sharded alike",
                    "name both in the plan, as vocabulary and column-gathered for an embedding tied to a head",
                )
    return {parameter: spec for parameter, (_, spec) in found.items() if spec is not None}


def _check_layer(model: nn.Module, path: str, style: ParallelStyle) -> None:
    kind = KINDS[style.kind]
    why = _obstacle(model.get_submodule(path), kind)
    if why is not None:
        named = f"nn.{kind.layer.__name__}"
        raise SettingError(f"tensor_plan names {path} as {style.kind}", why, f"name a plain {named}, or leave it out")


def _units(model: nn.Module, path: str, style: ParallelStyle) -> tuple[int, str]:
    """The number and the kind of the indivisible units of a layer, such as heads."""
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
    """Why a layer cannot be sharded in this way."""
    if not isinstance(layer, kind.layer):
        return f"it is a {type(layer).__name__}"
    if type(layer).forward is not kind.layer.forward or "forward" in vars(layer):
        return f"its class {type(layer).__name__} overrides forward"
    if "weight" not in dict(layer.named_parameters(recurse=False)):
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
    gradients: Iterable[tuple[str, Tensor | None]], specs: Mapping[str, ShardSpec], group: SubGroup
) -> list[str]:
    """The whole parameters whose gradients differ between the workers, after a backward of all.

    A correct plan has none: such a parameter belongs to a layer with sharded activations. Differences by rounding, as
    in some GPU kernels, are ignored.
    """
    named = [(name, gradient) for name, gradient in gradients if name not in specs and gradient is not None]
    if group.size == 1 or not named:
        return []
    norms = torch.stack([plain(gradient).norm().double().cpu() for _, gradient in named])
    largest = group.max(torch.cat((norms, -norms)))
    high, low = largest[: len(named)], -largest[len(named) :]
    return [name for (name, _), differs in zip(named, high - low > 1e-3 * high, strict=True) if differs]
