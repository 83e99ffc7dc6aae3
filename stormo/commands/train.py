"""The verb `train`: reads the settings, then starts the workers of this node or, in a worker, trains."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stormo.commands import dry_run
from stormo.config import options
from stormo.config.layout import Layout
from stormo.config.plan import resolve
from stormo.config.schema import TrainConfig
from stormo.errors import EXIT_FAILURE, EXIT_USAGE, StormoError, full_disk
from stormo.launch import FailureReporter, RankInfo, alone, open_failure_reporter, run_node
from stormo.launch.environments.local import silence_resource_tracker
from stormo.launch.environments.torchrun import note_failure
from stormo.launch.failure import Failure
from stormo.launch.hosts import hosts_of, on_hosts, start_on_hosts
from stormo.launch.nodes import check_restarts, equal_settings, find_rank_info, node_of, run_with_restarts
from stormo.launch.output import say
from stormo.launch.slices import take_slice
from stormo.system.process import STARTED, die_with_parent, keep_imported, process_start_unix_s, stormo_command
from stormo.system.signals import exit_if_sigusr1_came
from stormo.tasks.check import check_task
from stormo.telemetry.runs_folder import default_run_name, run_started_at
from stormo.telemetry.runs_folder import note_failure as note_failure_of_run
from stormo.training import staging
from stormo.training.initial_file import check_initial
from stormo.training.settings import Settings, checked, inherited_settings, merged_settings

if TYPE_CHECKING:
    from stormo.distributed.store import Store


def main(arguments: list[str]) -> int:
    """Read the settings, find out who this process is, and go."""
    inherited = inherited_settings(os.environ)
    if inherited is not None:
        settings, (config, task_class) = None, inherited
    else:
        settings, task_class = merged_settings(arguments)
        config = settings.config(task_class.Options)
    check_task(task_class)
    rank_info = find_rank_info(config)
    take_slice(rank_info, config.workers.device)
    hosts = hosts_of(config)
    check_restarts(on_hosts(config, hosts), rank_info)
    if hosts and not config.command.dry_run:
        return start_on_hosts(config, hosts, "train", arguments)
    config = on_hosts(config, hosts)
    layout, task = checked(config, task_class, rank_info)
    dry_run.check(config)
    if config.command.dry_run:
        if rank_info is None or rank_info.is_main:
            if config.run.init_from is not None and config.resumed is None:
                check_initial(config.run.init_from, config.run.runs_folder)
            if task.needs_data_for_facts():
                task.fetch()
            dry_run.show(config, resolve(config, layout, task.facts()), task, sys.stdout)
        return 0
    if settings is not None and rank_info is None and (layout.world_size > 1 or config.workers.max_restarts):
        if not task.needs_data_for_facts():
            resolve(config, layout, task.facts())  # refuses what it can before any process starts
        with staging.cleaned_up(config.command):
            return _start_workers(arguments, settings, config, task_class.Options, layout)
    who = rank_info or alone()

    def train(store: Store | None, reporter: FailureReporter) -> int:
        from stormo.training.trainer import run_worker

        keep_imported()
        return run_worker(config, layout, task, who, store, reporter)

    return work(config, layout, who, train)


def _start_workers(
    arguments: list[str], settings: Settings, config: TrainConfig, task_options: type[Any], layout: Layout
) -> int:
    """Be the agent of this node: each worker runs this command again, and gets the settings that were read here."""
    exit_if_sigusr1_came()
    workers, run, signals, failures, started = config.workers, config.run, set[int](), list[Failure](), 0.0
    # A restart resumes the run of the first attempt, so its name is set here.
    named = [*arguments, "--runs-folder", run.runs_folder, "--run-name", run.run_name or default_run_name(config.task)]
    first = named if workers.max_restarts and run.resume is None else arguments

    def attempt(number: int) -> int:
        attempt_arguments = [*named, "--resume"] if number else first
        merged = settings if attempt_arguments is arguments else merged_settings(attempt_arguments)[0]
        equal = equal_options(merged.config(task_options), layout)
        nonlocal started
        started = time.time() if number else process_start_unix_s()
        failures.clear()
        return run_node(
            [*stormo_command("train"), *attempt_arguments],
            node_of(config, layout),
            timeout_s=workers.timeout,
            environ={**os.environ, STARTED: str(started), **merged.to_environment()},
            signals=signals,
            failures=failures,
            **equal,
        )

    code = run_with_restarts(attempt, restarts=workers.max_restarts, signals=signals, join_s=workers.timeout)
    if failures and code in (EXIT_FAILURE, EXIT_USAGE) and workers.node_id == 0:
        _note_failure(Path(run.runs_folder), started, failures[-1])
    return code


def _note_failure(runs_folder: Path, started_unix_s: float, failure: Failure) -> None:
    """Write why the workers failed into their run, and say how to resume it."""
    with contextlib.suppress(OSError, StormoError):  # neither may hide the failure
        run = run_started_at(runs_folder, started_unix_s)
        if run is not None and (hint := note_failure_of_run(run, failure.sentence)):
            say(hint)


def work(
    config: TrainConfig,
    layout: Layout,
    rank_info: RankInfo,
    body: Callable[[Store | None, FailureReporter], int],
) -> int:
    """Be one worker, which runs `body`; a failure is reported to the others before this process ends."""
    if rank_info.launcher == "torchrun":
        die_with_parent()  # torchrun would leave it behind
    silence_resource_tracker(os.environ)
    # Opened before torch is imported where possible: an agent wants signs of life from the start.
    reporter = open_failure_reporter(rank_info) if rank_info.launcher in ("local", "alone") else None
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch also raises the errors that it logs
    try:
        from stormo.distributed.store import Store, address_book_of

        if config.command.preflight:
            from stormo.doctor.measure import require_rendezvous

            require_rendezvous(rank_info)
        timeout_s = config.workers.timeout
        if reporter is None:
            equal = equal_options(config, layout)
            reporter = open_failure_reporter(
                rank_info, address_book=address_book_of(rank_info, timeout_s), timeout_s=timeout_s, **equal
            )
        store = Store(rank_info, timeout_s, reporter.store_address) if rank_info.world_size > 1 else None
        code = body(store, reporter)
    except (Exception, SystemExit) as raised:
        error = _exit_error(raised) if isinstance(raised, SystemExit) else full_disk(raised) or raised
        if reporter is None or not reporter.shows_failures:
            note_failure(os.environ, f"{type(error).__name__}: {error}")
            raise error from None if error is not raised else raised.__cause__
        from stormo.distributed.store import is_secondary

        reporter.report_failure(error, secondary=is_secondary(error))
        return error.exit_code if isinstance(error, StormoError) else EXIT_FAILURE
    reporter.close()
    return code


def _exit_error(raised: SystemExit) -> StormoError:
    return StormoError(
        f"the task ended its process with exit code {raised.code} in the middle of training; "
        "raise an error instead, or let training end by --epochs or --target-accuracy."
    )


def equal_options(config: TrainConfig, layout: Layout) -> dict[str, Any]:
    """The settings that must be equal on all nodes."""
    settings = {f"--{key.replace('_', '-')}": str(value) for key, value in options.flat_settings(config).items()}
    settings["the resumed run"] = str(config.resumed)  # a node that does not see its folder would start a new one
    return equal_settings(settings, layout)
