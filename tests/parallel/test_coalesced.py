"""Tensors of all workers brought together: whatever their type, layout and number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stormo.distributed.world import World
from stormo.parallel import coalesced
from tests.tiny_run import arrays, assert_same_bits

Ranks = Callable[..., list[Any]]


def _tensors(rank: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(rank)
    image = torch.randn(2, 3, 4, 5, generator=drawn).contiguous(memory_format=torch.channels_last)
    turned = torch.randn(6, 4, generator=drawn).t()
    values = [image, turned, torch.randn((), generator=drawn), torch.randn(0, 3)]
    others = torch.complex64, torch.float16, torch.bfloat16, torch.float64
    return values + [torch.randn(5, generator=drawn).to(kind) for kind in others]


def _named(tensors: list[Tensor]) -> dict[str, Any]:
    """As arrays, of which those of two bytes have no counterpart."""
    return arrays((str(at), t.float() if t.dtype.itemsize == 2 else t) for at, t in enumerate(tensors))


def _brought_together(world: World) -> tuple[Any, Any, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coalesced, "_BUCKET_BYTES", 64)
        tensors = _tensors(world.rank)
        means = list(coalesced.means(world, tensors))
        assert_same_bits(_named(tensors), _named(_tensors(world.rank)))
        assert [(t.shape, t.dtype) for t in means] == [(t.shape, t.dtype) for t in tensors]
        equal = [tensor.bfloat16() for tensor in _tensors(9)[:2]]
        for tensor, mean in zip(equal, coalesced.means(world, equal), strict=True):
            assert torch.equal(tensor, mean)
        more = [torch.full((2,), world.rank, dtype=kind) for kind in (torch.int16, torch.int64, torch.bool)]
        coalesced.broadcast(world, [*tensors, *more])
        return _named(means), _named(tensors), _named(more)


@pytest.mark.parametrize("size", [1, 3])
def test_means_and_shared_values_of_every_type_and_layout(run_ranks: Ranks, size: int) -> None:
    wide = [
        [t.to(torch.complex128 if t.is_complex() else torch.float64) for t in _tensors(rank)] for rank in range(size)
    ]
    expected = _named([sum(each) / size for each in zip(*wide, strict=True)])
    for means, shared, more in run_ranks(_brought_together, size):
        for name, value in expected.items():
            assert means[name] == pytest.approx(value, abs=1e-2 if name == "6" else 1e-3 if name == "5" else 1e-6)
        assert_same_bits(shared, _named(_tensors(0)))
        assert not any(value.any() for value in more.values())
