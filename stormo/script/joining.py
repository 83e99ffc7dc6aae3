"""How a script joins the other workers, how it is asked to stop, and how it ends."""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist

from stormo.config import schema
from stormo.config.layout import Layout, resolve_layout
from stormo.distributed.devices import device_of, share_cores
from stormo.distributed.store import Store, address_book_of, is_secondary
from stormo.distributed.world import World
from stormo.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_RESUMABLE, SettingError, StormoError
from stormo.launch import FailureReporter, RankInfo, alone, open_failure_reporter
from stormo.launch.environments.detect import detect
from stormo.launch.failure_reporter import flush_streams
from stormo.launch.nodes import BACKEND, DEVICE, TIMEOUT, equal_settings, shape_of
from stormo.launch.slices import take_slice
from stormo.system.hardware import visible_gpus
from stormo.system.signals import BY_SCRIPT
from stormo.telemetry.text import tell

_releases: list[Callable[[], None]] = []  # called before an error ends the process at once


def join(device: str | None, backend: str | None, timeout_s: float | None) -> tuple[World, FailureReporter]:
    """Join the other workers; None stands for the flag of `stormo run`, or else the default."""
    _require_clean_process()
    _write_whole_lines()
    rank_info = detect(os.environ) or alone()
    take_slice(rank_info, device or os.environ.get(DEVICE, "auto"))
    reporter = open_failure_reporter(rank_info) if rank_info.launcher in ("local", "alone") else None
    if reporter is not None:
        _report_errors(rank_info, reporter)
    limit_s = timeout_s if timeout_s is not None else float(os.environ.get(TIMEOUT, schema.Workers.timeout))
    layout = _layout(rank_info, device, backend, limit_s)
    share_cores(rank_info)
    if reporter is None:  # another launcher has started the workers
        same = equal_settings({"the script and its flags": " ".join(sys.argv)}, layout)
        address_book = address_book_of(rank_info, limit_s)
        reporter = open_failure_reporter(rank_info, address_book=address_book, timeout_s=limit_s, **same)
        _report_errors(rank_info, reporter)
    store = Store(rank_info, limit_s, reporter.store_address) if rank_info.world_size > 1 else None
    own = device_of(layout.device_type, rank_info, store, may_share=layout.may_share)
    if rank_info.rank == 0 and layout.backend == "nccl" and layout.shares_a_gpu:
        tell(f"workers: {dict(layout.explanation)['workers']}")
    return World(rank_info, own, store=store, backend=layout.backend, timeout_s=limit_s), reporter


def _layout(rank_info: RankInfo, device: str | None, backend: str | None, timeout_s: float) -> Layout:
    choices: dict[str, Any] = {"timeout": timeout_s}
    for name, given, flag in (
        ("device", device, os.environ.get(DEVICE)),
        ("backend", backend, os.environ.get(BACKEND)),
    ):
        if given is not None and flag not in (None, "auto", given):
            raise SettingError(
                f"stormo run was given --{name} {flag}",
                f"the script says World({name}={given!r})",
                "leave one of them out",
            )
        choices[name] = given or flag or "auto"
    workers = schema.Workers(**choices)
    return resolve_layout(schema.TrainConfig(workers=workers), visible_gpus(), shape_of(rank_info))


def _require_clean_process() -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SettingError(
            "stormo.World() was called in a process that the script has started",
            "such a process runs the whole file again",
            'put all but definitions under if __name__ == "__main__":',
        )
    if dist.is_available() and dist.is_initialized():
        raise SettingError(
            "stormo.World() was called after torch.distributed.init_process_group()",
            "it joins the workers itself, with its own store and time limits",
            "leave that line out; torch.distributed works after stormo.World()",
        )


def _write_whole_lines() -> None:
    """With PYTHONUNBUFFERED set, print writes a line and its end separately, and another worker's can come between."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)


def _report_errors(rank_info: RankInfo, reporter: FailureReporter) -> None:
    """Report an error that ends this script to the other workers; show those of stormo without a traceback."""
    inner = sys.excepthook
    pid = os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != pid:  # the script has forked this process
            inner(kind, error, trace)
            return
        for release in _releases:
            with contextlib.suppress(Exception):
                release()
        if rank_info.world_size == 1 and (not isinstance(error, StormoError) or hasattr(sys, "ps1")):
            inner(kind, error, trace)
            return
        if isinstance(error, KeyboardInterrupt):  # the terminal has signalled all of them, and the agent reports it
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            flush_streams()
            os.kill(pid, signal.SIGINT)
        with contextlib.suppress(Exception):
            reporter.report_failure(error, secondary=is_secondary(error))
        if not reporter.shows_failures:
            tell(str(error))
            atexit._run_exitfuncs()  # nobody waits for this process, so it ends as any does
        flush_streams()
        # Nothing may wait for the others now, as leaving a process group might.
        os._exit(error.exit_code if isinstance(error, StormoError) else EXIT_FAILURE)

    sys.excepthook = hook


def before_error_exit(release: Callable[[], None]) -> None:
    """Call this before an error ends the process, which then runs no more of the script."""
    _releases.append(release)


def at_exit(close: Callable[[], None]) -> None:
    """Call this when the script ends; not when a process that it has forked does."""
    pid = os.getpid()
    atexit.register(lambda: close() if os.getpid() == pid else None)


def exit_code_of(agreed_stop: int) -> int:
    """What a script ends with after the stop that its workers have agreed on."""
    if agreed_stop <= BY_SCRIPT:
        return 0
    return EXIT_INTERRUPTED if agreed_stop == signal.SIGINT else EXIT_RESUMABLE
