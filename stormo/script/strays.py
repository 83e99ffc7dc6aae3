"""Optimizers that a script steps beside those it has wrapped, told once: nothing else would show that workers part."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stormo.script.agreement import call_site
from stormo.script.loop import Loop
from stormo.strategies.buckets import is_summed


def watch(loop: Loop) -> None:
    """Look at every optimizer of this process that steps, as long as the loop is there."""
    reference, told = weakref.ref(loop), weakref.WeakSet[Optimizer]()

    def look(optimizer: Optimizer, _: tuple[Any, ...], __: dict[str, Any]) -> None:
        here = reference()
        # One that steps inside of a wrapped one is a part of it.
        if here is None or here.agreement.is_closed or here.is_stepping or optimizer in told:
            return
        wrapped = [each for group in here.groups for each in group.optimizers]
        if any(optimizer is each for each in wrapped) or not (wrapped or _has_own_gradients(optimizer, here)):
            return
        told.add(optimizer)
        if here.world.is_main:
            name = type(optimizer).__name__
            print(  # noqa: T201
                f"stormo: the {name} that steps in {call_site()} was not passed to world.wrap(), and is not saved; of "
                "several workers each moves what was not wrapped, or got its gradient by loss.backward(), by its own "
                "samples alone. Pass it along with its module: world.wrap(module, optimizer).",
                file=sys.stderr,
                flush=True,
            )

    register_optimizer_step_pre_hook(look)


def _has_own_gradients(optimizer: Optimizer, loop: Loop) -> bool:
    """Whether it moves a wrapped model by gradients that are not summed over the workers."""
    known = {id(parameter) for group in loop.groups for parameter in group.model.parameters()}
    moved = (parameter for settings in optimizer.param_groups for parameter in settings["params"])
    return loop.world.size > 1 and any(
        id(parameter) in known and parameter.grad is not None and not is_summed(parameter.grad) for parameter in moved
    )
