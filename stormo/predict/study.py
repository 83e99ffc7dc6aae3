"""One task on one kind of GPU: what was counted once, and the forecast of every way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stormo.config.layout import Layout, resolve_layout
from stormo.config.plan import Facts, Plan
from stormo.config.plan.choices import choose_precision
from stormo.config.plan.sharding import STAGES_PER_WORKER
from stormo.config.schema import TrainConfig
from stormo.data.fashion_mnist import DataNotFoundError
from stormo.errors import SettingError, StormoError
from stormo.parallel.compression import HALVES
from stormo.predict.blank import Blank
from stormo.predict.curve import Curve, Rows
from stormo.predict.forecast import forecast
from stormo.predict.model import count_model, cut_by_tensor, stages_by_pipeline
from stormo.predict.passes import NotKnownError, Passes, few_samples, without_fetching
from stormo.predict.rounds import cut_by_hybrid
from stormo.predict.terms import Forecast, Model, Spread
from stormo.predict.ways import Way
from stormo.system.hardware import Gpu
from stormo.tasks.task import Task

_FUSED_FROM = (8, 0)  # compute capability of stormo's fused layers


class Study:
    """Counts as little as the ways ask for, and each thing once."""

    def __init__(self, task: Task, config: TrainConfig, gpus: Sequence[Gpu]) -> None:
        self._task, self._config, self._gpu = task, config, gpus[0]
        self.num_gpus = len(gpus)
        self.notices: list[str] = []
        has_data = self._has_data()
        self.facts = self._facts()
        plain = replace(config, workers=replace(config.workers, strategy="auto", mesh=None, zero=None))
        self.precision, _ = choose_precision(config, resolve_layout(plain, gpus))  # as servers have it, where asked for
        self._blank = Blank(task, self.precision)
        self.model: Model = count_model(task, self._blank, config)
        self.notices += self.model.notices
        if not has_data:
            self._unknown("there are no data here; set --task.data-folder, or train once where they can be fetched")
        self._passes = self._read() if has_data else None
        self._curves: dict[tuple[bool, bool, bool, int, bool], Curve | None] = {}  # None for those that are not known
        self._validation: Rows = ()
        self._base: int | None = None
        self.kept_per_sample: float | None = None

    def _has_data(self) -> bool:
        """Whether the data are here, as far as that is known; a folder that was named and has none is refused."""
        try:
            without_fetching(self._task)
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
                "bring them first: training fetches them, for one epoch if need be",
            ) from error

    def _read(self) -> Passes | None:
        try:
            batch = few_samples(self._task)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._unknown(f"the data cannot be read here ({type(error).__name__}: {reason})")
            return None
        return Passes(
            self._task,
            self._blank,
            batch,
            self.precision,
            has_fused=self._gpu.capability >= _FUSED_FROM,
            shard_modules=self._config.sharding.shard_modules,
            ghost_batch_size=self._config.batch.ghost_batch_size,
        )

    def _unknown(self, reason: str) -> None:
        self._note(f"Activations are not known, and what is shown is without them: {reason}")

    def _note(self, text: str) -> None:
        if text not in self.notices:
            self.notices.append(text)

    def forecast(self, way: Way) -> tuple[Way, Forecast | None]:
        """The row of a way; None where it cannot be, for the reason that the way has then."""
        plan = way.plan
        if plan is None:
            return way, None
        try:
            spread = self._spread(way, plan)
        except SettingError as error:
            return replace(way, plan=None, reason=str(error).partition(", but ")[2].rstrip(".")), None
        if plan.compile:
            self._note("What torch.compile changes is not counted; it mostly needs less")
        curve = self._curve(plan, way)
        one = forecast(self.model, spread, curve, self._gpu.memory_bytes, self._validation)
        if spread.graph and not one.fits and self._config.speed.graph is None:
            # More passes to a step are not captured anyway.
            spread, way = replace(spread, graph=False), replace(way, flags=(*way.flags, "--no-graph"))
            one = forecast(self.model, spread, curve, self._gpu.memory_bytes, self._validation)
        return way, one

    def smallest(self) -> tuple[Spread, Forecast] | None:
        """The leanest way without offloading, on two GPUs or more, with one sample a pass; None if it is not known."""
        if self._passes is None or self._base is None:
            return None
        try:
            curve = self._passes.curve(self._base, recomputes=True, is_sharded=True, channels_last=False)
        except NotKnownError:
            return None
        num_workers = max(2, self.num_gpus * int(self._config.workers.num_nodes))
        half = HALVES.get(self.precision)
        half_bytes = None if half is None else half.itemsize
        spread = Spread(num_workers=num_workers, shard=num_workers, zero=3, half_bytes=half_bytes, recompute=True)
        return spread, forecast(self.model, spread, curve, self._gpu.memory_bytes)

    def _curve(self, plan: Plan, way: Way) -> Curve | None:
        if self._passes is None:
            return None
        self._base = self._base or max(1, plan.batch_per_pass)
        layout, recomputes = plan.layout, way.config.sharding.checkpoint_activations
        kind = (recomputes, layout.zero == 3, plan.channels_last, layout.mesh.tensor, layout.spec.cuts_classifier)
        if kind not in self._curves:
            try:
                self._curves[kind] = self._passes.curve(
                    self._base,
                    recomputes=kind[0],
                    is_sharded=kind[1],
                    channels_last=kind[2],
                    num_parts=kind[3],
                    is_hybrid=kind[4],
                )
            except NotKnownError as error:
                self._curves[kind] = None
                self._unknown(f"the loss cannot be computed on tensors without values ({error})")
        curve = self._curves[kind]
        if curve is not None and self.kept_per_sample is None:
            self.kept_per_sample = curve.kept_per_sample
            self._validate(self._passes, plan)
        return curve

    def _validate(self, passes: Passes, plan: Plan) -> None:
        size = min(self._config.speed.validation_batch_size, self.facts.num_validation or 2**30)
        try:
            self._validation = passes.validation(size, channels_last=plan.channels_last)
        except NotKnownError as error:
            self._note(f"What a validation holds is not known and not counted ({error})")

    def _spread(self, way: Way, plan: Plan) -> Spread:
        layout, sharding = plan.layout, way.config.sharding
        mesh, spec = layout.mesh, layout.spec
        per_worker = 1 if spec.schedule else STAGES_PER_WORKER[sharding.schedule]
        cut: frozenset[str] = frozenset()
        stages: tuple[frozenset[str], ...] = ()
        if mesh.tensor > 1:
            cut_by = cut_by_hybrid if spec.cuts_classifier else cut_by_tensor
            cut = cut_by(self._task, self._blank.model(), mesh.tensor)
        if mesh.pipeline > 1:
            stages = stages_by_pipeline(self._task, self._blank.model(), mesh.pipeline, per_worker)
        half = HALVES.get(self.precision)
        return Spread(
            num_workers=layout.world_size,
            workers_per_node=layout.workers_per_node,
            shard=mesh.shard,
            tensor=mesh.tensor,
            pipeline=mesh.pipeline,
            zero=layout.zero,
            offload=sharding.offload,
            recompute=sharding.checkpoint_activations,
            half_bytes=None if half is None else half.itemsize,
            batch=plan.batch_per_pass,
            accumulate=plan.accumulate,
            micro_batches=plan.micro_batches,
            in_flight=_in_flight(sharding.schedule, mesh.pipeline, plan.micro_batches),
            graph=plan.graph,
            tail=None if self.facts.is_stream else self.facts.num_train % plan.global_batch_size,
            data_bytes=self._data_bytes(plan),
            merges=not sharding.checkpoint_activations and sharding.shard_modules is None and not sharding.offload,
            # Local steps and servers need no buckets of DDP; in the hybrid all workers have the trunk.
            copies=(mesh.tensor if spec.cuts_classifier else mesh.replicate) if spec.averages_gradients else 1,
            averages=spec.local_updates and layout.world_size > 1,
            kept_copies=_kept_copies(way.config, layout),
            servers=way.config.workers.servers if "servers" in spec.options else 0,
            rooms=1 if way.config.workers.staleness else 3,
            cut=cut,
            stages=stages,
        )

    def _data_bytes(self, plan: Plan) -> int:
        facts = self.facts
        if plan.loader == "resident" and facts.train_bytes is not None:
            return round(facts.train_bytes * (1 + (facts.num_validation or 0) / max(facts.num_train, 1)))
        return 0 if self._passes is None else self._passes.batch_bytes(plan.batch_per_pass)


def _kept_copies(config: TrainConfig, layout: Layout) -> int:
    """Of the weights: those of the last averaging and, with momentum, a velocity; none where the mean is taken.

    Of the gradients: what PowerSGD keeps back, little of which small weights have.
    """
    rate, momentum = config.optimizer.outer_lr, config.optimizer.outer_momentum
    if layout.spec.local_updates:
        return 0 if (rate, momentum) == (1, 0) else 1 + (momentum != 0)
    return int(config.workers.compress == "powersgd" and layout.world_size > 1)


def _in_flight(schedule: str, num_workers: int, micro_batches: int) -> float:
    """Micro-batches whose activations a worker of a pipeline has at a time."""
    if schedule == "gpipe":
        return float(micro_batches)
    # Two stages a worker begin more micro-batches before the first backward: half as many more, as a rule of thumb.
    most = num_workers * (1.5 if STAGES_PER_WORKER[schedule] > 1 else 1.0)
    return min(most, float(micro_batches))
