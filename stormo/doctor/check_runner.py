"""Runs the checks of one machine in subprocesses with time limits.

A driver or a file system that hangs does not hang the doctor. A subprocess, `python -m` this module, writes a line of
JSON for what it checks next and for each finding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from stormo.doctor import gpus
from stormo.doctor.finding import Finding
from stormo.doctor.machine import Machine, check_limits, check_network, check_storage
from stormo.system.process import die_with_parent

_START_S = 60.0  # an interpreter from a slow file system
_POLL_S = 0.1
_CLEANUP_S = 5.0  # a full write to a slow disk
_INTERRUPTED_S = 1.0
_FIX = "see what is wrong there (dmesg; a file system or a driver that does not answer); --skip {name} leaves it out"


class Check(NamedTuple):
    """A check of one part of a machine, and its time limit."""

    run: Callable[[Machine], Iterable[Finding]]
    limit_s: float


def _data_folder_exists(machine: Machine) -> Iterator[Finding]:
    is_folder = machine.data_folder.expanduser().is_dir()
    yield Finding("folder", "ok" if is_folder else "note", str(machine.data_folder))


# In the order they run: GPUs before torch uses one of them, storage when nothing else reads or writes.
CHECKS: dict[str, Check] = {
    "devices": Check(gpus.check_gpus, 20.0),
    "libraries": Check(gpus.check_libraries, 70.0),  # an import from a loaded network file system takes so long
    "backends": Check(gpus.check_backends, 70.0),
    "network": Check(check_network, 15.0),
    "limits": Check(check_limits, 10.0),
    "storage": Check(check_storage, 30.0),
}
_SHARE_TORCH = ("libraries", "backends")  # one subprocess, as importing torch takes long
FLAG_CHECKS = {"folder": Check(_data_folder_exists, 5.0)}  # of a flag, before anything else


def run_checks(
    names: Sequence[str],
    folders: Mapping[str, str] | None = None,
    *,
    table: str = "stormo.doctor.check_runner:CHECKS",
    limit_s: float | None = None,
) -> list[Finding]:
    """What these checks find on this machine.

    Args:
        names: of checks in the table.
        folders: `runs_folder` and `data_folder`, where they are not the default ones.
        table: where the checks are, as module:name.
        limit_s: the longest that any check may take, where its own limit is longer.
    """
    found: list[Finding] = []
    for _, together in itertools.groupby(names, lambda name: "torch" if name in _SHARE_TORCH else name):
        group = list(together)
        limit = sum(_load(table)[name].limit_s for name in group)
        request = {"table": table, "names": group, "folders": dict(folders or {})}
        found += _run_in_subprocess(request, limit if limit_s is None else min(limit, limit_s))
    return found


def _run_in_subprocess(request: Mapping[str, Any], limit_s: float) -> list[Finding]:
    """Run the checks of one subprocess; that one hung or crashed is a finding too."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "stormo.doctor.check_runner", json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that all it started ends with it
    )
    try:
        out, err = _communicate(process, limit_s)
    except BaseException:  # Ctrl-C
        _end(process, _INTERRUPTED_S)
        raise
    failure = ""
    if process.poll() is None:
        _end(process, _CLEANUP_S)
        failure = f"took longer than {limit_s:g} s and was ended"
    elif code := process.returncode:
        last = next((line.strip() for line in reversed(err.decode(errors="replace").splitlines()) if line), "")
        failure = f"crashed: {f'signal {-code}' if code < 0 else f'exit code {code}'}, {last[:300]}"
    messages = [json.loads(line) for line in out.decode(errors="replace").splitlines(keepends=True) if "\n" in line]
    found = [Finding(**message["found"]) for message in messages if "found" in message]
    if failure:
        at = next((f" (at {message['at']})" for message in reversed(messages) if "at" in message), "")
        names = [request["names"][0], *(message["check"] for message in messages if "check" in message)]
        found.append(_failed(names[-1], failure + at))
    return found


def _communicate(process: subprocess.Popen[bytes], limit_s: float) -> tuple[bytes, bytes]:
    """Its output until it ends, or until `limit_s` after its first line."""
    began_s, has_begun = time.monotonic(), False
    while True:
        try:
            return process.communicate(timeout=_POLL_S)
        except subprocess.TimeoutExpired as late:
            if late.output and not has_begun:
                began_s, has_begun = time.monotonic(), True
            if time.monotonic() - began_s > (limit_s if has_begun else _START_S):
                return late.output or b"", b""


def _end(process: subprocess.Popen[bytes], wait_s: float) -> None:
    """End a process and all that it started, after `wait_s` to delete what it wrote."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(wait_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver: it cannot be ended
        process.wait(1.0)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _failed(name: str, failure: str) -> Finding:
    return Finding(name, "error", f"the check {failure}", _FIX.format(name=name), group=name)


def _load(table: str) -> Mapping[str, Check]:
    module, _, name = table.partition(":")
    checks: Mapping[str, Check] = getattr(importlib.import_module(module), name)
    return checks


def _serve(request: Mapping[str, Any], out: IO[str]) -> None:
    """Inside the subprocess: run the checks and write what they find."""

    def send(**message: Any) -> None:
        out.write(f"{json.dumps(message)}\n")
        out.flush()

    folders: dict[str, Any] = {key: Path(folder) for key, folder in request["folders"].items()}
    facts = functools.cache(gpus.torch_facts)
    machine = Machine(**folders, torch=facts, progress=lambda what: send(at=what))
    for name in request["names"]:
        send(check=name)
        try:
            for finding in _load(request["table"])[name].run(machine):
                send(found=dataclasses.asdict(dataclasses.replace(finding, group=name)))
        except Exception as error:  # a check that fails is a finding like any other
            send(found=dataclasses.asdict(_failed(name, f"failed: {type(error).__name__}: {error}")))


def _end_on_sigterm() -> None:
    """On SIGTERM, which also comes when the doctor dies, delete what a check has written and end."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def end_late() -> None:  # where a call into a driver keeps Python from handling the signal
        os.read(reader, 1)
        time.sleep(_CLEANUP_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_late, daemon=True).start()
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    die_with_parent(signal.SIGTERM)


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        os.dup2(2, 1)  # what libraries print must not mix with the lines
        _end_on_sigterm()
        try:
            _serve(json.loads(sys.argv[1]), lines)
        except SystemExit:
            os.killpg(0, signal.SIGKILL)  # programs that a check has started too
