"""`world.wrap(…, strategy="fsdp")`: a user's model in shards, one for each worker, by torch's `fully_shard`.

Parameters and optimizer state are DTensors then. torch gathers the weights of a block when it runs, and sums its
gradients into the shards in every backward. Checkpoints hold whole tensors, so that any number of workers loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stormo.config.mesh import Mesh
from stormo.distributed.parallel_dims import ParallelDims
from stormo.distributed.world import World
from stormo.errors import SettingError, pluralize
from stormo.optim.sharded import steps_elementwise
from stormo.parallel.buckets import put_mark
from stormo.parallel.exchange import GradientExchange
from stormo.parallel.units import units_of
from stormo.script.loop import Loop


class ShardedExchange(GradientExchange):
    """Stands where gradients of replicas are summed: torch has summed those of shards in the backward."""

    @property
    def is_touched(self) -> bool:
        """Whether this step has a gradient."""
        return any(parameter.grad is not None for parameter in self._model.parameters())

    def finish(self) -> None:
        """Mark the sums of the shards, as those of replicas are."""
        super().finish()
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                put_mark(parameter.grad, parameter.grad._version)

    def _follow_model(self) -> None:
        self._signature = "shards"


def shard_models(loop: Loop, models: list[nn.Module], optimizers: list[Optimizer], dtype: torch.dtype | None) -> None:
    """Shard models that are the same on all workers, and let their optimizers step the shards."""
    from torch.distributed.fsdp import FSDPModule

    from stormo.parallel.fsdp import require_rows, shard

    world = loop.world
    for optimizer in optimizers:
        if optimizer.state:
            raise SettingError(
                'world.wrap(…, strategy="fsdp") was given an optimizer that has stepped',
                "its state is of whole parameters",
                "wrap it before the first step; world.load() restores a saved one",
            )
        check_optimizer(optimizer)
    whole = {p: (number, n) for number, model in enumerate(models) for n, p in model.named_parameters()}
    dims = ParallelDims(Mesh(shard=world.size), world.rank, world.device, world.timeout)
    for model in models:
        require_rows(model, 'strategy="ddp"')
        shard(model, units_of(model), dims, dtype=dtype, frees=True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # world.backward gives every worker's loss its weight, so gradients are summed.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                # Scripts also forward without a backward, after which parameters must be the shards again.
                module.set_reshard_after_forward(True, recurse=False)
        # Before torch's own hook, which gathers weights: a worker that is refused would leave the others in it.
        model.register_forward_pre_hook(lambda *_: _before_forward(loop), prepend=True)
    cut = {(number, name): p for number, model in enumerate(models) for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for settings in optimizer.param_groups:
            settings["params"] = [cut[whole[parameter]] for parameter in settings["params"]]
    loop.has_shards = True
    loop.replaced.update({id(parameter): parameter for parameter in whole})


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step on shards is not its step on whole layers."""
    if not steps_elementwise(optimizer):
        raise SettingError(
            f'world.wrap() was given the optimizer {type(optimizer).__name__} for a model with strategy="fsdp"',
            "workers would each step a part of a layer, and it is not known to step every element independently",
            'set strategy="ddp", or elementwise = True in its class if it does',
        )


def _before_forward(loop: Loop) -> None:
    """Refuse a batch that some worker skips: all of them gather the weights together."""
    size = loop.world.size
    for loader in loop.iterating:
        info = loader.batch_info
        if info is None or loader.trains:
            continue
        least = size * loader.accumulate
        if info.rank_without is not None or (info.step_samples is not None and info.step_samples < least):
            error = SettingError(
                f"a batch of {pluralize(info.step_samples or 0, 'sample')} was given to a sharded model",
                f"every worker must run it, and {pluralize(size, 'worker')} × {loader.accumulate} need {least}",
                "choose a larger batch size; a short last batch is joined to the one before under torch.no_grad()",
            )
            loop.check.raise_on_all(error)
    loop.check.wait()


def whole_tensors(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Gather shards one by one; only rank 0 keeps them, in host memory. All workers call it."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        gathered = whole_tensor(tensor)
        if world.is_main:
            found[name] = gathered if gathered is tensor else gathered.cpu()
    return found


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor of which this one is a shard, or itself. All workers call it."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def like(whole: Tensor, target: Any) -> Tensor:
    """This worker's shard of a whole tensor, cut as the target is."""
    if not hasattr(target, "full_tensor") or whole.shape != target.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
