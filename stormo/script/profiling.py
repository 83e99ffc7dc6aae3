"""`stormo run --profile`: torch's profiler over some steps of a user's own loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stormo.config.plan.steps import parse_profile
from stormo.profiling.ranges import record_for_nsight
from stormo.profiling.window import ProfileWindow
from stormo.script.loop import Loop


class ScriptProfile:
    """A step lasts from the end of the one before to the end of `optimizer.step()`."""

    def __init__(self, text: str, loop: Loop, folder: Path) -> None:
        spec = parse_profile(text)
        record_for_nsight(is_asked=spec.nvtx)
        self._loop = loop
        self._window = ProfileWindow(spec, loop.world, folder)
        self._last: int | None = None  # steps that it knows of

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around a backward or a step of an optimizer: prepares before the first, and notes those that are done."""
        if self._last is None:
            self._begin(self._loop.num_steps)
        yield
        done = self._loop.num_steps
        if self._last is not None and done > self._last:
            if self._window.step_done(done):
                self._loop.check.exchange("the profile")
                self._begin(done)
            else:
                self._window.step_begins(done + 1)
            self._last = done

    def _begin(self, done: int) -> None:
        self._say(self._window.before_step(done + 1))
        self._window.step_begins(done + 1)
        self._last = done

    def close(self) -> None:
        """Write a window that is still open."""
        self._say(self._window.close())

    def _say(self, lines: list[str]) -> None:
        if self._loop.world.is_main:
            for line in lines:
                print(line, flush=True)  # noqa: T201
