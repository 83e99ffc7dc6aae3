"""The contract of all strategies, and the strategy of one device.

A strategy builds the task's model and optimizer, runs micro-batches (`micro_step`), steps (`step`), and gives and
takes state. A strategy for several workers overrides how the model is made and wrapped and how gradients meet. What
others must know of it without torch is its row in `stormo.config.strategies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
from stormo.layers.ghost_batch_norm import convert_ghost_batch_norm
from stormo.layers.sync_batch_norm import (
    LocalNorm,
    SynchronisedNorm,
    convert_sync_batch_norm,
    local_statistics,
    set_absent,
)
from stormo.optim.own import check_rates, group_rates, left_out, notice, own_optimizer
from stormo.optim.table import make_optimizer, start_momentum
from stormo.parallel.compression import HALF_DTYPES, PowerSgd
from stormo.parallel.cuda_graph import CaptureRefusedError, MicroBatchGraph, capture
from stormo.parallel.gradient_noise import GradientNoise, NoiseScaleMeter, total_norm
from stormo.parallel.loss_weights import REASON as REASON_OF_LOSS
from stormo.parallel.loss_weights import LossWeights
from stormo.parallel.parameter_shards import ParameterShard, whole_shard
from stormo.tasks.returned import check_model, read_loss, without_gradient
from stormo.tasks.task import Task

_SPARSE = "the model has sparse gradients"
# What was set, and what it does with a gradient; whatever is left out of the settings is none.
_NEED_DENSE = (
    ("noise_scale", "which are compared by their norms"),
    ("gradient_noise", "and noise is added to every element"),
    ("clip_norm", "whose norm is taken with that of all others"),
)


class Clock(Protocol):
    """How far the run is: its randomness belongs to the epoch and the step, not to the worker."""

    epoch: int
    step: int
    position: int  # samples of the epoch that are done


class _Start:
    epoch, step, position = 1, 0, 0


class Strategy:
    """One device. Subclasses spread the same work over several."""

    exposed_reason: str | None = None  # why it is not known how long a worker waits for gradients of others
    replicas_differ = False  # whether steps were done since the weights of all workers were the same
    staleness = 0  # steps that a worker may be ahead of the slowest
    powersgd: PowerSgd | None = None  # the error feedback of PowerSGD
    _is_trying = False  # whether the step under way is one of `try_step`

    def __init__(self, world: World, plan: Plan, task: Task, settings: schema.TrainConfig) -> None:
        self.world = world
        self.task = task
        self._plan = plan
        self._settings = settings
        self._autocast_dtype = HALF_DTYPES.get(plan.precision)  # a pipeline tries its stages while it makes them
        spec = plan.layout.spec
        self.is_sharded = spec.is_sharded  # whether this worker may hold less than the whole model
        self.sharded_checkpoint = spec.sharded_checkpoint  # whether every worker writes its own file of a checkpoint
        self.local_updates = spec.local_updates  # whether every worker has weights of its own between two averagings
        self.notices: list[str] = []  # what the user should know once the run has begun
        self.module = self._make_model()  # the user's model itself
        # Every group keeps its ratio to the first, whose learning rate is given to `step`.
        self.rates = group_rates(self.optimizer)  # of each group, as last set
        self._rate_ratios = [rate / self.rates[0] for rate in self.rates]
        self.rate_factor = self.rates[0] / settings.optimizer.base_lr  # of the first to the plan's
        self.scaler = self._make_scaler()
        self.clock: Clock = _Start()  # the run's progress, once there is one
        self._noise = GradientNoise(settings, world.device)
        self.loss_weights = LossWeights(task, world)
        self._has_looked_for_counts = False
        self._is_sparse = False  # whether any worker has sparse gradients, once a micro-batch has shown it
        self.noise_scale = self._meter()
        self._eager = self._wrap(self.module)
        self._model = self._compiled(self._eager) if plan.compile else self._eager
        self._graph: MicroBatchGraph | None = None

    # Building

    def _make_model(self) -> nn.Module:
        """The task's model on this worker's device, and its optimizer."""
        model = self._place(check_model(self.task, self.task.model()))
        if self._settings.sharding.checkpoint_activations:
            from stormo.parallel.units import recompute, units_of  # loads the compiler, which takes seconds

            recompute(model, units_of(model, self._settings.sharding.shard_modules) or [""])
        self._make_optimizer(model)
        return model

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

    def _make_optimizer(self, model: nn.Module) -> None:
        own = own_optimizer(self.task.optimizer, model)
        self.has_own_optimizer = own is not None  # the task's
        self.optimizer = make_optimizer(model, self._settings.optimizer) if own is None else own
        if own is not None:
            self.notices.append(notice(own, left_out(own, model), self._settings, self._plan.learning_rate))

    def _make_scaler(self) -> torch.amp.GradScaler:
        """Scales losses in fp16, and does nothing in other formats."""
        return torch.amp.GradScaler(self.world.device.type, enabled=self._plan.precision == "fp16")

    def _meter(self) -> NoiseScaleMeter | None:
        is_measured = self._plan.noise_scale and not self._is_sparse and self.loss_weights.is_plain
        return NoiseScaleMeter(self.world) if is_measured else None

    def _wrap(self, model: nn.Module) -> nn.Module:
        """Spread the model over the workers."""
        return model

    def _compiled(self, model: nn.Module) -> nn.Module:
        """The model as full batches go through it, where torch.compile is on."""
        return torch.compile(model, dynamic=False)  # type: ignore[return-value]

    # What it holds

    def devices(self) -> list[torch.device]:
        """The devices that this worker computes on."""
        count = self._plan.layout.devices_per_worker
        return [self.world.device] if count == 1 else [torch.device("cuda", index) for index in range(count)]

    def layer_kinds(self) -> dict[str, bool | None]:
        """Which kinds of layers the model has of those that the plan speaks of; None where another worker has them."""
        if self._plan.layout.mesh.pipeline > 1:
            return {"has_convolutions": None, "has_batch_norms": None}
        norms = (nn.modules.batchnorm._BatchNorm, SynchronisedNorm, LocalNorm)
        return {
            "has_convolutions": any(parameter.ndim == 4 for parameter in self.module.parameters()),
            "has_batch_norms": any(isinstance(layer, norms) for layer in self.module.modules()),
        }

    def optimizer_params(self) -> list[nn.Parameter]:
        """The tensors that the optimizer steps on this worker, as far as it holds all."""
        return list(self.module.parameters())

    def weights(self) -> list[Tensor]:
        """What is trained, as far as this worker holds it."""
        return [parameter for parameter in self.optimizer_params() if parameter.requires_grad]

    @property
    def validated(self) -> nn.Module:
        """The model as a validation calls it."""
        return self.module

    def parts(self) -> list[ParameterShard]:
        """What this worker holds of the model, in the order of its parameters."""
        return [
            whole_shard(name, parameter, is_counted=True, is_saved=self.world.is_main)
            for name, parameter in self.module.named_parameters()
        ]

    def shards_changed(self) -> None:
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

    def state_dict(self) -> dict[str, Any]:
        """The plain values that a checkpoint keeps, the same on all workers. All workers call it."""
        return {
            "scaler": dict(self.scaler.state_dict()),
            "noise_scale": self.noise_scale.state() if self.noise_scale is not None else None,
            "stale_gradients": {str(age): number for age, number in (self.stale_gradients or {}).items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` gave, also that of another strategy."""
        if state["scaler"]:
            self.scaler.load_state_dict(dict(state["scaler"]))
        if self.noise_scale is not None and state.get("noise_scale"):
            self.noise_scale.take(state["noise_scale"])

    # A micro-batch

    def autocast(self) -> AbstractContextManager[Any]:
        """The number format of the heavy arithmetic."""
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, self._autocast_dtype)

    def micro_step(self, batch: Batch) -> Tensor:
        """Add this micro-batch's part of the step's gradient; return its part of the loss, detached.

        The parts of a mean over samples add up to the mean loss of the step; of others `weighing.of_step` makes it.
        """
        if batch.span.is_first:
            self.loss_weights.begin()
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

    def _gradient_sync(self, is_last: bool) -> AbstractContextManager[Any]:
        """Hold back the exchange of gradients until the last micro-batch of a step."""
        return nullcontext()

    def _alone(self) -> nn.Module:
        """The model as it computes without communication."""
        return self._eager

    def _pass(self, model: nn.Module, data: Any, weight: float) -> Tensor:
        # Gradients are averaged over those who take parts of a batch, hence the factor of their number: together they
        # make the gradient of (sum of all samples' losses) / (number of all samples), however unequal the shares are.
        # With a count it is a sum over items, until the step divides it by the number of all of them.
        with self.autocast(), self.loss_weights.guarded(model) as guard:
            loss, count = read_loss(self.task, self.task.loss(model, data))
        loss, factor = self.loss_weights.weigh(loss, count, weight, guard)
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
        """Seconds that this worker waited for the gradients of others; None where `exposed_reason` says why."""
        return None if self.exposed_reason else 0.0

    @property
    def noise_scale_reason(self) -> str:
        """Why the noise scale is measured, or is not."""
        if self._plan.noise_scale and not self.loss_weights.is_plain:
            return REASON_OF_LOSS
        return _SPARSE if self._is_sparse and self._plan.noise_scale else self._plan.noise_scale_reason

    def set_accumulation(self, plan: Plan) -> None:
        """Go by another plan with the same model and batches cut into another number of micro-batches."""
        self._plan = plan
        meter = self._meter()
        if self.world.size == 1 and (meter is None) != (self.noise_scale is None):  # it compares micro-batches
            self.noise_scale = meter

    def pipeline_trace(self) -> dict[str, Any] | None:
        """What the workers of a pipeline did in one pass; None where there is none."""
        return None

    # A step

    def step(self, learning_rate: float) -> None:
        """Clip and apply the gradients at this learning rate of the first parameter group, then clear them."""
        self._set_rate(learning_rate)
        self._collect_gradients()
        self._divide_by_items(self._gradients())
        self._finish_gradients()
        start_momentum(self.optimizer, may_skip=self.scaler.is_enabled())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._spread_weights()
        self.clear_gradients()

    def _set_rate(self, rate: float) -> None:
        check_rates(self.optimizer, self.rates)
        self.rates = [rate * ratio for ratio in self._rate_ratios]
        for group, group_rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = group_rate

    def _collect_gradients(self) -> None:
        """Hand the gradients of the micro-batches to what the optimizer steps."""

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.optimizer_params() if parameter.grad is not None]

    def _divide_by_items(self, gradients: Iterable[Tensor]) -> None:
        """Where losses have counts: make gradients of their mean."""
        if self.loss_weights.has_counts:
            self.loss_weights.divide(gradients, self._total_items())

    def _total_items(self) -> Tensor:
        """The items of all workers in this step."""
        own = self.loss_weights.own.clone()
        return own if self._is_trying else self.world.data.sum(own)

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
                nn.utils.clip_grads_with_norm_(self.optimizer_params(), clip_norm, norm, foreach=True)
            if meter is not None:
                meter.end(norm if is_unscaled or scale is None else norm / scale, scale)
        if adds_noise:
            self._add_noise()

    def _gradient_norm(self) -> Tensor:
        """The norm of the whole gradient."""
        return total_norm(self._gradients())

    def _add_noise(self) -> None:
        self._noise.add([parameter.grad for parameter in self.optimizer_params()], self.clock.step)

    def _spread_weights(self) -> None:
        """Send other workers what the optimizer has made of this one's weights."""

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def try_step(self, data: Any) -> None:
        """Take up the memory of a step and of two micro-batches that add up after it; no collective, not compiled.

        The caller undoes every trace of it, except of the loss scale.
        """
        scaler, self.scaler = self.scaler, torch.amp.GradScaler(self.world.device.type, enabled=False)
        self.module.train()
        self._is_trying = True
        try:
            with local_statistics(self.module):
                self._pass(self._alone(), data, 1.0)
                if _has_sparse(self.module):
                    self._check_sparse()
                self.step(0.0)  # the optimizer's state exists from here on
                for _ in range(2):
                    self._pass(self._alone(), data, 1.0)
        finally:
            self.scaler, self._is_trying = scaler, False

    # Workers whose weights may differ for some steps

    def exchange_weights(self) -> None:
        """After a step: average the weights of all workers, where they step by themselves and it is time."""

    def mean_weights(self) -> Iterator[Tensor]:
        """The mean of each of `weights` over all workers, in turn, which leaves theirs alone. All workers take all."""
        return iter(self.weights())

    def outer_state(self) -> dict[str, Tensor]:
        """What a step with the mean of all workers keeps, by name; the same on all of them."""
        return {}

    def swap_in_mean_weights(self) -> AbstractContextManager[Any]:
        """While it lasts, the weights are those of the run as a whole. All workers enter it."""
        return nullcontext()

    def running(self) -> AbstractContextManager[Any]:
        """While it lasts, steps are taken. All workers enter it, and leave it together unless something fails."""
        return nullcontext()

    def synchronize(self) -> None:
        """Come to the same weights on all workers, where they may be some steps apart. All workers call it."""

    @property
    def stale_gradients(self) -> dict[int, int] | None:
        """How many gradients were applied at which age, in updates; None where none can be old."""
        return None

    # Before the first step

    def warm_up(
        self, loader: Loader, batches: Iterable[Batch] | None = None, look: Callable[[Tensor], None] | None = None
    ) -> None:
        """Run one micro-batch of each shape and throw its effect away: kernels, buffers and buckets are ready then.

        It also fixes the order in which gradients are exchanged, which DDP learns in its first backward: the first step
        after a resume must add up in the same order as every other.

        Args:
            loader: of the run.
            batches: the micro-batches to run; the loader's first and last where none are given.
            look: called with the loss of each while its gradients are there.
        """
        self.make_kernels()
        self.module.train()  # as the loop will, and as the captured micro-batch remains
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        meter, self.noise_scale = self.noise_scale, None  # no step comes of these
        if meter is not None:
            meter.forget()
        with torch.random.fork_rng(devices=[self.world.device] if self.world.device.type == "cuda" else []):
            for batch in loader.first_and_last() if batches is None else batches:
                loss = self.micro_step(batch)
                if look is not None:
                    look(loss)
                self._look_for_sparse()
                self._look_for_counts()
                self.clear_gradients()
                check_rates(self.optimizer, self.rates)
                if self._plan.graph and self._graph is None and self._is_full(batch):
                    self._capture(batch)
        self.noise_scale = meter if self.loss_weights.is_plain and not self._is_sparse else None
        for name, buffer in self.module.named_buffers():
            if name in buffers:  # a module may make some in its first forward
                buffer.copy_(buffers[name])
        loader.wait_s = 0.0

    def make_kernels(self) -> None:
        """Compile the fused kernels of the model's layers, all at once."""
        if self.world.device.type == "cuda" and not self._plan.compile:
            compile_ahead(self.module, self._autocast_dtype or torch.get_default_dtype(), self.world.device)

    def _look_for_sparse(self) -> None:
        """See what layout the gradients have; all workers call it, and go the same way."""
        if self._is_sparse:
            return
        self._is_sparse = self._any_has_sparse()
        if self._is_sparse:
            self._check_sparse()
            if self._plan.noise_scale:
                self.notices.append(f"The gradient noise scale is not measured, as {_SPARSE}.")

    def _any_has_sparse(self) -> bool:
        """Whether the micro-batch that is done has given a parameter of any worker a sparse gradient."""
        return bool(self.world.max(torch.tensor([float(_has_sparse(self.module))])).item())

    def _check_sparse(self) -> None:
        """Refuse what was set and needs gradients that are dense."""
        settings, instead = self._settings, "make the embeddings with sparse=False, or"
        if not self.has_own_optimizer:
            raise SettingError(
                f"--optimizer {settings.optimizer.optimizer} is in force",
                f"{_SPARSE}, which it does not take",
                f"{instead} give the task an optimizer() that does (torch.optim.SparseAdam)",
            )
        if settings.workers.compress != "none":
            raise SettingError(
                f"--compress {settings.workers.compress} was set",
                f"{_SPARSE}, which travel as they are",
                f"{instead} leave out --compress",
            )
        for name, why in _NEED_DENSE:
            value, flag = getattr(settings.optimizer, name), f"--{name.replace('_', '-')}"
            if value:
                said = f"{flag}{'' if value is True else f' {value:g}'} was set"
                raise SettingError(said, f"{_SPARSE}, {why}", f"{instead} leave out {flag}")

    def _look_for_counts(self) -> None:
        """See whether the losses have counts; all workers call it, and go the same way."""
        if self._has_looked_for_counts:
            return
        self._has_looked_for_counts = True
        self.loss_weights.agree(self._plan.accumulate)
        if self._plan.noise_scale and not self.loss_weights.is_plain:
            self.notices.append(f"The gradient noise scale is not measured, as {REASON_OF_LOSS}.")

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
        """Look at the first gradients for what would go wrong without a word. All workers call it."""

    def without_gradient(self) -> list[str]:
        """The trained parameters that the micro-batch just done has not reached, as far as it can be seen."""
        return without_gradient(self.module)


@contextmanager
def _absent(module: nn.Module, is_ghost: bool) -> Iterator[None]:
    """While a stand-in sample is computed, keep it out of every statistic."""
    if not is_ghost:
        yield
        return
    set_absent(module, True)
    try:
        yield
    finally:
        set_absent(module, False)


def _has_sparse(module: nn.Module) -> bool:
    return any(p.grad is not None and p.grad.layout is not torch.strided for p in module.parameters())
