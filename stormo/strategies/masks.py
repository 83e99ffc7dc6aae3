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


def draws_random(module: nn.Module) -> bool:
    """Whether a pass draws random numbers: a dropout layer, or a layer with a number above 0 that is called dropout."""
    return any(
        (isinstance(layer, _DropoutNd) and layer.p > 0)
        or any("drop" in name.lower() and isinstance(value, float) and value > 0 for name, value in vars(layer).items())
        for layer in module.modules()
    )


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
