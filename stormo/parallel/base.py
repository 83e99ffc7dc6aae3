"""The contract of all strategies, and the strategy of one device.

A strategy builds the task's model and optimizer, runs micro-batches (`micro_step`), steps (`step`), and saves and
restores state. A strategy for several workers overrides how the model is built and wrapped and how gradients are
reduced. What can be known of it without torch is its row in `stormo.config.strategies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stormo.config import schema
from stormo.config.plan import Plan
from stormo.config.plan.checks import check_schedule_free
from stormo.data.loaders import Batch, Loader
from stormo.data.order import part
from stormo.distributed.world import World
from stormo.errors import SettingError, pluralize
from stormo.launch.torch_errors import is_single_value_per_channel
from stormo.layers.compile_ahead import compile_ahead
from stormo.layers.ghost_batch_norm import convert_ghost_batch_norm
from stormo.layers.sync_batch_norm import (
    BatchNormBase,
    LocalNorm,
    Reduce,
    SynchronisedNorm,
    absent,
    convert_sync_batch_norm,
    local_statistics,
    synchronised_norms,
)
from stormo.optim import schedule_free
from stormo.optim.muon import Muon
from stormo.optim.schedule_free import is_schedule_free
from stormo.optim.table import freeze, make_optimizer, muon_notice, start_momentum
from stormo.optim.task_optimizer import (
    IGNORED,
    check_learning_rates,
    group_learning_rates,
    make_task_optimizer,
    optimizer_notice,
    parameters_not_in,
)
from stormo.optim.task_scheduler import TaskScheduler
from stormo.parallel.coalesced import broadcast, copy, split_like
from stormo.parallel.compression import HALF_DTYPES, PowerSgd
from stormo.parallel.cuda_graph import CaptureRefusedError, MicroBatchGraph, batch_obstacle, capture
from stormo.parallel.exposed import ExposedWait
from stormo.parallel.gradient_noise import GradientNoise, NoiseScaleMeter, total_norm
from stormo.parallel.host_sum import open_host_sum
from stormo.parallel.loss_weights import REASON as REASON_OF_LOSS
from stormo.parallel.loss_weights import LossWeights
from stormo.parallel.norm_order import NormOrder
from stormo.parallel.parameter_shards import ParameterShard, whole_shard
from stormo.parallel.weight_average import WeightAverage
from stormo.tasks.returned import make_model, read_loss, without_gradient
from stormo.tasks.task import Task

_SPARSE = "the model has sparse gradients"
_NO_HOST_SUM = (
    "Statistics of batch norm are summed by NCCL: the workers' slices could not share host memory, which is faster."
)
_OTHER_STATISTICS = (
    "The statistics of batch norm are those of the weights that are trained, and validation uses the average of these "
    "weights: its accuracy may be too low. Layer norm and group norm have no statistics."
)
_BATCH_NORMS = (BatchNormBase, SynchronisedNorm, LocalNorm)
# Settings of the optimizer that need dense gradients, and why.
_NEED_DENSE = (
    ("noise_scale", "which are compared by their norms"),
    ("gradient_noise", "and noise is added to every element"),
    ("clip_norm", "whose norm is taken with that of all others"),
)


class Clock(Protocol):
    """The progress of the run, from which random numbers are derived."""

    epoch: int
    step: int
    position: int  # samples of the epoch that are done


class _Start:
    epoch, step, position = 1, 0, 0


class Strategy:
    """One device. Subclasses do the same work on several."""

    measures_exposed_wait = True  # whether `exposed_s` is known
    replicas_differ = False  # whether workers have stepped since their weights were equal
    staleness = 0  # steps that a worker may be ahead of the slowest
    powersgd: PowerSgd | None = None
    later_losses: Tensor | None = None  # of a step, after that of the first optimizer of several
    _is_trying = False  # whether this step is one of `try_step`
    _is_warming_up = False  # whether micro-batches belong to no step
    _norm_order: NormOrder | None = None

    def __init__(self, world: World, plan: Plan, task: Task, settings: schema.TrainConfig) -> None:
        self.world = world
        self.task = task
        self._plan = plan
        self._settings = settings
        self._autocast_dtype = HALF_DTYPES.get(plan.precision)  # before the model: a pipeline runs stages to build it
        spec = plan.layout.spec
        self.is_sharded = spec.is_sharded  # whether this worker may hold less than the whole model
        self.sharded_checkpoint = spec.sharded_checkpoint  # whether every worker writes its own file of a checkpoint
        self.local_updates = spec.local_updates  # whether weights differ between workers until they are averaged
        self.notices: list[str] = []  # what was chosen, for the start of the run
        self.warnings: list[str] = []  # what the user should change
        self.module = self._make_model()  # the user's model itself
        # Every parameter group keeps its ratio to --base-lr or, of a task's optimizer, to the first.
        self.learning_rates = group_learning_rates(self.optimizer)  # of each group, as last set
        reported = self.learning_rates[0] if self.has_own_optimizer else settings.optimizer.base_lr
        self._lr_ratios = [rate / reported for rate in self.learning_rates]
        self._own_rates = self.learning_rates  # of the optimizer, as made
        self.scheduler = self._make_scheduler()
        self.lr_factor = reported / settings.optimizer.base_lr  # of what is given to `step` to the plan's
        self.scaler = self._make_scaler()
        self.clock: Clock = _Start()  # the trainer replaces it
        self._noise = GradientNoise(settings, world.device)
        self.loss_weights = LossWeights(task, world)
        self._knows_counts = False
        self._is_sparse = False  # whether any worker has sparse gradients; known after a first micro-batch
        self.noise_scale = self._meter()
        self.exposed = ExposedWait(world.device)
        self._eager = self._wrap(self.module)
        self._model = self._compiled(self._eager) if plan.compile else self._eager
        self._graph: MicroBatchGraph | None = None

    # Building

    def _make_model(self) -> nn.Module:
        """The task's model on this worker's device, and its optimizer."""
        model = make_model(self.task).to(self.world.device)
        if self._plan.precision == "fp64":
            model = model.double()
        if self._plan.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model = self._convert_batch_norms(model)
        if self._settings.sharding.checkpoint_activations:
            from stormo.parallel.units import recompute, units_of  # loads the compiler, which takes seconds

            recompute(model, units_of(model, self._settings.sharding.shard_modules) or [""])
        self._make_optimizer(model)
        return model

    def _convert_batch_norms(self, model: nn.Module) -> nn.Module:
        if self._settings.speed.sync_batch_norm and self.world.data.size > 1:
            model = convert_sync_batch_norm(model, self._statistics_sum())
            norms = [name for name, _ in synchronised_norms(model)]
            if norms and self.world.data.size == self.world.size and self._may_differ_in_norms(model, norms):
                self._norm_order = NormOrder(self.world, model)
        if self._settings.batch.ghost_batch_size is not None:
            model = convert_ghost_batch_norm(model, self._settings.batch.ghost_batch_size)
        return model

    def _may_differ_in_norms(self, model: nn.Module, norms: Iterable[str]) -> bool:
        """Whether workers may be at different batch norms: DDP notices only those whose parameters it trains."""
        trained = {name.rpartition(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
        return self.task.find_unused or not trained.issuperset(norms)

    def _statistics_sum(self) -> Reduce:
        """How the statistics of batch norm are summed: their messages are small, and the computation waits for them."""
        layout = self._plan.layout
        if layout.backend == "nccl" and layout.num_nodes == 1 and layout.shares_a_gpu:
            through_host = open_host_sum(self.world, self.world.data.ranks)
            if through_host is not None:
                return through_host
            self.notices.append(_NO_HOST_SUM)
        return self.world.small_messages().sum

    def _make_optimizer(self, model: nn.Module) -> None:
        # Of all parameters, before any is moved to another worker.
        self._parameter_numbers = {name: number for number, (name, _) in enumerate(model.named_parameters())}
        if self._settings.optimizer.freeze is not None:
            self.notices.append(freeze(model, self._settings.optimizer.freeze))
        own = self._task_optimizer(model)
        self.has_own_optimizer = own is not None  # the task's
        factors = self.task.lr_factors
        if own is not None and factors:
            said = f"{type(self.task).__name__} has lr_factors and an optimizer of its own"
            raise SettingError(said, "they are for the optimizers of --optimizer", "leave out one of them")
        self.optimizer = make_optimizer(model, self._settings.optimizer, factors) if own is None else own
        if own is None and isinstance(self.optimizer, Muon):
            self.notices.append(muon_notice(model, self.optimizer))
        if is_schedule_free(self.optimizer):
            check_schedule_free(type(self.optimizer).__name__, self._plan.layout.strategy)
            if has_batch_norms(model):
                self.warnings.append(_OTHER_STATISTICS)
        if own is not None:
            text = optimizer_notice(own, parameters_not_in(own, model), self._settings, self._plan.learning_rate)
            (self.notices if self._settings.given.isdisjoint(IGNORED) else self.warnings).append(text)

    def _task_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        return make_task_optimizer(self.task.optimizer, model)

    def _make_scheduler(self) -> TaskScheduler | None:
        """The task's scheduler, if it makes one."""
        if type(self.task).scheduler is Task.scheduler:
            return None
        made = TaskScheduler(self.task.scheduler, self.optimizer, self.task.scheduler_interval)
        text = f"The task's {made.name} sets the learning rates, once {'a' if made.interval == 'step' else 'an'} "
        text += f"{made.interval}; warm-up and decay of the settings have no effect."
        is_ignored = any(name.startswith(("decay", "warmup")) for name in self._settings.given)
        (self.warnings if is_ignored else self.notices).append(text)
        return made

    def step_scheduler(self, interval: str, metrics: Mapping[str, float] | None = None) -> None:
        """After a step or an epoch: let the task's scheduler set the next learning rates, if that is its interval."""
        if self.scheduler is not None and self.scheduler.interval == interval:
            self.scheduler.step(metrics)

    @property
    def scheduler_factor(self) -> float:
        """The factor of the learning rate that the task's scheduler has set."""
        return 1.0 if self.scheduler is None else self.scheduler.rates[0] / self._own_rates[0]

    def _make_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.world.device.type, enabled=self._plan.precision == "fp16")

    def _meter(self) -> NoiseScaleMeter | None:
        is_measured = self._plan.noise_scale and not self._is_sparse and self.loss_weights.is_plain
        return NoiseScaleMeter(self.world) if is_measured else None

    def _wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model, which distributes it over the workers; here all get rank 0's values."""
        broadcast(self.world, [*model.parameters(), *model.buffers()])
        return model

    def _compiled(self, model: nn.Module) -> nn.Module:
        """The model for full batches, if torch.compile is on."""
        return torch.compile(model, dynamic=False)  # type: ignore[return-value]

    # What it holds

    def devices(self) -> list[torch.device]:
        """The devices that this worker computes on."""
        count = self._plan.layout.devices_per_worker
        return [self.world.device] if count == 1 else [torch.device("cuda", index) for index in range(count)]

    def layer_kinds(self) -> dict[str, bool | None]:
        """Which layers the model has, of those that the plan depends on; None if other workers have them."""
        if self._plan.layout.mesh.pipeline > 1:
            return {"has_convolutions": None, "has_batch_norms": None}
        return {
            "has_convolutions": any(parameter.ndim == 4 for parameter in self.module.parameters()),
            "has_batch_norms": has_batch_norms(self.module),
        }

    def optimizer_params(self) -> list[nn.Parameter]:
        """The tensors that the optimizer steps on this worker."""
        return list(self.module.parameters())

    def weights(self) -> list[Tensor]:
        """The trained tensors on this worker."""
        return [parameter for parameter in self.optimizer_params() if parameter.requires_grad]

    @property
    def validated(self) -> nn.Module:
        """The model as a validation calls it."""
        return self.module

    def shards(self) -> list[ParameterShard]:
        """This worker's part of the model, in the order of its parameters."""
        return [
            whole_shard(name, parameter, is_counted=True, is_saved=self.world.is_main)
            for name, parameter in self.module.named_parameters()
        ]

    def shards_changed(self) -> None:
        """Called after the tensors of `shards` were given other values."""

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This worker's buffers by their names in the whole model."""
        return self.module.named_buffers()

    def persistent_buffers(self) -> dict[str, Tensor]:
        """The buffers of this worker that are in the model's `state_dict`."""
        persistent = {id(tensor) for tensor in self.module.state_dict(keep_vars=True).values()}
        return {name: buffer for name, buffer in self.named_buffers() if id(buffer) in persistent}

    @cached_property
    def average(self) -> WeightAverage | None:
        """The moving average of the weights, if that is set; made when it is first needed."""
        decay = self._settings.optimizer.ema
        if decay is None:
            return None
        return WeightAverage(decay, self.shards(), self.persistent_buffers(), self.shards_changed)

    def update_average(self) -> None:
        """After a step: update the moving average of the weights, if that is set."""
        if self.average is not None:
            self.average.update()

    def average_buffers(self) -> None:
        """Set the buffers (running statistics) of all workers to their mean."""
        group = self.world.data
        if group.size == 1:
            return
        floats = [buffer for _, buffer in self.named_buffers() if buffer.is_floating_point()]
        if floats:
            flat = torch.cat([buffer.flatten().double() for buffer in floats])
            copy(floats, split_like(group.sum(flat).div_(group.size), floats))

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint, the same on all workers. All workers call it."""
        return {
            "scaler": dict(self.scaler.state_dict()),
            "noise_scale": self.noise_scale.collect_moments() if self.noise_scale is not None else None,
            "schedule_free": schedule_free.counters(self.optimizer) if is_schedule_free(self.optimizer) else None,
            "stale_gradients": {str(age): number for age, number in (self.stale_gradients or {}).items()},
            **({} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`, also of another strategy."""
        if state["scaler"]:
            self.scaler.load_state_dict(dict(state["scaler"]))
        if self.noise_scale is not None and state.get("noise_scale"):
            self.noise_scale.load_moments(state["noise_scale"])
        if self.scheduler is not None and "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])
        if is_schedule_free(self.optimizer) and state.get("schedule_free"):
            schedule_free.resume(self.optimizer, state["schedule_free"])
            self.shards_changed()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside it, the weights are those that are validated and saved: of a schedule-free optimizer, its averages."""
        if not is_schedule_free(self.optimizer):
            yield
            return
        with schedule_free.averaged(self.optimizer):
            self.shards_changed()
            yield
        self.shards_changed()

    # A micro-batch

    def autocast(self) -> AbstractContextManager[Any]:
        """The autocast context of the plan's precision."""
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, self._autocast_dtype)

    def micro_step(self, batch: Batch) -> Tensor:
        """Add this micro-batch's part of the step's gradient; return its part of the loss, detached.

        These parts sum to the mean loss of the step, if the loss is a mean over samples. `LossWeights.of_step` has
        other losses.
        """
        span, is_full = batch.span, self._is_full(batch)
        if span.is_first:
            self.loss_weights.begin()
            if self.noise_scale is not None:
                sigma = self._noise.sigma(span.step_samples)
                self.noise_scale.begin(span, self._plan.accumulate, sigma, self.clock.step)
        if is_full and self._graph is not None:
            loss = self._graph.replay(batch.data)
            if loss is not None:
                return loss
            if self.world.size > 1:  # the others may have started to replay
                raise SettingError(
                    "--graph is in force on several workers",
                    f"the batch of rank {self.world.rank} has another shape than the captured one, and gradients are "
                    "exchanged inside a replay: all replay a step or none",
                    "set --no-graph, or let the task make all batches of one shape",
                )
        model = self._model if is_full else self._eager
        try:
            sync, timing = self._gradient_sync(span.is_last), no_cudnn_benchmark(self._is_short_step(batch))
            with sync, absent(self.module, batch.is_padding), timing:
                with self._noise.on_samples(model, batch, self.clock.epoch):
                    loss = self._forward_backward(model, batch.data, batch.weight)
                self._end_micro_batch()
                if self.noise_scale is not None:
                    self.noise_scale.update_micro_batch(span, self.module.parameters())
                return loss
        except ValueError as error:
            may_be_one = self._plan.layout.devices_per_worker > 1 or batch.span.num_samples <= self._plan.micro_batches
            if may_be_one and is_single_value_per_channel(error):
                raise self._too_few_values(batch.span.step_samples) from error
            raise

    def _too_few_values(self, step_samples: int) -> SettingError:
        """The error for a batch of which batch norm sees a single value per channel."""
        workers = pluralize(self.world.data.size, self._plan.layout.sharer)
        instead = "set another --batch-size or --global-batch-size"
        if step_samples > 1 and self.world.data.size > 1 and not self._settings.speed.sync_batch_norm:
            instead += ", or --sync-batch-norm"
            instead += " instead of --ghost-batch-size" * (self._settings.batch.ghost_batch_size is not None)
        why = f"a batch of {step_samples} leaves one of them a single sample"
        if 1 < self._plan.micro_batches == self._plan.micro_batch_size:
            count = self._plan.micro_batches
            why = f"the pipeline cuts the {count} samples of each into {count} micro-batches of a single sample"
            instead = f"set fewer --micro-batches than {count}, or a larger --global-batch-size"
        elif step_samples == 1:
            which = "a batch of 1" if self._plan.global_batch_size == 1 else "the last step of an epoch"
            why = f"{which} is a single sample"
        return SettingError(
            f"a global batch of {self._plan.global_batch_size} was set for {workers}",
            f"{why}, and batch norm needs two",
            instead,
        )

    def _gradient_sync(self, is_last: bool) -> AbstractContextManager[Any]:
        """Delay the gradient exchange until the last micro-batch of a step."""
        return nullcontext()

    def _local_model(self) -> nn.Module:
        """The model without communication."""
        return self._eager

    def loss_of(self, model: nn.Module, data: Any) -> Any:
        """What the task's loss returns."""
        return self.task.loss(model, data)

    def _forward_backward(self, model: nn.Module, data: Any, weight: float) -> Tensor:
        # Gradients are averaged over data-parallel workers, hence the factor of their number. The result is the
        # gradient of (sum of all samples' losses) / (number of all samples), however unequal the shares are. With a
        # count it is a sum over items, which the step divides by the number of all items.
        with self.autocast(), self.loss_weights.guarded(model) as guard:
            loss, count = read_loss(self.task, self.loss_of(model, data))
        loss, factor = self.loss_weights.weigh(loss, count, weight, guard)
        self._backward(self.scaler.scale(loss * (factor * self.world.data.size)))
        return loss.detach() * (factor * self._loss_share)

    def _end_micro_batch(self) -> None:
        if self._norm_order is not None:
            self._norm_order.end_micro_batch()

    @property
    def _loss_share(self) -> float:
        """This worker's share of the loss of its samples, which model-parallel peers compute as well."""
        return self.world.data.size / self.world.size

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _is_full(self, batch: Batch) -> bool:
        # A model is compiled or captured for one shape; the short last batch runs eagerly.
        size, data = self._plan.global_batch_size, self.world.data
        start, stop = part(*part(0, size, 0, self._plan.accumulate), data.rank, data.size)  # of its first micro-batch
        return batch.span.step_samples == size and batch.span.num_samples == stop - start

    def _is_short_step(self, batch: Batch) -> bool:
        # The short last step comes once an epoch, unless there is no other.
        return batch.span.step_samples < min(self._plan.global_batch_size, self._plan.facts.num_train)

    @property
    def exposed_s(self) -> float | None:
        """Seconds that this worker waited for others while it had nothing to compute; None if that is not measured."""
        return self.exposed.total_s if self.measures_exposed_wait else None

    @property
    def noise_scale_reason(self) -> str:
        """Why the noise scale is measured or not."""
        if self._plan.noise_scale and not self.loss_weights.is_plain:
            return REASON_OF_LOSS
        return _SPARSE if self._is_sparse and self._plan.noise_scale else self._plan.noise_scale_reason

    def set_accumulation(self, plan: Plan) -> None:
        """Use a plan with another number of micro-batches in a step."""
        self._plan = plan
        meter = self._meter()
        if self.world.size == 1 and (meter is None) != (self.noise_scale is None):  # it compares micro-batches
            self.noise_scale = meter

    def pipeline_trace(self) -> dict[str, Any] | None:
        """What the workers of a pipeline did in one micro-step; None without a pipeline."""
        return None

    # A step

    def step(self, learning_rate: float) -> None:
        """Clip and apply the gradients at this learning rate, of which groups may have multiples, then clear them."""
        self._set_learning_rate(learning_rate)
        self._apply_gradients(self.optimizer)
        self.scaler.update()
        self.clear_gradients()
        self.update_average()

    def _apply_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Step an optimizer with the gradients of all workers."""
        self._collect_gradients()
        if self.loss_weights.has_counts:
            self.loss_weights.divide(self._gradients(), self._total_items())
        self._finish_gradients(optimizer)
        start_momentum(optimizer, may_skip=self.scaler.is_enabled())
        if self._graph is not None and self.scaler.is_enabled() and not optimizer.defaults.get("fused"):
            self.world.wait_for_device()  # the scaler would, without a time limit
        self.scaler.step(optimizer)

    def _set_learning_rate(self, rate: float) -> None:
        check_learning_rates(self.optimizer, self.learning_rates)
        self.learning_rates = [rate * ratio for ratio in self._lr_ratios]
        if self.scheduler is not None:
            pairs = zip(self.scheduler.rates, self._own_rates, self.learning_rates, strict=True)
            self.learning_rates = [new / own * base for new, own, base in pairs]
        for group, group_rate in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = group_rate

    def _collect_gradients(self) -> None:
        """Give the optimizer's tensors their gradients."""

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.optimizer_params() if parameter.grad is not None]

    def _total_items(self) -> Tensor:
        """The items of all workers in this step."""
        own = self.loss_weights.own.clone()
        return own if self._is_trying else self.world.data.sum(own)

    def _finish_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure and clip the gradient of the whole batch, then add noise to it."""
        # Clipping comes first. The norm of noise over d elements is sigma * sqrt(d): clipping both would leave next to
        # nothing of the gradient.
        clip_norm, adds_noise = self._settings.optimizer.clip_norm, self._settings.optimizer.gradient_noise is not None
        meter = self.noise_scale if self.noise_scale is not None and self.noise_scale.is_due else None
        is_unscaled, scale = clip_norm is not None or adds_noise, None
        if meter is not None and self.scaler.is_enabled():
            scale = self.scaler.scale(torch.ones((), device=self.world.device))  # without waiting for the device
        if is_unscaled:
            self.scaler.unscale_(optimizer)
        if meter is not None or clip_norm is not None:
            norm = self._gradient_norm()
            if clip_norm is not None:
                nn.utils.clip_grads_with_norm_(self.optimizer_params(), clip_norm, norm, foreach=True)
            if meter is not None:
                meter.end(norm if is_unscaled or scale is None else norm / scale, scale)
        if adds_noise:
            chunks = (
                (gradient, self._parameter_numbers[shard.name], shard.whole_shape, shard.offset)
                for shard in self.shards()
                if (gradient := shard.local.grad) is not None
            )
            self._noise.add(chunks, self.clock.step)

    def _gradient_norm(self) -> Tensor:
        """The norm of the whole gradient."""
        return total_norm(self._gradients())

    def clear_gradients(self) -> None:
        """Set all gradients to None."""
        self.optimizer.zero_grad(set_to_none=True)

    def try_step(self, data: Any) -> None:
        """Use the memory of a step and of two accumulated micro-batches, without collectives and not compiled.

        The caller restores all state except the loss scale.
        """
        scaler, self.scaler = self.scaler, torch.amp.GradScaler(self.world.device.type, enabled=False)
        self.module.train()
        self._is_trying = True
        try:
            with local_statistics(self.module):
                self._forward_backward(self._local_model(), data, 1.0)
                if _has_sparse(self.module):
                    self._check_sparse()
                self.step(0.0)  # creates the optimizer's state
                for _ in range(2):
                    self._forward_backward(self._local_model(), data, 1.0)
        finally:
            self.scaler, self._is_trying = scaler, False

    # Workers whose weights may differ for some steps

    def exchange_weights(self) -> None:
        """After a step: average the weights of all workers, if that is due."""

    def mean_weights(self) -> Iterator[Tensor]:
        """The mean over all workers of each of `weights`, which do not change. All workers iterate to the end."""
        return iter(self.weights())

    def outer_state(self) -> dict[str, Tensor]:
        """The state of an outer optimizer by name; the same on all workers."""
        return {}

    def swap_in_mean_weights(self) -> AbstractContextManager[Any]:
        """Inside it, the weights are the mean of all workers. All workers enter it."""
        return nullcontext()

    def running(self) -> AbstractContextManager[Any]:
        """Around all steps of a run. All workers enter it, and leave it together unless something fails."""
        return nullcontext()

    def synchronize(self) -> None:
        """Make the weights of all workers equal. All workers call it."""

    @property
    def stale_gradients(self) -> dict[int, int] | None:
        """How many gradients were applied at which age, in updates; None if none can be old."""
        return None

    # Before the first step

    def warm_up(
        self, loader: Loader, batches: Iterable[Batch] | None = None, on_loss: Callable[[Tensor], None] | None = None
    ) -> None:
        """Run the micro-batches of a full and of a short step without effect: kernels, buffers and buckets get ready.

        DDP learns its order of buckets in its first backward. It must be fixed before the first step, so that a resumed
        run sums in the same order.

        Args:
            loader: of the run.
            batches: the micro-batches to run; by default the loader's first and last.
            on_loss: called with each loss while its gradients are there.
        """
        self.make_kernels()
        self.module.train()  # as in the loop, and as captured
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        meter, self.noise_scale = self.noise_scale, None  # these belong to no step
        if meter is not None:
            meter.forget()
        self._is_warming_up = True
        try:
            with torch.random.fork_rng(devices=[self.world.device] if self.world.device.type == "cuda" else []):
                for batch in loader.first_and_last() if batches is None else batches:
                    loss = self.micro_step(batch)
                    if on_loss is not None:
                        on_loss(loss)
                    self._detect_sparse()
                    self._detect_counts()
                    if batch.span.is_last:  # DDP remembers which parameters a step has used
                        self.clear_gradients()
                    check_learning_rates(self.optimizer, self.learning_rates)
                    if self._plan.graph and self._graph is None and self._is_full(batch):
                        # All ranks or none: each enters collectives, and then has them in its graph.
                        first = self.world.first_object
                        refusal = first(batch_obstacle(batch.data)) or first(self._capture(batch))
                        if refusal is not None:
                            self._graph = None
                            self._refuse_graph(refusal)
                self.clear_gradients()
        finally:
            self._is_warming_up = False
        self.noise_scale = meter if self.loss_weights.is_plain and not self._is_sparse else None
        for name, buffer in self.module.named_buffers():
            if name in buffers:  # a module may create some in its first forward
                buffer.copy_(buffers[name])
        loader.wait_s = 0.0
        self.exposed.reset()

    def make_kernels(self) -> None:
        """Compile the fused kernels of the model's layers."""
        if self.world.device.type == "cuda" and not self._plan.compile:
            compile_ahead(self.module, self._autocast_dtype or torch.get_default_dtype(), self.world.device)

    def _detect_sparse(self) -> None:
        """Detect sparse gradients on any worker. All workers call it."""
        if self._is_sparse:
            return
        self._is_sparse = self._any_has_sparse()
        if self._is_sparse:
            self._check_sparse()
            if self._plan.noise_scale:
                self.notices.append(f"The gradient noise scale is not measured, as {_SPARSE}.")

    def _any_has_sparse(self) -> bool:
        """Whether a parameter of any worker has a sparse gradient."""
        return self.world.any(_has_sparse(self.module))

    def _check_sparse(self) -> None:
        """Refuse settings that need dense gradients."""
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
                f"{_SPARSE}, which are not compressed",
                f"{instead} leave out --compress",
            )
        for name, why in _NEED_DENSE:
            value, flag = getattr(settings.optimizer, name), f"--{name.replace('_', '-')}"
            if value:
                said = f"{flag}{'' if value is True else f' {value:g}'} was set"
                raise SettingError(said, f"{_SPARSE}, {why}", f"{instead} leave out {flag}")

    def _detect_counts(self) -> None:
        """Detect whether losses have counts. All workers call it."""
        if self._knows_counts:
            return
        self._knows_counts = True
        self.loss_weights.agree(self._plan.accumulate)
        if self._plan.noise_scale and not self.loss_weights.is_plain:
            self.notices.append(f"The gradient noise scale is not measured, as {REASON_OF_LOSS}.")

    def _capture(self, batch: Batch) -> str | None:
        """Replay such batches from now on; return why not, if the task does not allow it."""
        weight = batch.weight  # the same for every full batch

        def forward_backward(data: Any) -> Tensor:
            with self._gradient_sync(True):
                return self._forward_backward(self._eager, data, weight)

        try:
            self._graph = capture(
                forward_backward, batch.data, self.module, {"task": self.task}, has_peers=self.world.size > 1
            )
        except CaptureRefusedError as refusal:
            return str(refusal)
        return None

    def _refuse_graph(self, reason: str) -> None:
        """Go on without a CUDA graph, and say why."""
        text = f"Steps are run by Python, not replayed as a CUDA graph: {reason}."
        (self.warnings if self._settings.speed.graph else self.notices).append(text)

    def close(self) -> None:
        """Free the CUDA graph: while one holds collectives, NCCL does not end."""
        self._graph = None

    def check_first_gradients(self) -> None:
        """Check the first gradients for errors that would stay silent. All workers call it."""

    def without_gradient(self) -> list[str]:
        """The trained parameters without a gradient after a micro-batch, as far as this worker knows."""
        return without_gradient(self.module)


def has_batch_norms(model: nn.Module) -> bool:
    """Whether any layer takes statistics of a batch."""
    return any(isinstance(layer, _BATCH_NORMS) for layer in model.modules())


@contextmanager
def no_cudnn_benchmark(is_rare: bool = True) -> Iterator[None]:
    """Take cuDNN's first choice for a shape that comes rarely: to time all of them (--autotune) never pays.

    torch keeps this choice: a shape that is first run in here is never timed.
    """
    if not is_rare:
        yield
        return
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _has_sparse(module: nn.Module) -> bool:
    return any(p.grad is not None and p.grad.layout is not torch.strided for p in module.parameters())
