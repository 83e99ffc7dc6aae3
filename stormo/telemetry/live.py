"""A terminal that is drawn on again and again: whether a stream leads to one, and a console that is safe on it."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def can_redraw(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether the stream leads to a terminal that knows more than plain lines."""
    return stream.isatty() and environ.get("TERM") not in ("dumb", "unknown")


def steady_console(stream: TextIO, environ: Mapping[str, str]) -> Console:
    """A console of rich's that leaves the terminal whole when its process is killed."""
    from rich.console import Console

    class SteadyConsole(Console):
        """Never hides the cursor, so that a killed process cannot leave the terminal without one."""

        def show_cursor(self, show: bool = True) -> bool:
            return False

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "nobody reads any more")  # rich would end the program

    columns = environ.get("COLUMNS", "")
    return SteadyConsole(
        file=stream,
        force_terminal=True,
        width=int(columns) if columns.isdecimal() and int(columns) > 0 else None,
        no_color=bool(environ.get("NO_COLOR")),  # the convention: set and not empty
        highlight=False,
        markup=False,
        emoji=False,
    )
