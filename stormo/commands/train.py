"""The verb `train`: reads the settings, then starts the workers of this node or, in a worker, trains."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from typing import Any

from stormo.commands import dry_run
from stormo.config import options
from stormo.config.layout import Layout
from stormo.config.plan import resolve
from stormo.config.schema import TrainConfig
from stormo.errors import EXIT_FAILURE, StormoError, full_disk
from stormo.launch import RankInfo, alone, open_failure_reporter, run_node
from stormo.launch.environments.local import silence_resource_tracker
from stormo.launch.environments.torchrun import note_failure
from stormo.launch.hosts import hosts_of, on_hosts, start_on_hosts
from stormo.launch.nodes import check_restarts, find_place, node_of, run_with_restarts
from stormo.system.early_signals import leave_if_warned
from stormo.system.process import STARTED, die_with_parent, own_command, process_start_unix_s
from stormo.tasks.check import add_method_note, check_task
from stormo.tasks.task import Task
from stormo.telemetry.runs_folder import default_run_name
from stormo.training import staging
from stormo.training.settings import Settings, checked, handed_settings, merged_settings
from stormo.version import __version__


def main(arguments: list[str]) -> int:
    """Read the settings, find out who this process is, and go."""
    handed = handed_settings(os.environ)
    if handed is not None:
        settings, (config, task_class) = None, handed
    else:
        settings, task_class = merged_settings(arguments)
        config = settings.config(task_class.Options)
    check_task(task_class)
    place = find_place(config)
    hosts = hosts_of(config)
    check_restarts(on_hosts(config, hosts), place)
    if hosts and not config.command.dry_run:
        return start_on_hosts(config, hosts, "train", arguments)
    config = on_hosts(config, hosts)
    layout, task = checked(config, task_class, place)
    dry_run.check(config)
    if config.command.dry_run:
        if place is None or place.is_main:
            if task.needs_data_for_facts():
                task.fetch()
            has_own = task_class.optimizer is not Task.optimizer
            plan = resolve(config, layout, task.facts())
            dry_run.show(config, plan, sys.stdout, has_own=has_own, loss_reduction=task.loss_reduction)
        return 0
    if settings is not None and place is None and (layout.world_size > 1 or config.workers.max_restarts):
        if not task.needs_data_for_facts():
            resolve(config, layout, task.facts())  # refuses what it can before any process starts
        with staging.cleaned_up(config.command):
            return _start_workers(arguments, settings, config, task_class.Options, layout)
    return _work(config, layout, task, place or alone())


def _start_workers(
    arguments: list[str], settings: Settings, config: TrainConfig, task_options: type[Any], layout: Layout
) -> int:
    """Become the agent of this node: each worker runs this command again, and gets the settings that were read here."""
    leave_if_warned()
    workers, run, signals = config.workers, config.run, set[int]()
    # A restart resumes the run of the first attempt, so its name is set here.
    named = [*arguments, "--runs-folder", run.runs_folder, "--run-name", run.run_name or default_run_name(config.task)]
    first = named if workers.max_restarts and run.resume is None else arguments

    def attempt(number: int) -> int:
        words = [*named, "--resume"] if number else first
        handed = settings if words is arguments else merged_settings(words)[0]
        same = _same_on_all(handed.config(task_options), layout)
        started = str(time.time() if number else process_start_unix_s())
        return run_node(
            [*own_command("train"), *words],
            node_of(config, layout),
            timeout_s=workers.timeout,
            environ={**os.environ, STARTED: started, **handed.to_environment()},
            signals=signals,
            **same,
        )

    return run_with_restarts(attempt, restarts=workers.max_restarts, signals=signals, join_s=workers.timeout)


def _work(config: TrainConfig, layout: Layout, task: Task, place: RankInfo) -> int:
    """Train as one worker; a failure is reported to the others before this process ends."""
    if place.launcher == "torchrun":
        die_with_parent()  # torchrun would leave it behind
    silence_resource_tracker(os.environ)
    # Opened before torch is imported where possible: an agent wants signs of life from the start.
    lifeline = open_failure_reporter(place) if place.launcher in ("local", "alone") else None
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's sockets warn of every name they cannot look up
    try:
        from stormo.distributed.store import Store, address_book_of
        from stormo.training.trainer import run_worker

        if config.command.preflight:
            from stormo.doctor.network import require_rendezvous

            require_rendezvous(place)
        timeout_s = config.workers.timeout
        if lifeline is None:
            same = _same_on_all(config, layout)
            lifeline = open_failure_reporter(
                place, board=address_book_of(place, timeout_s), timeout_s=timeout_s, **same
            )
        store = Store(place, timeout_s, lifeline.store_address) if place.world_size > 1 else None
        code = run_worker(config, layout, task, place, store, lifeline)
    except (Exception, SystemExit) as raised:
        error = _no_exit(raised) if isinstance(raised, SystemExit) else full_disk(raised) or raised
        if not isinstance(error, StormoError):
            add_method_note(error, task)
        if lifeline is None or not lifeline.shows_failures:
            note_failure(os.environ, f"{type(error).__name__}: {error}")
            raise error from None if error is not raised else raised.__cause__
        from stormo.distributed.store import is_secondary

        lifeline.report_failure(error, secondary=is_secondary(error))
        return error.exit_code if isinstance(error, StormoError) else EXIT_FAILURE
    lifeline.close()
    return code


def _no_exit(raised: SystemExit) -> StormoError:
    return StormoError(
        f"the task ended its process with exit code {raised.code} in the middle of training; "
        "raise an error instead, or let training end by --epochs or --target-accuracy."
    )


def _same_on_all(config: TrainConfig, layout: Layout) -> dict[str, Any]:
    """What all nodes must agree on, as a digest and in words."""
    settings = {f"--{key.replace('_', '-')}": str(value) for key, value in options.flat_settings(config).items()}
    settings |= {
        "the release of stormo": __version__,
        "the device": layout.device_type,
        "the communication library": layout.backend,
        "the resumed run": str(config.resumed),  # a node that does not see its folder would start a new one
    }
    return {"digest": hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest(), "options": settings}
