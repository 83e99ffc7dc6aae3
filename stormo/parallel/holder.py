"""The model of one worker and its optimizer: built, placed on its device, and what of it is stepped and saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from stormo.config import schema
from stormo.config.plan import Plan
from stormo.distributed.world import World
from stormo.layers.ghost_batch_norm import convert_ghost_batch_norm
from stormo.layers.sync_batch_norm import LocalNorm, SynchronisedNorm, convert_sync_batch_norm
from stormo.optim.own import check_rates, group_rates, left_out, notice, own_optimizer
from stormo.optim.table import make_optimizer
from stormo.parallel.parts import Part, whole_part
from stormo.tasks.returned import check_model, without_gradient
from stormo.tasks.task import Task


class ModelHolder:
    """The whole model on one device. Subclasses may hold less of it."""

    is_spread = False  # whether this worker may hold less than the whole model
    saves_apart = False  # whether every worker writes its own file of a checkpoint

    def __init__(self, world: World, plan: Plan, task: Task, settings: schema.TrainConfig) -> None:
        self.world = world
        self.task = task
        self._plan = plan
        self._settings = settings
        self.notices: list[str] = []  # what the user should know once the run has begun
        self.module = self._make_model()  # the user's model itself
        # Every group keeps its ratio to the first, whose rate is given to `step`.
        self.rates = group_rates(self.optimizer)  # of each group, as last set
        self._rate_ratios = [rate / self.rates[0] for rate in self.rates]
        self.rate_factor = self.rates[0] / settings.optimizer.base_lr  # of the first to the plan's
        self.scaler = self._make_scaler()

    def _make_model(self) -> nn.Module:
        """The task's model on this worker's device, and its optimizer."""
        model = self._place(check_model(self.task, self.task.model()))
        if self._settings.sharding.checkpoint_activations:
            from stormo.parallel.blocks import blocks_of
            from stormo.parallel.recompute import recompute

            recompute(model, blocks_of(model, self._settings.sharding.shard_modules) or [""])
        self._make_optimizer(model)
        return model

    def _make_optimizer(self, model: nn.Module) -> None:
        own = own_optimizer(self.task.optimizer, model)
        self.has_own_optimizer = own is not None  # the task's
        self.optimizer = make_optimizer(model, self._settings.optimizer) if own is None else own
        if own is not None:
            self.notices.append(notice(own, left_out(own, model), self._settings, self._plan.learning_rate))

    def _make_scaler(self) -> torch.amp.GradScaler:
        """Scales losses in fp16, and does nothing in other formats."""
        return torch.amp.GradScaler(self.world.device.type, enabled=self._plan.precision == "fp16")

    def _place(self, model: nn.Module) -> nn.Module:
        model = model.to(self.world.device)
        if self._plan.precision == "fp64":
            model = model.double()
        if self._plan.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return self._convert(model)

    def _convert(self, model: nn.Module) -> nn.Module:
        """Batch norm over the samples that the settings ask for."""
        if self._settings.speed.sync_batch_norm and self.world.data.size > 1:
            model = convert_sync_batch_norm(model, self.world.data.sum)
        if self._settings.batch.ghost_batch_size is not None:
            model = convert_ghost_batch_norm(model, self._settings.batch.ghost_batch_size)
        return model

    def devices(self) -> list[torch.device]:
        """The devices that this worker computes on."""
        count = self._plan.layout.devices_per_worker
        return [self.world.device] if count == 1 else [torch.device("cuda", index) for index in range(count)]

    def layers_it_has(self) -> dict[str, bool | None]:
        """Which kinds of layers the model has of those that the plan speaks of; None where another worker has them."""
        if self._plan.layout.mesh.pipeline > 1:
            return {"has_convolutions": None, "has_batch_norms": None}
        norms = (nn.modules.batchnorm._BatchNorm, SynchronisedNorm, LocalNorm)
        return {
            "has_convolutions": any(parameter.ndim == 4 for parameter in self.module.parameters()),
            "has_batch_norms": any(isinstance(layer, norms) for layer in self.module.modules()),
        }

    def stepped(self) -> list[nn.Parameter]:
        """The tensors that the optimizer steps on this worker, as far as it holds all."""
        return list(self.module.parameters())

    def weights(self) -> list[Tensor]:
        """What is trained, as far as this worker holds it."""
        return [parameter for parameter in self.stepped() if parameter.requires_grad]

    @property
    def validated(self) -> nn.Module:
        """The model as a validation calls it."""
        return self.module

    def parts(self) -> list[Part]:
        """What this worker holds of the model, in the order of its parameters."""
        return [
            whole_part(name, parameter, is_counted=True, is_saved=self.world.is_main)
            for name, parameter in self.module.named_parameters()
        ]

    def parts_changed(self) -> None:
        """The tensors of `parts` have been given other values."""

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that this worker holds, by the names that one process gives them."""
        return self.module.named_buffers()

    def average_buffers(self) -> None:
        """Make the buffers (running statistics) of all workers equal: the mean of theirs."""
        line = self.world.data
        if line.size == 1:
            return
        floats = [buffer for _, buffer in self.named_buffers() if buffer.is_floating_point()]
        if floats:
            flat = torch.cat([buffer.flatten().double() for buffer in floats])
            line.sum(flat).div_(line.size)
            for buffer, mean in zip(floats, flat.split([b.numel() for b in floats]), strict=True):
                buffer.copy_(mean.view_as(buffer))

    def scaler_state(self) -> Mapping[str, float]:
        """The loss scale, where one is used."""
        return dict(self.scaler.state_dict())

    def _set_rate(self, rate: float) -> None:
        """Have the optimizer step at this rate of the first parameter group."""
        check_rates(self.optimizer, self.rates)
        self.rates = [rate * ratio for ratio in self._rate_ratios]
        for group, group_rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = group_rate

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.stepped() if parameter.grad is not None]

    def without_gradient(self) -> list[str]:
        """The trained parameters that the pass just done has not reached, as far as it can be seen."""
        return without_gradient(self.module)
