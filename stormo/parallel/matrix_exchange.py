"""Whole matrices from the shards of all workers: each is gathered on one of them, and shards of the result go back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stormo.distributed.parallel_dims import SubGroup
from stormo.parallel.parameter_shards import ParameterShard, chunk_of

_NUM_FLAGS = 3  # of a chunk, before its offset and shape


class _Chunk(NamedTuple):
    """One worker's chunk of a matrix, which may have more than two dimensions."""

    number: int  # of the whole parameter in the model
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    is_counted: bool  # True on one of the workers that have the same chunk
    is_double: bool  # whether its weights are float64

    def of(self, whole: Tensor) -> Tensor:
        """The chunk of the whole tensor, in its memory."""
        return chunk_of(whole, self.offset, self.shape)


class MatrixExchange:
    """Two all-to-alls a step: shards to the owner of their matrix, and shards of the results back.

    The owner of a matrix is one of the workers that hold some of it, so that they share the work. All workers of the
    group make it and call it together.

    Args:
        shards: of this worker.
        whole_shapes: of all parameters of the model.
        group: the workers of one replica.
        device: of the exchange and of the computation.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        whole_shapes: Mapping[str, tuple[int, ...]],
        group: SubGroup,
        device: torch.device,
    ) -> None:
        self._shapes, self._group, self._device = list(whole_shapes.values()), group, device
        numbers = {name: number for number, name in enumerate(whole_shapes)}
        self._number: dict[Tensor, int] = {shard.local: numbers[shard.name] for shard in shards}
        self._of_rank = self._gathered(shards)
        self._kinds = sorted({chunk.is_double for held in self._of_rank for chunk in held.values()})
        self._owner: dict[int, int] = {}
        load = [0] * group.size
        for number, shape in enumerate(self._shapes):
            holders = [rank for rank, held in enumerate(self._of_rank) if number in held]
            if len(shape) > 1 and holders:
                self._owner[number] = owner = min(holders, key=load.__getitem__)
                load[owner] += math.prod(shape) * min(shape[0], math.prod(shape[1:]))

    def _gathered(self, shards: Sequence[ParameterShard]) -> list[dict[int, _Chunk]]:
        """The chunks of every worker by number, except empty ones."""
        num_dims = max((len(shape) for shape in self._shapes), default=0)
        own = torch.zeros(len(self._shapes), _NUM_FLAGS + 2 * num_dims, dtype=torch.int64)
        for shard in shards:
            padding = [0] * (num_dims - shard.local.ndim)
            flags = shard.local.numel() > 0, shard.is_counted, shard.local.dtype == torch.float64
            own[self._number[shard.local]] = torch.tensor(
                [*flags, *shard.offset, *padding, *shard.local.shape, *padding]
            )
        every = torch.empty(self._group.size, *own.shape, dtype=torch.int64, device=self._device)
        self._group.gather(every, own.to(self._device))
        found: list[dict[int, _Chunk]] = []
        for rows in every.tolist():
            found.append({})
            for number, (is_held, is_counted, is_double, *sides) in enumerate(rows):
                if is_held:
                    count = len(self._shapes[number])
                    offset, shape = tuple(sides[:count]), tuple(sides[num_dims:][:count])
                    found[-1][number] = _Chunk(number, offset, shape, bool(is_counted), bool(is_double))
        return found

    def whole_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """The shape of the whole parameter of a shard."""
        return self._shapes[self._number[parameter]]

    def __call__(self, shards: Mapping[Tensor, Tensor], compute: Callable[[Tensor], Tensor]) -> dict[Tensor, Tensor]:
        """This worker's shards of `compute` of every whole matrix, by parameter.

        Args:
            shards: what to compute from, by parameter; the other workers give their shards of the same matrices.
            compute: takes and returns a matrix of two dimensions; called on its owner.
        """
        results: dict[Tensor, Tensor] = {}
        for is_double in self._kinds:  # the same on all workers
            dtype = torch.float64 if is_double else torch.bfloat16
            results |= self._exchange({key: one for key, one in shards.items() if one.dtype == dtype}, compute, dtype)
        return results

    def _exchange(
        self, shards: Mapping[Tensor, Tensor], compute: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> dict[Tensor, Tensor]:
        """The same for shards of one dtype."""
        parameter_of = {self._number[parameter]: parameter for parameter in shards}
        numbers, rank, ranks = sorted(parameter_of), self._group.rank, range(self._group.size)
        owned = [number for number in numbers if self._owner[number] == rank]
        mine = [[self._of_rank[rank][number] for number in numbers if self._owner[number] == to] for to in ranks]
        theirs = [[held[number] for number in owned if number in held] for held in self._of_rank]
        received = self._all_to_all(
            [[shards[parameter_of[one.number]] for one in chunks if one.is_counted] for chunks in mine],
            [[one for one in chunks if one.is_counted] for chunks in theirs],
            dtype,
        )
        wholes = {number: torch.empty(self._shapes[number], dtype=dtype, device=self._device) for number in owned}
        for chunk, values in received:
            chunk.of(wholes[chunk.number]).copy_(values)
        for number, whole in wholes.items():
            wholes[number] = compute(whole.flatten(1)).reshape(whole.shape)
        results = self._all_to_all([[one.of(wholes[one.number]) for one in chunks] for chunks in theirs], mine, dtype)
        return {parameter_of[chunk.number]: values for chunk, values in results}

    def _all_to_all(
        self, sent: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[_Chunk]], dtype: torch.dtype
    ) -> list[tuple[_Chunk, Tensor]]:
        """Send each worker its tensors; return the chunks that come from each worker, with their values."""
        flat = [tensor.to(self._device).flatten() for tensors in sent for tensor in tensors]
        message = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=self._device)
        lengths = [sum(math.prod(chunk.shape) for chunk in chunks) for chunks in expected]
        received = message.new_empty(sum(lengths))
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        dist.all_to_all_single(received, message, lengths, sizes, group=self._group.group)
        chunks = [chunk for chunks in expected for chunk in chunks]
        values = received.split([math.prod(chunk.shape) for chunk in chunks])
        return [(chunk, one.view(chunk.shape)) for chunk, one in zip(chunks, values, strict=True)]
