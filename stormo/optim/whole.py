"""Norms of whole layers where every worker holds a part of them: sums of squares, added up over the workers at once.

Squares are float64, which neither overflow nor lose what small parts add; there are only a few for each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class WholeSquares:
    """Sums over whole layers from what each worker has of them; one exchange a call, which every worker makes.

    Args:
        parameters: what this worker holds, in any order.
        numbers: of each one's layer among all layers of the model; several may belong to one layer.
        is_counted: whether this worker speaks for it: of equal boxes of one copy of the model, one is counted.
        num_layers: of the whole model, the same on all workers.
        reduce: sums in place over the workers of one copy of the model.
        device: where the exchange takes place.
    """

    def __init__(
        self,
        *,
        parameters: Sequence[Tensor],
        numbers: Sequence[int],
        is_counted: Sequence[bool],
        num_layers: int,
        reduce: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        places = zip(parameters, numbers, is_counted, strict=True)
        self._places = {parameter: (number, counted) for parameter, number, counted in places}
        self._num_layers = num_layers
        self._reduce = reduce
        self._device = device
        self._last: tuple[tuple[int, ...], Tensor, Tensor, Tensor] | None = None  # a change of it waits for the device

    def __call__(self, parameters: Sequence[Tensor], squares: Tensor) -> Tensor:
        """The sums over the whole layers, as [..., parameters] like what this worker has of them."""
        columns, theirs, numbers = self._indices(parameters)
        squares = squares.to(self._device)
        whole = squares.new_zeros((*squares.shape[:-1], self._num_layers))
        whole.index_add_(-1, theirs, squares.index_select(-1, columns))
        return self._reduce(whole).index_select(-1, numbers)

    def total(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The norm of all gradients of the whole model; given are this worker's, one for each of its parameters."""
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        wide = torch.float32
        for gradient, (_, is_counted) in zip(gradients, self._places.values(), strict=True):
            if gradient is not None:
                wide = torch.promote_types(wide, gradient.dtype)
                if is_counted and gradient.numel():
                    alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        total = torch.zeros(1, dtype=torch.float64, device=self._device)
        for group in alike.values():
            total += squares_of(group).sum().to(self._device)
        return self._reduce(total)[0].sqrt().to(wide)

    def _indices(self, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Which columns count, the layers of these, and those of all; as a rule from the call before."""
        key = tuple(map(id, parameters))
        if self._last is None or self._last[0] != key:
            places = [self._places[parameter] for parameter in parameters]
            columns = [column for column, (_, is_counted) in enumerate(places) if is_counted]
            self._last = (
                key,
                self._index(columns),
                self._index([places[column][0] for column in columns]),
                self._index([number for number, _ in places]),
            )
        return self._last[1:]

    def _index(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def squares_of(tensors: list[Tensor]) -> Tensor:
    """The sum of squares of each, as a float64 vector on their device; of one dtype and device, and none is empty."""
    # torch's kernel for lists of tensors on GPUs is not to be trusted with empty ones.
    return torch.stack(torch._foreach_norm(tensors, 2.0, torch.float64)).square()
