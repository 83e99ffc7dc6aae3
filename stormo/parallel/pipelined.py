"""Pipeline parallelism: the layers in stages, through which micro-batches go one after the other.

The task's `loss(model, batch)` is called once for the inputs of the first stage, and once with the output of the last
stage for the loss. Along the other axes a stage is sharded as `fsdp` shards a whole model.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from stormo.config.plan.parallelism import STAGES_PER_WORKER, even_bubble
from stormo.data.batches import batch_length, cut
from stormo.data.generators import host_states, same_states
from stormo.data.loaders import Batch
from stormo.errors import SettingError, pluralize
from stormo.launch.torch_errors import is_single_value_per_channel
from stormo.layers.sync_batch_norm import local_statistics
from stormo.parallel.base import has_batch_norms
from stormo.parallel.coalesced import copy, means
from stormo.parallel.fsdp import Sharded, compose
from stormo.parallel.loss_weights import EmptyBatchGuard
from stormo.parallel.meta_init import sample_batch, temporary_weights
from stormo.parallel.pipeline.activation_packing import ModelCall
from stormo.parallel.pipeline.engine import Engine
from stormo.parallel.pipeline.loss_capture import model_inputs, stand_in, with_output
from stormo.parallel.pipeline.partition import check_pieces, into_stages, measured_costs
from stormo.parallel.pipeline.schedules import Span, idle_share, worker_stages
from stormo.parallel.pipeline.split_points import Pieces, StageModule, find_pieces, keep_only
from stormo.parallel.pipeline.stage import ScheduleTrace
from stormo.parallel.tensor.layers import ShardSpec
from stormo.tasks.returned import read_loss

_TRACED_BATCH = 3  # the first ones are slower than all later ones
_MOST_CHECKED = 50_000_000  # parameters of a model whose pieces are compared with it, for which it is whole in memory


class Pipelined(Sharded):
    """One worker of a mesh with the axis pipeline."""

    def _transform(self, model: nn.Module) -> dict[str, ShardSpec]:
        plan, dims = self._plan, self.world.parallel_dims
        self._pipeline = dims.subgroup("pipeline")
        self._schedule = plan.layout.spec.schedule or self._settings.sharding.schedule
        per_worker = 1 if plan.layout.spec.schedule else STAGES_PER_WORKER[self._schedule]
        self._num_stages = per_worker * self._pipeline.size
        pieces = self._find_pieces(model)
        stages = into_stages(pieces, self._num_stages, lambda: self._costs(model, pieces))
        self._numbers = worker_stages(self._pipeline.rank, self._pipeline.size, self._num_stages)
        self._stages = [StageModule(stages[number]) for number in self._numbers]
        self._min_micro_batch_size = 1
        # Of the whole model, of which a worker keeps its stages alone: all workers cut a batch alike.
        if has_batch_norms(model) and plan.micro_batches > 1:
            size = plan.micro_batch_size // plan.micro_batches
            self._min_micro_batch_size = min(2, size)
            samples = pluralize(size, "sample")
            self.notices.append(f"In a pipeline batch norm takes its statistics over micro-batches, here of {samples}.")
        specs = compose(model, self._stages, plan, self._settings, self.task, dims)
        keep_only(model, [piece for number in self._numbers for piece in stages[number]], pieces)
        return specs

    def _find_pieces(self, model: nn.Module) -> Pieces:
        """The pieces of the model, from the task or from one call of the model."""
        name, plan = type(self.task).__name__, self._plan
        batch = sample_batch(self.task, max(1, plan.micro_batch_size // plan.micro_batches), self.world.device)
        before, gpu_before = host_states(), _gpu_state(self.world.device)
        self._call = model_inputs(lambda model: self.task.loss(model, batch), model, f"{name}.loss")
        if not same_states(before, host_states()) or _gpu_state(self.world.device) != gpu_before:
            raise SettingError(
                f"{name}.loss draws random numbers before it calls the model",
                "a pipeline calls it once for the inputs and once for the loss, and the second call would draw others",
                "draw them in the model's forward, or take those of augment",
            )
        given = self.task.pieces(model)
        pieces = find_pieces(model, given, name=name, call=self._call)
        is_small = sum(parameter.numel() for parameter in model.parameters()) <= _MOST_CHECKED
        if given is not None and is_small and self.world.is_main:
            with temporary_weights([model], self.world.device), local_statistics(model):
                check_pieces(model, pieces, self._call, self.world.device)
        direct = [getattr(module, name) for piece in pieces.items for module, name in piece.direct]
        if self._zero and any(isinstance(tensor, nn.Parameter) for tensor in direct):
            raise SettingError(
                f"the forward of {name}.model() uses parameters of the model itself",
                "sharded stages gather only the weights of modules that they call",
                f"put them into a module, or leave out the axis shard, or give {name} a pieces(model)",
            )
        return pieces

    def _costs(self, model: nn.Module, pieces: Pieces) -> list[float]:
        """Seconds of each piece, as rank 0 measures them."""
        costs: list[float] | None = []
        if self.world.is_main:
            try:
                with self.autocast(), local_statistics(model):
                    costs = measured_costs(pieces, self._call, self.world.device)
            except ValueError as error:
                if not is_single_value_per_channel(error):
                    raise
                costs = None
        costs = self.world.broadcast_object(costs)
        if costs is None:
            raise self._too_few_values(self._plan.global_batch_size)
        return [float(cost) for cost in costs]

    def _roots(self) -> list[nn.Module]:
        return list(self._stages)

    def _wrap(self, model: nn.Module) -> nn.Module:
        # Data-parallel stages that exchange tensors in every micro-batch must have equally many of them.
        self._is_synchronized = self.world.data.size > 1 and (self._zero > 0 or self._settings.speed.sync_batch_norm)
        for stage in self._stages if self._zero in (1, 2) else ():
            assert isinstance(stage, FSDPModule)
            stage.set_reshard_after_backward(False)
        engine = self._engine = Engine(
            self._stages,
            num_stages=self._num_stages,
            group=self._pipeline,
            device=self.world.device,
            schedule=self._schedule,
            num_micro_batches=self._plan.micro_batches,
            min_micro_batch_size=self._min_micro_batch_size,
            waiting=self.exposed.waiting,
            synchronized=self.world.data if self._is_synchronized else None,
            example=ModelCall(*self._call),
        )
        self._is_even = True  # whether all workers have equally many samples in this micro-step
        count = 1 if self._is_synchronized else None
        self._validated = stand_in(model, lambda *args, **kwargs: engine.forward(args, kwargs, count=count))
        self._num_full = 0  # micro-steps of full batches
        self.spans: list[Span] | None = None  # actions of the workers of this pipeline in one micro-step
        return model

    @property
    def validated(self) -> nn.Module:
        """The model as a validation calls it: a call runs all stages, and all workers get the output."""
        return self._validated

    def _gradient_sync(self, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext()  # a stage exchanges its gradients in the backward of its last micro-batch

    def micro_step(self, batch: Batch) -> Tensor:
        """As on one device, through all stages."""
        self._num_full += self._is_full(batch)
        self._is_even = batch.span.step_samples % (self.world.data.size * self._plan.accumulate) == 0
        return super().micro_step(batch)

    def _forward_backward(self, model: nn.Module, data: Any, weight: float) -> Tensor:
        task, method = self.task, f"{type(self.task).__name__}.loss"
        args, kwargs = model_inputs(lambda model: task.loss(model, data), self.module, method)
        num_samples = batch_length(data)
        count = self._engine.num_micro_batches(num_samples) if self._is_even or not self._is_synchronized else 1
        size = num_samples // count
        before = self.loss_weights.own.clone()
        seen = torch.zeros((), dtype=torch.float64, device=self.world.device)
        knew_counts = self.loss_weights.has_counts is not None

        def loss_of(output: Any, number: int) -> Tensor:
            part, guard = cut(data, number * size, (number + 1) * size), EmptyBatchGuard()
            guard.watch(output)
            found = with_output(lambda model: task.loss(model, part), output, self.module, method)
            loss, factor = self.loss_weights.weigh(*read_loss(task, found), weight / count, guard)
            seen.add_(loss.detach() * factor)
            return self.scaler.scale(loss * (factor * self.world.data.size))

        if self._num_full == _TRACED_BATCH and self.spans is None:
            self._engine.trace = ScheduleTrace(self._pipeline, self.world.device)
        with self.autocast():
            self._engine.forward_backward(args, loss_of, kwargs, count=count)
        if self._engine.trace is not None:
            self.spans, self._engine.trace = self._engine.trace.gather(), None
        if self._zero in (1, 2):
            self._reshard()  # weights stay gathered for all micro-batches
        # Only the last stage has the losses and their counts.
        has_counts = torch.full_like(seen, float(bool(self.loss_weights.has_counts)))
        sums = torch.stack([seen, self.loss_weights.own - before, has_counts])
        with self.exposed.waiting():
            self._pipeline.sum(sums)
        self.loss_weights.own.copy_(before + sums[1])  # also where another worker has counted them
        if not knew_counts:
            self.loss_weights.require_alike(bool(sums[2]))
        return sums[0] * self._loss_share

    def _collect_gradients(self) -> None:
        if not self._zero and self.world.data.size > 1:
            with self.exposed.waiting():
                gradients = self._reached()
                copy(gradients, means(self.world, gradients, group=self.world.data))
        super()._collect_gradients()

    def _reached(self) -> list[Tensor]:
        """The gradients of this worker's stages; zeros where only data-parallel peers have one."""
        trained = [parameter for parameter, _ in self._pairs if parameter.requires_grad]
        if self.task.find_unused and trained:
            is_reached = torch.tensor([float(parameter.grad is not None) for parameter in trained])
            for parameter, is_anywhere in zip(trained, self.world.data.max(is_reached).tolist(), strict=True):
                if is_anywhere and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in trained if parameter.grad is not None]

    def pipeline_trace(self) -> dict[str, Any] | None:
        """One micro-step of rank 0's pipeline, with the measured and the predicted idle share."""
        if self.spans is None:
            return None
        workers, count = self._pipeline.size, 1 + max(span.micro_batch for span in self.spans)
        return {
            "schedule": self._schedule,
            "num_stages": self._num_stages,
            "micro_batches": count,
            # Several stages a worker with fewer micro-batches than workers: there is no formula.
            "predicted_bubble": even_bubble(self._schedule, workers, count)
            if count >= workers or self._num_stages == workers
            else None,
            "measured_bubble": idle_share(self.spans, workers),
            "spans": [list(span) for span in self.spans],
        }


def _gpu_state(device: torch.device) -> Any:
    return torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None
