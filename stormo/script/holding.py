"""Batches that a loop holds while it trains: where it fetches ahead, a loss may belong to another one than the last.

What a script does with a batch cannot be seen, but whether it still has it can: an earlier batch that was not trained
and is still there when a backward comes may be the one it is for. One that was passed over is gone by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.weak import TensorWeakRef

from stormo.data.batches import tensors_in

if TYPE_CHECKING:
    from stormo.script.loop import Given


class Held:
    """The batches that one loader has given and the script may still have."""

    def __init__(self) -> None:
        self.is_ahead = False  # which of them the last backward was for is not known
        self._batches: list[tuple[Given, list[TensorWeakRef]]] = []

    def add(self, batch: Any, given: Given) -> None:
        """Note a batch that is given now."""
        if self._batches and not _is_there(self._batches[0][1]):
            self._batches = [each for each in self._batches if _is_there(each[1])]
        self._batches.append((given, [TensorWeakRef(tensor) for tensor in tensors_in(batch)]))

    def look(self, last: Given) -> list[Given]:
        """The batches before the last one that a backward which begins now may be for; none in an ordinary loop."""
        earlier = self._before(last)
        self.is_ahead = any(not given.is_trained for given in earlier) or (self.is_ahead and bool(earlier))
        if not self.is_ahead:
            self._batches = []
        return earlier if self.is_ahead else []

    def look_again(self, last: Given) -> None:
        """After the step: what only the graph of the loss had held was a part of it, and is gone with it."""
        if self.is_ahead and not self._before(last):
            self.forget()

    def forget(self) -> None:
        """Nothing is held."""
        self.is_ahead, self._batches = False, []

    def _before(self, last: Given) -> list[Given]:
        return [given for given, tensors in self._batches if given is not last and _is_there(tensors)]


def _is_there(tensors: list[TensorWeakRef]) -> bool:
    return any(tensor() is not None for tensor in tensors)
