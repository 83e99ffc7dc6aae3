"""Phases that all workers of a job go through together, each with a time limit, over the store where they have met.

The store is no part of what is measured: when a collective hangs, the main worker still learns from it who has finished
and who has not.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from stormo.errors import EXIT_FAILURE, StormoError
from stormo.launch import Lifeline

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL_S = 0.005
_GRACE_S = 2.0  # for workers that began a little later
_VERDICT_S = 60.0  # for the main worker's word, after the limit


class HungError(StormoError):
    """A phase that some workers did not finish in time, or in which some failed; raised by the main one."""

    def __init__(self, phase: str, limit_s: float, missing: Sequence[int], failures: dict[int, str]) -> None:
        super().__init__(f"{phase} did not end within {limit_s:g} s" if missing else f"{phase} failed")
        self.phase, self.limit_s, self.missing, self.failures = phase, limit_s, list(missing), failures


class StoppedError(StormoError):
    """The main worker has found trouble and ends the phases; raised by the others."""


class Phases:
    """One worker's part of the phases.

    Args:
        store: of this use alone.
        on_hang: called in a thread of the main worker when that one itself hangs; ends the process.
    """

    def __init__(self, store: Store, rank: int, size: int, on_hang: Callable[[HungError], None]) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._on_hang = on_hang

    @property
    def is_main(self) -> bool:
        """Whether this worker learns what all have found."""
        return self.rank == 0

    def run(
        self,
        phase: str,
        part: Callable[[], Any],
        limit_s: float,
        *,
        decide: Callable[[list[Any]], Any] | None = None,
    ) -> tuple[list[Any] | None, Any]:
        """Do this worker's part; return all workers' JSON-able values on the main one, and what it decides on all."""
        began = time.monotonic()
        watch = Watch(limit_s + _GRACE_S, lambda: self._on_hang(self._trouble(phase, limit_s)))
        try:
            if self.is_main:
                watch.start()
            answer = {"value": part()}
        except Exception as error:
            answer = {"failure": _in_words(error)}
        finally:
            watch.stop()
        self._store.set(f"{phase}/{self.rank}", json.dumps(answer))
        self._store.add(f"{phase}/count", 1)
        if not self.is_main:
            return None, self._told(phase, limit_s)
        while self._store.add(f"{phase}/count", 0) < self.size:
            if time.monotonic() - began > limit_s + _GRACE_S:
                break
            time.sleep(_POLL_S)
        trouble = self._trouble(phase, limit_s)
        if trouble.missing or trouble.failures:
            raise trouble
        values = [answer["value"] for answer in self._answers(phase, range(self.size))]
        decided = decide(values) if decide else None
        self._store.set(f"{phase}/verdict", json.dumps({"decided": decided}))
        return values, decided

    def share(self, name: str, value: Any) -> None:
        """Let those workers know something that ask for it."""
        self._store.set(f"shared/{name}", json.dumps(value))

    def shared(self, name: str) -> Any:
        """What a worker shares, once it does."""
        self._store.wait([f"shared/{name}"], timedelta(seconds=_VERDICT_S))
        return json.loads(self._store.get(f"shared/{name}"))

    def stop(self, phase: str, sentence: str) -> None:
        """Say, on the main worker, that there is nothing more to be done after a phase that it did not end."""
        self._store.set(f"{phase}/verdict", json.dumps({"stop": sentence}))

    def _told(self, phase: str, limit_s: float) -> Any:
        self._store.wait([f"{phase}/verdict"], timedelta(seconds=limit_s + _VERDICT_S))
        verdict = json.loads(self._store.get(f"{phase}/verdict"))
        if "stop" in verdict:
            raise StoppedError(verdict["stop"])
        return verdict["decided"]

    def _answers(self, phase: str, ranks: Sequence[int]) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self._store.multi_get([f"{phase}/{rank}" for rank in ranks])]

    def _trouble(self, phase: str, limit_s: float) -> HungError:
        came: Sequence[int] = range(self.size)
        if self._store.add(f"{phase}/count", 0) < self.size:
            came = [rank for rank in range(self.size) if self._store.check([f"{phase}/{rank}"])]
        answers = dict(zip(came, self._answers(phase, came), strict=True)) if came else {}
        failures = {rank: answer["failure"] for rank, answer in answers.items() if "failure" in answer}
        return HungError(phase, limit_s, sorted(set(range(self.size)) - set(came)), failures)


class Watch:
    """Calls something unless it is stopped in time."""

    def __init__(self, limit_s: float, call: Callable[[], None]) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._wait, args=(limit_s, call), name="stormo-watch", daemon=True)

    def start(self) -> None:
        """From now on it is waited."""
        self._thread.start()

    def stop(self) -> None:
        """What was to be done in time is done."""
        self._stopped.set()

    def _wait(self, limit_s: float, call: Callable[[], None]) -> None:
        if not self._stopped.wait(limit_s):
            call()


def end_process(error: StormoError, lifeline: Lifeline) -> None:
    """Tell everybody and end, whatever the main thread waits for."""
    if lifeline.shows_failures:
        lifeline.report_failure(error, secondary=False)
    else:
        print(f"stormo: {error}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(EXIT_FAILURE)


def _in_words(error: Exception) -> str:
    if isinstance(error, StormoError):
        return str(error).rstrip(".")
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
