"""Optimizers that a script steps beside those it has wrapped, told once: nothing else would show that workers part."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stormo.parallel.buckets import is_summed
from stormo.script.agreement import call_site
from stormo.script.loop import Loop


def watch(loop: Loop) -> None:
    """Look at every optimizer of this process that steps, as long as the loop is there."""
    reference = weakref.ref(loop)

    def look(optimizer: Optimizer, _: tuple[Any, ...], __: dict[str, Any]) -> None:
        here = reference()
        # One that steps inside of a wrapped one is a part of it.
        if here is None or here.agreement.is_closed or here.is_stepping or not here.groups:
            return
        wrapped = [each for group in here.groups for each in group.optimizers]
        if any(optimizer is each for each in wrapped) or not _matters(optimizer, here, has_others=bool(wrapped)):
            return
        where = call_site()
        here.tell(
            where,  # and not of each: a script may make one for every batch
            f"the {type(optimizer).__name__} that steps in {where} was not passed to world.wrap(), and is not saved; "
            "of several workers each moves what was not wrapped, or got its gradient by loss.backward(), by its own "
            "samples alone. Pass it along with its module: world.wrap(module, optimizer).",
        )

    register_optimizer_step_pre_hook(look)


def _matters(optimizer: Optimizer, loop: Loop, *, has_others: bool) -> bool:
    """Whether training depends on it: tensors that are no parameters, as of an attack, are a worker's own affair."""
    known = {id(parameter) for group in loop.groups for parameter in group.model.parameters()}
    moved = [parameter for settings in optimizer.param_groups for parameter in settings["params"]]
    ours = [parameter for parameter in moved if id(parameter) in known]
    if has_others:
        return bool(ours) or (loop.world.size > 1 and any(isinstance(each, nn.Parameter) for each in moved))
    # Where none was wrapped, gradients of world.backward() are right all the same.
    return loop.world.size > 1 and any(each.grad is not None and not is_summed(each.grad) for each in ours)
