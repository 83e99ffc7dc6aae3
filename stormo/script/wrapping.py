"""`world.wrap`: models and what trains them, checked, on the device, with rank 0's weights, in one group."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stormo.distributed.world import World
from stormo.errors import SettingError, pluralize
from stormo.layers.sync_batch_norm import LocalNorm, convert_sync_batch_norm, synchronised_norms
from stormo.parallel.buckets import is_summed, require_shape
from stormo.parallel.compression import HALF_DTYPES
from stormo.parallel.pytree import tree_map_only
from stormo.script.collective_check import batch_norm_site, call_site
from stormo.script.loop import Loop
from stormo.script.sharding import check_optimizer, shard_models
from stormo.script.stepping import Group, replace_method

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
_IS_SHARDED = {"ddp": False, "fsdp": True}  # by strategy


def wrap(
    loop: Loop,
    parts: tuple[Any, ...],
    *,
    sync_batch_norm: bool,
    compress: str,
    strategy: str,
    precision: str,
) -> None:
    """Make a group of models and what belongs to them, or add to the group of a model that was wrapped before."""
    models = [part for part in parts if isinstance(part, nn.Module)]
    group = None if models else _group_of(parts, loop.groups)
    _check_parts(parts, models, group, compress)
    _check_choices(strategy, precision, compress, has_model=bool(models))
    loop.check.exchange(f"world.wrap({compress=}, {strategy=}, {precision=}) in {call_site()}")
    if group is not None:
        _check_new([], parts, loop.groups)
        for optimizer in parts if group.is_sharded else ():
            if isinstance(optimizer, Optimizer):
                check_optimizer(optimizer)
        group.add(parts)
        return
    if _IS_SHARDED[strategy]:
        _check_separate(models)
    _forget_unused(loop)
    model = models[0] if len(models) == 1 else nn.ModuleList(models)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        require_shape(name, tensor)
    _check_new(model.parameters(), parts, loop.groups)
    is_sharded = _IS_SHARDED[strategy] and loop.world.size > 1
    for each in models if not is_sharded else ():  # shards move block by block
        each.to(loop.world.device)
    _check_optimizers(parts, model)
    if sync_batch_norm and loop.world.size > 1:
        convert_sync_batch_norm(model, SumInModel(loop))
        loop.has_sync_norm |= bool(synchronised_norms(model))
    if loop.has_sync_norm:
        loop.check.hint = (
            " If nothing else has failed: a batch norm that only some workers run waits like this, and "
            "world.wrap(…, sync_batch_norm=False) gives every worker its own."
        )
    _broadcast_weights(loop.world, model)
    # Ghost batch norm stays what it is, and its running statistics are a worker's own.
    has_local = any(isinstance(layer, LocalNorm) for layer in model.modules())
    averages = has_local or not sync_batch_norm
    dtype = HALF_DTYPES.get(precision)
    if is_sharded:
        shard_models(loop, models, [part for part in parts if isinstance(part, Optimizer)], dtype)
    if dtype is not None:
        for each in models:
            compute_in(each, loop.world.device, dtype)
    made = Group(loop, model, parts, average_buffers=averages, compress=compress, is_sharded=is_sharded)
    loop.groups.append(made)


def _check_choices(strategy: str, precision: str, compress: str, *, has_model: bool) -> None:
    called = f"world.wrap(…, {strategy=}, {precision=}) was called"
    if strategy not in _IS_SHARDED:
        raise SettingError(
            f"world.wrap(…, {strategy=}) was called",
            "scripts have replicas or shards of a model",
            'set strategy="ddp" or "fsdp"',
        )
    if precision not in ("fp32", "bf16"):
        instead = 'set precision="bf16", or keep torch.autocast and a GradScaler in the script'
        raise SettingError(
            called, "scripts choose between fp32 and bf16: fp16 needs a scaled loss, fp64 a model in it", instead
        )
    if _IS_SHARDED[strategy] and compress != "none":
        raise SettingError(called, "torch sums the gradients of shards itself", "leave compress out")
    if not has_model and (_IS_SHARDED[strategy] or precision != "fp32"):
        raise SettingError(called, "it is a model's", "set it where the model is wrapped")


def _check_separate(models: Sequence[nn.Module]) -> None:
    """Refuse models that share parameters: torch would cut them for each model anew, and they would be two."""
    owners: dict[Tensor, int] = {}
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            if owners.setdefault(parameter, number) != number:
                raise SettingError(
                    f'world.wrap(…, strategy="fsdp") was given models that share the parameter {name}',
                    "each model is cut into shards of its own, and the shared one would become two",
                    'pass one module that holds them and whose forward calls them, or leave out strategy="fsdp"',
                )


def compute_in(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Run a model's forward under autocast; its outputs are float32, in which a loss is exact enough."""

    def forward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            outputs = inner(*args, **kwargs)
        return tree_map_only(Tensor, lambda each: each.float() if each.dtype == dtype else each, outputs)

    replace_method(model, "forward", forward)


class SumInModel:
    """The sum of a synchronised batch norm; posts come first, so that no worker is in another collective."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def __call__(self, vector: Tensor) -> object:
        """Sum in place over all workers."""
        for loader in self._loop.iterating:
            if loader.batch_info is not None and not loader.trains:
                loader.check_first(loader.batch_info)  # a worker without a sample has skipped this batch
        self._loop.check.wait()
        add = self._loop.world.sum
        return self._loop.check.guarded("a batch norm over all workers", lambda: add(vector), batch_norm_site)

    def __deepcopy__(self, memo: dict[int, Any]) -> SumInModel:
        return self  # a copy of the model has the same workers

    def __reduce__(self) -> Any:
        return type(None), ()  # a model that is read from a file belongs to one process


@torch.no_grad()
def _broadcast_weights(world: World, model: nn.Module) -> None:
    """Give all workers rank 0's parameters and buffers; models of other shapes are refused."""
    shapes = [f"{name} {tuple(getattr(tensor, 'shape', ()))}" for name, tensor in model.state_dict().items()]
    world.require_same({"wrapped model": hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:12]})
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.numel() and world.size > 1:
            whole = tensor.detach().to(world.device).contiguous()
            world.broadcast(whole.view(-1).view(torch.uint8))
            tensor.copy_(whole)


def _forget_unused(loop: Loop) -> None:
    """Forget models that the script no longer holds, as between the folds of a cross-validation.

    Only what is wrapped, or hangs on its parameters, keeps a group. Python frees memory at other times on other
    workers, so they agree here on what is left.
    """
    if not loop.groups:
        return
    references = [weakref.ref(group) for group in loop.groups]
    loop.groups.clear()
    gc.collect()
    world = loop.world
    found = world.broadcast_object(world.gather_objects([reference() is not None for reference in references]))
    for reference, is_there in zip(references, zip(*found, strict=True), strict=True):
        group = reference()
        if group is not None and all(is_there):
            loop.groups.append(group)
        elif group is not None:  # another worker has forgotten it
            group.exchange.close()
    if not loop.groups:
        loop.folders.clear()  # their checkpoints are of other models


def _group_of(parts: tuple[Any, ...], groups: list[Group]) -> Group | None:
    """The group of optimizers, schedulers and loss scalers that come without a model; None if it is ambiguous."""
    made = [part for part in parts if isinstance(part, Optimizer)]
    scheduled = [part.optimizer for part in parts if hasattr(part, "optimizer")]
    owners = [
        group
        for group in groups
        if all(any(each is own for own in (*group.optimizers, *made)) for each in scheduled)
        and not any(_foreign_tensors(optimizer, group.model) for optimizer in made)
    ]
    return owners[0] if parts and len(owners) == 1 else None


def _foreign_tensors(optimizer: Optimizer, model: nn.Module) -> list[Tensor]:
    known = {id(parameter) for parameter in model.parameters()}
    return [p for settings in optimizer.param_groups for p in settings["params"] if id(p) not in known]


def _check_parts(parts: tuple[Any, ...], models: list[nn.Module], group: Group | None, compress: str) -> None:
    if not models and group is None:
        raise SettingError(
            "world.wrap() was called without a model",
            f"it was given {', '.join(type(part).__name__ for part in parts) or 'nothing'}",
            "pass the model first: world.wrap(model, optimizer)",
        )
    for part in parts:
        called = f"world.wrap() was given a {type(part).__name__}"
        if any(base.__name__ in _WRAPPERS for base in type(part).__mro__):
            raise SettingError(called, "it sums the gradients itself", "pass the model without it")
        if not isinstance(part, nn.Module | Optimizer) and not (hasattr(part, "step") and hasattr(part, "state_dict")):
            raise SettingError(called, "it is no model, optimizer, scheduler or loss scaler", "leave it out")
    called = f"world.wrap(…, compress={compress!r}) was called"
    if compress not in ("none", *HALF_DTYPES):
        raise SettingError(called, "scripts can send gradients as bf16 or fp16", 'set compress="bf16", or leave it out')
    if compress != "none" and not models:
        raise SettingError(called, "gradients are those of a model", "set it where the model is wrapped")


def _check_new(parameters: Iterable[nn.Parameter], parts: tuple[Any, ...], groups: list[Group]) -> None:
    known = {id(parameter) for group in groups for parameter in group.model.parameters()}
    num_shared = sum(id(parameter) in known for parameter in parameters)
    wrapped = [each for group in groups for each in (*group.optimizers, *group.others)]
    again = next((part for part in parts if any(part is each for each in wrapped)), None)
    if num_shared or again is not None:
        what = pluralize(num_shared, "parameter") if num_shared else f"a {type(again).__name__}"
        raise SettingError(
            f"world.wrap() was given {what} for the second time",
            "gradients are summed over the workers once",
            "pass models that share parameters, and all that goes with them, in one call",
        )


def _check_optimizers(parts: tuple[Any, ...], model: nn.Module) -> None:
    for optimizer in (part for part in parts if isinstance(part, Optimizer)):
        if foreign := _foreign_tensors(optimizer, model):
            raise SettingError(
                f"world.wrap() was given an optimizer with {pluralize(len(foreign), 'tensor')} not of the model",
                "their gradients would differ between the workers",
                "make the optimizer from model.parameters(), and pass all models it moves in one call",
            )


def warn_of_unwrapped_optimizers(loop: Loop) -> None:
    """Warn once of an optimizer that steps without having been wrapped: the replicas would differ."""
    reference = weakref.ref(loop)

    def check(optimizer: Optimizer, _: tuple[Any, ...], __: dict[str, Any]) -> None:
        here = reference()
        # One that steps inside of a wrapped one is a part of it.
        if here is None or here.check.is_closed or here.is_stepping or not here.groups:
            return
        if any(id(p) in here.replaced for settings in optimizer.param_groups for p in settings["params"]):
            raise SettingError(
                f"the {type(optimizer).__name__} that steps in {call_site()} was made before world.wrap()",
                'strategy="fsdp" has replaced the parameters that it moves by shards',
                "pass it along, world.wrap(model, optimizer, ...), or make it after that",
            )
        if _is_unwrapped(optimizer, here):
            where = call_site()  # and not by the optimizer: a script may make one for every batch
            here.warn_once(
                where,
                f"the {type(optimizer).__name__} that steps in {where} was not passed to world.wrap(): it is not "
                "saved, and on several workers it moves what was not wrapped, or has its gradient from "
                "loss.backward(), by the worker's own samples. Pass it along: world.wrap(module, optimizer).",
            )

    register_optimizer_step_pre_hook(check)


def _is_unwrapped(optimizer: Optimizer, loop: Loop) -> bool:
    """Whether training depends on it. Tensors that are no parameters, as of an attack, are a worker's own affair."""
    wrapped = [each for group in loop.groups for each in group.optimizers]
    if any(optimizer is each for each in wrapped):
        return False
    moved = [p for settings in optimizer.param_groups for p in settings["params"] if isinstance(p, nn.Parameter)]
    # Where no optimizer was wrapped, gradients of world.backward() are right all the same.
    is_own = any(each.grad is not None and not is_summed(each.grad) for each in moved)
    return bool(moved) and (bool(wrapped) or (loop.world.size > 1 and is_own))
