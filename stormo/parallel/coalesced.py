"""Collectives over many tensors: neighbours of one type travel as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from stormo.distributed.world import World

_BUCKET_BYTES = 25 * 2**20  # that travel together
# Of two bytes, values that all workers have in common would be others after their sum was rounded.
_SUMMED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@torch.no_grad()
def share(world: World, tensors: Sequence[Tensor]) -> None:
    """Give all workers the main one's values: what a task's model() draws may differ."""
    for bucket in _buckets(tensors) if world.size > 1 else ():
        flat = torch.cat([_flat(tensor) for tensor in bucket])
        world.broadcast(flat.view(torch.uint8))  # whatever the type
        copy(bucket, _split(flat, bucket))


@torch.no_grad()
def means(world: World, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """The mean of each tensor over all workers, in turn; all of them take all.

    Args:
        world: of the workers.
        tensors: of the same shapes on all of them.
        dtype: in which they are summed and given, if not their own.
    """
    for bucket in _buckets(tensors):
        own = bucket[0].dtype
        summed = dtype or _SUMMED_AS.get(own, own)
        flat = torch.cat([_flat(tensor).to(world.device, summed) for tensor in bucket])
        world.sum(torch.view_as_real(flat) if flat.is_complex() else flat)
        yield from _split(flat.div_(world.size).to(dtype or own), bucket)


@torch.no_grad()
def copy(tensors: Sequence[Tensor], values: Iterable[Tensor]) -> None:
    """Give the tensors these values, one after the other."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)


def _split(flat: Tensor, bucket: Sequence[Tensor]) -> Iterator[Tensor]:
    for tensor, values in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
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
