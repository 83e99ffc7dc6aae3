"""Collectives over many tensors: neighbours of one dtype are sent as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from stormo.distributed.parallel_dims import SubGroup
from stormo.distributed.world import World

_BUCKET_BYTES = 25 * 2**20
# Rounded to 16 bits, the sum of equal values would not be a multiple of them.
_SUMMED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@torch.no_grad()
def broadcast(world: World, tensors: Sequence[Tensor]) -> None:
    """Give all workers rank 0's values: what a task's model() draws may differ."""
    for bucket in _buckets(tensors) if world.size > 1 else ():
        flat = torch.cat([_flat(tensor) for tensor in bucket])
        world.broadcast(flat.view(torch.uint8))  # of any dtype
        copy(bucket, split_like(flat, bucket))


@torch.no_grad()
def means(
    world: World, tensors: Sequence[Tensor], dtype: torch.dtype | None = None, group: SubGroup | None = None
) -> Iterator[Tensor]:
    """The mean of each tensor over all workers, or over a group of them, one by one. All of them iterate to the end.

    Args:
        world: of the workers.
        tensors: of the same shapes on all of them.
        dtype: of the sums and of the result, if not the tensors' own.
        group: of workers, if not all.
    """
    workers = group or world
    for bucket in _buckets(tensors):
        own = bucket[0].dtype
        summed = dtype or _SUMMED_AS.get(own, own)
        flat = torch.cat([_flat(tensor).to(world.device, summed) for tensor in bucket])
        workers.sum(torch.view_as_real(flat) if flat.is_complex() else flat)
        yield from split_like(flat.div_(workers.size).to(dtype or own), bucket)


@torch.no_grad()
def copy(tensors: Sequence[Tensor], values: Iterable[Tensor]) -> None:
    """Copy values to tensors."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The values of a flat tensor in the shapes of these tensors, in their order."""
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        yield values.view(tensor.shape)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    for _, group in groupby(tensors, lambda tensor: tensor.dtype):
        bucket, num_bytes = list[Tensor](), 0
        for tensor in group:
            if bucket and num_bytes + tensor.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(tensor)
            num_bytes += tensor.nbytes
        yield bucket
