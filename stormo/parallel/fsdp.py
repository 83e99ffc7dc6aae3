"""Models that are sharded: any product of the mesh axes replicate, shard and tensor.

The model is built without values (`meta_init`), transformed (`compose`), and filled with what one process would begin
with: rank 0 has it, all receive one tensor at a time, and each keeps its own chunk. The optimizer steps plain local
tensors (`parameter_shards`), and norms are those of whole layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

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
from stormo.optim.layerwise import LayerwiseOptimizer
from stormo.optim.local import check_elementwise, to_local_params
from stormo.optim.scaler import AgreedGradScaler
from stormo.optim.whole import WholeSquares
from stormo.parallel.base import Strategy
from stormo.parallel.compression import HALF_DTYPES
from stormo.parallel.ddp import check_reached, in_own_words, replica
from stormo.parallel.meta_init import Values, materialize, meta_model
from stormo.parallel.parameter_shards import LocalParameter, ParameterShard, as_shard_parameter, local_parameters, plain
from stormo.parallel.tensor.hybrid import split_classifier
from stormo.parallel.tensor.layers import ShardSpec
from stormo.parallel.tensor.plan import derive_plan
from stormo.parallel.tensor.split import split_tensor, unequal_gradients
from stormo.parallel.units import recompute, units_of
from stormo.tasks.returned import without_gradient
from stormo.tasks.task import Task


class Sharded(Strategy):
    """One worker of a mesh without the axis pipeline."""

    exposed_reason = "it is watched under ddp alone"

    def __init__(self, world: World, plan: Plan, task: Task, settings: schema.TrainConfig) -> None:
        self._zero = plan.layout.zero
        self._copy = world.grid.line(*MODEL)  # the workers that hold one copy of the model
        self._replica: DistributedDataParallel | None = None
        self._has_exchanged = True  # whether the micro-batch just done ended with an exchange of gradients
        if self._zero and task.find_unused and world.data.size > 1:
            raise SettingError(
                f"{type(task).__name__}.find_unused is True and the weights are sharded",
                "workers gather and sum the weights of a block together, and one whose pass leaves it out would be "
                "waited for",
                "set --strategy ddp, or a --mesh without the axis shard",
            )
        super().__init__(world, plan, task, settings)
        self._own_parts()

    # Building

    def _make_model(self) -> nn.Module:
        model, values = meta_model(self.world, self.task, self.notices)
        _check_dense(model)
        if self._plan.precision == "fp64":
            model = model.double()
        model = self._convert(model)
        # Of whole layers: groups go by their shapes, and a task's own optimizer by its names.
        self._make_optimizer(model)
        self._whole = dict(model.named_parameters())
        self._whole_shapes = {name: tuple(parameter.shape) for name, parameter in self._whole.items()}
        self._cuts = self._transform(model)
        self._fill(model, values)
        return model

    def _transform(self, model: nn.Module) -> dict[str, ShardSpec]:
        return compose(model, [model], self._plan, self._settings, self.task, self.world.grid)

    def _make_room(self, model: nn.Module) -> None:
        """Give the model memory for its values."""
        materialize(model, torch.device("cpu") if self._settings.sharding.offload else self.world.device)

    @torch.no_grad()
    def _fill(self, model: nn.Module, values: Values) -> None:
        self._make_room(model)
        own = local_parameters(model.named_parameters(), self._whole_shapes, self._cuts, self.world.grid)
        parameters, buffers = {one.name: one for one in own}, dict(model.named_buffers())
        for names, value in values:
            for name in names:
                if (one := parameters.pop(name, None)) is not None:
                    one.tensor.copy_(one.of(value))
                if (buffer := buffers.pop(name, None)) is not None:
                    buffer.data = value.to(self.world.device, buffer.dtype, copy=True)
        assert not parameters, parameters.keys()
        assert not buffers, buffers.keys()

    def _wrap(self, model: nn.Module) -> nn.Module:
        line = self.world.data
        if self._zero or line.size == 1:
            return model
        if self._plan.layout.spec.cuts_classifier:  # these are cut, not copied
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(self._cuts))
        self._replica = replica(
            model,
            device_ids=[self.world.device] if self.world.device.type == "cuda" else None,
            process_group=line.group,
            gradient_as_bucket_view=True,
            find_unused_parameters=self.task.find_unused,
        )
        return self._replica

    def _compiled(self, model: nn.Module) -> nn.Module:
        return model  # its blocks are compiled

    def _make_scaler(self) -> torch.amp.GradScaler:
        # Where the optimizer steps, as the scale would be copied there without waiting otherwise.
        device = torch.device("cpu") if self._settings.sharding.offload else self.world.device
        return AgreedGradScaler(device, self._copy.max, enabled=self._plan.precision == "fp16")

    # What the optimizer steps

    def _own_parts(self) -> None:
        """Let the optimizer step this worker's parts, by norms of whole layers."""
        check_elementwise(self.optimizer)
        grid = self.world.grid
        self._held = local_parameters(self.module.named_parameters(), self._whole_shapes, self._cuts, grid)
        self._pairs = [(one, self._part(one)) for one in self._held]
        own = {part.name: part.local for _, part in self._pairs}
        to_local_params(self.optimizer, {parameter: own.get(name) for name, parameter in self._whole.items()})
        del self._whole
        numbers = {name: number for number, name in enumerate(self._whole_shapes)}
        self._squares = WholeSquares(
            parameters=[part.local for _, part in self._pairs],
            numbers=[numbers[part.name] for _, part in self._pairs],
            is_counted=[part.is_counted for _, part in self._pairs],
            num_layers=len(numbers),
            reduce=self._copy.sum,
            device=self.world.device,
        )
        if isinstance(self.optimizer, LayerwiseOptimizer) and self._copy.size > 1:
            self.optimizer.whole_squares = self._squares

    def _part(self, one: LocalParameter) -> ParameterShard:
        """What this worker steps of a parameter."""
        is_sharded = self._zero > 0
        return ParameterShard(
            name=one.name,
            whole_shape=one.whole_shape,
            offset=one.offset,
            local=as_shard_parameter(one.tensor, requires_grad=one.parameter.requires_grad)
            if is_sharded
            else one.parameter,
            is_counted=one.is_first,
            is_saved=one.is_first and self.world.grid.at["replicate"] == 0,
        )

    def parts(self) -> list[ParameterShard]:
        """What this worker holds of the model."""
        self._follow_torch()
        return [part for _, part in self._pairs]

    def _follow_torch(self) -> None:
        """Have the parts where torch has its shards, which it may lay anew in their first pass."""
        for one, part in self._pairs if self._zero else ():
            if part.local.data_ptr() != one.tensor.data_ptr():
                part.local.data = one.tensor

    def shards_changed(self) -> None:
        """The tensors of `parts` have been given other values: what torch has gathered of the old ones is freed."""
        self._reshard()

    def _roots(self) -> list[nn.Module]:
        """The modules that were sharded as wholes."""
        return [self.module]

    def _reshard(self) -> None:
        for root in self._roots():
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def optimizer_params(self) -> list[nn.Parameter]:
        """The parts."""
        return [part.local for _, part in self._pairs]

    # A step

    def _gradient_sync(self, is_last: bool) -> AbstractContextManager[Any]:
        if isinstance(self.module, FSDPModule):
            is_copied = self.world.mesh.replicate > 1
            self._has_exchanged = is_last or not (is_copied or self._zero == 1)
            if self._zero < 3:
                self.module.set_reshard_after_backward(is_last)  # weights are gathered once in a step
            if self._zero == 1:
                self.module.set_requires_gradient_sync(is_last)
            elif is_copied:
                # Every micro-batch sums to the shards, as whole gradients would not fit; copies are averaged once.
                self.module.set_requires_all_reduce(is_last)
        if self._replica is not None and not is_last:
            return self._replica.no_sync()
        return nullcontext()

    def micro_step(self, batch: Batch) -> Tensor:
        """As on one device; a parameter that DDP waits for in vain is named."""
        with in_own_words(self.task, self.module):
            return super().micro_step(batch)

    def _collect_gradients(self) -> None:
        if self._replica is not None:
            check_reached(self.task, self.module, (one.parameter for one in self._held))
        self._follow_torch()
        for one, part in self._pairs if self._zero else ():
            gradient = one.parameter.grad
            part.local.grad = None if gradient is None else plain(gradient).to(part.local.device)

    def _gradient_norm(self) -> Tensor:
        return self._squares.total([part.local.grad for _, part in self._pairs])

    def _add_noise(self) -> None:
        boxes = [(part.local.grad, part) for _, part in self._pairs if part.local.grad is not None]
        numbers = {name: number for number, name in enumerate(self._whole_shapes)}
        self._noise.add_to_boxes(
            [(gradient, numbers[part.name], part.whole_shape, part.offset) for gradient, part in boxes], self.clock.step
        )

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        super().clear_gradients()
        for one in self._held:
            one.parameter.grad = None
        for parameter in self.module.parameters():  # those that torch has gathered, where none were exchanged
            parameter.grad = None

    def check_first_pass(self) -> None:
        """Refuse a plan of the axis tensor under which workers would come to different weights."""
        if self._plan.layout.spec.cuts_classifier or not self._has_exchanged:
            return
        gradients = ((one.name, one.parameter.grad) for one in self._held)
        names = unequal_gradients(gradients, self._cuts, self.world.grid.line("tensor"))
        if names:
            raise SettingError(
                f"{type(self.task).__name__}.tensor_plan(model) was given",
                f"the workers come to different gradients of {names[0]}, which it leaves whole: what that layer "
                "computes with is cut",
                "cut it as well, or gather its inputs (row, column-gathered)",
            )

    def without_gradient(self) -> list[str]:
        """The trained parameters that the pass just done has not reached, as far as it can be seen."""
        if not self._has_exchanged:
            return without_gradient(self.module) if self._zero == 1 else []
        return [one.name for one in self._held if one.parameter.requires_grad and one.parameter.grad is None]


def _check_dense(model: nn.Module) -> None:
    for path, layer in model.named_modules():
        if getattr(layer, "sparse", False) is True:
            raise SettingError(
                f"the layer {path} has sparse gradients",
                "gradients travel in parts of whole tensors where a model is spread",
                "make it with sparse=False, or set --strategy ddp",
            )


def compose(
    model: nn.Module, roots: Sequence[nn.Module], plan: Plan, settings: TrainConfig, task: Task, grid: ParallelDims
) -> dict[str, ShardSpec]:
    """Tensor, recomputing, compiling, sharding, in this order and in place; a pipeline has cut the model before.

    Returns what the axis tensor has cut, by the names of the parameters.

    Args:
        model: the whole tree, on meta.
        roots: the parts of it that this worker computes: the model itself, or its stages of a pipeline.
        plan: of the run.
        settings: of the run.
        task: whose model it is.
        grid: of the workers.
    """
    layout, sharding = plan.layout, settings.sharding
    cuts: dict[str, ShardSpec] = {}
    if layout.spec.cuts_classifier:
        cuts = split_classifier(task, model, grid.line("tensor"))
    elif grid.mesh.tensor > 1:
        cuts = split_tensor(model, derive_plan(task, model, grid.mesh.tensor), grid.line("tensor"))
    for root, units in zip(roots, _units(model, roots, sharding.shard_modules), strict=True):
        if sharding.checkpoint_activations:
            recompute(root, units or [""])
        if plan.compile:
            for path in units or [""]:
                root.get_submodule(path).compile(dynamic=False)
        if layout.zero:
            # ZeRO-1 and 2 gather the weights as they are, once for the whole step.
            frees = layout.zero == 3 and grid.mesh.shard > 1
            dtype, on_gpu = HALF_DTYPES.get(plan.precision) if layout.zero == 3 else None, layout.device_type == "cuda"
            # What computes again in backward does so unit by unit, and what was asked for stays as it is.
            merges = grid.mesh.size == 1 and not sharding.checkpoint_activations and sharding.shard_modules is None
            shard(root, units, grid, dtype=dtype, frees=frees, offload=sharding.offload, on_gpu=on_gpu, merges=merges)
    return cuts


def _units(model: nn.Module, roots: Sequence[nn.Module], asked: str | None) -> list[list[str]]:
    """Paths of the blocks in each root; those that are asked for go by their names in the whole model."""
    if asked is None:
        return [units_of(root) for root in roots]
    wanted = [model.get_submodule(path) for path in units_of(model, asked)]
    found = []
    for root in roots:
        paths = {module: path for path, module in root.named_modules()}
        found.append([paths[module] for module in wanted if module in paths])
    return found


_LONE_GROUPS = 4  # every unit costs the host some milliseconds a step; what is summed at once needs memory


def shard(
    model: nn.Module,
    units: Sequence[str],
    grid: ParallelDims,
    *,
    dtype: torch.dtype | None,
    frees: bool,
    offload: bool,
    on_gpu: bool,
    merges: bool,
) -> FSDPModule:
    """Shard a model in place: its units, then what is left of it.

    Args:
        model: on any device, also on meta.
        units: paths of the modules that are gathered one at a time.
        grid: of the workers.
        dtype: in which weights are gathered and used; gradients are summed in float32 then. None: as they are.
        frees: free what was gathered of a unit between forward and backward.
        offload: keep what belongs to this worker in host memory.
        on_gpu: whether the workers compute on GPUs.
        merges: let neighbours be one unit, where nothing is freed between them.
    """
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise SettingError(
                f"the parameter {name} is a single number",
                "the axis shard cuts parameters by their rows",
                "give it the shape [1], or set --strategy ddp",
            )
    both = grid.mesh.replicate > 1
    mesh = grid.devices["replicate", "shard"] if both else grid.devices["shard"]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
    host = CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()
    # Weights of batch norm must be of the type of its running statistics, as in one process: small units of their own.
    norms = [path for path, layer in model.named_modules() if path and _has_statistics(layer)] if dtype else []
    groups = [[path] for path in units if path not in norms]
    if merges and not (frees or both or offload):
        groups = _merged([path for (path,) in groups], _LONE_GROUPS)
    for paths in (*([path] for path in norms), *groups):
        fully_shard(
            [model.get_submodule(path) for path in paths],
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy() if paths[0] in norms else policy,
            offload_policy=host,
            reshard_after_forward=frees,
        )
    # The root is needed again at once, in backward: its own weights stay gathered in between.
    return fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=host, reshard_after_forward=False)


def _merged(paths: list[str], num_groups: int) -> list[list[str]]:
    """Neighbours together, in so many groups at most."""
    size = -(-len(paths) // num_groups)
    return [paths[start : start + size] for start in range(0, len(paths), size)] if paths else []


def _has_statistics(layer: nn.Module) -> bool:
    """Whether it is a batch norm of any kind, also stormo's fused one, with weights and running statistics."""
    has_weights = any(parameter is not None for parameter in layer._parameters.values())
    return has_weights and layer._buffers.get("running_mean") is not None
