"""What every strategy does: forward and backward of one pass, the optimizer step, state given and taken.

The base class is the whole of it on one device; a strategy for several changes only how the model is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stormo import config
from stormo.data.loaders import Batch, Loader
from stormo.data.order import part
from stormo.errors import SettingError, counted
from stormo.layers.compile_ahead import compile_ahead
from stormo.layers.ghost_batch_norm import convert_ghost_batch_norm
from stormo.layers.sync_batch_norm import convert_sync_batch_norm, local_statistics, set_absent
from stormo.optim.own import group_rates, left_out, notice, own_optimizer
from stormo.optim.table import make_optimizer
from stormo.plan import Plan
from stormo.strategies.exposed import ExposedWait
from stormo.strategies.graph import CaptureRefusedError, PassGraph, capture
from stormo.strategies.noise import GradientNoise
from stormo.strategies.noise_scale import NoiseScaleMeter, total_norm
from stormo.strategies.parts import Part, whole_part
from stormo.strategies.sparse import NOT_MEASURED, REASON, check_sparse, has_sparse
from stormo.tasks.returned import check_loss, check_model, without_gradient
from stormo.tasks.task import Task
from stormo.world.world import World

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Clock(Protocol):
    """How far the run is: its randomness belongs to the epoch and the step, not to the worker."""

    epoch: int
    step: int
    position: int  # samples of the epoch that are done


class _Start:
    epoch, step, position = 1, 0, 0


class Strategy:
    """One device. Subclasses spread the same work over several."""

    name = "single"
    is_spread = False  # whether this worker may hold less than the whole model
    saves_apart = False  # whether every worker writes its own file of a checkpoint
    staleness = 0  # steps that a worker may be ahead of the slowest
    exposed_reason: str | None = None  # why it is not known how long a worker stands still for others

    def __init__(self, world: World, plan: Plan, task: Task, settings: config.TrainConfig) -> None:
        self.world = world
        self.task = task
        self._plan = plan
        self._settings = settings
        self._autocast_dtype = HALVES.get(plan.precision)
        self.notices: list[str] = []  # what the user should know once the run has begun
        self.module = self._make_model()  # the user's model itself
        # Every group keeps its ratio to the first, whose rate is given to `step`.
        self._rate_ratios = [rate / group_rates(self.optimizer)[0] for rate in group_rates(self.optimizer)]
        self.rate_factor = group_rates(self.optimizer)[0] / settings.optimizer.base_lr  # of the first to the plan's
        self.scaler = self._make_scaler()
        self.clock: Clock = _Start()  # the run's progress, once there is one
        self._noise = GradientNoise(settings, world.device)
        self._is_sparse = False  # whether any worker has sparse gradients, once a pass has shown it
        self.noise_scale = self._meter()
        self._exposed = ExposedWait(world.device)
        self._eager = self._wrap(self.module)
        self._model = self._compiled(self._eager) if plan.compile else self._eager
        self._graph: PassGraph | None = None

    def _make_model(self) -> nn.Module:
        """The task's model on this worker's device, and its optimizer."""
        model = self._place(check_model(self.task, self.task.model()))
        if self._settings.sharding.checkpoint_activations:
            from stormo.strategies.blocks import blocks_of
            from stormo.strategies.recompute import recompute

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

    def _compiled(self, model: nn.Module) -> nn.Module:
        """The model as full batches go through it, where torch.compile is on."""
        return torch.compile(model, dynamic=False)  # type: ignore[return-value]

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

    def _wrap(self, model: nn.Module) -> nn.Module:
        """Spread the model over the workers."""
        return model

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
        """Add this pass's part of the global batch's mean-loss gradient; return its part of that loss, detached."""
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
                workers = counted(self.world.data.size, self._plan.layout.sharer)
                raise SettingError(
                    f"a global batch of {self._plan.global_batch_size} was set for {workers}",
                    f"a batch of {batch.span.step_samples} leaves one of them a single sample, of which batch norm can "
                    "make no statistics",
                    "set another --batch-size or --global-batch-size, or --sync-batch-norm"
                    + " instead of --ghost-batch-size" * (self._settings.batch.ghost_batch_size is not None),
                ) from error
            raise

    def _pass(self, model: nn.Module, data: Any, weight: float) -> Tensor:
        # Gradients are averaged over those who take parts of a batch, hence the factor of their number: together they
        # make the gradient of (sum of all samples' losses) / (number of all samples), however unequal the shares are.
        with self.autocast():
            loss = check_loss(self.task, self.task.loss(model, data))
        self._backward(self.scaler.scale(loss * (weight * self.world.data.size)))
        return loss.detach() * (weight * self._loss_share)

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

    def step(self, learning_rate: float) -> None:
        """Clip and apply the gradients at this rate of the first parameter group, then clear them."""
        for group, ratio in zip(self.optimizer.param_groups, self._rate_ratios, strict=True):
            group["lr"] = learning_rate * ratio
        if self.scaler.is_enabled() and not self.optimizer.state:
            _start_momentum(self.optimizer)
        self._collect_gradients()
        self._finish_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._spread_weights()
        self.clear_gradients()

    def _collect_gradients(self) -> None:
        """Hand the gradients of the passes to what the optimizer steps."""

    def _spread_weights(self) -> None:
        """Tell other workers what the optimizer has made of this one's weights."""

    def exchange_weights(self) -> None:
        """After a step: bring the weights of all workers together, where they step by themselves and it is time."""

    def averaged(self) -> AbstractContextManager[Any]:
        """While it lasts, the weights are those of the run as a whole. All workers enter it."""
        return nullcontext()

    def running(self) -> AbstractContextManager[Any]:
        """While it lasts, steps are taken. All workers enter it, and leave it together unless something fails."""
        return nullcontext()

    def settle(self) -> None:
        """Come to the same weights on all workers, where they may be some steps apart. All workers call it."""

    @property
    def stale_gradients(self) -> dict[int, int] | None:
        """How many gradients were applied at which age, in updates; None where none can be old."""
        return None

    def take_stale_gradients(self, seen: Mapping[Any, int]) -> None:
        """Go on counting from what was seen before."""

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def _finish_gradients(self) -> None:
        """Measure and clip the gradient of the whole batch, then add noise to it."""
        # Not noise before clipping: over d elements it is as long as its spread times the root of d, so that clipping
        # both would leave next to nothing of the gradient. Clipped first, each keeps the size that was asked for.
        clip_norm, adds_noise = self._settings.optimizer.clip_norm, self._settings.optimizer.gradient_noise is not None
        meter = self.noise_scale if self.noise_scale is not None and self.noise_scale.is_due else None
        is_unscaled, scale = clip_norm is not None or adds_noise, None
        if meter is not None and self.scaler.is_enabled():
            scale = self.scaler.scale(torch.ones((), device=self.world.device))  # without waiting for the device
        if is_unscaled:
            self.scaler.unscale_(self.optimizer)
        if meter is not None or clip_norm is not None:
            norm = self._gradient_norm()
            if clip_norm is not None:
                nn.utils.clip_grads_with_norm_(self.stepped(), clip_norm, norm, foreach=True)
            if meter is not None:
                meter.end(norm if is_unscaled or scale is None else norm / scale, scale)
        if adds_noise:
            self._add_noise()

    def stepped(self) -> list[nn.Parameter]:
        """The tensors that the optimizer steps on this worker, as far as it holds all."""
        return list(self.module.parameters())

    def weights(self) -> list[Tensor]:
        """What is trained, as far as this worker holds it."""
        return [parameter for parameter in self.stepped() if parameter.requires_grad]

    def _gradient_norm(self) -> Tensor:
        """The norm of the whole gradient."""
        return total_norm(self._gradients())

    def _add_noise(self) -> None:
        self._noise.add([parameter.grad for parameter in self.stepped()], self.clock.step)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.stepped() if parameter.grad is not None]

    def without_gradient(self) -> list[str]:
        """The trained parameters that the pass just done has not reached, as far as it can be seen."""
        return without_gradient(self.module)

    def check_first_pass(self) -> None:
        """Look at the gradients of a first pass for what would go wrong without a word. All workers call it."""

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
                self.clear_gradients()
                if self._plan.graph and self._graph is None and self._is_full(batch):
                    self._capture(batch)
        self.noise_scale = None if self._is_sparse else meter
        for name, buffer in self.module.named_buffers():
            if name in buffers:  # a module may make some in its first pass
                buffer.copy_(buffers[name])
        loader.wait_s = 0.0
        self._exposed.forget()

    @property
    def exposed_s(self) -> float | None:
        """Seconds that this worker has stood still for the gradients of others; on a GPU of the steps it has finished.

        That time is the exchange's own as well as that by which others come later to it. None where it is not measured,
        for the `exposed_reason`.
        """
        return None if self.exposed_reason else self._exposed.total_s

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

    @property
    def noise_scale_reason(self) -> str:
        """Why the noise scale is measured, or is not."""
        return REASON if self._is_sparse and self._plan.noise_scale else self._plan.noise_scale_reason

    def pipeline_seen(self) -> dict[str, Any] | None:
        """What the workers of a pipeline did in one pass; None where there is none."""
        return None

    def make_kernels(self) -> None:
        """Compile the fused kernels of the model's layers, all at once."""
        if self.world.device.type == "cuda" and not self._plan.compile:
            compile_ahead(self.module, self._autocast_dtype or torch.get_default_dtype(), self.world.device)

    def devices(self) -> list[torch.device]:
        """The devices that this worker computes on."""
        count = self._plan.layout.devices_per_worker
        return [self.world.device] if count == 1 else [torch.device("cuda", index) for index in range(count)]

    def try_step(self, data: Any) -> None:
        """Take up the memory of a step and of two passes that add up after it; no collective, not compiled.

        Every trace of it is the caller's to undo, except of the loss scale.
        """
        scaler, self.scaler = self.scaler, torch.amp.GradScaler(self.world.device.type, enabled=False)
        self.module.train()
        try:
            with local_statistics(self.module):
                self._pass(self._alone(), data, 1.0)
                if has_sparse(self.module):
                    check_sparse(self._settings, has_own_optimizer=self.has_own_optimizer)
                self.step(0.0)  # the optimizer's state exists from here on
                for _ in range(2):
                    self._pass(self._alone(), data, 1.0)
        finally:
            self.scaler = scaler

    def cut_as(self, plan: Plan) -> None:
        """Go on by a plan with the same model and another cut of the batch into passes."""
        self._plan = plan
        meter = self._meter()
        if self.world.size == 1 and (meter is None) != (self.noise_scale is None):  # it compares passes
            self.noise_scale = meter

    def _meter(self) -> NoiseScaleMeter | None:
        return NoiseScaleMeter(self.world) if self._plan.noise_scale and not self._is_sparse else None

    def _capture(self, batch: Batch) -> None:
        """Replay such batches from now on, where the task allows it."""
        weight = batch.weight  # the same for every full batch
        try:
            self._graph = capture(
                lambda data: self._pass(self._eager, data, weight), batch.data, self.module, {"task": self.task}
            )
        except CaptureRefusedError as refusal:
            self.notices.append(f"Steps are run by Python, not replayed as a CUDA graph: {refusal}.")

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


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Zeros, which change no step: torch's fused sgd leaves it unset if the first step overflows and is left out."""
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


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
