"""Sees to it that all workers go the same way through a script, before any of them waits for another in vain.

Everything that workers do together (the next batch, a backward, a sum, a save) is announced first in one small
exchange. Where two workers announce different things, all of them raise the same sentence, with the lines of the
script they are at.
"""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch import Tensor, nn

from stormo.distributed.store import PeerFailedError
from stormo.distributed.world import World
from stormo.errors import SettingError, StormoError
from stormo.launch.peer_loss import PeerLoss, peer_loss
from stormo.launch.root_cause import waiting_text

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_STANDARD_LIBRARY = str(Path(contextlib.__file__).parent)
_MODULE = nn.Module.__call__.__code__.co_filename
_REFUSAL = -1  # a kind that no words have


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all workers have said: a number each, and the highest of their flags."""

    numbers: Sequence[int]
    flag: int


class Agreement:
    """Announcements of one worker, compared with those of all others. With one worker it only keeps the flag."""

    def __init__(self, world: World, flag: Callable[[], int]) -> None:
        self._world = world
        self._flag = flag  # what this worker wants known, with its next announcement
        self._board = world.board() if world.size > 1 else None
        self._heard = Agreed([0] * world.size, 0)  # the last announcements of all
        self._is_open = False  # something was announced, and the others have not been heard yet
        self._said = ""
        self._number = 0
        self._broken: StormoError | None = None
        self._pid = os.getpid()
        self.is_closed = False  # the worker has left the others
        self.is_barred = False  # inside of what only some workers run, while the others wait for it
        self.agreed_flag = 0  # the highest flag that all workers know of
        self.num_casts = 0
        self.remark = ""  # on what a worker may be waiting in beside announcements

    def cast(self, what: str, where: str = "", number: int = 0) -> None:
        """Announce something without waiting for the others; `settle` hears them. `where` may differ, `what` not."""
        self.require_worker(what)
        if self.is_closed:
            raise SettingError(f"{what} was called", "the world is closed", "call it before world.close()")
        if self.is_barred:
            raise SettingError(
                f"{what} was called inside `with world.once_per_node()`",
                "the other workers wait for the end of that block, and would never come",
                "call it behind the block",
            )
        self.settle()
        self._said, self._number = f"{what} in {where}" if where else what, number
        self.num_casts += 1
        if self._world.size == 1:
            self.agreed_flag = max(self.agreed_flag, self._flag())
            return
        self._send(zlib.crc32(what.encode()))

    def _send(self, kind: int) -> None:
        assert self._board is not None, "one worker has nobody to tell"
        board, said = self._board, (kind, self._number, self._flag())
        self._is_open = True
        self._guard(lambda: board.post(said))

    def settle(self) -> Agreed:
        """Wait for the others' announcements, or raise what all of them raise."""
        self.require_worker("something of stormo.World")
        if self._broken is not None:
            raise self._broken
        if self._board is None:
            return Agreed([self._number], self.agreed_flag)
        if self._is_open:
            self._is_open = False
            said: Tensor = self._guard(self._board.read)
            kinds, numbers, flags = said.T.tolist()
            if kinds[0] == _REFUSAL or any(kind != kinds[0] for kind in kinds):
                self._raise_difference(kinds)
            self.agreed_flag = max(self.agreed_flag, *flags)
            self._heard = Agreed(numbers, self.agreed_flag)
        return self._heard

    def is_settled(self) -> bool:
        """Whether `settle` would not have to wait."""
        return not self._is_open or self._board is None or bool(self._guard(self._board.is_complete))

    def exchange(self, what: str, where: str = "", number: int = 0) -> Agreed:
        """Announce something and hear the others."""
        self.cast(what, where, number)
        return self.settle()

    def refuse(self, error: SettingError) -> NoReturn:
        """Raise an error on all workers, whatever the others announce next: they would wait for this one in vain."""
        self.settle()
        if self._world.size > 1:
            self._said = str(error)
            try:
                self._send(_REFUSAL)
                self.settle()
            except PeerFailedError:
                pass  # nobody is left to be told
        raise error

    def together(self, what: str, call: Callable[[], Any], where: Callable[[], str] = str) -> Any:
        """Do with all workers what is not announced, as there is too much of it; say so if one does not come."""
        before, self._said = self._said, what
        result = self._guard(call, where)
        self._said = before
        return result

    def break_off(self, error: StormoError) -> None:
        """Nothing can be done together any more: from now on everything raises this."""
        if self._world.size > 1 and self._broken is None:
            self._broken = error

    def require_worker(self, what: str) -> None:
        """Refuse a process that was forked from a worker: the others would answer the worker, and it would wait."""
        if self._world.size > 1 and os.getpid() != self._pid:
            raise SettingError(
                f"{what} was called",
                f"this process was forked from worker {self._world.rank}, which alone can speak with the others",
                "call it in the worker itself, before the fork, and use the result here",
            )

    def _raise_difference(self, kinds: list[int]) -> None:
        words = self._guard(lambda: self._world.share_json(self._world.gather_json(self._said)))
        if _REFUSAL in kinds:
            self._broken = SettingError.__new__(SettingError, words[kinds.index(_REFUSAL)])  # it is whole already
            raise self._broken
        rank = next(rank for rank, kind in enumerate(kinds) if kind != kinds[0])
        self._broken = SettingError(
            f"rank 0 is at: {_brief(words[0])}",
            f"rank {rank} is at: {_brief(words[rank])}, and they would wait for each other in vain",
            "let every worker take the same way: decide with world.any(...) or world.stop_requested, "
            "and call what they do together outside of what only some of them run",
        )
        raise self._broken

    def _guard(self, call: Callable[[], Any], where: Callable[[], str] = str) -> Any:
        """Say where this worker was when another one turned out to be gone."""
        try:
            return call()
        except RuntimeError as error:
            found = peer_loss(error)
            if found is None:
                raise
            loss = PeerLoss(found.waited_s, _brief(self._said) + where(), self.remark)
            self._broken = PeerFailedError(waiting_text(self._world.rank, loss), loss)
            raise self._broken from error


def call_site(*, of_model: bool = False) -> str:
    """The line of the script that called into stormo, or the model in which that was, as `train.py line 40`."""
    found: FrameType | None = None
    frame: FrameType | None = _outermost_call_of_model() if of_model else sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE):
            found = found or frame
            if not _is_installed(file):  # between it and stormo may be a progress bar, or another package
                found = frame
                break
        frame = frame.f_back
    assert found is not None
    return f"{Path(found.f_code.co_filename).name} line {found.f_lineno}"


def _outermost_call_of_model() -> FrameType:
    frame: FrameType | None = sys._getframe(1)
    assert frame is not None
    outermost = frame
    while frame is not None:
        if frame.f_code.co_filename == _MODULE:
            outermost = frame
        frame = frame.f_back
    return outermost


def _is_installed(file: str) -> bool:
    return file.startswith((_STANDARD_LIBRARY, "<")) or "site-packages" in file or "dist-packages" in file


def _brief(words: str) -> str:
    return words if len(words) <= 300 else f"{words[:150]} … {words[-120:]}"
