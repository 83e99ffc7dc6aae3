"""The verb `doctor`: examines this machine, or hands over to the doctor of a whole job.

Each check runs in a process of its own, `python -m` this module: a driver or a file system that hangs does not hang the
doctor. The process writes what it looks at and what it finds, a line of JSON each; one that takes too long is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
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

from stormo.config.options import Parser, options_of
from stormo.config.schema import Run, Workers
from stormo.doctor import gpus, libraries, machine, network
from stormo.doctor.finding import Finding, as_json, exit_code, show
from stormo.doctor.machine import Machine
from stormo.errors import SettingError, unknown_name
from stormo.launch.environments.detect import LAUNCHERS
from stormo.launch.rank_info import host_name
from stormo.system.cache import data_cache
from stormo.telemetry.text import write_text
from stormo.version import __version__

_JOB_FLAGS = tuple(option.flag for option in options_of("workers", Workers))
_PR_SET_PDEATHSIG = 1
_START_S = 60.0  # an interpreter from a slow file system
_LOOK_S = 0.1
_CLEANUP_S = 5.0  # a full write to a slow disk
_INTERRUPTED_S = 1.0
_REMOVED = {
    "clock": "chronyc tracking or timedatectl tells whether the clock is right",
    "schedulers": "sinfo, qstat or lsid tells whether the scheduler answers",
    "energy": "stormo monitor --count 1 tells which energy counters can be read",
}
_FIX = "see what is wrong there (dmesg; a file system or a driver that does not answer); --skip {name} leaves it out"


class Check(NamedTuple):
    """What looks at one part of a machine, and how long it may take."""

    run: Callable[[Machine], Iterable[Finding]]
    limit_s: float


def _is_there(machine: Machine) -> Iterator[Finding]:
    is_folder = machine.data_folder.expanduser().is_dir()
    yield Finding("folder", "ok" if is_folder else "note", str(machine.data_folder))


# In the order they are made: GPUs before torch uses one of them, storage when nothing else reads or writes.
CHECKS: dict[str, Check] = {
    "devices": Check(gpus.check, 20.0),
    "libraries": Check(libraries.check, 70.0),  # an import from a network file system under load takes so long
    "backends": Check(libraries.check_backends, 70.0),
    "network": Check(network.check, 15.0),
    "limits": Check(machine.check_limits, 10.0),
    "storage": Check(machine.check_storage, 30.0),
}
ASKED = {"folder": Check(_is_there, 5.0)}  # before anything else is looked at


def main(arguments: Sequence[str]) -> int:
    """Examine, print, and return the exit code: 1 where something is an error."""
    if _is_job(arguments, os.environ):
        from stormo.doctor import job

        return job.main(list(arguments))
    parsed = _parser().parse_args(arguments)
    names = _chosen(parsed.only, parsed.skip)
    folders = {"runs_folder": parsed.runs_folder, "data_folder": _data_folder(parsed.data_folder)}
    findings = examine(names, folders)
    if parsed.json:
        write_text(as_json(findings) + "\n", sys.stdout)
    else:
        system = os.uname()
        write_text(f"stormo {__version__} on {host_name()}, {system.sysname} {system.release}\n\n", sys.stdout)
        show(findings, sys.stdout)
    return exit_code(findings)


def examine(
    names: Sequence[str],
    folders: Mapping[str, str] | None = None,
    *,
    table: str = "stormo.doctor.command:CHECKS",
    limit_s: float | None = None,
) -> list[Finding]:
    """What these checks find on this machine.

    Args:
        names: of checks in the table.
        folders: `runs_folder` and `data_folder`, where they are not the usual ones.
        table: where the checks are, as module:name.
        limit_s: the longest that any check may take, where its own limit is longer.
    """
    found: list[Finding] = []
    for name in names:
        limit = _load(table)[name].limit_s
        asked = {"table": table, "name": name, "folders": dict(folders or {})}
        found += _examine_apart(asked, limit if limit_s is None else min(limit, limit_s))
    return found


def _examine_apart(asked: Mapping[str, Any], limit_s: float) -> list[Finding]:
    """Run one check in a process of its own; one that hangs or dies is a finding too."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "stormo.doctor.command", json.dumps(asked)],
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
    how = ""
    if process.poll() is None:
        _end(process, _CLEANUP_S)
        how = f"took longer than {limit_s:g} s and was ended"
    elif code := process.returncode:
        last = next((line.strip() for line in reversed(err.decode(errors="replace").splitlines()) if line), "")
        how = f"ended its process: {f'signal {-code}' if code < 0 else f'exit code {code}'}, {last[:300]}"
    messages = [json.loads(line) for line in out.decode(errors="replace").splitlines(keepends=True) if "\n" in line]
    found = [Finding(**message["found"]) for message in messages if "found" in message]
    if how:
        at = next((f" (at {message['at']})" for message in reversed(messages) if "at" in message), "")
        found.append(_failed(str(asked["name"]), how + at))
    return found


def _communicate(process: subprocess.Popen[bytes], limit_s: float) -> tuple[bytes, bytes]:
    """Its output until it ends, or for so long since its first line at most."""
    began_s, has_begun = time.monotonic(), False
    while True:
        try:
            return process.communicate(timeout=_LOOK_S)
        except subprocess.TimeoutExpired as late:
            if late.output and not has_begun:
                began_s, has_begun = time.monotonic(), True
            if time.monotonic() - began_s > (limit_s if has_begun else _START_S):
                return late.output or b"", b""


def _end(process: subprocess.Popen[bytes], wait_s: float) -> None:
    """End a process and all that it started; it has so long to delete what it wrote."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(wait_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # held by a driver: nobody can end it
        process.wait(1.0)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _failed(name: str, how: str) -> Finding:
    return Finding(name, "error", f"the check {how}", _FIX.format(name=name), group=name)


def _load(table: str) -> Mapping[str, Check]:
    module, _, name = table.partition(":")
    checks: Mapping[str, Check] = getattr(importlib.import_module(module), name)
    return checks


def _serve(asked: Mapping[str, Any], out: IO[str]) -> None:
    """Inside the process: run the check and write what it finds."""

    def say(**message: Any) -> None:
        out.write(f"{json.dumps(message)}\n")
        out.flush()

    say()  # it has begun
    name = asked["name"]
    folders: dict[str, Any] = {key: Path(folder) for key, folder in asked["folders"].items()}
    machine = Machine(**folders, torch=libraries.gather, tell=lambda what: say(at=what))
    try:
        for finding in _load(asked["table"])[name].run(machine):
            say(found=dataclasses.asdict(dataclasses.replace(finding, group=name)))
    except Exception as error:  # a check that fails is a finding like any other
        say(found=dataclasses.asdict(_failed(name, f"failed: {type(error).__name__}: {error}")))


def _end_on_sigterm() -> None:
    """End on SIGTERM, which also comes when the doctor dies, however: what a check has written is deleted first."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def end_late() -> None:  # where a call into a driver keeps Python from hearing of the signal
        os.read(reader, 1)
        time.sleep(_CLEANUP_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_late, daemon=True).start()
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _is_job(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether several workers are asked for, or a launcher has started this process as one of them."""
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments if argument.startswith("--")}
    return bool(given & set(_JOB_FLAGS)) or any(launcher.detect(environ) for launcher in LAUNCHERS.values())


def _chosen(only: str | None, skip: str | None) -> list[str]:
    names = _names("--only", only) if only is not None else list(CHECKS)
    left_out = _names("--skip", skip) if skip is not None else []
    chosen = [name for name in CHECKS if name in names and name not in left_out]
    if not chosen:
        raise SettingError(
            f"--skip {skip} was set", "it leaves nothing of what is to be looked at", "leave a name out of it"
        )
    return chosen


def _names(flag: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name in _REMOVED:
            raise SettingError(f"{flag} {name} was set", "stormo no longer has this check", _REMOVED[name])
        if name not in CHECKS:
            raise unknown_name(f"{flag}", name, CHECKS)
    if not names:
        raise SettingError(f"{flag} {text!r} was set", "it names no check", f"name some of: {', '.join(CHECKS)}")
    return names


def _data_folder(asked: str | None) -> str:
    if asked is None:
        return str(data_cache(os.environ))
    # In a process apart: a file system that does not answer is named by the storage check, which has a limit.
    (found,) = examine(["folder"], {"data_folder": asked}, table=f"{__name__}:ASKED")
    if found.level == "note":
        raise SettingError(f"--data-folder {asked} was set", "there is no such folder", "check the path")
    return asked


def _parser() -> Parser:
    parser = Parser(
        prog="stormo doctor",
        description="Look at this machine: what would slow a training, end it, or make its figures wrong, and how to "
        "fix it. With --num-nodes or --num-gpus, or under srun, mpirun or torchrun: at all workers of a job and the "
        "links between them.",
        epilog=f"checks: {', '.join(CHECKS)}. The exit code is 1 where something is an error, else 0.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--only", metavar="NAMES", help="look at these alone, with commas between them")
    parser.add_argument("--skip", metavar="NAMES", help="leave these out; storage writes up to 64 MB to each folder")
    parser.add_argument(
        "--runs-folder", default=Run.runs_folder, metavar="FOLDER", help="where runs go (default: %(default)s)"
    )
    parser.add_argument(
        "--data-folder", metavar="FOLDER", help="where data are read from (default: where stormo keeps what it fetched)"
    )
    return parser


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        os.dup2(2, 1)  # libraries may print, which must not come between the lines
        _end_on_sigterm()
        try:
            _serve(json.loads(sys.argv[1]), lines)
        except SystemExit:
            os.killpg(0, signal.SIGKILL)  # programs that a check has started too
