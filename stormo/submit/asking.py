"""From the command line of `stormo submit` to a job: every check that can be made before Slurm is asked."""

from __future__ import annotations

import sys
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from stormo.config import options
from stormo.config.layout import Launched, resolve_layout
from stormo.config.plan import check_settings, resolve
from stormo.config.plan.checks import check_run_name
from stormo.config.schema import SECTIONS, NodeRange, TrainConfig, least_nodes
from stormo.config.strategies import names
from stormo.errors import SettingError
from stormo.submit.script import Job, Run
from stormo.submit.settings import SECTION, Slurm, joined, make_slurm
from stormo.submit.sweep import Point, read_grid, read_seeds
from stormo.system.hardware import Gpu
from stormo.tasks.check import check_made, check_task
from stormo.tasks.task import Task
from stormo.telemetry.finding import default_run_name, require_new_run
from stormo.training.settings import read_settings

_USAGE = """\
stormo submit [TASK] [options of the job] [any option of stormo train]
       stormo submit my_task.py --num-nodes 4 --num-gpus 8 --time 02:00:00 --partition gpu"""
_DESCRIPTION = (
    "Train TASK as a Slurm job: as often as the time limit ends it, it goes on from where it was, until it is done. "
    "stormo train --help shows the options of the training."
)
# What the job says itself, and what belongs to another call.
_REFUSED = {
    "node_id": "Slurm numbers the nodes",
    "master_addr": "Slurm says where the first node is",
    "launcher": "srun starts the workers",
    "hosts": "Slurm chooses the nodes",
    "hostfile": "Slurm chooses the nodes",
    "max_restarts": "the job itself goes on from its last checkpoint",
    "dry_run": "nothing would be trained",
    "plot_schedule": "nothing would be trained",
}
_NOT_TOLD = ("task", "config", "resume", "run_name")
# What stands for the devices of a node that is not known yet: modern enough for everything that may be asked of one.
_SOME_GPU = Gpu(name="a GPU of the cluster", memory_bytes=80 * 2**30, capability=(9, 0))


def read_job(arguments: Sequence[str]) -> Job:
    """The job that is asked for."""
    words_of_all = joined(arguments)
    flags, words = options.take_flags("stormo submit", _USAGE, _DESCRIPTION, words_of_all, (SECTION, Slurm))
    config, task_class = read_settings(words)
    source = config.command.config
    document = options.read_toml(Path(source)) if source is not None else {}
    slurm = make_slurm(flags, document, source or "")
    _refuse(config)
    check_task(task_class)
    points = _points(slurm, options.train_options(task_class.Options))
    configs = [read_settings([*words, *options.as_flags(point)])[0] for point in points]
    for each in configs or [config]:
        _check(each, task_class)
    name = _name(config, is_sweep=bool(points))
    # Of what is given, a point may replace more than it names.
    of_all = config.given.intersection(*(each.given for each in configs)).difference(*points)
    runs = tuple(
        Run(
            name=f"{name}-{number}",
            words=(*options.as_flags(point), *_told(each, each.given - of_all - {*point})),
        )
        for number, (point, each) in enumerate(zip(points, configs, strict=True))
    )
    workers = config.workers
    on_gpus = workers.device != "cpu"
    per_node = _workers_per_node(config)
    job = Job(
        name=name,
        runs=runs or (Run(name=name),),
        is_array=bool(points),
        slurm=slurm,
        setup=_setup(slurm),
        least_nodes=least_nodes(workers.num_nodes),
        most_nodes=int(workers.num_nodes),
        workers_per_node=1 if workers.strategy in names(lambda row: row.is_one_process) else per_node,
        gpus_per_node=per_node if on_gpus else 0,
        folder=Path.cwd(),
        runs_folder=Path.cwd() / config.run.runs_folder,
        python=sys.executable,
        words=(config.task, *_told(config, of_all)),
    )
    _check_folders(job)
    if config.run.resume is None:
        for run in job.runs:
            require_new_run(job.runs_folder, run.name)
    return job


def _check_folders(job: Job) -> None:
    for folder in (job.folder, job.runs_folder):
        if any(sign in str(folder) for sign in '\n"\\'):
            raise SettingError(
                f"the folder of the job is {str(folder)!r}",
                "a line of an sbatch script holds no such text",
                "go to a folder without line ends, double quotes and backslashes in its name",
            )


def _refuse(config: TrainConfig) -> None:
    for key, why in _REFUSED.items():
        if key in config.given:
            flag = f"--{key.replace('_', '-')}"
            raise SettingError(f"{flag} was set for a job that is submitted", why, f"leave {flag} out")
    if config.run.resume and (Path(config.run.resume) / "manifest.json").is_file():
        raise SettingError(
            f"--resume {config.run.resume} was set for a job that is submitted",
            "every attempt of the job would go back to that checkpoint",
            "set --run-name and --resume to go on from the newest, or go back with stormo train first",
        )


def _workers_per_node(config: TrainConfig) -> int:
    workers = config.workers
    if workers.num_gpus is None and workers.device != "cpu":
        raise SettingError(
            "no --num-gpus was set for a job that is submitted",
            "Slurm must be told how many GPUs of each node it is for",
            "set --num-gpus, or --device cpu for a training without",
        )
    return workers.num_gpus or 1


def _check(config: TrainConfig, task_class: type[Task]) -> None:
    """Go through everything that would be refused inside the job."""
    workers, per_node = config.workers, _workers_per_node(config)
    num_nodes = int(workers.num_nodes)
    launched = Launched(launcher="srun", world_size=per_node * num_nodes, local_size=per_node, num_nodes=num_nodes)
    is_one = workers.strategy in names(lambda row: row.is_one_process) or launched.world_size == 1
    gpus = [] if workers.device == "cpu" else [_SOME_GPU] * per_node
    layout = resolve_layout(config, gpus, None if is_one else launched)
    check_settings(config, layout)
    task = task_class(config.task_options)
    check_made(task)
    if not task.needs_data_for_facts():
        resolve(config, layout, task.facts())


def _points(slurm: Slurm, known: Sequence[options.Option]) -> list[Point]:
    if slurm.sweep is not None:
        return read_grid(slurm.sweep, known)
    return [] if slurm.array is None else read_seeds(slurm.array)


def _name(config: TrainConfig, *, is_sweep: bool) -> str:
    name = config.run.run_name or default_run_name(config.task)
    check_run_name(name)
    if any(sign in name for sign in '"\\'):
        raise SettingError(
            f"--run-name {name!r} was set", "it stands in a job script", "set one without quotes and backslashes"
        )
    if is_sweep and config.run.resume:
        raise SettingError(
            f"--resume {config.run.resume} was set with a sweep",
            "a sweep has several runs",
            "set --run-name and --resume without a name",
        )
    return name


def _setup(slurm: Slurm) -> str:
    try:
        of_file = Path(slurm.setup_file).read_text(encoding="utf-8") if slurm.setup_file is not None else ""
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise SettingError(
            f"--setup-file {slurm.setup_file} was set", f"it cannot be read ({why})", "name a file of shell lines"
        ) from None
    return "\n".join(filter(None, (of_file.strip(), (slurm.setup or "").strip())))


def _told(config: TrainConfig, keys: Set[str]) -> list[str]:
    """What the training is told: each of these settings, wherever it was given."""
    values: dict[str, Any] = {}
    for section in SECTIONS:
        values |= vars(getattr(config, section))
    if config.task_options is not None:
        values |= {f"task.{key}": value for key, value in vars(config.task_options).items()}
    left_out = {*_NOT_TOLD} | ({"num_nodes"} if isinstance(config.workers.num_nodes, NodeRange) else set())
    # In the order of --help, whatever the order on the command line.
    return options.as_flags({key: value for key, value in values.items() if key in keys and key not in left_out})
