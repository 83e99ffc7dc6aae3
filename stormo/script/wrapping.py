"""Takes models and what trains them into the loop: on the device, with the main worker's weights, in one group."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import nn

from stormo.layers.sync_batch_norm import LocalNorm, SynchronisedNorm, convert_sync_batch_norm
from stormo.script.loop import Loop, SumInModel
from stormo.script.refusals import check_new, check_optimizers
from stormo.script.sharing import share_weights
from stormo.script.stepping import Group


def take_in(
    loop: Loop,
    parts: tuple[Any, ...],
    models: list[nn.Module],
    group: Group | None,
    *,
    sync_batch_norm: bool,
    compress: str,
) -> None:
    """Make a group of the models and what belongs to them, or add to the one whose optimizer was wrapped before.

    Args:
        loop: of the script.
        parts: all that was wrapped together.
        models: those of them.
        group: of an optimizer whose schedulers and loss scalers come later.
        sync_batch_norm: batch-norm statistics over all workers' samples.
        compress: how gradients travel.
    """
    if group is not None:
        check_new(nn.Identity(), parts, loop.groups)
        group.add(parts)
        return
    _let_go(loop)
    together = models[0] if len(models) == 1 else nn.ModuleList(models)
    check_new(together, parts, loop.groups)
    for model in models:
        model.to(loop.world.device)
        if sync_batch_norm and loop.world.size > 1:
            convert_sync_batch_norm(model, SumInModel(loop))
            synchronised = (layer for layer in model.modules() if isinstance(layer, SynchronisedNorm))
            loop.sums_in_models |= any(layer.reduce is not None for layer in synchronised)
    if loop.sums_in_models:
        loop.agreement.remark = (
            " If nothing else has failed: a batch norm that only some workers go through waits so, and "
            "world.wrap(…, sync_batch_norm=False) lets every worker have its own."
        )
    check_optimizers(parts, together)
    share_weights(loop.world, together)
    # Ghost batch norm stays what it is, and its running statistics are a worker's own.
    has_local = any(isinstance(layer, LocalNorm) for layer in together.modules())
    averages = has_local or not sync_batch_norm
    loop.groups.append(Group(loop, together, parts, average_buffers=averages, compress=compress))


def _let_go(loop: Loop) -> None:
    """Forget models that the script has, as between the folds of a cross-validation: they cost memory and time.

    Only what is wrapped, or hangs on its parameters, keeps a group. Memory is freed at other times on other workers,
    so they agree here on what is left.
    """
    if not loop.groups:
        return
    references = [weakref.ref(group) for group in loop.groups]
    loop.groups.clear()
    gc.collect()
    world = loop.world
    found = world.share_json(world.gather_json([reference() is not None for reference in references]))
    for reference, is_there in zip(references, zip(*found, strict=True), strict=True):
        group = reference()
        if group is not None and all(is_there):
            loop.groups.append(group)
        elif group is not None:  # another worker can no longer take part
            group.exchange.close()
    if not loop.groups:
        loop.folders.clear()  # their checkpoints are of other models
