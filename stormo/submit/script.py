"""The sbatch script of a job, as a pure function of its settings.

Every attempt of the job runs the same command, `stormo train … --run-name NAME --resume`: it starts a new run, or
resumes one from its last checkpoint.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stormo.errors import EXIT_RESUMABLE
from stormo.submit.settings import Slurm

SCRIPT, _LOG, _ATTEMPTS = "job.sh", "slurm.log", "slurm-attempts.txt"  # in the run folder
_AS_SBATCH = (  # options that have sbatch's own name
    *("cpus-per-task", "mem", "time", "partition", "account", "qos", "constraint", "reservation"),
    *("nodelist", "exclude"),
)
_PLAIN = re.compile(r"[\w@%+=:,./\[\]-]+", flags=re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Everything the script says."""

    name: str  # of the run
    slurm: Slurm
    setup: str  # lines of shell before the training
    least_nodes: int
    most_nodes: int
    workers_per_node: int
    gpus_per_node: int
    folder: Path  # where it was submitted, and where it runs
    runs_folder: Path
    python: str
    arguments: tuple[str, ...]  # of `stormo train`

    @property
    def run_folder(self) -> Path:
        """Where the run is kept."""
        return self.runs_folder / self.name

    @property
    def log(self) -> Path:
        """The file of the job's output."""
        return self.folder / self.slurm.log if self.slurm.log is not None else self.run_folder / _LOG


def render(job: Job) -> str:
    """The whole script."""
    # What the setup sets stays set; with -e the exit code of the training would end the script.
    setup = [f"# Said by --setup.\n{job.setup.strip()}", "set +e -u"] if job.setup.strip() else ["set -u"]
    parts = [_head(job), _warning(job), *setup, _attempt(job), _end(job)]
    return "\n\n".join(parts) + "\n"


def _head(job: Job) -> str:
    lines = ["#!/bin/bash", f"# Trains the run {job.name}; written by stormo submit."]
    lines += [f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={value}" for name, value in _directives(job)]
    lines += [f"#SBATCH {_directive_word(word)}" for word in shlex.split(job.slurm.sbatch or "")]
    return "\n".join(lines)


def _directives(job: Job) -> Iterator[tuple[str, str | None]]:
    slurm = job.slurm
    nodes = str(job.most_nodes) if job.least_nodes == job.most_nodes else f"{job.least_nodes}-{job.most_nodes}"
    yield "job-name", _quoted(slurm.job_name or job.name)
    yield "chdir", _quoted(str(job.folder))
    yield "output", _quoted(str(job.log).replace("%", "%%"))
    yield "open-mode", "append"
    yield "nodes", nodes
    yield "ntasks-per-node", str(job.workers_per_node)
    if job.gpus_per_node and not re.search(r"--(gres|gpus)\b", slurm.sbatch or ""):
        yield "gpus-per-node", str(job.gpus_per_node)
    for name in _AS_SBATCH:
        value = getattr(slurm, name.replace("-", "_"))
        if value is not None:
            yield name, _quoted(str(value))
    if slurm.exclusive:
        yield "exclusive", None
    yield "requeue", None  # Slurm requeues a job that it preempts, and one that has lost a node
    yield "signal", f"B:USR1@{slurm.warn_s}"


def _warning(job: Job) -> str:
    return f"""\
# Slurm sends USR1 {job.slurm.warn_s} s before the time limit: the training ends its step, saves, and ends with \
{EXIT_RESUMABLE}.
step= warnings=0
trap 'warnings=$((warnings + 1)); [ -z "$step" ] || warn' USR1"""


def _attempt(job: Job) -> str:
    command = " \\\n        ".join(_command(job))
    return f"""\
run={shlex.quote(job.name)}
folder={shlex.quote(str(job.run_folder))}

note() {{ printf '%s %s %s\\n' "$SLURM_JOB_ID" "$(date +%s)" "$*" >> "$folder/{_ATTEMPTS}"; }}

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
    """The command of the training, one string a line."""
    slurm = job.slurm
    # Since release 22.05 srun does not take it from the job.
    srun = ["srun"] if slurm.cpus_per_task is None else ["srun", f"--cpus-per-task={slurm.cpus_per_task}"]
    program = [job.python, "-P", "-m", "stormo"]
    if slurm.apptainer is not None:
        image = str(job.folder / slurm.apptainer)
        own = dict.fromkeys((str(job.folder), str(job.runs_folder)))  # which an image need not see
        binds = [*own, *([slurm.apptainer_bind] if slurm.apptainer_bind else [])]
        nvidia = ["--nv"] if job.gpus_per_node else []
        program = ["apptainer", "exec", *nvidia, "--bind", ",".join(binds), image, "stormo"]
    listening = ["bash", "-c", 'trap "" USR1; exec "$@"', "-"]
    pieces = [shlex.join([*srun, *listening, *program, "train", job.arguments[0]]), *_flag_groups(job.arguments[1:])]
    return [*pieces, '--run-name "$run" --resume']


def _flag_groups(arguments: Sequence[str]) -> Iterator[str]:
    """Each flag together with its values."""
    position = 0
    while position < len(arguments):
        end = position + 1
        while end < len(arguments) and not arguments[end].startswith("--"):
            end += 1
        yield shlex.join(arguments[position:end])
        position = end


def _end(job: Job) -> str:
    if job.slurm.on_time_limit == "stop":
        return 'exit "$code"'
    return f"""\
# Only after the warning: a cancelled job stays cancelled, and Slurm itself requeues one that it preempts.
if [ "$code" = {EXIT_RESUMABLE} ] && [ "$warnings" != 0 ]; then
    if [ "$saved" = "$(ls "$folder/checkpoints" 2> /dev/null)" ]; then
        echo "stormo: no step was done within the time limit, nor would be the next time; set a longer --time" >&2
        exit {EXIT_RESUMABLE}
    fi
    note requeue
    scontrol requeue "$SLURM_JOB_ID" ||
        echo "stormo: Slurm does not requeue this job; submit it again with --run-name $run --resume" >&2
fi
exit "$code\""""


def _quoted(text: str) -> str:
    """A value on an #SBATCH line, which takes double quotes."""
    return text if _PLAIN.fullmatch(text) else f'"{text}"'


def _directive_word(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"{name}{equals}{_quoted(value)}" if equals else name
