"""What ssh starts on a host: becomes the command that it is told, which does not outlive the connection.

Runs as `python -m stormo.launch.remote`. The first line of its input says what to do; every further line is a signal
for the command, and the end of the input means that whoever wanted the command is gone: it is asked to save and stop.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from stormo.system.process import die_with_parent

STARTED = "stormo: started here"
SIGNALS = ("INT", "TERM", "USR1")
_ENDS_WITHIN_S = 120.0  # an agent ends its workers long before; this is for what does not listen


def order(command: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """The first line of the input."""
    return json.dumps({"command": list(command), "environ": dict(environ)}).encode() + b"\n"


def main() -> None:
    """Read the order, leave somebody behind who watches the connection, and become the command."""
    told = json.loads(_read_line(0))
    os.environ.update(told["environ"])
    for descriptor in (1, 2):  # what came before was the login's
        os.write(descriptor, STARTED.encode() + b"\n")
    command = os.getpid()  # the command is this very process, as ssh would not get the exit code of another
    if os.fork() == 0:
        os.setsid()  # what is sent to the group of the command is not for the watcher
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (1, 2):  # or ssh would wait for the watcher to close them
            os.dup2(nowhere, descriptor)
        _watch(command)
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.execv(told["command"][0], told["command"])


def _read_line(descriptor: int) -> bytes:
    """One line and not a byte more, as the rest is for the watcher."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            sys.exit("stormo: the connection ended before it was said what to start")
        line += byte
    return bytes(line)


def _watch(command: int) -> None:
    """Pass signals on, and end the command when the input ends; this process ends with the command."""
    die_with_parent()
    if os.getppid() != command:  # gone before that
        return
    rest = b""
    while chunk := os.read(0, 4096):
        *names, rest = (rest + chunk).split(b"\n")
        for name in names:
            if name.decode() in SIGNALS:
                _send(command, signal.Signals[f"SIG{name.decode()}"])
    _send(command, signal.SIGTERM)
    time.sleep(_ENDS_WITHIN_S)
    _send(command, signal.SIGKILL)


def _send(command: int, number: int) -> None:
    if os.getppid() == command:  # else it has ended, and its number may be another's
        os.kill(command, number)


if __name__ == "__main__":
    main()
