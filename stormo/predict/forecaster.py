"""Counts one task for one kind of GPU, each thing once, and forecasts every candidate."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from stormo.config.layout import Layout, resolve_layout
from stormo.config.link import sends_half_gradients, uses_sockets
from stormo.config.plan import Facts, Plan
from stormo.config.plan.choices import choose_precision
from stormo.config.plan.parallelism import STAGES_PER_WORKER
from stormo.config.schema import TrainConfig
from stormo.data.fashion_mnist import DataNotFoundError
from stormo.errors import SettingError, StormoError
from stormo.parallel.compression import HALF_DTYPES
from stormo.predict.candidates import Candidate
from stormo.predict.fake_tensors import FakeModel
from stormo.predict.forecast import Forecast, MemoryCurve, ModelSize, ParallelSpec, Rows, forecast
from stormo.predict.model import count_model, pipeline_stages, tensor_sharded
from stormo.predict.tracing import PassKind, Tracer, UntraceableError, few_samples, forbid_fetching
from stormo.system.hardware import Gpu
from stormo.tasks.task import Task

_FUSED_FROM = (8, 0)  # compute capability that stormo's fused layers need


class Forecaster:
    """Counts only what the candidates need, and each thing once."""

    def __init__(self, task: Task, config: TrainConfig, gpus: Sequence[Gpu]) -> None:
        self._task, self._config, self._gpu = task, config, gpus[0]
        self.num_gpus = len(gpus)
        self.notices: list[str] = []
        has_data = self._has_data()
        self.facts = self._facts()
        plain = replace(config, workers=replace(config.workers, strategy="auto", mesh=None, zero=None))
        self.precision, _ = choose_precision(config, resolve_layout(plain, gpus))
        half = HALF_DTYPES.get(self.precision)
        self._half_bytes = None if half is None else half.itemsize
        self._fake_model = FakeModel(task, self.precision)
        self.model: ModelSize = count_model(task, self._fake_model, config)
        self.notices += self.model.notices
        if not has_data:
            self._note_unknown("the data are not here; set --task.data-folder, or train once where they can be fetched")
        self._tracer = self._read() if has_data else None
        self._curves: dict[PassKind, MemoryCurve | None] = {}  # None: not known
        self._validation: Rows = ()
        self._base: int | None = None
        self.kept_per_sample: float | None = None

    def _has_data(self) -> bool:
        """False where the data are known to be missing; a named folder without data is refused."""
        try:
            forbid_fetching(self._task)
        except DataNotFoundError:
            return False
        return True

    def _facts(self) -> Facts:
        try:
            return self._task.facts()
        except StormoError:
            raise
        except Exception as error:
            raise SettingError(
                f"{type(self._task).__name__} was to be forecast",
                f"its data cannot be read here ({type(error).__name__}: {error})",
                "fetch them first: training does, even for one epoch",
            ) from error

    def _read(self) -> Tracer | None:
        try:
            batch = few_samples(self._task)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._note_unknown(f"the data cannot be read here ({type(error).__name__}: {reason})")
            return None
        return Tracer(
            self._task,
            self._fake_model,
            batch,
            self.precision,
            has_fused=self._gpu.capability >= _FUSED_FROM,
            shard_modules=self._config.sharding.shard_modules,
            ghost_batch_size=self._config.batch.ghost_batch_size,
        )

    def _note_unknown(self, reason: str) -> None:
        self._note(f"Activations are unknown and left out: {reason}")

    def _note(self, text: str) -> None:
        if text not in self.notices:
            self.notices.append(text)

    def forecast(self, candidate: Candidate) -> tuple[Candidate, Forecast | None]:
        """The candidate and its forecast; None where it is not possible, and the candidate then has the reason."""
        plan = candidate.plan
        if plan is None:
            return candidate, None
        try:
            spec = self._parallel_spec(candidate, plan)
        except SettingError as error:
            return replace(candidate, plan=None, reason=f"{error.why}; {error.instead}"), None
        if plan.compile:
            self._note("torch.compile is not counted; it mostly needs less memory")
        curve = self._curve(plan, candidate)
        one = forecast(self.model, spec, curve, self._gpu.memory_bytes, self._validation)
        if spec.graph and not one.fits and self._config.speed.graph is None:
            # A step of several micro-batches is not captured anyway.
            spec, candidate = replace(spec, graph=False), replace(candidate, flags=(*candidate.flags, "--no-graph"))
            one = forecast(self.model, spec, curve, self._gpu.memory_bytes, self._validation)
        return candidate, one

    def smallest(self) -> tuple[ParallelSpec, Forecast] | None:
        """fsdp with recomputed activations and one sample a micro-batch, on two GPUs or more; None if not known."""
        curve = self._traced(PassKind(recomputes=True, is_sharded=True))
        if curve is None:
            return None
        num_workers = max(2, self.num_gpus * int(self._config.workers.num_nodes))
        spec = ParallelSpec(num_workers=num_workers, shard=num_workers, zero=3, half_bytes=self._half_bytes)
        return spec, forecast(self.model, spec, curve, self._gpu.memory_bytes)

    def _curve(self, plan: Plan, candidate: Candidate) -> MemoryCurve | None:
        self._base = self._base or max(1, plan.micro_batch_size)
        layout, recomputes = plan.layout, candidate.config.sharding.checkpoint_activations
        curve = self._traced(PassKind(recomputes, layout.zero == 3, plan.channels_last, layout.mesh.tensor))
        if curve is not None and self.kept_per_sample is None:
            self.kept_per_sample = curve.kept_per_sample
            self._validate(plan)
        return curve

    def _traced(self, kind: PassKind) -> MemoryCurve | None:
        """Each kind once; None where its memory is not known."""
        if self._tracer is None or self._base is None:
            return None
        if kind not in self._curves:
            try:
                self._curves[kind] = self._tracer.curve(self._base, kind)
            except UntraceableError as error:
                self._curves[kind] = None
                self._note_unknown(f"the loss cannot be computed on tensors without values ({error})")
        return self._curves[kind]

    def _validate(self, plan: Plan) -> None:
        assert self._tracer is not None
        size = min(self._config.speed.validation_batch_size, self.facts.num_validation or 2**30)
        try:
            self._validation = self._tracer.validation(size, channels_last=plan.channels_last)
        except UntraceableError as error:
            self._note(f"The memory of a validation is unknown and not counted ({error})")

    def _parallel_spec(self, candidate: Candidate, plan: Plan) -> ParallelSpec:
        layout, sharding = plan.layout, candidate.config.sharding
        mesh, strategy = layout.mesh, layout.spec
        per_worker = 1 if strategy.schedule else STAGES_PER_WORKER[sharding.schedule]
        sharded: frozenset[str] = frozenset()
        stages: tuple[frozenset[str], ...] = ()
        if mesh.tensor > 1:
            sharded = tensor_sharded(self._task, self._fake_model.model(), mesh.tensor)
        if mesh.pipeline > 1:
            stages = pipeline_stages(self._task, self._fake_model.model(), mesh.pipeline, per_worker)
        return ParallelSpec(
            num_workers=layout.world_size,
            workers_per_node=layout.workers_per_node,
            shard=mesh.shard,
            tensor=mesh.tensor,
            pipeline=mesh.pipeline,
            zero=layout.zero,
            offload=sharding.offload,
            half_bytes=self._half_bytes,
            batch=plan.micro_batch_size,
            accumulate=plan.accumulate,
            micro_batches=plan.micro_batches,
            in_flight=_in_flight(sharding.schedule, mesh.pipeline, plan.micro_batches),
            graph=plan.graph,
            tail=None if self.facts.is_stream else self.facts.num_train % plan.global_batch_size,
            data_bytes=self._data_bytes(plan),
            merge_blocks=not sharding.checkpoint_activations
            and sharding.shard_modules is None
            and not sharding.offload,
            half_gradients=sends_half_gradients(candidate.config, layout) and uses_sockets(layout, os.environ),
            copies=mesh.replicate if strategy.averages_gradients else 1,  # local and server have no DDP buckets
            averages_weights=strategy.local_updates and layout.world_size > 1,
            extra_copies=_extra_copies(candidate.config, layout),
            servers=candidate.config.workers.servers if "servers" in strategy.options else 0,
            server_buffers=1 if candidate.config.workers.staleness else 3,
            tensor_sharded=sharded,
            stages=stages,
        )

    def _data_bytes(self, plan: Plan) -> int:
        facts = self.facts
        if plan.loader == "resident" and facts.train_bytes is not None:
            return round(facts.train_bytes * (1 + (facts.num_validation or 0) / max(facts.num_train, 1)))
        return 0 if self._tracer is None else self._tracer.batch_bytes(plan.micro_batch_size)


def _extra_copies(config: TrainConfig, layout: Layout) -> int:
    """Copies of the weights for an outer step (the last average and a velocity), or PowerSGD's error feedback."""
    outer_lr, momentum = config.optimizer.outer_lr, config.optimizer.outer_momentum
    if layout.spec.local_updates:
        return 0 if (outer_lr, momentum) == (1, 0) else 1 + (momentum != 0)
    return int(config.workers.compress == "powersgd" and layout.world_size > 1)


def _in_flight(schedule: str, num_workers: int, micro_batches: int) -> float:
    """Micro-batches whose activations a pipeline worker holds at a time."""
    if schedule == "gpipe":
        return float(micro_batches)
    # With two stages a worker starts about half as many more micro-batches before its first backward.
    most = num_workers * (1.5 if STAGES_PER_WORKER[schedule] > 1 else 1.0)
    return min(most, float(micro_batches))
