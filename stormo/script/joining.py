"""How a script becomes one of the workers: who it is, its device, its line to the others, and how it ends."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch.distributed as dist

from stormo.config import schema
from stormo.config.layout import Launched, Layout, resolve_layout
from stormo.distributed.devices import device_of, share_cores
from stormo.distributed.store import Store, board_of, is_secondary
from stormo.distributed.world import World
from stormo.errors import EXIT_FAILURE, SettingError, StormoError
from stormo.launch import Lifeline, Place, alone, open_lifeline
from stormo.launch.environments.detect import detect
from stormo.launch.environments.slurm import gpus_on_node
from stormo.launch.nodes import BACKEND, DEVICE, TIMEOUT
from stormo.system.hardware import visible_gpus

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A worker that has met the others."""

    world: World
    lifeline: Lifeline


def join(device: str | None, backend: str | None, timeout_s: float | None) -> Joined:
    """Meet the other workers; None stands for what `stormo run` was told, or else the default."""
    _require_own_process()
    _require_no_group()
    _write_whole_lines()
    place = detect(os.environ) or alone()
    lifeline = open_lifeline(place) if place.launcher in ("local", "alone") else None
    if lifeline is not None:
        _tell_failures(place, lifeline)
    layout = _layout(place, device, backend, timeout_s)
    limit_s = _limit_s(timeout_s)
    share_cores(place)
    if lifeline is None:  # another launcher has started the workers
        board = board_of(place, limit_s)
        lifeline = open_lifeline(place, board=board, timeout_s=limit_s, **_same_on_all(layout))
        _tell_failures(place, lifeline)
    store = Store(place, limit_s, lifeline.meeting_point) if place.world_size > 1 else None
    own = device_of(layout.device_type, place, store, may_share=layout.backend == "gloo")
    world = World(place, own, store=store, backend=layout.backend, timeout_s=limit_s)
    return Joined(world=world, lifeline=lifeline)


def _layout(place: Place, device: str | None, backend: str | None, timeout_s: float | None) -> Layout:
    choices: dict[str, Any] = {"timeout": _limit_s(timeout_s)}
    for name, given, variable in (("device", device, DEVICE), ("backend", backend, BACKEND)):
        choices[name] = _one_of(name, given, os.environ.get(variable))
    launched = Launched(
        launcher=place.launcher,
        world_size=place.world_size,
        local_size=place.local_size,
        num_nodes=place.num_nodes,
        gpus_on_node=gpus_on_node(os.environ) if place.launcher == "slurm" else None,
    )
    workers = schema.Workers(**choices)
    return resolve_layout(schema.TrainConfig(workers=workers), visible_gpus(), launched)


def _one_of(name: str, given: str | None, flag: str | None) -> str:
    if given is not None and flag not in (None, "auto", given):
        raise SettingError(
            f"stormo run was given --{name} {flag}", f"the script says World({name}={given!r})", "leave one of them out"
        )
    return given or flag or "auto"


def _limit_s(timeout_s: float | None) -> float:
    return timeout_s if timeout_s is not None else float(os.environ.get(TIMEOUT, schema.Workers.timeout))


def _same_on_all(layout: Layout) -> dict[str, Any]:
    options = {"the script and its flags": " ".join(sys.argv), "the device": layout.device_type}
    digest = hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()
    return {"digest": digest, "options": options}


def _require_own_process() -> None:
    """Refuse a process that loads data and, as it starts, runs the script again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SettingError(
            "stormo.World() was called in a process that the script has started",
            "such a process runs the whole file again to find what it needs",
            'put all but definitions under if __name__ == "__main__":',
        )


def _require_no_group() -> None:
    """Refuse a script that has joined the workers itself, as those for torchrun do."""
    if dist.is_available() and dist.is_initialized():
        raise SettingError(
            "stormo.World() was called behind torch.distributed.init_process_group()",
            "it joins the workers itself, with a store and time limits of its own",
            "leave that line out; what torch.distributed offers works behind stormo.World()",
        )


def _write_whole_lines() -> None:
    """With PYTHONUNBUFFERED set, print writes a line and its end apart, and another worker's can come between."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)


def _tell_failures(place: Place, lifeline: Lifeline) -> None:
    """From now on an error that ends this script is told to the others; one of ours is one sentence, not a trace."""
    inner: _Hook = sys.excepthook
    pid = os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_alone = place.world_size == 1 and (not isinstance(error, StormoError) or hasattr(sys, "ps1"))
        if is_alone or os.getpid() != pid:  # or the script has forked this process
            inner(kind, error, trace)
            return
        if isinstance(error, KeyboardInterrupt):  # the terminal has told all of them, and the agent says so
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _flush()
            os.kill(pid, signal.SIGINT)
        with contextlib.suppress(Exception):
            lifeline.report_failure(error, secondary=is_secondary(error))
        if not lifeline.shows_failures:
            print(f"stormo: {error}", file=sys.stderr)  # noqa: T201
            atexit._run_exitfuncs()  # nobody waits for this process, so it ends as any does
        _flush()
        # Nothing may wait for the others now, as leaving a process group might.
        os._exit(error.exit_code if isinstance(error, StormoError) else EXIT_FAILURE)

    sys.excepthook = hook


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def at_any_end(release: Callable[[], None]) -> None:
    """Before an error that ends this script is told, which ends the process at once, let go of something."""
    inner: _Hook = sys.excepthook
    pid = os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == pid:
            with contextlib.suppress(Exception):
                release()
        inner(kind, error, trace)

    sys.excepthook = hook


def at_exit(close: Callable[[], None]) -> None:
    """Leave in order when the script ends; not when a process that it has forked does."""
    pid = os.getpid()

    def leave() -> None:
        if os.getpid() == pid:
            close()

    atexit.register(leave)
