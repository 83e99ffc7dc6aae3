"""Norms of whole layers from the shards of all workers: sums of squares in float64, with one all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


class GlobalSquares:
    """Sums over whole layers; every call is one all-reduce, so all workers must make it.

    Args:
        layer_of: of each shard of this worker, the index of its layer in the model, which may have several shards, and
            whether norms count the shard here: True on one rank per replica.
        num_layers: of the model.
        reduce: sums in place over the workers of one replica.
        device: of the all-reduce.
    """

    def __init__(
        self,
        *,
        layer_of: Mapping[Tensor, tuple[int, bool]],
        num_layers: int,
        reduce: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        self._layer_of = layer_of
        self._num_layers = num_layers
        self._reduce = reduce
        self._device = device
        self._last: tuple[tuple[int, ...], Tensor, Tensor, Tensor] | None = None  # indices of the last call

    def __call__(self, parameters: Sequence[Tensor], squares: Tensor) -> Tensor:
        """From sums over this worker's shards, [..., parameters], the sums over their whole layers."""
        columns, theirs, numbers = self._indices(parameters)
        squares = squares.to(self._device)
        whole = squares.new_zeros((*squares.shape[:-1], self._num_layers))
        whole.index_add_(-1, theirs, squares.index_select(-1, columns))
        return self._reduce(whole).index_select(-1, numbers)

    def total(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The norm of all gradients of the model, given those of this worker's shards."""
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        wide = torch.float32
        for gradient, (_, is_counted) in zip(gradients, self._layer_of.values(), strict=True):
            if gradient is not None:
                wide = torch.promote_types(wide, gradient.dtype)
                if is_counted and gradient.numel():
                    alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        total = torch.zeros(1, dtype=torch.float64, device=self._device)
        for group in alike.values():
            total += squares_of(group).sum().to(self._device)
        return self._reduce(total)[0].sqrt().to(wide)

    def _indices(self, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The columns that count, their layers, and the layers of all columns; usually those of the last call."""
        key = tuple(map(id, parameters))
        if self._last is None or self._last[0] != key:
            layers = [self._layer_of[parameter] for parameter in parameters]
            columns = [column for column, (_, is_counted) in enumerate(layers) if is_counted]
            self._last = (
                key,
                self._index(columns),
                self._index([layers[column][0] for column in columns]),
                self._index([number for number, _ in layers]),
            )
        return self._last[1:]

    def _index(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def squares_of(tensors: list[Tensor]) -> Tensor:
    """The sum of squares of each tensor, as a float64 vector; all of one dtype and device, none empty."""
    # torch's kernel for lists of tensors is wrong for empty ones on GPUs.
    return torch.stack(torch._foreach_norm(tensors, 2.0, torch.float64)).square()
