"""The shards that a worker holds of the model: the tensor that the optimizer steps, and its place in the parameter.

The optimizer sees plain tensors under every strategy. A shard is a box of a whole parameter: offsets and a shape. The
axis tensor cuts first, and the axis shard cuts the rows of what is left.
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
    """A box of one whole parameter, on this worker."""

    name: str  # of the whole parameter, as one process has it
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]  # where the box begins, for each dimension
    local: nn.Parameter  # what the optimizer steps: of the shape of the box, perhaps empty
    is_counted: bool  # true on one rank per replica of the model, so that norms count a shard once
    is_saved: bool  # true on one rank of all, which writes it

    def of(self, whole: Tensor) -> Tensor:
        """The box of a tensor that is as large as the whole parameter."""
        return box(whole, self.offset, self.local.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalParameter:
    """A parameter of the model on this worker, and which box of the whole one it is."""

    name: str
    parameter: nn.Parameter
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    is_first: bool  # whether no worker before this one, along the axis tensor, holds the same

    @property
    def tensor(self) -> Tensor:
        """Its values on this worker, as a plain tensor."""
        return plain(self.parameter)

    def of(self, whole: Tensor) -> Tensor:
        """The box of a tensor that is as large as the whole parameter."""
        return box(whole, self.offset, self.shape)


def plain(tensor: Tensor) -> Tensor:
    """What this worker holds of a tensor, which may be a DTensor."""
    if not _is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():  # no function of autograd around it
        return tensor.to_local()


def _is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Without an import of its module, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def box(whole: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """A box of a tensor, in its memory."""
    for dim, (start, size) in enumerate(zip(offset, shape, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def chunk(size: int, index: int, count: int) -> tuple[int, int]:
    """Start and length of a part when rows are cut as torch cuts them: equal ones, the last shorter or empty."""
    step = -(-size // count)
    start = min(index * step, size)
    return start, min(step, size - start)


def local_parameters(
    parameters: Iterable[tuple[str, nn.Parameter]],
    whole_shapes: Mapping[str, tuple[int, ...]],
    cuts: Mapping[str, ShardSpec],
    grid: ParallelDims,
) -> list[LocalParameter]:
    """The place of every parameter of this worker; DTensors hold rows of what the axis tensor has left."""
    found = []
    for name, parameter in parameters:
        whole, cut = whole_shapes[name], cuts.get(name)
        offset, shape = [0] * len(whole), list(whole)
        if cut is not None:
            offset[cut.dim], shape[cut.dim] = cut.start, parameter.shape[cut.dim]
        if _is_dtensor(parameter):
            start, shape[0] = chunk(shape[0], grid.at["shard"], grid.mesh.shard)
            offset[0] += start
        found.append(
            LocalParameter(
                name=name,
                parameter=parameter,
                whole_shape=whole,
                offset=tuple(offset),
                shape=tuple(shape),
                is_first=cut is not None or grid.at["tensor"] == 0,
            )
        )
    return found


def whole_shard(name: str, tensor: nn.Parameter, *, is_counted: bool, is_saved: bool) -> ParameterShard:
    """A parameter that is not cut."""
    shape = tuple(tensor.shape)
    offset = (0,) * tensor.ndim
    return ParameterShard(
        name=name, whole_shape=shape, offset=offset, local=tensor, is_counted=is_counted, is_saved=is_saved
    )


def as_shard_parameter(tensor: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """A parameter in the memory of a tensor."""
    return nn.Parameter(tensor.detach(), requires_grad=requires_grad)
