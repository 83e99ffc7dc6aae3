"""Checks that hang, fail, die and print, for the process that runs checks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from stormo.doctor.command import Check
from stormo.doctor.finding import Finding
from stormo.doctor.machine import Machine


def fine(machine: Machine) -> Iterator[Finding]:
    """Finds the folder it was told of."""
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
        words = "sleep 600 & echo $! > pid.new; mv pid.new pid; wait"
        subprocess.run(["/bin/sh", "-c", words], cwd=folder, check=False)
    finally:
        shutil.rmtree(folder)
    yield from fine(machine)


def fails(_: Machine) -> Iterator[Finding]:
    """Has a mistake in it."""
    raise KeyError("speed")
    yield


def dies(_: Machine) -> Iterator[Finding]:
    """Is ended by a library."""
    sys.stderr.write("libdriver: assertion failed\n")
    sys.stderr.flush()
    os._exit(3)
    yield


def prints(machine: Machine) -> Iterator[Finding]:
    """Uses a library that prints, to whom it may concern."""
    os.write(1, b"warming up\n")
    yield from fine(machine)


CHECKS = {
    "fine": Check(fine, 60.0),
    "hangs": Check(hangs, 2.0),
    "fails": Check(fails, 60.0),
    "dies": Check(dies, 60.0),
    "prints": Check(prints, 60.0),
    "waits": Check(waits, 600.0),
}
