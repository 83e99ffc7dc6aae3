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


def make_shards(
    parameters: Iterable[tuple[str, nn.Parameter]],
    whole_shapes: Mapping[str, tuple[int, ...]],
    specs: Mapping[str, ShardSpec],
    dims: ParallelDims,
) -> list[tuple[nn.Parameter, ParameterShard]]:
    """The model's parameters on this worker with their shards; DTensors hold rows of what the axis tensor leaves."""
    found = []
    for name, parameter in parameters:
        spec, local = specs.get(name), parameter
        offset = [0] * len(whole_shapes[name])
        if spec is not None:
            offset[spec.dim] = spec.start
        if _is_dtensor(parameter):
            offset[0] += chunk_range(parameter.shape[0], dims.at["shard"], dims.mesh.shard)[0]
            local = nn.Parameter(plain(parameter).detach(), requires_grad=parameter.requires_grad)
        is_first = spec is not None or dims.at["tensor"] == 0  # of the workers along that axis that hold the same
        shard = ParameterShard(
            name=name,
            whole_shape=whole_shapes[name],
            offset=tuple(offset),
            local=local,
            is_counted=is_first,
            is_saved=is_first and dims.at["replicate"] == 0,
        )
        found.append((parameter, shard))
    return found


def whole_shard(name: str, tensor: nn.Parameter, *, is_counted: bool, is_saved: bool) -> ParameterShard:
    """A parameter that is not sharded."""
    shape = tuple(tensor.shape)
    offset = (0,) * tensor.ndim
    return ParameterShard(
        name=name, whole_shape=shape, offset=offset, local=tensor, is_counted=is_counted, is_saved=is_saved
    )
