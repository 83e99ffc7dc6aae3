"""Sharded models: any product of the mesh axes replicate, shard and tensor.

The model is built on meta (`meta_init`), transformed (`compose`), and filled with the initial values of a single
process: rank 0 broadcasts one tensor at a time, and each worker keeps its chunk. The optimizer steps plain local
tensors (`parameter_shards`), and norms are those of whole layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from stormo.config import schema
from stormo.config.plan import Plan
from stormo.config.schema import TrainConfig
from stormo.data.loaders import Batch
from stormo.distributed.parallel_dims import MODEL, ParallelDims
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.layers.sync_batch_norm import own_classes
from stormo.optim.global_norms import GlobalSquares
from stormo.optim.layerwise import LayerwiseOptimizer
from stormo.optim.muon import Muon
from stormo.optim.sharded import ShardedGradScaler, check_elementwise, to_local_params
from stormo.parallel.compression import HALF_DTYPES
from stormo.parallel.ddp import Replicated
from stormo.parallel.half_gradients import HalfReduceScatter
from stormo.parallel.matrix_exchange import MatrixExchange
from stormo.parallel.meta_init import Values, materialize, meta_model
from stormo.parallel.parameter_shards import ParameterShard, make_shards, plain
from stormo.parallel.tensor.hybrid import split_classifier
from stormo.parallel.tensor.layers import ShardSpec, count_waits
from stormo.parallel.tensor.plan import derive_plan
from stormo.parallel.tensor.split import split_tensor, unequal_gradients
from stormo.parallel.units import recompute, units_of
from stormo.tasks.returned import without_gradient
from stormo.tasks.task import Task


class Sharded(Replicated):
    """One worker of a mesh without the axis pipeline."""

    def __init__(self, world: World, plan: Plan, task: Task, settings: schema.TrainConfig) -> None:
        self._zero = plan.layout.zero
        self._model_group = world.parallel_dims.subgroup(*MODEL)  # the workers that hold one replica
        self._has_exchanged = True  # whether the last micro-batch ended with an exchange of gradients
        if self._zero and task.find_unused and world.data.size > 1:
            raise SettingError(
                f"{type(task).__name__}.find_unused is True and the weights are sharded",
                "all workers gather the weights of a block together, and would wait for one that leaves it out",
                "set --strategy ddp, or a --mesh without the axis shard",
            )
        super().__init__(world, plan, task, settings)
        self._make_shards()
        self._watch_waits()

    # Building

    def _make_model(self) -> nn.Module:
        model, values = meta_model(self.world, self.task, self.notices)
        _check_dense(model)
        if self._plan.precision == "fp64":
            model = model.double()
        model = self._convert_batch_norms(model)
        # Of whole layers: parameter groups depend on shapes, and a task's own optimizer on names.
        self._make_optimizer(model)
        self._whole = dict(model.named_parameters())
        self._whole_shapes = {name: tuple(parameter.shape) for name, parameter in self._whole.items()}
        if self._zero:
            require_rows(model)  # before a pipeline keeps its own stages
        self._shard_specs = self._transform(model)
        self._fill(model, values)
        return model

    def _transform(self, model: nn.Module) -> dict[str, ShardSpec]:
        link = self.world.link
        half_gradients = link is not None and link.half_gradients
        plan, settings, dims = self._plan, self._settings, self.world.parallel_dims
        return compose(model, [model], plan, settings, self.task, dims, half_gradients=half_gradients)

    @torch.no_grad()
    def _fill(self, model: nn.Module, values: Values) -> None:
        materialize(model, torch.device("cpu") if self._settings.sharding.offload else self.world.device)
        shards, buffers = {shard.name: shard for _, shard in self._shards_of(model)}, dict(model.named_buffers())
        for names, value in values:
            for name in names:
                if (shard := shards.pop(name, None)) is not None:
                    shard.local.copy_(shard.of(value))
                if (buffer := buffers.pop(name, None)) is not None:
                    buffer.data = value.to(self.world.device, buffer.dtype, copy=True)
        assert not shards, shards.keys()
        assert not buffers, buffers.keys()

    def _wrap(self, model: nn.Module) -> nn.Module:
        group = self.world.data
        if self._plan.channels_last:
            for layer in model.modules():
                if isinstance(layer, nn.Conv2d):
                    layer.register_forward_pre_hook(_in_channels_last)
        if self._zero or group.size == 1:
            return model
        if self._plan.layout.spec.cuts_classifier:  # these are sharded, not replicated
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(self._shard_specs))
        return self._replicate(model, group=group.group)

    def _watch_waits(self) -> None:
        """Count the time in which this worker waits for others."""
        for root in self._roots() if self._zero and self.world.size > 1 else ():
            self.exposed.watch_shards(root)
        if self.world.mesh.tensor > 1:
            # Collectives inside compiled blocks cannot be timed from outside.
            self.measures_exposed_wait = not self._plan.compile
            group = self.world.parallel_dims.subgroup("tensor").group
            assert group is not None
            count_waits(group.group_name, self.exposed)

    def _compiled(self, model: nn.Module) -> nn.Module:
        return model  # its blocks are compiled

    def _make_scaler(self) -> torch.amp.GradScaler:
        # On the device of the optimizer, to which torch would copy the scale without waiting.
        device = torch.device("cpu") if self._settings.sharding.offload else self.world.device
        return ShardedGradScaler(device, self._model_group.max, enabled=self._plan.precision == "fp16")

    # What the optimizer steps

    def _shards_of(self, model: nn.Module) -> list[tuple[nn.Parameter, ParameterShard]]:
        dims = self.world.parallel_dims
        return make_shards(model.named_parameters(), self._whole_shapes, self._shard_specs, dims)

    def _make_shards(self) -> None:
        """Let the optimizer step this worker's shards, with norms of whole layers."""
        check_elementwise(self.optimizer)
        self._pairs = self._shards_of(self.module)
        own = {shard.name: shard.local for _, shard in self._pairs}
        to_local_params(self.optimizer, {parameter: own.get(name) for name, parameter in self._whole.items()})
        del self._whole
        self._global_squares = GlobalSquares(
            layer_of={s.local: (self._parameter_numbers[s.name], s.is_counted) for _, s in self._pairs},
            num_layers=len(self._parameter_numbers),
            reduce=self._model_group.sum,
            device=self.world.device,
        )
        if isinstance(self.optimizer, LayerwiseOptimizer) and self._model_group.size > 1:
            self.optimizer.global_squares = self._global_squares
        if isinstance(self.optimizer, Muon) and self._model_group.size > 1:
            shards = [shard for _, shard in self._pairs]
            self.optimizer.exchange = MatrixExchange(shards, self._whole_shapes, self._model_group, self.world.device)

    def shards(self) -> list[ParameterShard]:
        """This worker's part of the model."""
        self._follow_torch()
        return [shard for _, shard in self._pairs]

    def _follow_torch(self) -> None:
        """Use the memory of torch's shards, which torch may allocate again in their first forward."""
        for parameter, shard in self._pairs if self._zero else ():
            values = plain(parameter)
            if shard.local.data_ptr() != values.data_ptr():
                shard.local.data = values

    def shards_changed(self) -> None:
        """Free the old values that torch has gathered."""
        self._reshard()

    def _roots(self) -> list[nn.Module]:
        """The outermost modules that were sharded."""
        return [self.module]

    @cached_property
    def _sharded_modules(self) -> list[FSDPModule]:
        return [module for root in self._roots() for module in root.modules() if isinstance(module, FSDPModule)]

    def _reshard(self) -> None:
        for module in self._sharded_modules:
            module.reshard()

    def optimizer_params(self) -> list[nn.Parameter]:
        """The shards."""
        return [shard.local for _, shard in self._pairs]

    # A step

    def _gradient_sync(self, is_last: bool) -> AbstractContextManager[Any]:
        if isinstance(self.module, FSDPModule):
            is_replicated = self.world.mesh.replicate > 1
            self._has_exchanged = is_last or not (is_replicated or self._zero == 1)
            if self._zero < 3:
                self.module.set_reshard_after_backward(is_last)  # weights are gathered once in a step
            if self._zero == 1:
                self.module.set_requires_gradient_sync(is_last)
            elif is_replicated:
                # Every micro-batch reduces to the shards, as whole gradients would not fit; replicas are averaged once.
                self.module.set_requires_all_reduce(is_last)
        return super()._gradient_sync(is_last)

    def _collect_gradients(self) -> None:
        super()._collect_gradients()
        self._follow_torch()
        for parameter, shard in self._pairs if self._zero else ():
            gradient = parameter.grad
            shard.local.grad = None if gradient is None else plain(gradient).to(shard.local.device)

    def micro_step(self, batch: Batch) -> Tensor:
        """As on one device; every worker gathers the weights, also those that a replay does not fit."""
        if self._graph is not None:
            self._reshard()  # a replay gathers for itself, and what a validation has gathered gets old
        return super().micro_step(batch)

    def _capture(self, batch: Batch) -> str | None:
        if frees_weights(self.module, self._plan, self._settings, self.world.parallel_dims):
            return f"with --shard-modules, or above {KEPT_BYTES >> 20} MiB, they are gathered again for backward"
        return super()._capture(batch)

    def _refuse_graph(self, reason: str) -> None:
        """End the run: torch's sharding does not recover from half a step."""
        raise SettingError(
            "--graph was set", f"a step with sharded weights cannot be captured: {reason}", "set --no-graph"
        )

    def _gradient_norm(self) -> Tensor:
        return self._global_squares.total([shard.local.grad for _, shard in self._pairs])

    def clear_gradients(self) -> None:
        """Set all gradients to None."""
        super().clear_gradients()
        for parameter, _ in self._pairs:
            parameter.grad = None
        for parameter in self.module.parameters():  # those that torch has gathered, if none were exchanged
            parameter.grad = None

    def check_first_gradients(self) -> None:
        """Refuse a tensor plan that leads to different weights on different workers."""
        if self._plan.layout.spec.cuts_classifier or not self._has_exchanged:
            return
        gradients = ((shard.name, parameter.grad) for parameter, shard in self._pairs)
        names = unequal_gradients(gradients, self._shard_specs, self.world.parallel_dims.subgroup("tensor"))
        if names:
            raise SettingError(
                f"{type(self.task).__name__}.tensor_plan(model) was given",
                f"the gradients of {names[0]}, which it leaves whole, differ between workers: the inputs of that layer "
                "are sharded",
                "shard it as well, or gather its inputs (row, column-gathered)",
            )

    def without_gradient(self) -> list[str]:
        """The trained parameters without a gradient after a micro-batch, as far as this worker knows."""
        if not self._has_exchanged:
            return without_gradient(self.module) if self._zero == 1 else []
        return [shard.name for parameter, shard in self._pairs if parameter.requires_grad and parameter.grad is None]


def _in_channels_last(layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give a convolution its input in channels_last: its output, and so all later activations, then have it too.

    torch's sharding takes contiguous weights only, so the layout must come from the activations. With one channel both
    layouts are the same memory, and the strides tell which is meant.
    """
    images, *others = arguments
    if images.dim() != 4:
        return arguments
    images = images.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = images.shape
    strides = (channels * height * width, 1, channels * width, channels)
    return images if images.stride() == strides else images.as_strided(images.shape, strides), *others


def _check_dense(model: nn.Module) -> None:
    for path, layer in model.named_modules():
        if getattr(layer, "sparse", False) is True:
            raise SettingError(
                f"the layer {path} has sparse gradients",
                "a sharded model exchanges chunks of dense tensors",
                "make it with sparse=False, or set --strategy ddp",
            )


def compose(
    model: nn.Module,
    roots: Sequence[nn.Module],
    plan: Plan,
    settings: TrainConfig,
    task: Task,
    dims: ParallelDims,
    *,
    half_gradients: bool = False,
) -> dict[str, ShardSpec]:
    """Apply tensor parallelism, recomputing, torch.compile and sharding, in this order and in place.

    Returns the shards of the axis tensor by parameter name.

    Args:
        model: the whole model, on meta.
        roots: what this worker computes of it: the model itself, or its stages of a pipeline.
        plan: of the run.
        settings: of the run.
        task: whose model it is.
        dims: of the workers.
        half_gradients: as of `shard`.
    """
    layout, sharding = plan.layout, settings.sharding
    specs: dict[str, ShardSpec] = {}
    if layout.spec.cuts_classifier:
        specs = split_classifier(task, model, dims.subgroup("tensor"))
    elif dims.mesh.tensor > 1:
        specs = split_tensor(model, derive_plan(task, model, dims.mesh.tensor), dims.subgroup("tensor"))
    for root, units in zip(roots, _units(model, roots, sharding.shard_modules), strict=True):
        if sharding.checkpoint_activations:
            recompute(root, units or [""])
        if plan.compile:
            for path in units or [""]:
                root.get_submodule(path).compile(dynamic=False)
        if layout.zero:
            # ZeRO-1 and 2 gather the weights as they are, once for the whole step.
            is_split = layout.zero == 3 and dims.mesh.shard > 1
            dtype = HALF_DTYPES.get(plan.precision) if layout.zero == 3 else None
            shard(
                root,
                units,
                dims,
                dtype=dtype,
                frees=frees_weights(root, plan, settings, dims),
                offload=sharding.offload,
                merges=_may_join(settings) and dims.mesh.size == 1,
                joins_small=is_split and _saves_messages(plan, settings, dims),
                joins_norms=not sharding.checkpoint_activations and dims.mesh.pipeline == 1,
                half_gradients=half_gradients,
            )
    return specs


def frees_weights(root: nn.Module, plan: Plan, settings: TrainConfig, dims: ParallelDims) -> bool:
    """Whether gathered weights are freed between forward and backward, and gathered again."""
    if plan.layout.zero != 3 or dims.mesh.shard == 1:
        return False
    if settings.sharding.offload or not _saves_messages(plan, settings, dims):
        return True
    return _gathered_bytes(root, HALF_DTYPES.get(plan.precision)) > KEPT_BYTES


def _saves_messages(plan: Plan, settings: TrainConfig, dims: ParallelDims) -> bool:
    """Whether workers send fewer messages, in more memory."""
    return _may_join(settings) and plan.layout.device_type == "cuda" and dims.mesh.pipeline == 1


def _may_join(settings: TrainConfig) -> bool:
    """Whether units may be joined: not with recomputing, which runs unit by unit, nor with --shard-modules."""
    return not settings.sharding.checkpoint_activations and settings.sharding.shard_modules is None


def _gathered_bytes(model: nn.Module, dtype: torch.dtype | None) -> int:
    """Of all weights of a model that is gathered in this dtype, None for their own."""
    return sum(one.numel() * (dtype or one.dtype).itemsize for one in model.parameters())


def _units(model: nn.Module, roots: Sequence[nn.Module], asked: str | None) -> list[list[str]]:
    """Paths of the units in each root; --shard-modules names them in the whole model."""
    if asked is None:
        return [units_of(root) for root in roots]
    wanted = [model.get_submodule(path) for path in units_of(model, asked)]
    found = []
    for root in roots:
        paths = {module: path for path, module in root.named_modules()}
        found.append([paths[module] for module in wanted if module in paths])
    return found


KEPT_BYTES = 256 << 20  # of gathered weights, which are then not gathered again for backward
UNITS_OF_ONE_WORKER = 4  # more units save memory, fewer save host time: some milliseconds a step for each


def require_rows(model: nn.Module, instead: str = "--strategy ddp") -> None:
    """Refuse parameters that cannot be cut by rows."""
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise SettingError(
                f"the parameter {name} is a single number",
                "the axis shard cuts parameters by their rows",
                f"give it the shape [1], or set {instead}",
            )
        if not parameter.is_contiguous():
            raise SettingError(
                f"the parameter {name} is not contiguous in memory, as after a transpose or channels_last",
                "the axis shard cuts parameters by their rows",
                f"make it of a .contiguous() tensor, or set {instead}",
            )


@own_classes()
def shard(
    model: nn.Module,
    units: Sequence[str],
    dims: ParallelDims,
    *,
    dtype: torch.dtype | None,
    frees: bool,
    offload: bool = False,
    merges: bool = False,
    joins_small: bool = False,
    joins_norms: bool = True,
    half_gradients: bool = False,
) -> FSDPModule:
    """Shard a model in place: its units, then what is left of it.

    Args:
        model: on any device, also on meta.
        units: paths of the modules that are gathered one at a time.
        dims: of the workers.
        dtype: in which weights are gathered and used, with gradients reduced in float32. None: their own.
        frees: free the gathered weights of a unit between forward and backward.
        offload: keep the shards in host memory.
        merges: merge neighbouring units, if nothing is freed between them.
        joins_small: gather small neighbouring units together.
        joins_norms: gather all batch norms together, as their weights are small and each message costs time.
        half_gradients: send gradients in `dtype`, as they were computed; every backward must reduce them.
    """
    both = dims.mesh.replicate > 1
    mesh = dims.devices["replicate", "shard"] if both else dims.devices["shard"]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
    host = CPUOffloadPolicy(pin_memory=dims.devices.device_type == "cuda") if offload else OffloadPolicy()
    # Batch norms are units without mixed precision: their weights must have the dtype of their running statistics.
    norms = [path for path, layer in model.named_modules() if path and has_statistics(layer)] if dtype else []
    norm_groups = [norms] if norms and joins_norms else [[path] for path in norms]
    groups = [[path] for path in units if path not in norms]
    if merges and not (frees or both or offload):
        groups = _merged([path for (path,) in groups], UNITS_OF_ONE_WORKER)
    elif joins_small:
        groups = _joined(model, [path for (path,) in groups])
    reduce_scatter: Any = HalfReduceScatter(dtype) if dtype and half_gradients else None
    for paths in (*norm_groups, *groups):
        is_norm = paths[0] in norms
        modules = [model.get_submodule(path) for path in paths]
        fully_shard(
            modules,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy() if is_norm else policy,
            offload_policy=host,
            reshard_after_forward=frees and not (is_norm and joins_norms),
        )
        if reduce_scatter is not None and not is_norm:
            cast(FSDPModule, modules[0]).set_custom_reduce_scatter(reduce_scatter)
    # Backward needs the root at once: its weights stay gathered in between.
    root = fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=host, reshard_after_forward=False)
    if reduce_scatter is not None:
        root.set_custom_reduce_scatter(reduce_scatter)
    return root


def _merged(paths: list[str], num_groups: int) -> list[list[str]]:
    """Neighbours in at most this many groups."""
    size = -(-len(paths) // num_groups)
    return [paths[start : start + size] for start in range(0, len(paths), size)] if paths else []


def _joined(model: nn.Module, paths: list[str]) -> list[list[str]]:
    """Neighbours together up to the size of the largest unit: fewer messages, in no more memory.

    On a GPU a message first waits for free multiprocessors, on every worker.
    """
    sizes = {path: sum(one.numel() for one in model.get_submodule(path).parameters()) for path in paths}
    groups: list[list[str]] = []
    for path in paths:
        if groups and sizes[path] + sum(sizes[one] for one in groups[-1]) <= max(sizes.values()):
            groups[-1].append(path)
        else:
            groups.append([path])
    return groups


def has_statistics(layer: nn.Module) -> bool:
    """Whether it is a batch norm of any kind, also stormo's fused one, with weights and running statistics."""
    has_weights = next(layer.parameters(recurse=False), None) is not None
    return has_weights and isinstance(getattr(layer, "running_mean", None), Tensor)
