"""The shards of the model on a worker: the tensors that the optimizer steps, and their offsets in whole parameters.

The optimizer sees plain tensors under every strategy. A shard is a chunk of a whole parameter: offsets and a shape. The
axis tensor cuts first, and the axis shard cuts the rows of the result.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from stormo.distributed.parallel_dims import ParallelDims

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from stormo.parallel.tensor.layers import ShardSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShard:
    """The chunk of a parameter that this worker steps."""

    name: str  # of the whole parameter
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]  # of the chunk in the whole parameter, for each dimension
    local: nn.Parameter  # what the optimizer steps: of the shape of the chunk, which may be empty
    is_counted: bool  # true on one rank per replica of the model, so that norms count a shard once
    is_saved: bool  # true on one rank of all, which writes it to a checkpoint

    def of(self, whole: Tensor) -> Tensor:
        """The chunk of a tensor of the whole parameter's shape."""
        return chunk_of(whole, self.offset, self.local.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalParameter:
    """A parameter of the model on this worker, and which chunk of the whole one it is."""

    name: str
    parameter: nn.Parameter
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    is_first: bool  # whether no earlier worker along the axis tensor holds the same

    @property
    def tensor(self) -> Tensor:
        """Its values on this worker, as a plain tensor."""
        return plain(self.parameter)

    def of(self, whole: Tensor) -> Tensor:
        """The chunk of a tensor of the whole parameter's shape."""
        return chunk_of(whole, self.offset, self.shape)


def plain(tensor: Tensor) -> Tensor:
    """The local values of a tensor, which may be a DTensor."""
    if not _is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():  # without an autograd function around it
        return tensor.to_local()


def _is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, without importing its module, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def chunk_of(whole: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """A chunk of a tensor, in its memory."""
    for dim, (start, size) in enumerate(zip(offset, shape, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def chunk_range(size: int, index: int, count: int) -> tuple[int, int]:
    """Start and length of a chunk of rows as torch cuts them: equally long, the last ones shorter or empty."""
    step = -(-size // count)
    start = min(index * step, size)
    return start, min(step, size - start)


def local_parameters(
    parameters: Iterable[tuple[str, nn.Parameter]],
    whole_shapes: Mapping[str, tuple[int, ...]],
    specs: Mapping[str, ShardSpec],
    dims: ParallelDims,
) -> list[LocalParameter]:
    """The parameters of this worker; DTensors hold rows of what the axis tensor leaves."""
    found = []
    for name, parameter in parameters:
        whole, spec = whole_shapes[name], specs.get(name)
        offset, shape = [0] * len(whole), list(whole)
        if spec is not None:
            offset[spec.dim], shape[spec.dim] = spec.start, parameter.shape[spec.dim]
        if _is_dtensor(parameter):
            start, shape[0] = chunk_range(shape[0], dims.at["shard"], dims.mesh.shard)
            offset[0] += start
        found.append(
            LocalParameter(
                name=name,
                parameter=parameter,
                whole_shape=whole,
                offset=tuple(offset),
                shape=tuple(shape),
                is_first=spec is not None or dims.at["tensor"] == 0,
            )
        )
    return found


def whole_shard(name: str, tensor: nn.Parameter, *, is_counted: bool, is_saved: bool) -> ParameterShard:
    """A parameter that is not sharded."""
    shape = tuple(tensor.shape)
    offset = (0,) * tensor.ndim
    return ParameterShard(
        name=name, whole_shape=shape, offset=offset, local=tensor, is_counted=is_counted, is_saved=is_saved
    )
