"""The options of a Slurm job, and their checks; every other option of `stormo submit` is one of `stormo train`."""

from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stormo.config.options import Option, options_of, take_flags
from stormo.config.schema import TrainConfig, option
from stormo.config.toml import read_toml, settings_from_toml
from stormo.errors import SettingError
from stormo.tasks.task import Task
from stormo.training.settings import read_settings

_SECTION = "slurm"
_USAGE = """\
stormo submit [TASK] [options of the job] [any option of stormo train]
       stormo submit my_task.py --num-nodes 4 --num-gpus 8 --time 02:00:00 --partition gpu"""
_DESCRIPTION = (
    "Train TASK as a Slurm job. After each time limit the job resumes, until the training is done. "
    "stormo train --help all shows the options of the training."
)
_CLOCK = re.compile(r"((?P<days>\d+)-)?(?P<clock>\d+(:\d+){0,2})", flags=re.ASCII)
_UNLIMITED = ("infinite", "unlimited")
_UNFIT = re.compile(r'[\n"\\]')  # for a line of an sbatch script
# What the job's own lines say already: a second value would silently win or lose.
_OURS = {
    "--array": "one job for each run",
    "--chdir": "the folder you submit from",
    "--error": "--log",
    "--job-name": "--job-name",
    "--nodes": "--num-nodes",
    "--ntasks": "--num-nodes and --num-gpus",
    "--ntasks-per-node": "--num-gpus",
    "--open-mode": "nothing: the log is appended to",
    "--output": "--log",
    "--parsable": "nothing: the job's number is printed",
    "--signal": "--warn-s",
    "--time": "--time",
    "--wait": "nothing: submit returns at once",
    "--wrap": "the task",
}


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Slurm: the job."""

    time: str | None = option(
        None, "time limit of one attempt, as Slurm writes it; default the partition's", metavar="[D-]HH:MM:SS"
    )
    partition: str | None = option(None, "partition, or several with commas between; default the cluster's")
    account: str | None = option(None, "account that pays")
    qos: str | None = option(None, "quality of service")
    constraint: str | None = option(None, "features that the nodes must have")
    reservation: str | None = option(None, "reservation to run in")
    nodelist: str | None = option(None, "nodes that must take part", metavar="NODES")
    exclude: str | None = option(None, "nodes that must not", metavar="NODES")
    mem: str | None = option(None, "memory of a node, 0 for all of it", metavar="SIZE[K|M|G|T]")
    cpus_per_task: int | None = option(None, "processors of one worker")
    exclusive: bool = option(False, "share the nodes with no other job")
    job_name: str | None = option(None, "name in the queue; default the run's", metavar="NAME")
    log: str | None = option(None, "file of the output; default slurm.log in the run folder", metavar="FILE")
    on_time_limit: Literal["requeue", "stop"] = option("requeue", "after the warning: requeue the job, or end")
    warn_s: int = option(120, "seconds before the time limit at which the training saves", metavar="S")
    apptainer: str | None = option(None, "run inside this image, which has stormo", metavar="IMAGE.sif")
    apptainer_bind: str | None = option(
        None, "folders that the image sees too; repeat for more", metavar="FROM[:TO]", joins=","
    )
    setup: str | None = option(
        None,
        'shell lines before the training, such as "module load cuda"; repeat for more',
        metavar="LINES",
        joins="\n",
    )
    setup_file: str | None = option(None, "the same from a file", metavar="FILE")
    sbatch: str | None = option(
        None, 'any other flags of sbatch: "--mail-type=END --nice=10"', metavar="FLAGS", joins=" "
    )
    print: bool = option(False, "print the script, submit nothing")


def slurm_options() -> list[Option]:
    """The options of `stormo submit` that are not those of `stormo train`."""
    return options_of(_SECTION, Slurm)


def read_slurm(arguments: Sequence[str]) -> tuple[Slurm, TrainConfig, type[Task]]:
    """The settings of the job (flags, then the section of a TOML file) and of the training."""
    arguments = _with_value(arguments)
    flags, rest = take_flags("stormo submit", _USAGE, _DESCRIPTION, arguments, (_SECTION, Slurm))
    config, task_class = read_settings(rest)
    source = config.command.config
    section = (read_toml(Path(source)) if source is not None else {}).get(_SECTION, {})
    of_file = settings_from_toml({_SECTION: section}, slurm_options(), source or "")
    slurm = Slurm(**(of_file | flags))
    _check(slurm)
    return slurm, config, task_class


def _with_value(arguments: Sequence[str]) -> list[str]:
    """`--sbatch --nice=10` as `--sbatch=--nice=10`: argparse takes a second word with dashes for a flag of its own."""
    words = iter(arguments)
    return [word if word != "--sbatch" or (value := next(words, None)) is None else f"{word}={value}" for word in words]


def seconds_of(time: str) -> float | None:
    """The seconds of a time as Slurm writes it; infinite without a limit; None where it is no time."""
    if time.lower() in _UNLIMITED:
        return float("inf")
    match = _CLOCK.fullmatch(time)
    if match is None:
        return None
    numbers = [int(number) for number in match["clock"].split(":")]
    # Slurm reads M, M:S or H:M:S, and behind days H, H:M or H:M:S.
    units_s = (3600, 60, 1) if match["days"] or len(numbers) == 3 else (60, 1)
    seconds = 86400 * int(match["days"] or 0) + sum(map(operator.mul, numbers, units_s))
    return float(seconds or "inf")  # Slurm takes 0 for no limit


def _check(slurm: Slurm) -> None:
    _check_time(slurm)
    if slurm.mem is not None and not re.fullmatch(r"\d+[KMGTkmgt]?", slurm.mem, flags=re.ASCII):
        raise SettingError(f"--mem {slurm.mem} was set", "it is no size that Slurm reads", "set something like 64G")
    if slurm.cpus_per_task is not None and slurm.cpus_per_task < 1:
        raise SettingError(
            f"--cpus-per-task {slurm.cpus_per_task} was set", "it must be at least 1", "set --cpus-per-task 1 or more"
        )
    for name in ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "job_name", "log"):
        value = getattr(slurm, name)
        if value is not None and (not value.strip() or _UNFIT.search(value)):
            flag = f"--{name.replace('_', '-')}"
            raise SettingError(
                f"{flag} was set to {value!r}",
                "a line of an sbatch script holds no such text",
                "set a name without line ends, double quotes and backslashes",
            )
    _check_files(slurm)
    _check_sbatch(slurm.sbatch or "")


def _check_time(slurm: Slurm) -> None:
    limit_s = None if slurm.time is None else seconds_of(slurm.time)
    if slurm.time is not None and limit_s is None:
        raise SettingError(
            f"--time {slurm.time} was set",
            "it is no time that Slurm reads",
            "set minutes (90), hours:minutes:seconds (02:00:00) or days-hours (1-12)",
        )
    if not 0 < slurm.warn_s <= 65535:
        raise SettingError(
            f"--warn-s {slurm.warn_s} was set", "Slurm warns 1 to 65535 seconds before the limit", "set --warn-s 120"
        )
    if limit_s is not None and slurm.warn_s >= limit_s:
        raise SettingError(
            f"--time {slurm.time} was set with --warn-s {slurm.warn_s}",
            f"the limit of {limit_s:g} s leaves no time before a warning {slurm.warn_s} s ahead of it",
            "set a longer --time or a smaller --warn-s",
        )


def _check_files(slurm: Slurm) -> None:
    for flag, name in (("--apptainer", slurm.apptainer), ("--setup-file", slurm.setup_file)):
        if name is not None and not Path(name).exists():
            raise SettingError(f"{flag} {name} was set", "there is no such file", "check the path")
    if slurm.log is not None and not Path(slurm.log).parent.is_dir():
        raise SettingError(f"--log {slurm.log} was set", "there is no such folder", "make it, or set another file")
    if slurm.log is not None and Path(slurm.log).is_dir():
        raise SettingError(f"--log {slurm.log} was set", "that is a folder", "name a file in it")
    if slurm.apptainer_bind is not None and slurm.apptainer is None:
        raise SettingError(
            f"--apptainer-bind {slurm.apptainer_bind} was set",
            "there is no image that could see it",
            "set it with --apptainer IMAGE.sif",
        )


def _check_sbatch(flags: str) -> None:
    try:
        parts = shlex.split(flags)
    except ValueError as error:
        raise SettingError(f"--sbatch {flags!r} was set", f"its quotes do not match ({error})", "close them") from None
    for word in parts:
        flag = word.partition("=")[0]
        if not word.startswith("-"):
            raise SettingError(
                f"--sbatch {flags!r} was set", f"{word!r} is no flag", "write each as --name=value, in quotes"
            )
        if _UNFIT.search(word):
            raise SettingError(
                f"--sbatch {flags!r} was set",
                "a line of an sbatch script holds no such text",
                "leave out line ends, double quotes and backslashes",
            )
        if flag in _OURS:
            raise SettingError(f"--sbatch {flags!r} was set", f"{flag} is set by {_OURS[flag]}", "leave it out there")
