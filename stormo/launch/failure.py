"""What ended a rank or a node: the message for the user, which may come from another machine.

Text that arrives over a socket is cut to a bounded length and stripped of control characters before it is shown.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from stormo.errors import EXIT_DIVERGED, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_RESUMABLE, EXIT_USAGE, StormoError
from stormo.launch.torch_errors import PeerLoss, first_line, loss_in, peer_loss, watchdog_error, without_frames
from stormo.system import files

MAX_DETAILS_CHARACTERS = 24_000
_MAX_SENTENCE_CHARACTERS = 4_000
OUT_OF_MEMORY = "the kernel's out-of-memory killer may have done this; dmesg would say so"
CLEAN_EXIT_CODES = (0, EXIT_DIVERGED, EXIT_RESUMABLE, EXIT_INTERRUPTED)
_EXIT_CODES = (EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_RESUMABLE)
_KINDS = ("exception", "setting", "signal", "exit", "early", "silent", "gone", "stopped")
_MAX_CHARACTERS = {
    "kind": 20,
    "who": 100,
    "host": 300,
    "what": _MAX_SENTENCE_CHARACTERS,
    "details": MAX_DETAILS_CHARACTERS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One way in which a job failed."""

    kind: str
    who: str  # "rank 3" or "node 1"
    host: str
    what: str  # follows `who`: "failed: ValueError: boom"; for a setting the whole sentence
    details: str = ""  # the traceback, or the last lines on stderr
    exit_code: int = EXIT_FAILURE
    secondary: bool = False  # a survivor that misses its peer, not the cause
    printed: bool = False  # the failed rank has shown it already
    rank: int = -1  # of the worker that failed; -1 for a node
    loss: PeerLoss | None = None  # of a rank that misses a peer

    def __post_init__(self) -> None:
        assert self.kind in _KINDS, self.kind

    @property
    def sentence(self) -> str:
        """The first line the user reads."""
        return self.what if self.kind == "setting" else f"{self.who} on host {self.host} {self.what}"

    def text(self) -> str:
        """The first line and the details, as printed."""
        details = f"{self.details.rstrip()}\n" if self.details.strip() else ""
        return f"stormo: {self.sentence}\n{details}"

    def to_message(self) -> dict[str, Any]:
        """As JSON-ready values."""
        loss = None if self.loss is None else asdict(self.loss)
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"loss": loss}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Failure | None:
        """From an untrusted message: None unless every value has its type."""
        values: dict[str, Any] = {name: message.get(name) for name in cls.__dataclass_fields__}
        codes = range(1, 256) if values["kind"] == "exit" else _EXIT_CODES
        if not files.fits(values, cls) or values["kind"] not in _KINDS or values["exit_code"] not in codes:
            return None
        texts = {name: printable(values[name], limit) for name, limit in _MAX_CHARACTERS.items()}
        loss = None if values["loss"] is None else PeerLoss(**values["loss"])
        if loss is not None:
            at, remark = (printable(text, _MAX_SENTENCE_CHARACTERS) for text in (loss.at, loss.remark))
            loss = replace(loss, at=at, remark=remark)
        return cls(**{**values, **texts, "loss": loss})

    def with_last_lines(self, lines: str) -> Failure:
        """With what the rank wrote last."""
        lines = without_frames(lines)
        if not lines.strip():
            return self
        lines = printable(lines, MAX_DETAILS_CHARACTERS - len(self.details) - 100)
        return replace(self, details=f"{self.details}Its last lines on stderr:\n{lines}")

    def as_cause(self) -> Failure:
        """As the cause, where no better one was found."""
        return replace(self, secondary=False)


def of_exception(error: BaseException, *, rank: int, host: str, secondary: bool) -> Failure:
    """The failure of a rank that raised; an error made for users goes without its traceback."""
    who = f"rank {rank}"
    if isinstance(error, StormoError) and error.exit_code == EXIT_USAGE:
        sentence = printable(_text(error), _MAX_SENTENCE_CHARACTERS)
        return Failure(kind="setting", who=who, host=host, what=sentence, exit_code=EXIT_USAGE)
    if isinstance(error, StormoError):
        summary, details = printable(_text(error), _MAX_SENTENCE_CHARACTERS), ""
    else:
        first = first_line(_text(error))
        summary = printable(f"{_name(error)}: {first}" if first else _name(error), _MAX_SENTENCE_CHARACTERS)
        lines = traceback.format_exception(error)
        details = printable(without_frames("".join(lines)), MAX_DETAILS_CHARACTERS)
    return Failure(
        kind="exception",
        who=who,
        host=host,
        what=f"failed: {summary}",
        details=details,
        secondary=secondary,
        rank=rank,
        loss=peer_loss(error),
    )


def of_signal(number: int, *, rank: int, host: str) -> Failure:
    """The failure of a rank that a signal ended."""
    what = f"was killed by {signal_name(number)} (signal {number})"
    details = f"{OUT_OF_MEMORY.capitalize()}.\n" if number == signal.SIGKILL else ""
    return Failure(kind="signal", who=f"rank {rank}", host=host, what=what, details=details, rank=rank)


def of_watchdog(lines: str, *, rank: int, host: str) -> Failure | None:
    """Why NCCL's watchdog ended a rank: an error, or another rank that it misses; None if it did not end it."""
    if (loss := loss_in(lines)) is None:
        why = watchdog_error(lines)
    else:
        why = "it lost another worker" if loss.waited_s is None else f"it waited {loss.waited_s:g} s for another worker"
    if why is None:
        return None
    return Failure(
        kind="exception",
        who=f"rank {rank}",
        host=host,
        what=f"was ended by NCCL's watchdog: {why}",
        secondary=loss is not None,
        rank=rank,
        loss=loss,
    )


def of_exit(code: int, *, rank: int, host: str, keeps_code: bool = False) -> Failure:
    """The failure of a rank that exited without a report; the code of a script is kept."""
    what = f"ended with exit code {code} and did not report why"
    exit_code = code if keeps_code else EXIT_FAILURE
    return Failure(kind="exit", who=f"rank {rank}", host=host, what=what, exit_code=exit_code, rank=rank)


def of_exit_before_world(code: int, *, rank: int, host: str, waiting: int) -> Failure:
    """The failure of a script's rank that exited cleanly while another waits for it to join."""
    what = f"ended with exit code {code} before it called stormo.World(), in which rank {waiting} waits for it; "
    return Failure(
        kind="early", who=f"rank {rank}", host=host, what=f"{what}let every worker reach it, or none", rank=rank
    )


def of_early_exit(*, rank: int, host: str) -> Failure:
    """The failure of a rank that ended with exit code 0 in the middle of its work."""
    what = "ended with exit code 0 before its work was done: something that it ran calls os._exit(0)"
    return Failure(kind="early", who=f"rank {rank}", host=host, what=what, rank=rank)


def of_stop(number: int, *, rank: int, host: str, is_script: bool) -> Failure:
    """The failure of a rank that a stop signal ended before it could save."""
    in_script = f"was ended by {signal_name(number)}: its script had not read world.stop_requested yet"
    what, exit_code = in_script if is_script else stopped_early(number), stop_exit_code(number)
    return Failure(kind="stopped", who=f"rank {rank}", host=host, what=what, exit_code=exit_code, rank=rank)


def stopped_early(number: int) -> str:
    """What happened to a process that a stop signal ended; follows its name."""
    return f"was ended by {signal_name(number)}, which reached it before it was ready to stop in order"


def stop_exit_code(number: int) -> int:
    """The exit code of a process that a stop signal ended."""
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_RESUMABLE


def combined_exit_code(codes: Iterable[int]) -> int:
    """The exit code of a job from those of its parts: 0 only if all are 0."""
    seen = set(codes)
    if not seen <= set(CLEAN_EXIT_CODES):
        return EXIT_FAILURE
    return next((code for code in (EXIT_INTERRUPTED, EXIT_DIVERGED, EXIT_RESUMABLE) if code in seen), 0)


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a signal"


def printable(text: str, max_characters: int) -> str:
    """Bounded text without control characters; of a long one the beginning and, mostly, the end are kept."""
    text = files.printable(text.replace("\r\n", "\n"))
    if len(text) <= max_characters:
        return text
    head = max_characters // 4
    return f"{text[:head]}\n[... {len(text) - max_characters} characters left out ...]\n{text[head - max_characters :]}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception class of the user's whose __str__ itself fails
        return "(its text cannot be shown)"


def _name(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
