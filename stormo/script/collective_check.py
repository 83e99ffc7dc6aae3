"""Checks that all workers call the same collective, before one waits for another for ever.

Every collective operation of a script (a batch, a backward, a sum, a save) is posted first, in one small exchange.
Where two workers post different ones, all raise the same error, with the lines of the script they are at.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import zlib
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from stormo.distributed.status_table import float_to_int, int_to_float
from stormo.distributed.store import PeerFailedError
from stormo.distributed.world import World
from stormo.errors import SettingError, StormoError
from stormo.launch.failure_reporter import PACKAGE, is_installed, line_of
from stormo.launch.root_cause import waiting_text
from stormo.launch.torch_errors import PeerLoss, peer_loss
from stormo.system.signals import StopFlag

_ERROR = -1  # no crc32 is negative


class CollectiveCheck:
    """Posts of one worker, compared with those of all others; a single worker only keeps the stop signal."""

    def __init__(self, world: World, own_stop: StopFlag) -> None:
        self._world = world
        self._own_stop = own_stop  # travels with every post
        self._table = world.status_table() if world.size > 1 else None
        self._numbers = [0] * world.size  # of the last post, by rank
        self._is_waiting = False  # something was posted, and the others' posts were not read yet
        self._posted, self._number = "", 0
        self._error: SettingError | None = None  # to be raised on all workers
        self._broken: StormoError | None = None
        self._pid = os.getpid()
        self.is_closed = False
        self.is_alone = False  # in a block that only some workers run, while the others wait
        self.agreed_stop = 0  # the highest stop signal that all workers know of
        self.num_posts = 0
        self.hint = ""  # what else than a post a worker may be waiting in

    def post(self, what: str, where: str = "", number: int = 0) -> None:
        """Send the others what comes next, without waiting. `what` must be the same on all workers, `where` not."""
        self.require_worker(what)
        if self.is_closed:
            raise SettingError(f"{what} was called", "the world is closed", "call it before world.close()")
        if self.is_alone:
            raise SettingError(
                f"{what} was called inside `with world.once_per_node()`",
                "the other workers wait for the end of that block",
                "call it after the block",
            )
        self.wait()
        self._posted, self._number = f"{what} in {where}" if where else what, number
        self.num_posts += 1
        if self._table is None:
            self.agreed_stop = max(self.agreed_stop, self._own_stop.signal_number)
        else:
            self._send(zlib.crc32(what.encode()))

    def _send(self, kind: int) -> None:
        table, line = self._table, (kind, self._number, self._own_stop.signal_number)
        assert table is not None
        self._is_waiting = True
        self._guard(lambda: table.post(line))

    def wait(self) -> list[int]:
        """Wait for the others' posts: their numbers by rank. Raises on all workers where their posts differ."""
        self.require_worker("something of stormo.World")
        if self._broken is not None:
            raise self._broken
        if self._table is None:
            return [self._number]
        if self._is_waiting:
            self._is_waiting = False
            lines: Tensor = self._guard(self._table.read)
            kinds, self._numbers, stops = lines.T.tolist()
            if kinds[0] == _ERROR or any(kind != kinds[0] for kind in kinds):
                self._raise_difference(kinds)
            self.agreed_stop = max(self.agreed_stop, *stops)
        return self._numbers

    def has_arrived(self) -> bool:
        """Whether `wait` would return at once."""
        return not self._is_waiting or self._table is None or bool(self._guard(self._table.is_complete))

    def exchange(self, what: str, where: str = "", number: int = 0) -> list[int]:
        """Post something and wait for the others: their numbers by rank."""
        self.post(what, where, number)
        return self.wait()

    def exchange_floats(self, what: str, value: float) -> list[float]:
        """Post a float and wait for the others: their floats by rank."""
        return [int_to_float(number) for number in self.exchange(what, number=float_to_int(value))]

    def raise_on_all(self, error: SettingError) -> NoReturn:
        """Raise an error on all workers, whatever the others post next."""
        self.wait()
        if self._world.size > 1:
            self._error = error
            with contextlib.suppress(PeerFailedError):  # no other worker is left
                self._send(_ERROR)
                self.wait()
        raise error

    def guarded(self, what: str, call: Callable[[], Any], where: Callable[[], str] = str) -> Any:
        """Run a collective that is not posted, as it is called too often; name it where a worker does not come."""
        before, self._posted = self._posted, what
        result = self._guard(call, where)
        self._posted = before
        return result

    def break_off(self, error: StormoError) -> None:
        """From now on every call raises this."""
        if self._world.size > 1 and self._broken is None:
            self._broken = error

    def require_worker(self, what: str) -> None:
        """Refuse a process that was forked from a worker: it would wait for answers that go to the worker."""
        if self._world.size > 1 and os.getpid() != self._pid:
            raise SettingError(
                f"{what} was called",
                f"this process was forked from rank {self._world.rank}, and only that one talks to the others",
                "call it before the fork, and use the result here",
            )

    def _raise_difference(self, kinds: list[int]) -> NoReturn:
        error = self._error
        here = self._posted if error is None else [error.what, error.why, error.instead]
        posts = self._guard(lambda: self._world.broadcast_object(self._world.gather_objects(here)))
        if _ERROR in kinds:
            self._broken = SettingError(*posts[kinds.index(_ERROR)])
            raise self._broken
        rank = next(rank for rank, kind in enumerate(kinds) if kind != kinds[0])
        self._broken = SettingError(
            f"rank 0 is at: {_brief(posts[0])}",
            f"rank {rank} is at: {_brief(posts[rank])}, so neither can complete",
            "let all workers make the same calls in the same order: decide with world.any(...) or "
            "world.stop_requested, and keep collective calls out of branches that only some workers enter",
        )
        raise self._broken

    def _guard(self, call: Callable[[], Any], where: Callable[[], str] = str) -> Any:
        """Say where this worker was when another one is gone."""
        try:
            return call()
        except RuntimeError as error:
            found = peer_loss(error)
            if found is None:
                raise
            loss = PeerLoss(found.waited_s, _brief(self._posted) + where(), self.hint)
            self._broken = PeerFailedError(waiting_text(self._world.rank, loss), loss)
            raise self._broken from error


def call_site() -> str:
    """The line of the script that called into stormo, as `train.py line 40`."""
    frame = sys._getframe(1)
    # A progress bar, or another package, may lie between the script and stormo, or be the script.
    return line_of(frame, is_installed) or line_of(frame, lambda file: file.startswith(PACKAGE))


def batch_norm_site() -> str:
    """Where a synchronised batch norm waits."""
    # On a GPU backward runs in another thread, which has no line of the script.
    line = f" in {call_site()}" if threading.current_thread() is threading.main_thread() else ""
    return f"{line} (after model.eval() it waits for nobody)"


def _brief(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:150]} … {text[-120:]}"
