"""A window of steps that torch's profiler records on every worker; outside the window it costs nothing.

`before_step` does what takes long (starting the profiler, writing) between steps and outside of training time. Traces
are Chrome traces, which Perfetto and TensorBoard's profiler plugin open.
"""

from __future__ import annotations

import atexit
import gzip
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from stormo.config.plan.steps import ProfileSpec
from stormo.data.loaders import Batch
from stormo.distributed.world import World
from stormo.profiling.ranges import range_of, record_ranges
from stormo.profiling.summary import STEP, lines, overview, summarise
from stormo.system.files import create
from stormo.telemetry.folder import write_json

_TRACE = "rank-{}.pt.trace.json.gz"  # TensorBoard's plugin looks for this ending
_NO_KERNELS = (
    "the driver reported no kernel, so the times are those of the host; another profiler may hold the GPU's "
    "counters, or they are restricted to root (NVreg_RestrictProfilingToAdminUsers)"
)
_WARM_UP_STEPS = 2  # the profiler's first events take long


class _Clock(Protocol):
    step: int


class ProfileWindow:
    """Records the steps of `--profile`, once; without a spec it does nothing."""

    def __init__(self, spec: ProfileSpec | None, world: World, folder: Path | None) -> None:
        """Traces go to `folder/profile` on the node of their worker; `folder` is that of the run."""
        self._spec = spec
        self._world = world
        self._folder = None if folder is None else folder / "profile"
        self._is_over = spec is None or spec.nvtx
        self._steps: range | None = None
        self._profiler: profile | None = None
        self._is_recording = False
        self._open_step: record_function | None = None
        self._done: list[int] = []
        self._kind_before = "off"

    def batches(self, batches: Iterator[Batch], clock: _Clock) -> Iterator[Batch]:
        """The same batches; the wait for the first batch of a step belongs to that step."""
        is_first = True
        while True:
            if is_first:
                self.step_begins(clock.step + 1)
            with range_of("input"):
                batch = next(batches, None)
            if batch is None:
                self._close_step()
                return
            is_first = batch.span.is_last
            yield batch

    def step_begins(self, step: int) -> None:
        """A step begins, counted from 1 as in the records."""
        if self._is_recording and self._steps is not None and step in self._steps:
            self._close_step()
            self._open_step = record_function(f"{STEP}{step}")
            self._open_step.__enter__()

    def step_done(self, step: int) -> bool:
        """A step is done; True if `before_step` is due before the next one."""
        if self._open_step is not None:
            self._close_step()
            self._done.append(step)
        return self._is_due(step + 1)

    def before_step(self, next_step: int) -> list[str]:
        """Do what is due before this step: prepare the profiler, start recording, or stop and write.

        All workers call it before their first step, and when `step_done` returns True, outside of training time: on a
        GPU the profiler loads a driver library, which takes seconds. Rank 0 gets the lines to print.
        """
        if self._is_over:
            return []
        if self._steps is None:
            assert self._spec is not None
            self._steps = self._spec.window(next_step)
        if next_step >= self._steps.stop:
            self._is_over = True
            return self._write() if self._is_recording else []
        if self._is_due(next_step):
            if self._profiler is None:
                self._prepare()
            if next_step in self._steps:
                self._start()
        return []

    def _is_due(self, next_step: int) -> bool:
        if self._is_over or self._steps is None:
            return False
        if self._is_recording:
            return next_step >= self._steps.stop
        return next_step >= self._steps.start - (_WARM_UP_STEPS if self._profiler is None else 0)

    def _write(self) -> list[str]:
        self._stop()
        own: dict[str, Any] = {"rank": self._world.rank, "steps": [], "operations": []}
        try:
            own |= summarise(self._write_trace(), self._done)
            if self._world.device.type == "cuda" and own["device"] == "cpu":
                own["notice"] = _NO_KERNELS
        except (OSError, RuntimeError, ValueError) as error:  # a full disk must not end the training
            own["failure"] = _reason(error)
        gathered = self._world.gather_objects(own)
        if gathered is None:
            return []
        assert self._folder is not None
        found = overview(gathered)
        shown = lines(found)
        try:
            self._remove_older()
            write_json(self._folder / "summary.json", found)
        except OSError as error:
            return [*shown, f"The summary cannot be written: {_reason(error)}."]
        if not found["steps"]:
            return shown
        return [*shown, f"Open {self._folder / _TRACE.format('*')} with ui.perfetto.dev or TensorBoard."]

    def close(self) -> list[str]:
        """Write what was recorded if the window is still open. All workers call it at the end of the run."""
        self._close_step()
        if self._done and self._is_recording:
            shown = self._write()
            record_ranges("off")
            return shown
        self._stop()
        record_ranges("off")
        was_asked = self._spec is not None and not self._spec.nvtx
        if not was_asked or self._done or not self._world.is_main:
            return []
        if self._steps is None:
            return ["--profile recorded nothing, as no step was done."]
        return [
            f"--profile recorded nothing: no step from {self._steps[0]} to {self._steps[-1]} was done since this start."
        ]

    def _prepare(self) -> None:
        on_gpu = self._world.device.type == "cuda"
        # Otherwise it logs its own start on every worker.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])
        with warnings.catch_warnings():
            # Some versions of torch warn at every start.
            warnings.filterwarnings("ignore", "(Warning: )?Profiler clears events at the end of", UserWarning)
            self._profiler.prepare_trace()
        atexit.register(self._abandon)
        if on_gpu:
            torch.zeros(1, device=self._world.device)  # the set-up of the first kernel belongs to no step
            self._world.wait_for_device()

    def _start(self) -> None:
        assert self._profiler is not None
        self._world.wait_for_device()  # so that the device has finished earlier steps
        self._profiler.start_trace()
        self._is_recording = True
        self._kind_before = record_ranges("profiler")

    def _stop(self) -> None:
        self._is_over = True
        if self._profiler is not None:
            if not self._is_recording:
                self._profiler.start_trace()  # a prepared profiler must be started before it can be stopped
            self._world.wait_for_device()
            self._profiler.stop_trace()
            atexit.unregister(self._abandon)
        if self._is_recording:
            record_ranges(self._kind_before)
            self._is_recording = False

    def _abandon(self) -> None:
        """Stop recording when a run fails: Python would crash at exit otherwise."""
        if self._is_recording and self._profiler is not None:
            self._profiler.stop_trace()

    def _write_trace(self) -> list[dict[str, Any]]:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        rank = self._world.rank
        plain, packed = self._folder / f".rank-{rank}.json", self._folder / f".rank-{rank}.json.gz"
        for path in self._folder.glob(f".rank-{rank}.*"):  # left by a kill, or a link put there
            path.unlink()
        try:
            profiler.export_chrome_trace(str(plain))  # on a full disk it writes half a file, or none, without an error
            try:
                content = json.loads(plain.read_text(encoding="utf-8", errors="replace"))
            except (FileNotFoundError, ValueError):
                raise OSError("torch's profiler could not write all of it; the disk may be full") from None
            with plain.open("rb") as source, create(packed) as raw, gzip.open(raw, "wb", compresslevel=5) as target:
                shutil.copyfileobj(source, target)
            packed.replace(self._folder / _TRACE.format(rank))
        finally:
            for path in self._folder.glob(f".rank-{rank}.*"):  # the profiler's own unfinished file among them
                os.truncate(path, 0)  # the profiler keeps it open, and its space with it
                path.unlink()
        events: list[dict[str, Any]] = content["traceEvents"]
        return events

    def _remove_older(self) -> None:
        """Remove traces of an earlier start with more workers."""
        assert self._folder is not None
        own = {_TRACE.format(rank) for rank in range(self._world.size)}
        for path in self._folder.glob(_TRACE.format("*")):
            if path.name not in own:
                path.unlink()

    def _close_step(self) -> None:
        if self._open_step is not None:
            self._open_step.__exit__(None, None, None)
            self._open_step = None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}"
    return f"{type(error).__name__}: {error}"
