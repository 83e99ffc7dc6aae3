"""One rank of a training, from joining the others to leaving them: `setup`, `run`, `close`."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial

import torch

from stormo.config.layout import Layout
from stormo.config.link import Link
from stormo.config.plan import Plan, resolve, with_layers, with_task_optimizer
from stormo.config.plan.steps import parse_profile
from stormo.config.schema import TrainConfig
from stormo.data.batches import Collate, collate
from stormo.data.generators import seed_generators
from stormo.data.loaders import IterableLoader, Loader, ResidentLoader, Share, StreamedLoader
from stormo.data.order import derive_seed
from stormo.data.reading import is_stream
from stormo.data.staging.copying import StoppedError
from stormo.data.tensors import TensorData
from stormo.distributed.devices import device_of, share_cores
from stormo.distributed.store import Store
from stormo.distributed.world import World
from stormo.errors import EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_RESUMABLE, StormoError
from stormo.launch import FailureReporter, RankInfo
from stormo.launch.failure import of_exception
from stormo.optim.schedule import make_schedule
from stormo.optim.task_optimizer import optimizer_name
from stormo.parallel.batch_size import find_micro_batch_size
from stormo.parallel.table import strategy_class
from stormo.profiling.ranges import record_for_nsight
from stormo.profiling.window import ProfileWindow
from stormo.system.affinity import bind_to_gpu
from stormo.system.files import keep_compiled
from stormo.system.hardware import num_cores
from stormo.system.process import SetupTimer
from stormo.system.signals import StopFlag, stop_flag
from stormo.tasks.task import Task
from stormo.telemetry.record import Notice
from stormo.telemetry.runs_folder import note_failure
from stormo.training.clock import open_node_recorder
from stormo.training.context import RunContext
from stormo.training.initial_weights import load_initial, read_initial
from stormo.training.loop import Outcome, train
from stormo.training.records import RunRecorder
from stormo.training.recovery import Recovery
from stormo.training.sanity_check import (
    add_memory_note,
    check_single_samples,
    check_streams,
    explain_errors,
    explain_out_of_memory,
    sanity_check,
)
from stormo.training.staging import staged_task
from stormo.training.state import Progress, RunState
from stormo.training.validation import Validation


def run_worker(
    config: TrainConfig, layout: Layout, task: Task, rank_info: RankInfo, store: Store | None, reporter: FailureReporter
) -> int:
    """Train as one rank of the job; return its exit code."""
    setup_times = SetupTimer()
    setup_times.done("imports")
    share_cores(rank_info)
    bound = _bind(config, layout, rank_info)
    with stop_flag(announces=rank_info.launcher == "alone") as flag, ExitStack() as resources:
        trainer = Trainer(config, reporter, flag, setup_times, resources, bound)
        try:
            trainer.setup(layout, task, rank_info, store)
            code = trainer.run()
        except StoppedError as stopped:  # while data was staged; on all ranks alike
            code = stopped.exit_code
        # Only after success: nothing may delay the report of a failure, and the process ends anyway.
        trainer.close()
    return code


def _bind(config: TrainConfig, layout: Layout, rank_info: RankInfo) -> list[Notice]:
    """Bind this worker to the cores next to its GPU, and say so."""
    if not config.workers.bind or layout.devices_per_worker > 1:
        return []
    bound = bind_to_gpu([gpu.bus_id for gpu in layout.gpus], rank_info.local_rank, rank_info.local_size)
    if bound is None:
        return []
    return [Notice(kind="info", text=f"rank {rank_info.rank} is {bound}; --no-bind turns it off")]


class Trainer:
    """Sets a run up, trains, and closes what it opened. Every rank makes one."""

    world: World
    plan: Plan
    task: Task

    def __init__(
        self,
        config: TrainConfig,
        reporter: FailureReporter,
        flag: StopFlag,
        setup_times: SetupTimer,
        resources: ExitStack,
        notices: Sequence[Notice] = (),
    ) -> None:
        self.config = config
        self._reporter = reporter
        self._stop_flag = flag
        self._setup_times = setup_times
        self._resources = resources  # closed after a failure too
        self._closing = ExitStack()  # closed after success alone
        self._notices = list(notices)  # for the run's records, once they are open

    def setup(self, layout: Layout, task: Task, rank_info: RankInfo, store: Store | None) -> None:
        """Join, fetch and stage the data, resolve the plan, build, check the first batches, open the run folder."""
        self._join(layout, rank_info, store)
        self._prepare_data(task)
        plan, link = resolve(self.config, layout, self.task.facts()), self.world.link
        self.plan = replace(plan, initial=replace(plan.initial, link=None if link is None else asdict(link)))
        _require_same_plan(self.plan, self.world)
        set_arithmetic(self.config, self.plan)
        self._build()
        self._check()
        self._open_run()

    def run(self) -> int:
        """Train to the end; return the exit code."""
        if self._has_nothing_to_do:
            return 0
        config, plan, records = self.config, self.plan, self._records
        records.start()
        recovery = Recovery(config, plan, self.world, self._state, records)
        profile = ProfileWindow(self._profile_spec, self.world, records.run_folder)
        chosen = (Notice(kind="info", text=text) for text in self._strategy.notices)
        warnings = (Notice(kind="warning", text=text) for text in self._strategy.warnings)
        for notice in (*self._notices, *chosen, *warnings):
            records.record(notice)
        try:
            recovery.prepare()
            self._stop_flag.is_training = True
            self._reporter.alive(self._state.progress.step)
            outcome = train(
                RunContext(
                    world=self.world,
                    plan=plan,
                    config=config,
                    state=self._state,
                    loader=self._loader,
                    validation=self._validation,
                    schedule=make_schedule(
                        config, plan, self._strategy.lr_factor, is_constant=self._strategy.scheduler is not None
                    ),
                    stop_flag=self._stop_flag,
                    record=records.record,
                    run_folder=records.run_folder,
                    save=self._save,
                    heartbeat=self._reporter.alive,
                    node_recorder=self._node_recorder,
                    profile=profile,
                    roll_back=recovery.roll_back,
                )
            )
        except BaseException as error:
            add_memory_note(config, plan, error)
            with suppress(OSError, StormoError):  # a full disk must not hide what went wrong
                records.end("error")
                if self.world.is_main and not self._reporter.shows_failures:  # else it is told by who shows it
                    cause = of_exception(error, rank=0, host=socket.gethostname(), secondary=False).sentence
                    if hint := note_failure(records.folder, cause):
                        error.add_note(f"stormo: {hint}")
            raise
        for text in profile.close():
            records.record(Notice(kind="info", text=text))
        if outcome.diverged is not None:
            recovery.give_up(outcome.diverged)
            records.end(outcome.stopped_by, diverged_at_step=outcome.diverged.step)
        else:
            records.end(outcome.stopped_by)
        return _exit_code(outcome)

    def _save(self, metric: float | None) -> None:
        progress = self._state.progress
        progress.stream = self._loader.bookmark(progress.epoch, progress.position)
        self._records.save(metric)

    def close(self) -> None:
        """End loading processes, remove staged data, close the energy account and leave the process group."""
        self._closing.close()
        self._resources.close()
        self.world.close()

    def _join(self, layout: Layout, rank_info: RankInfo, store: Store | None) -> None:
        config = self.config
        device = device_of(layout.device_type, rank_info, store, may_share=layout.may_share)
        join = partial(
            World,
            rank_info,
            device,
            store=store,
            backend=layout.backend,
            timeout_s=config.workers.timeout,
            mesh=layout.mesh,
            data_axes=layout.spec.data_axes,
            needs_group=layout.is_sharded,
            choose_link=partial(self._choose_link, layout, rank_info, store, device),
        )
        if config.command.preflight:
            from stormo.doctor.preflight import join_after_preflight

            self.world, notices = join_after_preflight(join, device, config, layout, rank_info, store, self._reporter)
            self._notices += notices
        else:
            self.world = join()
        node_recorder = open_node_recorder(
            self.world, devices_per_worker=layout.devices_per_worker, is_on=config.energy.energy
        )
        self._node_recorder = self._resources.enter_context(closing(node_recorder))
        self._setup_times.done("joining")

    def _choose_link(
        self, layout: Layout, rank_info: RankInfo, store: Store | None, device: torch.device
    ) -> Link | None:
        if store is None or layout.backend != "nccl":
            return None
        from stormo.distributed.link_tuning import choose_link

        link, text = choose_link(self.config, layout, rank_info, store, device)
        self._notices += [Notice(kind="info", text=text)] if text else []
        return link

    def _prepare_data(self, task: Task) -> None:
        """Fetch the task's data once on each node, and stage it where that is asked for."""
        fetched = None
        with self.world.once_per_node() as is_fetcher:
            if is_fetcher:
                fetched = task.fetch()
        self._setup_times.done("fetching")
        staged = staged_task(self.config.command, task, fetched, self.world, lambda: self._stop_flag.signal_number)
        self.task, sentences = self._resources.enter_context(staged)
        self._notices += [Notice(kind="info", text=text) for text in sentences]
        self._setup_times.done("staging")

    def _build(self) -> None:
        """Build the model with its optimizer, the loader and the validation; find the batch that fits."""
        config, world, task, seed = self.config, self.world, self.task, self.config.run.seed
        torch.manual_seed(derive_seed(seed, "model"))  # every rank builds the same model
        self._read_initial()
        explain = partial(explain_errors, task, "train_data", "loss")
        # A pipeline calls the model once, to split its layers into stages.
        calls_model = self.plan.layout.mesh.pipeline > 1
        with (
            explain_out_of_memory(config, self.plan, world.device, has_model=False),
            explain() if calls_model else nullcontext(),
        ):
            strategy = strategy_class(self.plan.layout, task)(world, self.plan, task, config)
        self._closing.callback(strategy.close)
        seed_generators(derive_seed(seed, "worker", world.random_stream))  # each rank draws its own dropout
        self._setup_times.done("model")
        self._loader = loader = make_loader(config, self.plan, task, world)
        self._setup_times.done("data")
        self._state = RunState(
            progress=Progress(),
            strategy=strategy,
            loss_sum=torch.zeros((), dtype=torch.float64, device=world.device),
        )
        self._strategy = strategy
        self._validation = Validation(
            task,
            task.datasets()[1],
            config.speed.validation_batch_size,
            world,
            resident=self.plan.loader == "resident",
            num_loader_workers=num_loader_workers(config, world),
            make_batch=make_batch(task),
            is_sharded=strategy.is_sharded,
        )
        self._closing.callback(self._validation.close)
        self._closing.callback(loader.close)
        plan = self.plan
        if strategy.has_own_optimizer:
            reason = None if strategy.noise_scale is not None else strategy.noise_scale_reason
            plan = with_task_optimizer(config, plan, optimizer_name(strategy.optimizer), no_noise_scale=reason)
        if config.batch.batch_size == "auto":
            with explain():
                plan = find_micro_batch_size(config, plan, strategy, loader)
            self._setup_times.done("batch size")
        self.plan = with_layers(config, plan, **strategy.layer_kinds(), loss_reduction=task.loss_reduction)

    def _read_initial(self) -> None:
        """Read the weights of --init-from on rank 0, from which all ranks get them when the model is built."""
        source, read = self.config.run.init_from, dict[str, torch.Tensor]()
        if source is None or self.config.resumed is not None:
            return

        def initialise(model: torch.nn.Module) -> None:
            text = load_initial(model, read, source)
            self._notices.append(Notice(kind="info", text=text))

        self.world.from_rank_0(lambda: read.update(read_initial(source, self.config.run.runs_folder)))
        self.task._initialise = initialise if self.world.is_main else None

    def _check(self) -> None:
        """Run the first batches and undo them, before the run has a folder."""
        config, plan, strategy, loader = self.config, self.plan, self._strategy, self._loader
        plans = [plan.at_epoch(stage.first_epoch) for stage in plan.stages]
        grown = max(plans, key=lambda each: each.micro_batch_size)
        largest = replace(loader.share, global_batch_size=grown.global_batch_size, accumulate=grown.accumulate)
        is_larger = grown.micro_batch_size > plan.micro_batch_size and not strategy.is_sharded
        check_streams(self.task, self.world, loader, self._validation)
        with explain_out_of_memory(config, plan, self.world.device, has_model=True):
            self._checked_steps = sanity_check(
                strategy,
                loader,
                self._validation,
                may_diverge=config.stop.on_divergence == "ignore",
                largest=largest if is_larger else None,
                is_resumed=config.resumed is not None,
            )
        if config.resumed is None:
            check_single_samples(strategy, loader, plan, Progress(), self._checked_steps)
        self._setup_times.done("warm-up")

    def _open_run(self) -> None:
        """Open the run folder, and restore the checkpoint of a run that is resumed."""
        config, profile = self.config, self.config.command.profile
        self._profile_spec = spec = None if profile is None else parse_profile(profile)
        record_for_nsight(is_asked=spec is not None and spec.nvtx)  # refuses before there is a run folder
        self._records = RunRecorder(config, self.plan, self.world, self._state, self._setup_times, self._node_recorder)
        try:
            self._records.restore()
            self._has_nothing_to_do = self._records.is_past_end
            if self._has_nothing_to_do:
                self._records.close_unchanged()
                return
            self._loader.resume_from(self._state.progress.stream)
            if config.resumed is not None:
                progress = self._state.progress
                check_single_samples(self._strategy, self._loader, self.plan, progress, self._checked_steps)
        except BaseException:
            self._records.close()
            raise
        self._setup_times.done("run folder")


def _exit_code(outcome: Outcome) -> int:
    if outcome.diverged is not None:
        return EXIT_DIVERGED
    if outcome.signal_number == signal.SIGINT:
        return EXIT_INTERRUPTED
    return EXIT_RESUMABLE if outcome.signal_number else 0


def _require_same_plan(plan: Plan, world: World) -> None:
    """Refuse nodes whose devices or data lead to different plans."""
    layout = plan.layout
    world.require_same(
        {
            "device": layout.device_type,
            "strategy": layout.strategy,
            "mesh": str(layout.mesh),
            "precision": plan.precision,
            "SHA-256 of the data": plan.facts.data_sha256,
            "global batch": plan.global_batch_size,
            "learning rate": plan.learning_rate,
            "steps an epoch": plan.steps_per_epoch,
            "number of training samples": plan.facts.num_train,
            "number of validation samples": plan.facts.num_validation,
        }
    )


def set_arithmetic(config: TrainConfig, plan: Plan) -> None:
    """Set torch to the number formats and algorithms of the plan."""
    if plan.compile:
        keep_compiled(os.environ)
    set_precision(config, plan.precision, autotune=plan.autotune)


def set_precision(config: TrainConfig, precision: str, *, autotune: bool) -> None:
    """Set torch to the number formats of a precision, and to the algorithms that go with it."""
    tf32 = "ieee" if precision in ("fp32", "fp64") else "tf32"
    torch.backends.cuda.matmul.fp32_precision = tf32
    torch.backends.cudnn.conv.fp32_precision = tf32  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = autotune and not config.run.deterministic
    torch.set_default_dtype(torch.float64 if precision == "fp64" else torch.float32)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not repeatable without it
        torch.use_deterministic_algorithms(True)


def make_loader(config: TrainConfig, plan: Plan, task: Task, world: World) -> Loader:
    """The loader that the plan names, with this rank's share of every batch."""
    data = task.datasets()[0]
    share = Share(
        global_batch_size=plan.global_batch_size,
        accumulate=plan.accumulate,
        worker=world.data.rank,
        num_workers=world.data.size,
    )
    common = share, config.run.seed, task.num_draws, task.augment, world.device
    if plan.loader == "resident":
        assert isinstance(data, TensorData)
        return ResidentLoader(data, *common)
    num_workers = num_loader_workers(config, world)
    if is_stream(data):
        repeat = config.batch.epoch_samples is not None
        return IterableLoader(data, plan.facts.num_train, *common, min(1, num_workers), make_batch(task), repeat=repeat)
    return StreamedLoader(data, *common, num_workers, make_batch(task))


def make_batch(task: Task) -> Collate:
    """The collate function; only a task that defines one is sent to loading processes."""
    return collate if type(task).collate is Task.collate else task.collate


def num_loader_workers(config: TrainConfig, world: World) -> int:
    """The loading processes of one rank."""
    if config.speed.loader_workers is not None:
        return config.speed.loader_workers
    return min(8, max(1, num_cores() // world.rank_info.local_size - 1))
