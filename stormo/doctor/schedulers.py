"""Schedulers and launchers: which are here, whether they answer, and whether this process is inside one's job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from stormo.doctor.finding import Finding
from stormo.doctor.machine import Machine, first_line, last_line
from stormo.errors import counted

_LIMIT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scheduler:
    name: str
    version: tuple[str, ...]  # the command that prints it
    asks: tuple[str, ...]  # a command that only a scheduler that is up answers
    job: str  # the variable of a process inside a job
    mend: str


_SCHEDULERS = (
    _Scheduler(
        name="Slurm",
        version=("sinfo", "--version"),
        asks=("sinfo", "--noheader", "--format=%D %t %G"),
        job="SLURM_JOB_ID",
        mend="see whether slurmctld is up (scontrol ping) and whether this machine reaches it and has its slurm.conf",
    ),
    _Scheduler(
        name="PBS",
        version=("qstat", "--version"),
        asks=("qstat", "-B"),
        job="PBS_JOBID",
        mend="see whether the PBS server is up and PBS_SERVER in /etc/pbs.conf names it",
    ),
    _Scheduler(
        name="LSF",
        version=("lsid", "-V"),
        asks=("lsid",),
        job="LSB_JOBID",
        mend="source LSF's profile.lsf, and see whether its master host is up",
    ),
)


def check(machine: Machine) -> Iterator[Finding]:
    """All that could start a job here."""
    num_found = 0
    for scheduler in _SCHEDULERS:
        found = list(_scheduler(machine, scheduler))
        num_found += bool(found)
        yield from found
    for found in (_mpi(machine), _kubernetes(machine)):
        num_found += bool(found)
        yield from found
    yield from _torchrun(machine)
    yield from _container(machine)
    if not num_found:
        text = "no scheduler and no mpirun: start the same command on each node with --num-nodes and --node-id"
        yield Finding(check="scheduler", level="ok", text=text)


def _scheduler(machine: Machine, scheduler: _Scheduler) -> Iterator[Finding]:
    name, check = scheduler.name, scheduler.name.lower()
    job = machine.environ.get(scheduler.job)
    if machine.program(scheduler.asks[0]) is None:
        if job:
            text = f"inside job {job} of {name}, whose commands are not here: as usual in a container"
            yield Finding(check=check, level="note", text=text, facts={"job": job})
        return
    told = machine.call(scheduler.version, _LIMIT_S)
    number = re.search(r"\d+(\.\d+)+", told.text) if told.code == 0 else None
    version = number[0] if number else None
    called = f"{name} {version}" if version else name
    answer = machine.call(scheduler.asks, _LIMIT_S)
    facts = {"version": version, "job": job, "answers": answer.code == 0}
    if answer.code != 0:
        text = f"{called} is installed, but does not answer: {last_line(answer.text)}"
        # Nothing of a training that runs here needs it; submitting one does.
        yield Finding(check=check, level="warning", text=text, mend=scheduler.mend, facts=facts)
        return
    text = f"{called} answers" + (f"; inside job {job}" if job else "")
    if name == "Slurm":
        text += f": {_nodes(answer.text)}"
    yield Finding(check=check, level="ok", text=text, facts=facts)
    if name == "Slurm" and job and "SLURM_PROCID" in machine.environ and "SLURM_STEP_ID" not in machine.environ:
        text = "inside the script of sbatch, which is one process: only srun starts the workers of all nodes"
        yield Finding(check=check, level="note", text=text, mend="start the training with srun stormo train …")


def _nodes(text: str) -> str:
    """`12 nodes (10 idle, 2 down)` of sinfo's lines."""
    states: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0].isdecimal():
            state = words[1].rstrip("*~#!%$@^-")
            states[state] = states.get(state, 0) + int(words[0])
    listed = ", ".join(f"{number} {state}" for state, number in states.items())
    return f"{counted(sum(states.values()), 'node')} ({listed})" if states else "no nodes"


def _mpi(machine: Machine) -> list[Finding]:
    if machine.program("mpirun") is None:
        return []
    answer = machine.call(("mpirun", "--version"), _LIMIT_S)
    version = first_line(answer.text)
    if answer.code != 0:
        mend = "load the module of your MPI anew, or take this mpirun out of PATH"
        return [Finding(check="mpi", level="warning", text=f"mpirun does not start: {version}", mend=mend)]
    return [Finding(check="mpi", level="ok", text=version, facts={"version": version})]


def _kubernetes(machine: Machine) -> list[Finding]:
    if machine.environ.get("KUBERNETES_SERVICE_HOST"):
        return [Finding(check="kubernetes", level="ok", text="inside a pod of Kubernetes")]
    if machine.program("kubectl"):
        return [Finding(check="kubernetes", level="ok", text="kubectl is here")]
    return []


def _torchrun(machine: Machine) -> Iterator[Finding]:
    environ = machine.environ
    if environ.get("TORCHELASTIC_RUN_ID"):
        text = f"inside a job of torchrun: rank {environ.get('RANK')} of {environ.get('WORLD_SIZE')}"
        yield Finding(check="torchrun", level="ok", text=text)
        return
    left = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if environ.get(name)]
    if left and not environ.get("STORMO_LAUNCHER"):
        mend = "unset them, unless a launcher of your own set them for its workers"
        text = f"{', '.join(left)} {'is' if len(left) == 1 else 'are'} set, as if a launcher had started this process"
        yield Finding(check="torchrun", level="note", text=text, mend=mend)


def _container(machine: Machine) -> Iterator[Finding]:
    environ, root = machine.environ, machine.root
    kind = ""
    if environ.get("APPTAINER_CONTAINER") or environ.get("SINGULARITY_CONTAINER"):
        kind = "Apptainer"
    elif (root / "run/.containerenv").exists():
        kind = "Podman"
    elif (root / ".dockerenv").exists():
        kind = "Docker"
    if kind:
        yield Finding(check="container", level="ok", text=f"inside a container of {kind}", facts={"container": kind})
