"""Pipeline parallelism: layers in stages, which micro-batches go through one after the other.

The task's `loss(model, batch)` stays what it is: it is called up to the model for the inputs of the first stage, and
around the output of the last one for the loss. Along the other axes a stage is sharded as a whole model is in `fsdp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from stormo.config.plan.sharding import STAGES_PER_WORKER
from stormo.data.batches import batch_length, cut
from stormo.data.generators import host_states
from stormo.data.loaders import Batch
from stormo.distributed.parallel_dims import SubGroup
from stormo.errors import SettingError
from stormo.layers.norm_act import NormAct
from stormo.parallel.fsdp import Sharded, compose
from stormo.parallel.loss_weights import Guard
from stormo.parallel.meta_init import sample_batch
from stormo.parallel.pipeline.bubble import Span, idle_share, predicted_bubble
from stormo.parallel.pipeline.capture import model_inputs, with_output
from stormo.parallel.pipeline.engine import Engine
from stormo.parallel.pipeline.lend import lent
from stormo.parallel.pipeline.orders import stages_of
from stormo.parallel.pipeline.pieces import Pieces, StageModule, find_pieces, keep_only
from stormo.parallel.pipeline.split import check_same, into_stages, measured_costs
from stormo.parallel.pipeline.watching import Watch
from stormo.parallel.tensor.layers import ShardSpec
from stormo.tasks.returned import read_loss

_WATCHED_PASS = 3  # the first ones are slower than all later ones
_MOST_CHECKED = 50_000_000  # parameters of a model whose pieces are compared with it: it is whole in memory then
_BUCKET_BYTES = 25 * 2**20  # of gradients that are averaged together
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, NormAct)


class Pipelined(Sharded):
    """One worker of a mesh with the axis pipeline."""

    def _transform(self, model: nn.Module) -> dict[str, ShardSpec]:
        plan, grid = self._plan, self.world.grid
        self._line = grid.line("pipeline")
        self._schedule = plan.layout.spec.schedule or self._settings.sharding.schedule
        per_worker = 1 if plan.layout.spec.schedule else STAGES_PER_WORKER[self._schedule]
        self._num_stages = per_worker * self._line.size
        pieces = self._find_pieces(model)
        stages = into_stages(pieces, self._num_stages, lambda: self._costs(pieces))
        self._numbers = stages_of(self._line.rank, self._line.size, self._num_stages)
        self._stages = [StageModule(stages[number]) for number in self._numbers]
        self.notices += self._batch_norm_notice(model)
        cuts = compose(model, self._stages, plan, self._settings, self.task, grid)
        keep_only(model, [piece for number in self._numbers for piece in stages[number]], pieces)
        return cuts

    def _find_pieces(self, model: nn.Module) -> Pieces:
        """How the model is cut, by the task or by what one call of it shows."""
        name, plan = type(self.task).__name__, self._plan
        batch = sample_batch(self.task, max(1, plan.batch_per_pass // plan.micro_batches), self.world.device)
        before = self._random_state()
        self._call = model_inputs(lambda stand_in: self.task.loss(stand_in, batch), model, f"{name}.loss")
        if self._random_state() != before:
            raise SettingError(
                f"{name}.loss draws random numbers before it calls the model",
                "in a pipeline it is called once for the inputs and once more for the loss, which would draw others",
                "draw them in the model's forward, or take those of augment",
            )
        given = self.task.pieces(model)
        pieces = find_pieces(model, given, name=name, call=self._call)
        is_small = sum(parameter.numel() for parameter in model.parameters()) <= _MOST_CHECKED
        if given is not None and is_small and self.world.is_main:
            with lent([model], self.world.device):
                check_same(model, pieces, self._call, self.world.device)
        own = [place for piece in pieces.items for place in piece.own]
        if self._zero and any(attribute in module._parameters for module, attribute in own):
            raise SettingError(
                f"{name}.model() has parameters that forward takes from the model itself",
                "sharded stages gather the weights of the modules that they call",
                f"put them into a module, or leave out the axis shard, or give {name} a pieces(model)",
            )
        return pieces

    def _random_state(self) -> str:
        """Where all generators are that a loss may draw from."""
        device = self.world.device
        on_gpu = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None
        numbers, *others = host_states()
        return repr((numbers.tolist(), on_gpu, *((kind, list(words), *rest) for kind, words, *rest in others)))

    def _costs(self, pieces: Pieces) -> list[float]:
        """Seconds of each piece, as the main worker measures them."""
        costs: list[float] = []
        if self.world.is_main:
            with self.autocast():
                costs = measured_costs(pieces, self._call, self.world.device)
        return [float(cost) for cost in self.world.broadcast_object(costs)]

    def _batch_norm_notice(self, model: nn.Module) -> list[str]:
        size = self._plan.batch_per_pass // self._plan.micro_batches
        if self._plan.micro_batches == 1 or not any(isinstance(layer, _BATCH_NORMS) for layer in model.modules()):
            return []
        return [f"In a pipeline batch norm takes its statistics over micro-batches, here of {size} samples."]

    def _roots(self) -> list[nn.Module]:
        return list(self._stages)

    def _wrap(self, model: nn.Module) -> nn.Module:
        # Where stages speak with those of other samples in every micro-batch, all must have equally many.
        self._is_in_step = self.world.data.size > 1 and (self._zero > 0 or self._settings.speed.sync_batch_norm)
        for stage in self._stages if self._zero in (1, 2) else ():
            assert isinstance(stage, FSDPModule)
            stage.set_reshard_after_backward(False)
        self._engine = Engine(
            self._stages,
            self._numbers,
            num_stages=self._num_stages,
            line=self._line,
            device=self.world.device,
            schedule=self._schedule,
            num_micro_batches=self._plan.micro_batches,
            in_step=self.world.data if self._is_in_step else None,
        )
        self._is_even = True  # whether all take equally many samples in the pass under way
        self._judged = _through(self._engine, model, 1 if self._is_in_step else None)
        self._num_full = 0  # passes of a full batch
        self.spans: list[Span] | None = None  # what the workers of this line did in one pass
        return model

    @property
    def validated(self) -> nn.Module:
        """The model as a validation calls it: a call goes through all stages, and its output to all workers."""
        return self._judged

    def _gradient_sync(self, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext()  # a stage exchanges its gradients in the backward of its last micro-batch

    def micro_step(self, batch: Batch) -> Tensor:
        """Add this pass's part of the global batch's mean-loss gradient; return its part of that loss, detached."""
        self._num_full += self._is_full(batch)
        self._is_even = batch.span.step_samples % (self.world.data.size * self._plan.accumulate) == 0
        return super().micro_step(batch)

    def _pass(self, model: nn.Module, data: Any, weight: float) -> Tensor:
        task, method = self.task, f"{type(self.task).__name__}.loss"
        args, kwargs = model_inputs(lambda stand_in: task.loss(stand_in, data), self.module, method)
        num_samples = batch_length(data)
        count = self._engine.num_micro_batches(num_samples) if self._is_even or not self._is_in_step else 1
        size = num_samples // count
        before = self.loss_weights.own.clone()
        seen = torch.zeros((), dtype=torch.float64, device=self.world.device)
        knows_counts = self.loss_weights.has_counts is not None

        def loss_of(output: Any, number: int) -> Tensor:
            part, guard = cut(data, number * size, (number + 1) * size), Guard()
            guard.watch(output)
            found = with_output(lambda stand_in: task.loss(stand_in, part), output, self.module, method)
            loss, factor = self.loss_weights.weigh(*read_loss(task, found), weight / count, guard)
            seen.add_(loss.detach() * factor)
            return self.scaler.scale(loss * (factor * self.world.data.size))

        self._watch_pass()
        with self.autocast():
            self._engine.forward_backward(args, loss_of, kwargs, count=count)
        self._see_pass()
        if self._zero in (1, 2):
            self._reshard()  # weights stay gathered for the micro-batches of a pass
        # Only the last stage has seen the losses and their counts.
        has_counts = torch.full_like(seen, float(bool(self.loss_weights.has_counts)))
        told = self._line.sum(torch.stack([seen, self.loss_weights.own - before, has_counts]))
        self.loss_weights.take(before + told[1])
        if not knows_counts:
            self.loss_weights.require_alike(bool(told[2]))
        return told[0] * self._loss_share

    def _collect_gradients(self) -> None:
        if not self._zero:
            average(self._reached(), self.world.data)
        super()._collect_gradients()

    def _reached(self) -> list[Tensor]:
        """The gradients of this worker's stages; zeros where only passes of others have reached a parameter."""
        trained = [one.parameter for one in self._held if one.parameter.requires_grad]
        if self.task.find_unused and trained:
            is_reached = torch.tensor([float(parameter.grad is not None) for parameter in trained])
            for parameter, is_anywhere in zip(trained, self.world.data.max(is_reached).tolist(), strict=True):
                if is_anywhere and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in trained if parameter.grad is not None]

    def without_gradient(self) -> list[str]:
        """The trained parameters of this worker's stages that the pass just done has not reached."""
        return [one.name for one in self._held if one.parameter.requires_grad and one.parameter.grad is None]

    # What the schedule came to

    def _watch_pass(self) -> None:
        if self._num_full == _WATCHED_PASS and self.spans is None:
            self._engine.watch = Watch(self._line, self.world.device)

    def _see_pass(self) -> None:
        if self._engine.watch is not None:
            self.spans, self._engine.watch = self._engine.watch.gather(), None

    def pipeline_trace(self) -> dict[str, Any] | None:
        """One pass of the main worker's line, and the idle share of its workers beside what the schedule must have."""
        if self.spans is None:
            return None
        workers, count = self._line.size, 1 + max(span.micro_batch for span in self.spans)
        return {
            "schedule": self._schedule,
            "num_stages": self._num_stages,
            "micro_batches": count,
            "predicted_bubble": predicted_bubble(self._schedule, workers, self._num_stages, count),
            "measured_bubble": idle_share(self.spans, workers),
            "spans": [list(span) for span in self.spans],
        }


def _through(engine: Engine, model: nn.Module, count: int | None) -> nn.Module:
    """An instance of the model's own class that shares all with it but the call."""

    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return engine.forward(args, kwargs, count=count)

    kind: Any = type(type(model).__name__, (type(model),), {"__call__": call, "forward": call})
    found: nn.Module = object.__new__(kind)
    object.__setattr__(found, "__dict__", model.__dict__)
    return found


@torch.no_grad()
def average(gradients: Sequence[Tensor], line: SubGroup) -> None:
    """The mean of every gradient over the workers of a line, in place, some at a time."""
    if line.size == 1:
        return
    waiting = list(gradients)
    while waiting:
        first, some, num_bytes = waiting[0], list[Tensor](), 0
        while waiting and waiting[0].dtype == first.dtype and (not some or num_bytes < _BUCKET_BYTES):
            some.append(waiting.pop(0))
            num_bytes += some[-1].nbytes
        flat = line.sum(torch.cat([gradient.reshape(-1) for gradient in some])).div_(line.size)
        for gradient, mean in zip(some, flat.split([g.numel() for g in some]), strict=True):
            gradient.copy_(mean.view_as(gradient))
