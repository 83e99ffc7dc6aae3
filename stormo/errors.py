"""Errors a user can act on, and the exit code of each way a command can end.

A message is one sentence: what was set, why it cannot hold, what to set instead.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib.util
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

# Names of options in other tools.
_OTHER_WORDS = {
    "batch": ("batch-size",),
    "devices": ("num-gpus",),
    "gpu": ("cuda", "num-gpus"),
    "gpus": ("num-gpus",),
    "grad-clip": ("clip-norm",),
    "gradient-accumulation-steps": ("accumulate",),
    "learning-rate": ("base-lr",),
    "lr": ("base-lr",),
    "n": ("num-gpus",),
    "name": ("run-name",),
    "nnodes": ("num-nodes",),
    "nodes": ("num-nodes",),
    "np": ("num-gpus",),
    "nproc": ("num-gpus",),
    "nproc-per-node": ("num-gpus",),
    "num-processes": ("num-gpus",),
    "num-workers": ("loader-workers",),
    "workers": ("num-gpus",),
}

ERROR_FILE = "STORMO_ERROR_FILE"  # names the file in which stormo.train() in Python reads why its command failed

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_DIVERGED = 65  # sysexits' "data error": the run diverged, and the same command would diverge again
EXIT_RESUMABLE = 75  # sysexits' "try again": stopped by SIGTERM or SIGUSR1, saved, resumable
EXIT_INTERRUPTED = 130  # Ctrl-C, as shells report it


class StormoError(Exception):
    """The root of every error raised on purpose; its text is shown without a traceback."""

    exit_code = EXIT_FAILURE


class SettingError(StormoError, ValueError):
    """Something the user set cannot hold: what was set, why not, what to set instead."""

    exit_code = EXIT_USAGE

    def __init__(self, what: str, why: str, instead: str) -> None:
        super().__init__(f"{what}, but {why}; {instead}.")
        self.what, self.why, self.instead = what, why, instead

    def __reduce__(self) -> tuple[type[SettingError], tuple[str, str, str]]:
        return SettingError, (self.what, self.why, self.instead)  # not of the sentence, which pickle would take


class MissingPackageError(StormoError, ImportError):
    """An optional package is needed for what was asked."""

    exit_code = EXIT_USAGE

    def __init__(self, package: str, needed_for: str, extra: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package}, which is not installed; "
            f"install it with: pip install 'stormo[{extra}]'."
        )


def require_package(package: str, needed_for: str, extra: str) -> None:
    """Refuse what needs an optional package that is not installed."""
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(package, needed_for, extra)


class RunFailedError(StormoError):
    """A training or a script that was started from Python has failed; the text begins with the cause."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def note_error(text: str, exit_code: int, parts: tuple[str, str, str] | None = None) -> None:
    """Note why this command fails for a Python program that has started it; the first error is the cause."""
    path = os.environ.get(ERROR_FILE)
    if path:
        with contextlib.suppress(OSError), Path(path).open("x", encoding="utf-8") as file:
            json.dump({"text": text, "exit_code": exit_code, "parts": parts}, file)


def full_disk(error: BaseException) -> StormoError | None:
    """What to say where a disk (or a quota) is full; None for all else."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    what = f"{error.filename}" if error.filename else "the output or the run folder"
    return StormoError(f"{what} cannot be written ({error.strerror}); make room, then start again (--resume a run).")


def pluralize(count: int | str, noun: str) -> str:
    """A number and what it counts: 1 worker, 2 workers, 3 batches."""
    ending = "" if str(count) == "1" else "es" if noun.endswith(("s", "tch")) else "s"
    return f"{count} {noun}{ending}"


def first_names(names: Sequence[str], most: int = 3) -> str:
    """The first of these names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> SettingError:
    """An error that lists every valid name, the closest one first."""
    names = sorted(choices)
    return SettingError(
        f"{kind} {name!r} was asked for",
        "there is none of that name",
        f"{suggestion(name, names)}choose one of: {', '.join(names)}",
    )


def suggestion(name: str, choices: Iterable[str]) -> str:
    """`did you mean train? `, or nothing where no choice is near; dashes in front and a task's prefix do not count."""
    plain = {choice.lstrip("-").removeprefix("task.").replace("_", "-"): choice for choice in choices}
    typed = name.lstrip("-").removeprefix("task.").replace("_", "-")
    known = [word for word in (typed, *_OTHER_WORDS.get(typed, ())) if word in plain]
    close = known or difflib.get_close_matches(typed, plain, n=1)
    return f"did you mean {plain[close[0]]}? " if close else ""
