"""What a rank saves, as named tensors: optimizer state, random state, parameters, buffers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from stormo.checkpoint.reader import Reader, ReadItem
from stormo.checkpoint.tensors import DTYPE_NAMES, DTYPES, weights_digest
from stormo.checkpoint.writer import Chunk, whole_chunk
from stormo.distributed.world import World
from stormo.errors import EXIT_USAGE, StormoError, first_names, pluralize
from stormo.parallel.base import Strategy
from stormo.parallel.parameter_shards import ParameterShard
from stormo.parallel.weight_average import EMA, WeightAverage

Names = Mapping[Tensor, str]  # of parameters

# Scalars that torch's optimizers keep in host memory, unless the step runs inside a kernel or a graph.
_HOST_SCALARS = frozenset({"step", "mu_product"})
# State with one value for each of the parameter's.
_LIKE_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "z"}
)
_ABSENT = -(2**62)
_DIGITS = 15  # hexadecimal ones, which fit a 64-bit number
_Described = Mapping[str, tuple[str, list[int], bool]]  # name: dtype, shape, whether it is in the model's state_dict


class OptimizerStateError(StormoError):
    """The state does not fit the optimizer, or cannot be stored."""


class ModelMismatchError(StormoError):
    """The checkpoint is of another model."""

    exit_code = EXIT_USAGE


# Optimizer state. Names are `parameter|key` for a tensor, `parameter|key=number` and `parameter|key=none` for a Python
# number and None, and `parameter|` for a parameter without state. Hyper-parameters are not stored: the plan sets them.


def flatten_optimizer(optimizer: Optimizer, names: Names) -> dict[str, Tensor]:
    """The state of every parameter as named tensors, which share the optimizer's memory."""
    tensors: dict[str, Tensor] = {}
    for name, parameter, _ in _named_parameters(optimizer, names):
        # Not `optimizer.state[parameter]`: that would create an empty entry.
        state: dict[Any, Any] = optimizer.state.get(parameter, {})
        if not state:
            tensors[f"{name}|"] = torch.empty(0, dtype=torch.uint8)
        for key, value in state.items():
            if not isinstance(key, str) or not key or "|" in key or "=" in key:
                raise OptimizerStateError(f"The state of {name} has the key {key!r}, which cannot be stored as a name.")
            if isinstance(value, Tensor):
                tensors[f"{name}|{key}"] = value.detach()
            elif isinstance(value, bool | int | float):
                tensors[f"{name}|{key}=number"] = _number_tensor(value)
            elif value is None:
                tensors[f"{name}|{key}=none"] = torch.empty(0, dtype=torch.uint8)
            else:
                raise OptimizerStateError(
                    f"The state {key!r} of {name} is a {type(value).__name__}; "
                    f"{type(optimizer).__name__} cannot be checkpointed, only tensors, numbers and None can be stored."
                )
    return tensors


@torch.no_grad()
def restore_optimizer(optimizer: Optimizer, names: Names, tensors: Mapping[str, Tensor]) -> None:
    """Replace the optimizer's state by copies of `tensors`, in their dtype and on the device the optimizer expects.

    Nothing is changed when the names do not fit.
    """
    stored = _stored_by_parameter(tensors)
    parameters = _named_parameters(optimizer, names)
    known = {name for name, _, _ in parameters}
    if unknown := sorted(set(stored) - known):
        raise OptimizerStateError(
            f"The stored optimizer state is for {first_names(unknown)}, which this optimizer lacks."
        )
    if missing := sorted(known - set(stored)):
        raise OptimizerStateError(f"The stored optimizer state has nothing for {first_names(missing)}.")
    for name, parameter, group in parameters:
        state: dict[str, Any] = {}
        for key, kind, tensor in stored[name]:
            if kind == "number":
                state[key] = tensor.item()
            elif kind == "none":
                state[key] = None
            elif key:
                if key in _LIKE_PARAMETER and tensor.dim() and tensor.shape != parameter.shape:
                    raise OptimizerStateError(
                        f"The stored {key} of {name} has shape {list(tensor.shape)}, and the parameter "
                        f"{list(parameter.shape)}."
                    )
                state[key] = _placed(tensor, key, parameter, group)
        if state:
            optimizer.state[parameter] = state
        else:
            optimizer.state.pop(parameter, None)


def _named_parameters(optimizer: Optimizer, names: Names) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """Name, parameter and its group, in the order of the groups."""
    pairs = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    if num_unnamed := sum(parameter not in names for parameter, _ in pairs):
        raise OptimizerStateError(
            f"The optimizer has {pluralize(len(pairs), 'parameter')}, of which the model lacks {num_unnamed}."
        )
    return [(names[parameter], parameter, group) for parameter, group in pairs]


def _stored_by_parameter(tensors: Mapping[str, Tensor]) -> dict[str, list[tuple[str, str, Tensor]]]:
    """Parameter name to its (key, kind, tensor)."""
    stored: dict[str, list[tuple[str, str, Tensor]]] = {}
    for full_name, tensor in tensors.items():
        # From the right: a state key never contains the separator, a parameter's name may.
        name, separator, tail = full_name.rpartition("|")
        key, _, kind = tail.partition("=")
        if not separator or kind not in ("", "number", "none") or (kind and not key):
            raise OptimizerStateError(f"The stored optimizer state {full_name!r} is not named parameter|key.")
        stored.setdefault(name, []).append((key, kind, tensor))
    return stored


def _number_tensor(value: float) -> Tensor:
    # The dtype tells the type when it is read back; int64 keeps counts above 2**53 exact.
    if isinstance(value, bool):
        return torch.tensor(value, dtype=torch.bool)
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def _placed(tensor: Tensor, key: str, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """A copy on the device that the optimizer expects, with the parameter's strides if the shapes agree."""
    on_device = bool(group.get("fused") or group.get("capturable"))
    if tensor.dim() == 0 and key in _HOST_SCALARS and not on_device:
        return tensor.to("cpu", copy=True)
    if tensor.shape == parameter.shape:
        # The multi-tensor kernels take their fast path only if state and parameter have the same strides.
        return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    return tensor.to(parameter.device, copy=True)


# Random state: torch (CPU, the current CUDA device), Python, NumPy's global generator.


def collect_random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The generators' states: the large parts as CPU tensors, the rest as JSON-ready values."""
    tensors = {"torch_rng": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        tensors["cuda_rng"] = torch.cuda.get_rng_state().cpu()
    version, words, gauss_next = random.getstate()
    tensors["python_rng"] = torch.tensor(words, dtype=torch.int64)
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    if numpy_state["bit_generator"] != "MT19937":
        raise StormoError(
            f"NumPy's global generator was set to {numpy_state['bit_generator']}, which a checkpoint cannot hold; "
            "keep the default MT19937, or use a generator of your own and store its state with the task."
        )
    tensors["numpy_rng"] = torch.tensor(numpy_state["state"]["key"].astype(np.int64), dtype=torch.int64)
    return tensors, {
        "python": {"version": version, "gauss_next": gauss_next},
        "numpy": {
            "position": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
    }


def restore_random_state(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Set the generators, except for one that only the process or only the stored state has."""
    try:
        python, numpy = values["python"], values["numpy"]
        torch.set_rng_state(tensors["torch_rng"].cpu())
        random.setstate((python["version"], tuple(tensors["python_rng"].tolist()), python["gauss_next"]))
        words = tensors["numpy_rng"].cpu().numpy().astype(np.uint32)
        # NumPy indexes its memory with the position and does not check it.
        if words.shape != (624,) or not 0 <= numpy["position"] <= 624:
            raise ValueError("NumPy's generator has 624 words and a position among them")
        np.random.set_state(("MT19937", words, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
        if "cuda_rng" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["cuda_rng"].cpu())
    except KeyError as error:
        raise StormoError(f"The stored random state has no {error}.") from error
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise StormoError(f"The stored random state cannot be restored ({error}).") from error


# Parameters and their optimizer state. State of the shape of a parameter's shard is a chunk of the whole state. Any
# other, such as the count of steps, is the same on all ranks with a part of the layer, and is stored once.


def chunks_of(parts: Sequence[ParameterShard], optimizer: Optimizer) -> list[Chunk]:
    """The chunks of weights and optimizer state that this rank stores."""
    chunks = [_chunk("model", part.name, part, part.local.detach()) for part in parts if part.is_saved]
    stepped = _stepped(parts, optimizer)
    for name, tensor in flatten_optimizer(optimizer, {part.local: part.name for part in stepped.values()}).items():
        own, _, key = name.rpartition("|")
        part = stepped[own]
        if not part.is_saved:
            continue
        if key and "=" not in key and tensor.ndim and tensor.shape == part.local.shape:
            chunks.append(_chunk("optimizer", name, part, tensor))
        elif not any(part.offset):
            chunks.append(whole_chunk("optimizer", name, tensor))
    return chunks


@torch.no_grad()
def restore_parts(
    reader: Reader, parts: Sequence[ParameterShard], optimizer: Optimizer, more: Sequence[ReadItem] = ()
) -> None:
    """Read the parts, the optimizer's state and `more` from a checkpoint."""
    items, stepped = list(more), _stepped(parts, optimizer)
    for part in parts:
        _require_shape(reader, part)
        items.append(ReadItem(section="model", name=part.name, offset=part.offset, into=part.local.detach()))
    stored = reader.entries("optimizer")
    keys: dict[str, list[str]] = {}
    for full_name in stored:
        # From the right: a state key never contains the separator, a parameter's name may.
        name, _, key = full_name.rpartition("|")
        if not full_name.endswith(EMA):
            keys.setdefault(name, []).append(key)
    state: dict[str, Tensor] = {}
    for own, part in stepped.items():
        for key in keys.get(own, []):
            name = f"{own}|{key}"
            entry = stored[name]
            is_sharded = entry.shape == part.whole_shape
            offset, shape = (part.offset, part.local.shape) if is_sharded else ((0,) * len(entry.shape), entry.shape)
            into = state[name] = torch.empty(shape, dtype=entry.dtype)
            items.append(ReadItem(section="optimizer", name=name, offset=offset, into=into))
    reader.fill(items)
    restore_optimizer(optimizer, {part.local: part.name for part in stepped.values()}, state)


def average_chunks(average: WeightAverage | None) -> list[Chunk]:
    """The chunks of the averaged weights that this rank stores; of buffers see `stored_buffers`."""
    if average is None or not average.has_started:
        return []
    return [_chunk("optimizer", part.name + EMA, part, tensor) for part, tensor in average.shards if part.is_saved]


def average_items(reader: Reader, average: WeightAverage | None) -> list[ReadItem]:
    """What to read of the averages of weights and buffers; the average starts anew where there is none."""
    if average is None:
        return []
    wanted = [(part.name + EMA, part.offset, tensor) for part, tensor in average.shards]
    wanted += [(name + EMA, (0,) * tensor.ndim, tensor) for name, tensor in average.buffers.items()]
    stored = reader.entries("optimizer")
    average.has_started = any(name.endswith(EMA) for name in stored)
    return [ReadItem(section="optimizer", name=n, offset=o, into=t) for n, o, t in wanted if n in stored]


@torch.no_grad()
def restore_average(average: WeightAverage, stored: Mapping[str, Tensor]) -> None:
    """Restore the average from whole tensors by their names in a checkpoint."""
    average.has_started = bool(stored)
    for name, tensor in (*((part.name, tensor) for part, tensor in average.shards), *average.buffers.items()):
        if name + EMA in stored:
            tensor.copy_(stored[name + EMA])


def stepped_names(parts: Sequence[ParameterShard], optimizer: Optimizer) -> set[str]:
    """The parameters that the optimizer steps on this rank."""
    return set(_stepped(parts, optimizer))


def _chunk(section: str, name: str, part: ParameterShard, tensor: Tensor) -> Chunk:
    return Chunk(section=section, name=name, whole_shape=part.whole_shape, offset=part.offset, tensor=tensor)


def _stepped(parts: Sequence[ParameterShard], optimizer: Optimizer) -> dict[str, ParameterShard]:
    """The parts that the optimizer steps, by name; the others are frozen."""
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return {part.name: part for part in parts if part.local in own}


def _require_shape(reader: Reader, part: ParameterShard) -> None:
    entry = reader.entries("model").get(part.name)
    if entry is None:
        raise ModelMismatchError(f"The checkpoint {reader.path} has no {part.name}, which the model has.")
    if entry.shape != part.whole_shape:
        raise ModelMismatchError(
            f"The checkpoint {reader.path} has {part.name} of shape {list(entry.shape)}, but the model's has shape "
            f"{list(part.whole_shape)}."
        )


# Buffers: equal ones are stored once, those that differ by every rank. An all-reduce of digests finds them.


@dataclass(frozen=True, kw_only=True)
class StoredBuffers:
    """What this rank stores of the buffers."""

    own: dict[str, Tensor] = field(default_factory=dict)  # for this rank
    model: dict[str, Tensor] = field(default_factory=dict)  # for the model, on any mesh
    sources: dict[str, int] = field(default_factory=dict)  # the rank that stores an equal buffer that is not persistent


@torch.no_grad()
def stored_buffers(world: World, strategy: Strategy) -> StoredBuffers:
    """What this rank stores of the buffers. Every rank calls it.

    Of floating-point buffers that differ the model gets the mean, of all others the first rank's.
    """
    held = {name: buffer.detach() for name, buffer in strategy.named_buffers()}
    persistent = {*strategy.persistent_buffers()}
    if strategy.average is not None and strategy.average.has_started:
        averages = {name + EMA: tensor for name, tensor in strategy.average.buffers.items()}
        held, persistent = held | averages, persistent | averages.keys()
    described = _described(world, {n: (DTYPE_NAMES[t.dtype], list(t.shape), n in persistent) for n, t in held.items()})
    found = StoredBuffers()
    firsts, differing = _compare(world, held, list(described))
    means = _means(world, held, {name: described[name] for name in differing})
    for name, (_, _, is_persistent) in described.items():
        is_first = firsts[name] == world.rank
        if name in differing and name in held:
            found.own[name] = held[name]
        elif name not in differing and not is_persistent:
            found.sources[name] = firsts[name]
            if is_first:
                found.own[name] = held[name]
        if is_persistent and is_first:
            found.model[name] = means.get(name, held[name])
    return found


def aliases(strategy: Strategy) -> dict[str, str]:
    """Further names of tied tensors, each with the name under which the tensor is stored."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in strategy.module.state_dict(keep_vars=True).items():
        by_tensor.setdefault(id(tensor), []).append(name)
    stored = {part.name for part in strategy.shards()} | strategy.persistent_buffers().keys()
    return {
        name: first
        for names in by_tensor.values()
        for first in names
        if first in stored
        for name in names
        if name not in stored
    }


def _described(world: World, held: _Described) -> _Described:
    """All buffers that some rank holds: without pipeline stages those of this rank."""
    if world.mesh.pipeline == 1:
        return held
    is_first_of_stage = not any(index for axis, index in world.parallel_dims.at.items() if axis != "pipeline")
    gathered = world.gather_objects(held if is_first_of_stage else {})
    union: dict[str, Any] = {}
    for each in gathered or []:
        union |= each
    shared: _Described = world.broadcast_object(union)
    return shared


def _compare(world: World, held: Mapping[str, Tensor], names: list[str]) -> tuple[dict[str, int], set[str]]:
    """The first rank that holds each buffer, and the buffers whose values differ between ranks."""
    if not names:
        return {}, set()
    rows = torch.full((len(names), 5), _ABSENT)
    for row, name in zip(rows, names, strict=True):
        if name in held:
            digest = weights_digest({name: held[name]})
            words = [int(digest[start : start + _DIGITS], 16) for start in (0, _DIGITS)]
            row.copy_(torch.tensor([*words, *(-word for word in words), world.size - world.rank]))
    world.max(rows)
    firsts = {name: world.size - int(row[4]) for row, name in zip(rows, names, strict=True)}
    return firsts, {name for row, name in zip(rows, names, strict=True) if not torch.equal(row[:2], -row[2:4])}


def _means(world: World, held: Mapping[str, Tensor], differing: _Described) -> dict[str, Tensor]:
    """The means of persistent floating-point buffers, over the ranks that hold them."""
    names = [n for n, (dtype, _, is_kept) in differing.items() if is_kept and DTYPES[dtype].is_floating_point]
    if not names:
        return {}
    sizes = [torch.Size(differing[name][1]).numel() for name in names]
    sums = torch.zeros(len(names) + sum(sizes), dtype=torch.float64)
    pieces = sums[len(names) :].split(sizes)
    for number, (name, piece) in enumerate(zip(names, pieces, strict=True)):
        if name in held:
            sums[number] = 1.0
            piece.copy_(held[name].reshape(-1))
    world.sum(sums)
    return {
        name: (piece / count).to(DTYPES[differing[name][0]]).reshape(differing[name][1])
        for name, count, piece in zip(names, sums, pieces, strict=False)
    }
