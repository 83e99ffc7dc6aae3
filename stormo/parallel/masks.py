"""Random numbers where activations are cut: dropout must leave out other units on every worker.

Workers along the axis tensor share one stream of random numbers, so that whatever they all compute alike stays alike.
Between a layer that cuts the activations and the one that puts them together again, each draws from a stream of its
own. That stream follows from the shared one, whose state a checkpoint holds: nothing more has to be saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from stormo.data.order import derive_seed

_KNOWN = ("torch.nn.", "stormo.")  # modules whose layers say in their attributes whether they draw
_DRAWING = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def draws_random(module: nn.Module) -> bool:
    """Whether a training pass may draw random numbers.

    A layer of torch or stormo tells by its kind, or by a rate of dropout above 0. What the code of any other draws,
    by F.dropout for one, cannot be seen from outside: it may.
    """
    return any(_may_draw(layer) for layer in module.modules())


def _may_draw(layer: nn.Module) -> bool:
    is_changed = "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks
    if is_changed or not type(layer).__module__.startswith(_KNOWN):
        return True
    if isinstance(layer, _DropoutNd):
        return layer.p > 0
    rates = (value for name, value in vars(layer).items() if "drop" in name.lower() and isinstance(value, float))
    return isinstance(layer, _DRAWING) or any(rate > 0 for rate in rates)


class OwnDraws:
    """Switches the device's generator between the stream of all workers of a line and one of this worker.

    Which one is under way is read off the generator itself: a pass that is computed anew, and may end anywhere, puts
    the generator back and thereby the switch. Under torch.compile a switch divides the graph.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._own: int | None = None  # seed of this worker's stream, while or after it was used
        self._shared_seed = 0
        self._shared_state: Tensor | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def enter(self, device: torch.device) -> None:
        """From here on this worker's own numbers."""
        generator = _generator(device)
        if generator.initial_seed() == self._own:
            return
        if device.type == "cuda":
            # The same place under another seed: no number is drawn on the device, for which the host would wait.
            self._shared_seed, offset = generator.initial_seed(), generator.get_offset()
            self._own = derive_seed(self._shared_seed, "cut", self._rank)
            generator.manual_seed(self._own).set_offset(offset)
            return
        drawn = int(torch.randint(2**62, ()))
        self._shared_state = generator.get_state()
        self._own = derive_seed(drawn, "cut", self._rank)
        generator.manual_seed(self._own)

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def leave(self, device: torch.device) -> None:
        """Back to the numbers of all."""
        generator = _generator(device)
        if generator.initial_seed() != self._own:
            return
        if device.type == "cuda":
            offset = generator.get_offset()
            generator.manual_seed(self._shared_seed).set_offset(offset)
        else:
            assert self._shared_state is not None
            generator.set_state(self._shared_state)


@contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Meanwhile the device's generator draws from a stream of this seed."""
    generator = _generator(device)
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
