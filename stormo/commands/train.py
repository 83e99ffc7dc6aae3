"""The verb `train`: reads the settings, then starts the workers of this node or, inside one, trains."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from typing import Any

from stormo.config import options
from stormo.config.layout import Layout
from stormo.config.plan import resolve
from stormo.config.schema import TrainConfig
from stormo.errors import EXIT_FAILURE, StormoError, full_disk
from stormo.launch import Place, alone, open_lifeline, run_node
from stormo.launch.environments.local import hush_tracker
from stormo.launch.environments.torchrun import note_failure
from stormo.launch.hosts import hosts_of, on_hosts, start_on_hosts
from stormo.launch.nodes import check_restarts, find_place, node_of, run_with_restarts
from stormo.system.early_signals import leave_if_warned
from stormo.system.process import STARTED, die_with_parent, own_command, process_start_unix_s
from stormo.tasks.check import check_task, note_method
from stormo.tasks.task import Task
from stormo.telemetry.finding import default_run_name
from stormo.training import dry_run, staging
from stormo.training.settings import checked, read_settings
from stormo.version import __version__


def main(arguments: list[str]) -> int:
    """Read the settings, see who this process is, and go."""
    config, task_class = read_settings(arguments)
    check_task(task_class)
    place = find_place(config)
    hosts = hosts_of(config)
    check_restarts(on_hosts(config, hosts), place)
    if hosts and not config.command.dry_run:
        return start_on_hosts(config, hosts, "train", arguments)
    config = on_hosts(config, hosts)
    layout, task = checked(config, task_class, place)
    if config.command.dry_run:
        if place is None or place.is_main:
            if task.needs_data_for_facts():
                task.fetch()
            has_own = task_class.optimizer is not Task.optimizer
            plan = resolve(config, layout, task.facts())
            dry_run.show(config, plan, sys.stdout, has_own=has_own, loss_reduction=task.loss_reduction)
        return 0
    if place is None and (layout.world_size > 1 or config.workers.max_restarts):
        if not task.needs_data_for_facts():
            resolve(config, layout, task.facts())  # whatever is wrong is said before any process starts
        with staging.cleaned_up(config.command):
            return _start_workers(arguments, config, layout)
    return _work(config, layout, task, place or alone())


def _start_workers(arguments: list[str], config: TrainConfig, layout: Layout) -> int:
    """Become the agent of this node: the workers run this very command again, told who they are."""
    leave_if_warned()
    workers, run, signals = config.workers, config.run, set[int]()
    # Restarts go on with the run of the first attempt, so that its name is settled here.
    named = [*arguments, "--runs-folder", run.runs_folder, "--run-name", run.run_name or default_run_name(config.task)]
    first = named if workers.max_restarts and run.resume is None else arguments

    def attempt(number: int) -> int:
        words = [*named, "--resume"] if number else first
        os.environ[STARTED] = str(time.time() if number else process_start_unix_s())
        same = _same_on_all(read_settings(words)[0] if number else config, layout)
        command = [*own_command("train"), *words]
        return run_node(command, node_of(config, layout), timeout_s=workers.timeout, signals=signals, **same)

    return run_with_restarts(attempt, restarts=workers.max_restarts, signals=signals, join_s=workers.timeout)


def _work(config: TrainConfig, layout: Layout, task: Task, place: Place) -> int:
    """Be a worker; whatever goes wrong is told to the others before this process ends."""
    if place.launcher == "torchrun":
        die_with_parent()  # nobody else would end it
    hush_tracker(os.environ)
    # Taken up before torch is imported where it can be: an agent wants signs of life from the start.
    lifeline = open_lifeline(place) if place.launcher in ("local", "alone") else None
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's sockets warn of every name they cannot look up
    try:
        from stormo.distributed.store import Store, board_of
        from stormo.training.worker import run_worker

        if config.command.preflight:
            from stormo.doctor.reach import require_meeting_point

            require_meeting_point(place)
        timeout_s = config.workers.timeout
        if lifeline is None:
            same = _same_on_all(config, layout)
            lifeline = open_lifeline(place, board=board_of(place, timeout_s), timeout_s=timeout_s, **same)
        store = Store(place, timeout_s, lifeline.meeting_point) if place.world_size > 1 else None
        code = run_worker(config, layout, task, place, store, lifeline)
    except (Exception, SystemExit) as raised:
        error = _no_exit(raised) if isinstance(raised, SystemExit) else full_disk(raised) or raised
        if not isinstance(error, StormoError):
            note_method(error, task)
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
    """What must agree on all nodes, as a digest and in words."""
    settings = {f"--{key.replace('_', '-')}": str(value) for key, value in options.flat_settings(config).items()}
    settings |= {
        "the release of stormo": __version__,
        "the device": layout.device_type,
        "the communication library": layout.backend,
        "the resumed run": str(config.resumed),  # a node that does not see its folder would start anew
    }
    return {"digest": hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest(), "options": settings}
