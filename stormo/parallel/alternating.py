"""Several optimizers, each with a loss and parameters of its own, in turn: a GAN's critic, then its generator.

In every step, each optimizer in the order of the task takes the gradient of its loss over the whole batch, and steps
before the next one begins. While it has its turn, the parameters of the others have no gradient. Replicas average the
gradients after backward: torch's DDP expects every parameter to be reached in every backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stormo.config import schema
from stormo.config.plan import Plan
from stormo.data.loaders import Batch
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.layers.sync_batch_norm import absent
from stormo.optim.task_optimizer import JoinedOptimizer, make_task_optimizers
from stormo.parallel.base import Strategy, no_cudnn_benchmark
from stormo.parallel.coalesced import copy, means
from stormo.tasks.returned import unused_parameters
from stormo.tasks.task import Task

STRATEGIES = ("single", "ddp")
REASON = "the task has several optimizers"


class Alternating(Strategy):
    """One device, or replicas of the model."""

    optimizer: JoinedOptimizer
    _turn: str  # the optimizer whose turn it is; between the turns the first

    def __init__(self, world: World, plan: Plan, task: Task, settings: schema.TrainConfig) -> None:
        check(settings)
        self._held: list[Batch] = []  # the micro-batches of the step, for the second optimizer and later ones
        super().__init__(world, plan, task, settings)

    def _task_optimizer(self, model: nn.Module) -> JoinedOptimizer:
        made = make_task_optimizers(self.task.optimizers, model)
        self._names = tuple(made.parts)
        self._turn = self._names[0]
        return made

    def _may_differ_in_norms(self, model: nn.Module, norms: Iterable[str]) -> bool:
        return True  # in the turn of one optimizer, those of the others need no gradient

    def _meter(self) -> None:
        return None

    @property
    def noise_scale_reason(self) -> str:
        """Why the noise scale is not measured."""
        return REASON

    def loss_of(self, model: nn.Module, data: Any) -> Any:
        """What the task returns for the optimizer whose turn it is."""
        found = self.task.loss(model, data, self._turn)  # type: ignore[call-arg]
        if isinstance(found, tuple):
            raise SettingError(
                f"{type(self.task).__name__}.loss() returned (loss, count)",
                f"{REASON}, whose losses are means over samples",
                "return the loss alone",
            )
        return found

    @contextmanager
    def _turn_of(self, name: str) -> Iterator[None]:
        """Inside it, only the parameters of this optimizer have gradients."""
        own = {id(parameter) for parameter in self._parameters(name)}
        others = [p for p in self.optimizer_params() if p.requires_grad and id(p) not in own]
        self._turn = name
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            self._turn = self._names[0]
            for parameter in others:
                parameter.requires_grad_(True)

    def _parameters(self, name: str) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.parts[name].param_groups for parameter in group["params"]]

    def micro_step(self, batch: Batch) -> Tensor:
        """Add this micro-batch's part of the gradient of the first optimizer; return its part of that loss."""
        if batch.span.is_first:
            self._held = []
        self._held.append(batch)
        with self._turn_of(self._names[0]):
            loss = super().micro_step(batch)
        for name in self._names[1:] if self._is_warming_up else ():
            with self._turn_of(name):
                self._run_again(batch)
        return loss

    def _run_again(self, batch: Batch) -> Tensor:
        with absent(self.module, batch.is_padding), no_cudnn_benchmark(self._is_short_step(batch)):
            loss = self._forward_backward(self._eager, batch.data, batch.weight)
        self._end_micro_batch()
        return loss

    def step(self, learning_rate: float) -> None:
        """Let every optimizer step in its turn."""
        self._set_learning_rate(learning_rate)
        self.later_losses = torch.zeros((), device=self.world.device)
        for name in self._names:
            with self._turn_of(name):
                for batch in self._held if name != self._names[0] else ():
                    self.later_losses += self._run_again(batch)
                self._apply_gradients(self.optimizer.parts[name])
            self.clear_gradients()
        self._held = []
        self.scaler.update()
        self.update_average()

    def _collect_gradients(self) -> None:
        own = [parameter for parameter in self._parameters(self._turn) if parameter.requires_grad]
        if missing := [parameter for parameter in own if parameter.grad is None]:
            if not self.task.find_unused and not self._is_trying:
                names = {id(parameter): name for name, parameter in self.module.named_parameters()}
                raise unused_parameters(self.task, [names[id(p)] for p in missing], f"in the turn of {self._turn}")
            for parameter in missing:
                parameter.grad = torch.zeros_like(parameter)
        if self.world.size > 1 and not self._is_trying:
            gradients = self._gradients()
            with self.exposed.waiting():
                copy(gradients, means(self.world, gradients))

    def _capture(self, batch: Batch) -> str | None:
        return REASON


def check(settings: schema.TrainConfig) -> None:
    """Refuse settings of a gradient that is one for the whole model."""
    optimizer, workers, batch = settings.optimizer, settings.workers, settings.batch
    if settings.speed.compile:
        why = f"{REASON}, whose losses call parts of the model"
        raise SettingError("--compile was set", why, "call compile() on these in model()")
    for is_set, said in (
        (workers.compress != "none", f"--compress {workers.compress}"),
        (batch.batch_size == "auto", "--batch-size auto"),
        (optimizer.gradient_noise is not None, f"--gradient-noise {optimizer.gradient_noise}"),
        (optimizer.gradient_noise_batch is not None, f"--gradient-noise-batch {optimizer.gradient_noise_batch}"),
        (optimizer.noise_scale, "--noise-scale"),
    ):
        if is_set:
            raise SettingError(f"{said} was set", f"{REASON}, and it is for one gradient", "leave it out")
