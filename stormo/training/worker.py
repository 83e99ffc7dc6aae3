"""Inside one worker: join the others, load the task, and train; the folder of the run is written by the main one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from stormo.config.layout import Layout
from stormo.config.plan import Plan, resolve, with_layers, with_own_optimizer
from stormo.config.plan.profile import parse_profile
from stormo.config.schema import TrainConfig
from stormo.data.batches import Collate, collate
from stormo.data.iterables import IterableLoader
from stormo.data.loaders import Loader, ResidentLoader, Share, StreamedLoader
from stormo.data.order import derive_seed, seed_generators
from stormo.data.reading import is_stream
from stormo.data.sample_check import require_same_start
from stormo.data.staging.copying import StoppedError
from stormo.data.tensors import TensorData
from stormo.distributed.devices import device_of, share_cores
from stormo.distributed.signals import StopFlag, stop_flag
from stormo.distributed.store import Store
from stormo.distributed.world import World
from stormo.errors import EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_RESUMABLE, SettingError
from stormo.launch import Lifeline, Place
from stormo.optim.schedule import make_schedule
from stormo.parallel.base import Strategy
from stormo.parallel.batch_size import find_passes
from stormo.parallel.table import strategy_class
from stormo.profiling.ranges import record_for_nsight
from stormo.profiling.window import ProfileWindow
from stormo.system.cache import keep_compiled
from stormo.system.hardware import num_cores
from stormo.system.process import SetUp
from stormo.tasks.task import Task
from stormo.telemetry.record import Notice
from stormo.training.journal import Journal
from stormo.training.loop import Training, train
from stormo.training.measuring import AnyKeeper, open_keeper
from stormo.training.metrics import Validation
from stormo.training.out_of_memory import memory_explained, note_memory
from stormo.training.progress import Progress
from stormo.training.recovery import Recovery
from stormo.training.rehearsal import Steps, explained, rehearse, rehearse_lone_samples
from stormo.training.staging import staged_task
from stormo.training.state import RunState

_NUM_COMPARED = 4  # samples at the start of a stream


def run_worker(
    config: TrainConfig, layout: Layout, task: Task, place: Place, store: Store | None, lifeline: Lifeline
) -> int:
    """Train as one worker of the job; return its exit code."""
    set_up = SetUp()
    set_up.done("imports")
    share_cores(place)
    with stop_flag(announces=place.launcher == "alone", is_last=True) as flag:
        device = device_of(layout.device_type, place, store, may_share=layout.backend == "gloo")
        join = partial(
            World,
            place,
            device,
            store=store,
            backend=layout.backend,
            timeout_s=config.workers.timeout,
            mesh=layout.mesh,
            data_axes=layout.data_axes,
            needs_group=layout.is_spread,
        )
        if config.command.preflight:
            from stormo.doctor.training import join_after_preflight

            world, notices = join_after_preflight(join, device, config, layout, place, store, lifeline)
        else:
            world, notices = join(), []
        keeper = open_keeper(world, devices_per_worker=layout.devices_per_worker, is_on=config.energy.energy)
        with contextlib.closing(keeper):
            set_up.done("joining")
            fetched = None
            with world.once_per_node() as is_fetcher:
                if is_fetcher:
                    fetched = task.fetch()
            set_up.done("fetching")
            try:
                with staged_task(config.command, task, fetched, world, lambda: flag.signal_number) as (near, said):
                    set_up.done("staging")
                    plan = resolve(config, layout, near.facts())
                    _require_same_plan(plan, world)
                    set_arithmetic(config, plan)
                    notices = [*notices, *(Notice(kind="info", text=text) for text in said)]
                    code = _train(config, plan, near, world, flag, lifeline.alive, set_up, keeper, notices)
            except StoppedError as stopped:  # all workers alike, before anything was trained
                code = stopped.exit_code
        # Only in order: after a failure nothing may stand between it and its report, and the process ends anyway.
        world.close()
    return code


def _require_same_plan(plan: Plan, world: World) -> None:
    """What follows from a node's own devices must follow on every node."""
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
    tf32 = "ieee" if plan.precision in ("fp32", "fp64") else "tf32"
    torch.backends.cuda.matmul.fp32_precision = tf32
    torch.backends.cudnn.conv.fp32_precision = tf32  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = plan.autotune
    torch.set_default_dtype(torch.float64 if plan.precision == "fp64" else torch.float32)
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not repeatable without it
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def _train(
    config: TrainConfig,
    plan: Plan,
    task: Task,
    world: World,
    flag: StopFlag,
    sign_of_life: Callable[[int], None],
    set_up: SetUp,
    keeper: AnyKeeper,
    notices: Sequence[Notice],
) -> int:
    seed = config.run.seed
    torch.manual_seed(derive_seed(seed, "model"))  # every worker builds the same model
    # To cut its layers into stages, a pipeline calls the model once.
    calls_model = plan.layout.mesh.pipeline > 1
    with (
        memory_explained(config, plan, world.device, has_model=False),
        explained(task, "train_data", "loss", world.device) if calls_model else contextlib.nullcontext(),
    ):
        strategy = strategy_class(plan.layout)(world, plan, task, config)
    plan = with_own_optimizer(config, plan, type(strategy.optimizer).__name__) if strategy.has_own_optimizer else plan
    seed_generators(derive_seed(seed, "worker", world.draws))  # and has its own dropout
    set_up.done("model")
    loader = make_loader(config, plan, task, world)
    set_up.done("data")
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    state = RunState(progress=Progress(), strategy=strategy, loss_sum=loss_sum)
    validation = Validation(
        task,
        task.datasets()[1],
        config.speed.validation_batch_size,
        world,
        resident=plan.loader == "resident",
        num_loader_workers=_num_loader_workers(config, world),
        make_batch=make_batch(task),
        together=strategy.is_spread,
    )
    if config.batch.batch_size == "auto":
        with explained(task, "train_data", "loss", world.device):
            plan = find_passes(config, plan, strategy, loader)
        set_up.done("batch size")
    rehearsed = _rehearse(config, plan, strategy, loader, validation)
    set_up.done("first passes")
    spec = None if config.command.profile is None else parse_profile(config.command.profile)
    record_for_nsight(is_asked=spec is not None and spec.nvtx)  # refuses before there is a run folder
    journal = Journal(
        config,
        with_layers(config, plan, **strategy.layers_it_has(), loss_reduction=task.loss_reduction),
        world,
        state,
        set_up,
        keeper,
    )
    if not _take_up(config, plan, journal, state, loader, rehearsed):
        loader.close()
        validation.close()
        return 0
    set_up.done("run folder")
    journal.start()
    recovery = Recovery(config, plan, world, state, journal)
    profile = ProfileWindow(spec, world, journal.run_folder)
    for notice in (*notices, *(Notice(kind="warning", text=text) for text in strategy.notices)):
        journal.record(notice)
    try:
        recovery.prepare()
        flag.is_training = True
        sign_of_life(state.progress.step)
        outcome = train(
            Training(
                world=world,
                plan=plan,
                settings=config,
                state=state,
                loader=loader,
                validation=validation,
                schedule=make_schedule(config, plan, strategy.rate_factor),
                flag=flag,
                record=journal.record,
                save=journal.save,
                sign_of_life=sign_of_life,
                keeper=keeper,
                profile=profile,
                recover=recovery.roll_back,
            )
        )
    except BaseException as error:
        note_memory(config, plan, error)
        with contextlib.suppress(OSError):  # a full disk must not hide what went wrong
            journal.end("error")
        raise
    for text in profile.close():
        journal.record(Notice(kind="info", text=text))
    if outcome.diverged is not None:
        recovery.give_up(outcome.diverged)
        journal.end(outcome.stopped_by, diverged_at_step=outcome.diverged.step)
    else:
        journal.end(outcome.stopped_by)
    loader.close()
    validation.close()
    if outcome.diverged is not None:
        return EXIT_DIVERGED
    if outcome.signal_number == signal.SIGINT:
        return EXIT_INTERRUPTED
    return EXIT_RESUMABLE if outcome.signal_number else 0


def _require_same_streams(task: Task, world: World, loader: Loader, validation: Validation) -> None:
    """Refuse a stream of which every worker reads another part. All workers call it."""
    if world.size == 1:
        return

    def refusal(method: str, rank: int) -> SettingError:
        return SettingError(
            f"{type(task).__name__}.{method}() gave a stream that starts with other samples on rank {rank} than on "
            "rank 0",
            "each worker reads the whole stream and takes its share of every batch, so that samples would be left out",
            "let the stream give all samples to every worker, whatever its rank: do not shard it",
        )

    if isinstance(loader, IterableLoader):
        read = partial(loader.start, _NUM_COMPARED)
        with explained(task, "train_data", "loss", world.device):
            require_same_start(world, read(), read, partial(refusal, "train_data"))
    if validation.is_stream:
        with explained(task, "validation_data", "metrics", world.device):
            require_same_start(world, validation.start(), validation.start, partial(refusal, "validation_data"))


def _rehearse(config: TrainConfig, plan: Plan, strategy: Strategy, loader: Loader, validation: Validation) -> Steps:
    """Take the first passes, before the run has a folder; the steps that need not be rehearsed again."""
    world = strategy.world
    grown = max(map(plan.at_epoch, (stage.first_epoch for stage in plan.stages)), key=lambda at: at.batch_per_pass)
    largest = replace(loader.share, global_batch_size=grown.global_batch_size, accumulate=grown.accumulate)
    _require_same_streams(strategy.task, world, loader, validation)
    with memory_explained(config, plan, world.device, has_model=True):
        rehearsed = rehearse(
            strategy,
            loader,
            validation,
            every_shape=world.size > 1 or world.device.type == "cuda" or plan.compile or plan.loader == "streamed",
            may_diverge=config.stop.on_divergence == "ignore",
            largest=largest if grown.batch_per_pass > plan.batch_per_pass and not strategy.is_spread else None,
            goes_on=config.resumed is not None,
        )
    if config.resumed is None:
        rehearse_lone_samples(strategy, loader, plan, Progress(), rehearsed)
    return rehearsed


def _take_up(
    config: TrainConfig, plan: Plan, journal: Journal, state: RunState, loader: Loader, rehearsed: Steps
) -> bool:
    """Go on where the run is; False where it has nothing left to do. So far its folder is as it was."""
    try:
        journal.resume()
        if journal.is_past_end:
            journal.leave()
            return False
        if config.resumed is not None:
            rehearse_lone_samples(state.strategy, loader, plan, state.progress, rehearsed)
    except BaseException:
        journal.close()
        raise
    return True


def make_loader(config: TrainConfig, plan: Plan, task: Task, world: World) -> Loader:
    """The loader that the plan names, with this worker's share of every batch."""
    data = task.datasets()[0]
    share = Share(
        global_batch_size=plan.global_batch_size,
        accumulate=plan.accumulate,
        worker=world.data.rank,
        num_workers=world.data.size,
    )
    seed, num_draws = config.run.seed, task.num_draws
    if plan.loader == "resident":
        assert isinstance(data, TensorData)
        return ResidentLoader(data, share, seed, num_draws, task.augment, world.device)
    num_workers = _num_loader_workers(config, world)
    if is_stream(data):
        return IterableLoader(
            data,
            plan.facts.num_train,
            share,
            seed,
            num_draws,
            task.augment,
            world.device,
            min(1, num_workers),
            make_batch(task),
            goes_on=config.batch.epoch_samples is not None,
        )
    return StreamedLoader(data, share, seed, num_draws, task.augment, world.device, num_workers, make_batch(task))


def make_batch(task: Task) -> Collate:
    """How samples become a batch; the task itself is sent to loading processes only where it says how."""
    return collate if type(task).collate is Task.collate else task.collate


def _num_loader_workers(config: TrainConfig, world: World) -> int:
    if config.speed.loader_workers is not None:
        return config.speed.loader_workers
    return min(8, max(1, num_cores() // world.place.local_size - 1))
