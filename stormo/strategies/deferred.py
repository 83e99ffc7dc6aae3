"""A model that is built without memory, and gives the value of each parameter on demand.

Every worker of a large model holds a part of each parameter; none may be asked to hold the whole model, not even at
the start. So the model is built on torch's meta device while all that would have given its tensors their values is
recorded (`recording`), and each value is computed alone (`tape`): bit for bit that of a model built in memory.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stormo.strategies.disguise import Disguise
from stormo.strategies.recording import Recorder
from stormo.strategies.tape import CannotDeferError, Place, Tape


class Deferred:
    """A model whose parameters and buffers are on the meta device, and where their values come from."""

    def __init__(self, module: nn.Module, tape: Tape, origins: dict[str, Place | Tensor]) -> None:
        self.module = module
        self._tape, self._origins = tape, origins

    @property
    def names(self) -> list[str]:
        """The names of all parameters and buffers; one that is tied has several."""
        return list(self._origins)

    def value(self, name: str) -> Tensor:
        """The whole value of one parameter or buffer, in CPU memory."""
        return self.values([name])[name]

    def values(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The same of several at once, which share memory where they are tied."""
        origins = {name: self._origins[name] for name in names}
        places = [origin for origin in origins.values() if isinstance(origin, Place)]
        computed = iter(self._tape.values(places))
        return {name: next(computed) if isinstance(one, Place) else one.detach() for name, one in origins.items()}


def deferred_model(make: Callable[[], nn.Module]) -> Deferred:
    """Call `make` and get its model without memory; torch's generator is left as plain construction leaves it.

    Raises CannotDeferError where that cannot be, after putting all generators back to where they were.
    """
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        return _deferred(make)
    except CannotDeferError:
        raise
    except Exception as error:
        # It may be the model's own, which building it in memory will show.
        raise CannotDeferError(f"building it without memory ended in {type(error).__name__}: {error}") from error
    finally:
        _put_back(states)


def _deferred(make):
    ...
