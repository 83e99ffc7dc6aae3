"""Becoming mpirun: the command that starts the workers on a list of hosts, for Open MPI and for the Hydra family.

What mpirun starts finds out by itself who it is (`mpi`); where rank 0 is it learns from MASTER_ADDR and MASTER_PORT.
Which mpirun, and what else it is to be told, may be said by STORMO_MPIRUN.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stormo.errors import SettingError
from stormo.launch.program import words_of

PROGRAM = "STORMO_MPIRUN"
_NAMES = ("mpirun", "mpiexec")
_ANSWER_WITHIN_S = 60.0
_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What is to run, and where."""

    hosts: tuple[str, ...]
    workers_per_host: int
    command: tuple[str, ...]
    variables: Mapping[str, str]  # that every worker gets with these values
    passed_on: tuple[str, ...] = ()  # variables that every worker gets as they are here

    @property
    def num_workers(self) -> int:
        """Workers on all hosts."""
        return len(self.hosts) * self.workers_per_host

    @property
    def listed(self) -> str:
        """Hosts and slots in one word, which all families read alike."""
        return ",".join(f"{host}:{self.workers_per_host}" for host in self.hosts)


Render = Callable[[Sequence[str], Start], list[str]]


def open_mpi(program: Sequence[str], start: Start) -> list[str]:
    """The command line of Open MPI; workers are not bound to cores, as each has threads of its own."""
    words = [*program, "--host", start.listed, "-n", str(start.num_workers)]
    words += ["--map-by", f"ppr:{start.workers_per_host}:node", "--bind-to", "none"]
    for name, value in start.variables.items():
        words += ["-x", f"{name}={value}"]
    for name in start.passed_on:
        words += ["-x", name]
    return [*words, *start.command]


def hydra(program: Sequence[str], start: Start) -> list[str]:
    """The command line of MPICH, which binds nobody to cores by itself."""
    return [*program, "-hosts", start.listed, *_rest_of_hydra(start)]


def intel(program: Sequence[str], start: Start) -> list[str]:
    """The command line of Intel MPI: MPICH's, but hosts are named without slots and workers would be pinned."""
    return [*program, "-hosts", ",".join(start.hosts), "-genv", "I_MPI_PIN", "off", *_rest_of_hydra(start)]


def _rest_of_hydra(start: Start) -> list[str]:
    words = ["-n", str(start.num_workers), "-ppn", str(start.workers_per_host)]
    for name, value in start.variables.items():
        words += ["-genv", name, value]
    if start.passed_on:
        words += ["-genvlist", ",".join(start.passed_on)]
    return [*words, *start.command]


# By a word of what `mpirun --version` prints; Intel's is looked for first, as it is of Hydra's family.
FLAVOURS: Mapping[str, Render] = {"Intel": intel, "Open MPI": open_mpi, "OpenRTE": open_mpi, "HYDRA": hydra}


def command_line(start: Start, environ: Mapping[str, str], *, is_shown: bool = False) -> list[str]:
    """The whole command of the mpirun that is installed here, which is to be run unless it is only shown."""
    program = _program(environ)
    render = _flavour(program)
    is_refused = render is open_mpi and os.geteuid() == 0 and not all(environ.get(name) for name in _ROOT)
    if is_refused and not is_shown:
        raise SettingError(
            "--launcher mpi was set by root",
            "Open MPI starts nothing for root unless it is told to twice",
            f"set {_ROOT[0]}=1 and {_ROOT[1]}=1, or work as another user",
        )
    return render(program, start)


def _program(environ: Mapping[str, str]) -> list[str]:
    said = words_of(PROGRAM, environ)
    names = said[:1] or list(_NAMES)
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        raise SettingError(
            f"{PROGRAM}={environ[PROGRAM]} was set" if said else "--launcher mpi was set",
            f"there is no {' or '.join(names)} here",
            f"load the module of your MPI, name its mpirun by {PROGRAM}, or set --launcher ssh",
        )
    return [found, *said[1:]]


def _flavour(program: Sequence[str]) -> Render:
    try:
        asked = subprocess.run([program[0], "--version"], capture_output=True, timeout=_ANSWER_WITHIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unknown(program[0], str(error)) from None
    said = (asked.stdout + asked.stderr).decode(errors="replace")  # whatever the locale
    for word, render in FLAVOURS.items():
        if word in said:
            return render
    raise _unknown(program[0], f"{program[0]} --version says {said.strip().partition(chr(10))[0]!r}")


def _unknown(program: str, why: str) -> SettingError:
    return SettingError(
        f"--launcher mpi was set and {program} found",
        f"it is neither Open MPI nor MPICH nor Intel MPI ({why})",
        f"name another one by {PROGRAM}, or type its command yourself: every MPI's ranks find one another",
    )
