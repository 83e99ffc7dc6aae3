"""Checks that hang, fail, crash and print."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from stormo.doctor.check_runner import Check
from stormo.doctor.finding import Finding
from stormo.doctor.machine import Machine


def fine(machine: Machine) -> Iterator[Finding]:
    """Finds the folder it was given."""
    yield Finding(check="fine", level="ok", text=str(machine.runs_folder), facts={"pid": os.getpid()})


def hangs(machine: Machine) -> Iterator[Finding]:
    """Finds something, then waits for a driver that never answers."""
    with tempfile.TemporaryDirectory() as name:
        yield Finding(check="fine", level="ok", text=name, facts={"pid": os.getpid()})
        time.sleep(600)


def waits(machine: Machine) -> Iterator[Finding]:
    """Writes something, then waits for a program that never answers."""
    folder = machine.runs_folder / "scratch"
    folder.mkdir()
    try:
        program = "sleep 600 & echo $! > pid.new; mv pid.new pid; wait"
        subprocess.run(["/bin/sh", "-c", program], cwd=folder, check=False)
    finally:
        shutil.rmtree(folder)
    yield from fine(machine)


def stuck(machine: Machine) -> Iterator[Finding]:
    """Waits in a call that no signal interrupts, as in a driver."""
    (machine.runs_folder / "pid.new").write_text(str(os.getpid()))
    (machine.runs_folder / "pid.new").rename(machine.runs_folder / "pid")
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
    yield from fine(machine)


def fails(_: Machine) -> Iterator[Finding]:
    """Raises."""
    raise KeyError("speed")
    yield


def crashes(_: Machine) -> Iterator[Finding]:
    """Is ended by a library."""
    sys.stderr.write("libdriver: assertion failed\n")
    sys.stderr.flush()
    os._exit(3)
    yield


def prints(machine: Machine) -> Iterator[Finding]:
    """Uses a library that prints."""
    os.write(1, b"warming up\n")
    yield from fine(machine)


CHECKS = {
    "hangs": Check(hangs, 0.5),
    "fails": Check(fails, 60.0),
    "crashes": Check(crashes, 60.0),
    "prints": Check(prints, 60.0),
    "waits": Check(waits, 600.0),
    "stuck": Check(stuck, 600.0),
}
