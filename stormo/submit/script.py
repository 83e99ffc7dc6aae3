"""The sbatch script of a job, as a pure function of what is asked for.

Every attempt of the job runs the same command, `stormo train … --run-name NAME --resume`, which starts the run where it
has not begun and goes on where it has.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stormo.errors import EXIT_RESUMABLE
from stormo.submit.settings import Slurm

SCRIPT, LOG, ATTEMPTS = "job.sh", "slurm.log", "slurm-attempts.txt"  # in the run folder
_PLAIN = re.compile(r"[\w@%+=:,./\[\]-]+", flags=re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training of the job: its name, and what it is told besides what all of them are told."""

    name: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Everything the script says."""

    name: str  # of the run, or of the sweep
    runs: tuple[Run, ...]
    is_array: bool
    slurm: Slurm
    setup: str  # lines of shell before the training
    least_nodes: int
    most_nodes: int
    workers_per_node: int
    gpus_per_node: int
    folder: Path  # where it was submitted, and where it runs
    runs_folder: Path
    python: str
    words: tuple[str, ...]  # what follows `stormo train`, the same for every run

    def run_folder(self, run: Run) -> Path:
        """Where a run of the job is kept."""
        return self.runs_folder / run.name


def render(job: Job) -> str:
    """The whole script."""
    # What the setup sets stays set; with -e the exit code of the training would end the script.
    setup = [_setup(job), "set +e -u"] if job.setup.strip() else ["set -u"]
    parts = [_head(job), _warning(job), *setup, _names(job), _attempt(job), _end(job)]
    return "\n\n".join(parts) + "\n"


def log_of(job: Job, run: Run) -> Path:
    """The file of a run's output."""
    return job.folder / job.slurm.log if job.slurm.log is not None else job.run_folder(run) / LOG


def _head(job: Job) -> str:
    what = f"the runs of {job.name}" if job.is_array else f"the run {job.name}"
    lines = ["#!/bin/bash", f"# Trains {what}; written by stormo submit."]
    lines += [f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={value}" for name, value in _directives(job)]
    lines += [f"#SBATCH {_directive_word(word)}" for word in shlex.split(job.slurm.sbatch or "")]
    return "\n".join(lines)


def _directives(job: Job) -> Iterator[tuple[str, str | None]]:
    slurm = job.slurm
    nodes = str(job.most_nodes) if job.least_nodes == job.most_nodes else f"{job.least_nodes}-{job.most_nodes}"
    log = _escaped(str(log_of(job, job.runs[0])))
    if job.is_array:
        log = f"{_escaped(str(job.runs_folder / job.name))}-%a/{LOG}"
        limit = "" if slurm.array_limit is None else f"%{slurm.array_limit}"
        yield "array", f"0-{len(job.runs) - 1}{limit}"
    yield "job-name", _quoted(slurm.job_name or job.name)
    yield "chdir", _quoted(str(job.folder))
    yield "output", _quoted(log)
    yield "open-mode", "append"
    yield "nodes", nodes
    yield "ntasks-per-node", str(job.workers_per_node)
    if job.gpus_per_node and not re.search(r"--(gres|gpus)\b", slurm.sbatch or ""):
        yield "gpus-per-node", str(job.gpus_per_node)
    for name in ("cpus-per-task", "mem", "time", "partition", "account", "qos", "constraint", "reservation"):
        value = getattr(slurm, name.replace("-", "_"))
        if value is not None:
            yield name, _quoted(str(value))
    for name, value in (("nodelist", slurm.nodelist), ("exclude", slurm.exclude)):
        if value is not None:
            yield name, _quoted(value)
    if slurm.exclusive:
        yield "exclusive", None
    if slurm.on_time_limit != "chain":
        yield "requeue", None  # a preempted job and one that has lost a node go on too
    yield "signal", f"B:USR1@{slurm.warn_s}"


def _warning(job: Job) -> str:
    return f"""\
# Slurm sends USR1 {job.slurm.warn_s} s before the time limit: the training ends its step, saves, and ends with \
{EXIT_RESUMABLE}.
step= warnings=0
trap 'warnings=$((warnings + 1)); [ -z "$step" ] || warn' USR1"""


def _setup(job: Job) -> str:
    return f"# Said by --setup.\n{job.setup.strip()}"


def _names(job: Job) -> str:
    if not job.is_array:
        folder = shlex.quote(str(job.run_folder(job.runs[0])))
        return f"job=$SLURM_JOB_ID\nrun={shlex.quote(job.name)}\nfolder={folder}"
    cases = [
        f"{number}) run={shlex.quote(run.name)} settings=({shlex.join(run.words)}) ;;"
        for number, run in enumerate(job.runs)
    ]
    return "\n".join(
        [
            "job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
            "case $SLURM_ARRAY_TASK_ID in",
            *cases,
            "esac",
            f"folder={shlex.quote(str(job.runs_folder))}/$run",
        ]
    )


def _attempt(job: Job) -> str:
    command = " \\\n        ".join(_command(job))
    return f"""\
note() {{ printf '%s %s %s\\n' "$job" "$(date +%s)" "$*" >> "$folder/{ATTEMPTS}"; }}

warn() {{ while kill -USR1 "$step" 2> /dev/null; do sleep 5; done & }}  # until it listens

saved=$(ls "$folder/checkpoints" 2> /dev/null)
note start "$SLURM_JOB_NODELIST"
(
    trap '' USR1  # what comes before anyone listens ends nothing
    exec {command}
) &
step=$!
# A process that has just begun does not ignore it yet.
[ "$warnings" = 0 ] || {{ sleep 1; warn; }}
seen=-1
while [ "$seen" != "$warnings" ]; do  # a warning ends `wait`, not the training
    seen=$warnings
    wait "$step"
    code=$?
done
# srun may end with 0 where it has lost a node.
if [ "$code" = 0 ] && ! grep -qs '"stopped_by": "\\(target\\|epochs\\)"' "$folder/summary.json"; then
    echo "stormo: srun ended, but the training has not" >&2
    code=1
fi
note end "$code\""""


def _command(job: Job) -> list[str]:
    """The line that trains, in pieces that go on lines of their own."""
    slurm = job.slurm
    # Since release 22.05 srun does not take it from the job.
    srun = ["srun"] if slurm.cpus_per_task is None else ["srun", f"--cpus-per-task={slurm.cpus_per_task}"]
    program = [job.python, "-P", "-m", "stormo"]
    if slurm.apptainer is not None:
        image = str(job.folder / slurm.apptainer)
        own = dict.fromkeys((str(job.folder), str(job.runs_folder)))  # which an image need not see by itself
        binds = [*own, *([slurm.bind] if slurm.bind else [])]
        nvidia = ["--nv"] if job.gpus_per_node else []
        program = ["apptainer", "exec", *nvidia, "--bind", ",".join(binds), image, "stormo"]
    listening = ["bash", "-c", 'trap "" USR1; exec "$@"', "-"]
    pieces = [shlex.join([*srun, *listening, *program, "train", job.words[0]]), *_pairs(job.words[1:])]
    return [*pieces, *(['"${settings[@]}"'] if job.is_array else []), '--run-name "$run" --resume']


def _pairs(words: Sequence[str]) -> Iterator[str]:
    """The words with a flag and its value together."""
    position = 0
    while position < len(words):
        end = position + 1
        while end < len(words) and not words[end].startswith("--"):
            end += 1
        yield shlex.join(words[position:end])
        position = end


def _end(job: Job) -> str:
    if job.slurm.on_time_limit == "stop":
        return 'exit "$code"'
    of_array = "_$SLURM_ARRAY_TASK_ID" if job.is_array else ""
    chain = f"""\
    if next=$(sbatch --parsable {_after(job)} "$folder/{SCRIPT}"); then
        note chain "${{next%%;*}}{of_array}"
    fi"""
    requeue = f"""\
    note requeue
    if ! scontrol requeue "$SLURM_JOB_ID"; then
        echo "stormo: Slurm does not queue this job again; another one goes on"
    {chain.replace(chr(10), chr(10) + "    ")}
    fi"""
    return f"""\
# Only after the warning: a job that was cancelled stays so, and Slurm itself requeues one that it preempts.
if [ "$code" = {EXIT_RESUMABLE} ] && [ "$warnings" != 0 ]; then
    if [ "$saved" = "$(ls "$folder/checkpoints" 2> /dev/null)" ]; then
        echo "stormo: no step was done within the time limit, nor would be the next time; set a longer --time" >&2
        exit {EXIT_RESUMABLE}
    fi
{requeue if job.slurm.on_time_limit == "requeue" else chain}
fi
exit "$code\""""


def _after(job: Job) -> str:
    """Which job the next one waits for, in flags of sbatch."""
    if not job.is_array:
        return '--dependency="afterany:$SLURM_JOB_ID"'
    array = '--array="$SLURM_ARRAY_TASK_ID"'
    if job.slurm.array_limit is None:
        return f'--dependency="afterany:$SLURM_JOB_ID" {array}'
    # Slurm's limit is that of one array, and the next job is no part of this one. So it comes after all of this array,
    # and then in one of as many lanes as may run: of jobs with one name, one runs at a time.
    lane = f"{shlex.quote(f'{job.slurm.job_name or job.name}-lane')}$((SLURM_ARRAY_TASK_ID % {job.slurm.array_limit}))"
    return f'--dependency="afterany:$SLURM_ARRAY_JOB_ID,singleton" --job-name={lane} {array}'


def _escaped(path: str) -> str:
    return path.replace("%", "%%")


def _quoted(text: str) -> str:
    """A value on an #SBATCH line, which takes double quotes."""
    return text if _PLAIN.fullmatch(text) else f'"{text}"'


def _directive_word(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"{name}{equals}{_quoted(value)}" if equals else name
