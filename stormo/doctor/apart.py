"""Runs checks in a process of its own, so that a driver or a file system that hangs does not hang the doctor.

The process says when it begins a check, what it finds, and when the check is done, a line of JSON each. One that takes
too long is killed and becomes a finding, and a new process goes on with the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from stormo.doctor.finding import Finding
from stormo.doctor.machine import Machine
from stormo.doctor.torch_facts import TorchProcess

TABLE = "stormo.doctor.checks:CHECKS"
_PR_SET_PDEATHSIG = 1
_TIDIES_UP_WITHIN_S = 5.0  # a full write to a slow disk
_HURRY_S = 1.0
_START_S = 60.0  # an interpreter from a slow file system
_WITH_TORCH = ("libraries", "backends")
# GPUs first, before torch uses one of them; storage last, when nothing else reads or writes.
_FIRST, _LAST = ("devices", "energy"), (*_WITH_TORCH, "storage")
_MEND = "see what is wrong there (dmesg; a file system or a driver that does not answer); --skip {name} leaves it out"


def examine(
    names: Sequence[str], folders: Mapping[str, str] | None = None, *, table: str = TABLE, limit_s: float | None = None
) -> list[Finding]:
    """What these checks find on this machine, in the order of the names.

    Args:
        names: of checks in the table.
        folders: `runs_folder` and `data_folder`, where they are not the usual ones.
        table: where the checks are, as module:name.
        limit_s: the longest that any check may take, where its own limit is longer.
    """
    found: dict[str, list[Finding]] = {name: [] for name in names}
    left = sorted(names, key=_turn)
    while left:
        with tempfile.TemporaryFile() as words:
            child = _Child({"table": table, "names": left, "folders": dict(folders or {})}, words)
            try:
                num_settled = _listen(child, left, found, table, limit_s)
            except BaseException:  # Ctrl-C
                child.end(_HURRY_S)
                raise
            child.end(_TIDIES_UP_WITHIN_S)
        left = left[num_settled:]
    return [finding for name in names for finding in found[name]]


def _turn(name: str) -> int:
    return -1 if name in _FIRST else 1 + _LAST.index(name) if name in _LAST else 0


def _listen(
    child: _Child, names: Sequence[str], found: dict[str, list[Finding]], table: str, longest_s: float | None
) -> int:
    """Take what the process finds, until it is done, dead or too slow; returns how many checks are settled."""
    num_done, limit_s, began_s, at = 0, _START_S, time.monotonic(), ""
    while num_done < len(names):
        name = names[num_done]
        line = child.line(began_s + limit_s - time.monotonic())
        if not line:
            text = (
                f"took longer than {limit_s:g} s{at} and was ended"
                if line is None
                else f"ended its process: {child.last_words()}"
            )
            found[name].append(_failed(name, text))
            return num_done + 1
        message = json.loads(line)
        if message["kind"] == "begun":
            limit_s, began_s = _load(table)[name].limit_s, time.monotonic()
            limit_s = limit_s if longest_s is None else min(limit_s, longest_s)
        elif message["kind"] == "at":
            at = f" at {message['content']}"
        elif message["kind"] == "found":
            found[name].append(Finding(**message["content"]))
        else:
            num_done, limit_s, began_s, at = num_done + 1, _START_S, time.monotonic(), ""
    return num_done


class _Child:
    """The process that runs the checks, and its lines."""

    def __init__(self, asked: Mapping[str, Any], words: IO[bytes]) -> None:
        self._words = words
        self._buffer = b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, json.dumps(asked)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
            start_new_session=True,  # so that all it started ends with it
        )
        assert self._process.stdout is not None
        self._out = self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)

    def line(self, limit_s: float) -> bytes | None:
        """The next line; empty at the end, None where it did not come in time."""
        deadline_s = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            if not self._selector.select(max(deadline_s - time.monotonic(), 0.0)):
                return None
            chunk = os.read(self._out.fileno(), 1 << 16)
            if not chunk:
                return b""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def last_words(self) -> str:
        """How it ended, which it has begun to do, and the last line it wrote."""
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(5.0)
        self._words.seek(0)
        said = [line.strip() for line in self._words.read().decode(errors="replace").splitlines() if line.strip()]
        how = "no exit code" if code is None else f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"{how}, {said[-1][:300]}" if said else how

    def end(self, wait_s: float) -> None:
        """End it and all that it started, if it has not ended; nobody waits longer for it to delete what it wrote."""
        if self._process.poll() is None:
            self._process.terminate()  # so that it does, and at the latest then ends by itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
        if wait_s >= _TIDIES_UP_WITHIN_S or self._process.poll() is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # held by a driver: nobody can end it
                self._process.wait(1.0)
        self._selector.close()
        self._out.close()


def _failed(name: str, how: str) -> Finding:
    return Finding(check=name, level="error", text=f"the check {how}", mend=_MEND.format(name=name), group=name)


def _load(table: str) -> Mapping[str, Any]:
    module, _, name = table.partition(":")
    checks: Mapping[str, Any] = getattr(importlib.import_module(module), name)
    return checks


def _serve(asked: Mapping[str, Any], out: IO[str]) -> None:
    """Inside the process: run the checks one after the other and tell what they find."""

    def say(kind: str, content: Any = None) -> None:
        out.write(f"{json.dumps({'kind': kind, 'content': content})}\n")
        out.flush()

    folders: dict[str, Any] = {name: Path(folder) for name, folder in asked["folders"].items()}
    machine = Machine(**folders, tell=lambda what: say("at", what))
    torch: TorchProcess | None = None
    for name in asked["names"]:
        if torch is None and name not in _FIRST and set(asked["names"]) & set(_WITH_TORCH):
            torch = TorchProcess(os.environ)  # imports while the others look
            machine = dataclasses.replace(machine, torch=torch.read)
        say("begun")
        try:
            for finding in _load(asked["table"])[name].run(machine):
                say("found", dataclasses.asdict(dataclasses.replace(finding, group=name)))
        except Exception as error:  # a check that fails is a finding like any other
            say("found", dataclasses.asdict(_failed(name, f"failed: {type(error).__name__}: {error}")))
        say("done")


def _main() -> None:
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # libraries may print, which must not come between the lines
        _listen_for_the_end()
        try:
            _serve(json.loads(sys.argv[1]), out)
        except SystemExit:
            os.killpg(0, signal.SIGKILL)  # programs that a check has started too


def _listen_for_the_end() -> None:
    """End on SIGTERM, which also comes when the doctor dies, however: what a check has written is deleted first."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def end_late() -> None:  # where a call into a driver keeps Python from hearing of the signal
        os.read(reader, 1)
        time.sleep(_TIDIES_UP_WITHIN_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_late, daemon=True).start()
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


if __name__ == "__main__":
    _main()
