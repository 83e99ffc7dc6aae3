"""Forward and backward of one pass, with its exact weight in the global batch, and the passes before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stormo.config import schema
from stormo.config.plan import Plan
from stormo.data.loaders import Batch, Loader
from stormo.data.order import part
from stormo.distributed.world import World
from stormo.errors import SettingError, counted
from stormo.layers.compile_ahead import compile_ahead
from stormo.layers.sync_batch_norm import set_absent
from stormo.optim.own import check_rates
from stormo.parallel.exposed import ExposedWait
from stormo.parallel.graph import CaptureRefusedError, PassGraph, capture
from stormo.parallel.halves import HALVES
from stormo.parallel.holder import ModelHolder
from stormo.parallel.noise import GradientNoise
from stormo.parallel.noise_scale import NoiseScaleMeter
from stormo.parallel.sparse import NOT_MEASURED, REASON, check_sparse, has_sparse
from stormo.parallel.weighing import NOT_MEASURED as NOT_MEASURED_OF_LOSS
from stormo.parallel.weighing import REASON as REASON_OF_LOSS
from stormo.parallel.weighing import Weighing
from stormo.tasks.returned import read_loss
from stormo.tasks.task import Task


class Clock(Protocol):
    """How far the run is: its randomness belongs to the epoch and the step, not to the worker."""

    epoch: int
    step: int
    position: int  # samples of the epoch that are done


class _Start:
    epoch, step, position = 1, 0, 0


class PassRunner(ModelHolder):
    """Runs batches through the model and leaves their gradients."""

    exposed_reason: str | None = None  # why it is not known how long a worker stands still for others

    def __init__(self, world: World, plan: Plan, task: Task, settings: schema.TrainConfig) -> None:
        # First, as a pipeline tries its stages while it makes them.
        self._autocast_dtype = HALVES.get(plan.precision)
        super().__init__(world, plan, task, settings)
        self.clock: Clock = _Start()  # the run's progress, once there is one
        self._noise = GradientNoise(settings, world.device)
        self.weighing = Weighing(task, world)
        self._has_looked_for_counts = False
        self._is_sparse = False  # whether any worker has sparse gradients, once a pass has shown it
        self.noise_scale = self._meter()
        self._exposed = ExposedWait(world.device)
        self._eager = self._wrap(self.module)
        self._model = self._compiled(self._eager) if plan.compile else self._eager
        self._graph: PassGraph | None = None

    def _wrap(self, model: nn.Module) -> nn.Module:
        """Spread the model over the workers."""
        return model

    def _compiled(self, model: nn.Module) -> nn.Module:
        """The model as full batches go through it, where torch.compile is on."""
        return torch.compile(model, dynamic=False)  # type: ignore[return-value]

    def _gradient_sync(self, is_last: bool) -> AbstractContextManager[Any]:
        """Hold back the exchange of gradients until the last pass of a step."""
        return nullcontext()

    def _alone(self) -> nn.Module:
        """The model as it computes without a word to other workers."""
        return self._eager

    def autocast(self) -> AbstractContextManager[Any]:
        """The number format of the heavy arithmetic."""
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, self._autocast_dtype)

    def forward_backward(self, batch: Batch) -> Tensor:
        """Add this pass's part of the step's gradient; return its part of the loss, detached.

        The parts of a mean over samples add up to the mean loss of the step; of others `weighing.of_step` makes it.
        """
        if batch.span.is_first:
            self.weighing.begin()
        is_full = self._is_full(batch)
        if is_full and self._graph is not None:
            loss = self._graph.replay(batch.data)
            if loss is not None:
                return loss
        model, span = self._model if is_full else self._eager, batch.span
        if self.noise_scale is not None and span.is_first:
            self.noise_scale.begin(span, self._noise.sigma(span.step_samples), self.clock.step)
        try:
            with self._gradient_sync(span.is_last), _absent(self.module, batch.is_ghost):
                with self._noise.on_samples(model, batch, self.clock.epoch):
                    loss = self._pass(model, batch.data, batch.weight)
                if self.noise_scale is not None:
                    self.noise_scale.see_pass(span, self.module.parameters())
                return loss
        except ValueError as error:
            may_be_one = self._plan.layout.devices_per_worker > 1 or batch.span.num_samples <= self._plan.micro_batches
            if may_be_one and "more than 1 value per channel" in str(error):
                raise self._too_few_values(batch.span.step_samples) from error
            raise

    def _too_few_values(self, step_samples: int) -> SettingError:
        """What to say of a batch of so many samples, of which batch norm sees a single value per channel."""
        workers = counted(self.world.data.size, self._plan.layout.sharer)
        instead = "set another --batch-size or --global-batch-size"
        # Statistics over all workers help where another one has samples too.
        if step_samples > 1 and self.world.data.size > 1 and not self._settings.speed.sync_batch_norm:
            instead += ", or --sync-batch-norm"
            instead += " instead of --ghost-batch-size" * (self._settings.batch.ghost_batch_size is not None)
        return SettingError(
            f"a global batch of {self._plan.global_batch_size} was set for {workers}",
            f"a batch of {step_samples} leaves one of them a single sample, of which batch norm can make no statistics"
            if step_samples > 1
            else "a batch of 1 is a single sample, of which batch norm can make no statistics",
            instead,
        )

    def _pass(self, model: nn.Module, data: Any, weight: float) -> Tensor:
        # Gradients are averaged over those who take parts of a batch, hence the factor of their number: together they
        # make the gradient of (sum of all samples' losses) / (number of all samples), however unequal the shares are.
        # With a count it is a sum over items, until the step divides it by the number of all of them.
        with self.autocast(), self.weighing.guarded(model) as guard:
            loss, count = read_loss(self.task, self.task.loss(model, data))
        loss, factor = self.weighing.weigh(loss, count, weight, guard)
        self._backward(self.scaler.scale(loss * (factor * self.world.data.size)))
        return loss.detach() * (factor * self._loss_share)

    @property
    def _loss_share(self) -> float:
        """This worker's part of the loss of its samples, which others may compute as well."""
        return self.world.data.size / self.world.size

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _is_full(self, batch: Batch) -> bool:
        # A model is compiled or captured for one shape; the short last batch is not worth a second time.
        plan = self._plan
        share = part(0, plan.global_batch_size, self.world.data.rank, self.world.data.size)
        start, stop = part(*share, 0, plan.accumulate)
        return batch.span.step_samples == plan.global_batch_size and batch.span.num_samples == stop - start

    @property
    def exposed_s(self) -> float | None:
        """Seconds that this worker has stood still for the gradients of others; on a GPU of the steps it has finished.

        That time is the exchange's own as well as that by which others come later to it. None where it is not measured,
        for the `exposed_reason`.
        """
        return None if self.exposed_reason else self._exposed.total_s

    def _meter(self) -> NoiseScaleMeter | None:
        is_measured = self._plan.noise_scale and not self._is_sparse and self.weighing.is_plain
        return NoiseScaleMeter(self.world) if is_measured else None

    @property
    def noise_scale_reason(self) -> str:
        """Why the noise scale is measured, or is not."""
        if self._plan.noise_scale and not self.weighing.is_plain:
            return REASON_OF_LOSS
        return REASON if self._is_sparse and self._plan.noise_scale else self._plan.noise_scale_reason

    def cut_as(self, plan: Plan) -> None:
        """Go on by a plan with the same model and another cut of the batch into passes."""
        self._plan = plan
        meter = self._meter()
        if self.world.size == 1 and (meter is None) != (self.noise_scale is None):  # it compares passes
            self.noise_scale = meter

    def pipeline_seen(self) -> dict[str, Any] | None:
        """What the workers of a pipeline did in one pass; None where there is none."""
        return None

    # Before the first step

    def warm_up(
        self, loader: Loader, batches: Iterable[Batch] | None = None, look: Callable[[Tensor], None] | None = None
    ) -> None:
        """Run one pass of each shape and throw its effect away: kernels, buffers and buckets are ready then.

        It also fixes the order in which gradients are exchanged, which DDP learns in its first pass: the first step
        after a resume must add up in the same order as every other.

        Args:
            loader: of the run.
            batches: the passes to run; the loader's first and last where none are given.
            look: called with the loss of each pass while its gradients are there.
        """
        self.make_kernels()
        self.module.train()  # as the loop will, and as the captured pass remains
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        meter, self.noise_scale = self.noise_scale, None  # no step comes of these passes
        if meter is not None:
            meter.forget()
        with torch.random.fork_rng(devices=[self.world.device] if self.world.device.type == "cuda" else []):
            for batch in loader.first_and_last() if batches is None else batches:
                loss = self.forward_backward(batch)
                if look is not None:
                    look(loss)
                self._look_for_sparse()
                self._look_for_counts()
                self.clear_gradients()
                check_rates(self.optimizer, self.rates)
                if self._plan.graph and self._graph is None and self._is_full(batch):
                    self._capture(batch)
        self.noise_scale = meter if self.weighing.is_plain and not self._is_sparse else None
        for name, buffer in self.module.named_buffers():
            if name in buffers:  # a module may make some in its first pass
                buffer.copy_(buffers[name])
        loader.wait_s = 0.0
        self._exposed.forget()

    def make_kernels(self) -> None:
        """Compile the fused kernels of the model's layers, all at once."""
        if self.world.device.type == "cuda" and not self._plan.compile:
            compile_ahead(self.module, self._autocast_dtype or torch.get_default_dtype(), self.world.device)

    def _look_for_sparse(self) -> None:
        """See what layout the gradients have; all workers call it, and go the same way."""
        if self._is_sparse:
            return
        seen = torch.tensor([float(has_sparse(self.module))])
        self._is_sparse = bool(self.world.max(seen).item())
        if self._is_sparse:
            check_sparse(self._settings, has_own_optimizer=self.has_own_optimizer)
            if self._plan.noise_scale:
                self.notices.append(NOT_MEASURED)

    def _look_for_counts(self) -> None:
        """See whether the losses have counts; all workers call it, and go the same way."""
        if self._has_looked_for_counts:
            return
        self._has_looked_for_counts = True
        self.weighing.agree(self._plan.accumulate)
        if self._plan.noise_scale and not self.weighing.is_plain:
            self.notices.append(NOT_MEASURED_OF_LOSS)

    def _capture(self, batch: Batch) -> None:
        """Replay such batches from now on, where the task allows it."""
        weight = batch.weight  # the same for every full batch
        try:
            self._graph = capture(
                lambda data: self._pass(self._eager, data, weight), batch.data, self.module, {"task": self.task}
            )
        except CaptureRefusedError as refusal:
            self.notices.append(f"Steps are run by Python, not replayed as a CUDA graph: {refusal}.")

    def check_first_pass(self) -> None:
        """Look at the gradients of a first pass for what would go wrong without a word. All workers call it."""


@contextmanager
def _absent(module: nn.Module, is_ghost: bool) -> Iterator[None]:
    """While a stand-in sample passes, keep it out of every statistic."""
    if not is_ghost:
        yield
        return
    set_absent(module, True)
    try:
        yield
    finally:
        set_absent(module, False)
