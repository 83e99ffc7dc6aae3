"""The verb `submit`: makes every check that needs no cluster, writes the script, and hands it to Slurm."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stormo.config import options, toml
from stormo.config.layout import Launched, resolve_layout
from stormo.config.plan import check_settings, resolve
from stormo.config.plan.checks import check_run_name
from stormo.config.schema import SECTIONS, NodeRange, TrainConfig, min_nodes
from stormo.config.strategies import names
from stormo.errors import SettingError
from stormo.submit import sbatch
from stormo.submit.script import SCRIPT, Job, render
from stormo.submit.settings import Slurm, read_slurm
from stormo.system.hardware import Gpu
from stormo.tasks.check import check_init, check_task
from stormo.tasks.task import Task
from stormo.telemetry.folder import write_whole
from stormo.telemetry.runs_folder import default_run_name, require_new_run
from stormo.telemetry.text import write_text

# What the job sets, and what belongs to another call.
_REFUSED = {
    "node_id": "Slurm numbers the nodes",
    "master_addr": "Slurm says where the first node is",
    "launcher": "srun starts the workers",
    "hosts": "Slurm chooses the nodes",
    "hostfile": "Slurm chooses the nodes",
    "max_restarts": "the job itself resumes from its last checkpoint",
    "dry_run": "nothing would be trained",
    "plot_schedule": "nothing would be trained",
}
_LEFT_OUT = ("task", "config", "resume", "run_name")
# Stands for the GPUs of a node that is not known yet: modern enough for everything that may be asked of one.
_SOME_GPU = Gpu(name="a GPU of the cluster", memory_bytes=80 * 2**30, capability=(9, 0))


def main(arguments: Sequence[str]) -> int:
    """Submit the job that is asked for, or print its script."""
    job = read_job(arguments)
    script = render(job)
    if job.slurm.print:
        write_text(script, sys.stdout)
        return 0
    sbatch.require_slurm()
    _refuse_second_job(job)
    job_id = _submit(job, script)
    sbatch.write_record(job.run_folder, job_id=job_id, log=job.log)
    text = f"""\
job {job_id}: run {job.name} in {job.run_folder}
its output:  tail -F {shlex.quote(str(job.log))}
its state:   squeue --jobs={job_id}
to end it:   scancel {job_id}
"""
    write_text(text, sys.stdout)
    return 0


def read_job(arguments: Sequence[str]) -> Job:
    """The job that is asked for, after every check that can be made here."""
    slurm, config, task_class = read_slurm(arguments)
    _refuse(config)
    check_task(task_class)
    _check_training(config, task_class)
    workers = config.workers
    per_node = _workers_per_node(config)
    job = Job(
        name=_name(config),
        slurm=slurm,
        setup=_setup(slurm),
        least_nodes=min_nodes(workers.num_nodes),
        most_nodes=int(workers.num_nodes),
        workers_per_node=1 if workers.strategy in names(lambda row: row.is_one_process) else per_node,
        gpus_per_node=per_node if workers.device != "cpu" else 0,
        folder=Path.cwd(),
        runs_folder=Path.cwd() / config.run.runs_folder,
        python=sys.executable,
        arguments=(config.task, *_given_flags(config)),
    )
    for folder in (job.folder, job.runs_folder):
        if any(sign in str(folder) for sign in '\n"\\'):
            raise SettingError(
                f"the folder of the job is {str(folder)!r}",
                "a line of an sbatch script holds no such text",
                "go to a folder without line ends, double quotes and backslashes in its name",
            )
    if config.run.resume is None:
        require_new_run(job.runs_folder, job.name)
    return job


def _refuse(config: TrainConfig) -> None:
    for key, why in _REFUSED.items():
        if key in config.given:
            flag = f"--{key.replace('_', '-')}"
            raise SettingError(f"{flag} was set for a job that is submitted", why, f"leave {flag} out")
    toml.refuse_secrets(config, "a job that is submitted", "the script of the job")
    if config.run.resume and (Path(config.run.resume) / "manifest.json").is_file():
        raise SettingError(
            f"--resume {config.run.resume} was set for a job that is submitted",
            "every attempt of the job would go back to that checkpoint",
            "set --run-name and --resume to resume from the newest, or go back with stormo train first",
        )


def _workers_per_node(config: TrainConfig) -> int:
    workers = config.workers
    if workers.num_gpus is None and workers.device != "cpu":
        raise SettingError(
            "no --num-gpus was set for a job that is submitted",
            "Slurm must know how many GPUs of each node to give",
            "set --num-gpus, or --device cpu for a training without",
        )
    return workers.num_gpus or 1


def _check_training(config: TrainConfig, task_class: type[Task]) -> None:
    """Make the checks that the training itself makes inside the job."""
    workers, per_node = config.workers, _workers_per_node(config)
    num_nodes = int(workers.num_nodes)
    launched = Launched(launcher="srun", world_size=per_node * num_nodes, local_size=per_node, num_nodes=num_nodes)
    is_one = workers.strategy in names(lambda row: row.is_one_process) or launched.world_size == 1
    gpus = [] if workers.device == "cpu" else [_SOME_GPU] * per_node
    layout = resolve_layout(config, gpus, None if is_one else launched)
    check_settings(config, layout)
    task = task_class(config.task_options)
    check_init(task)
    if not task.needs_data_for_facts():
        resolve(config, layout, task.facts())


def _name(config: TrainConfig) -> str:
    name = config.run.run_name or default_run_name(config.task)
    check_run_name(name)
    if any(sign in name for sign in '"\\'):
        raise SettingError(
            f"--run-name {name!r} was set", "it stands in a job script", "set one without quotes and backslashes"
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


def _given_flags(config: TrainConfig) -> list[str]:
    """The given settings as flags, in the order of --help."""
    values: dict[str, Any] = {}
    for section in SECTIONS:
        values |= vars(getattr(config, section))
    if config.task_options is not None:
        values |= {f"task.{key}": value for key, value in vars(config.task_options).items()}
    left_out = {*_LEFT_OUT} | ({"num_nodes"} if isinstance(config.workers.num_nodes, NodeRange) else set())
    keys = config.given - left_out
    return options.as_flags({key: value for key, value in values.items() if key in keys})


def _refuse_second_job(job: Job) -> None:
    """Refuse while the last job of the run waits or runs."""
    last = sbatch.read_job_id(job.run_folder)
    if last is not None and (state := sbatch.state_of(last)):
        raise SettingError(
            f"run {job.name} was to be submitted",
            f"job {last} carries it already ({state.lower()})",
            f"wait for its end, or end it with scancel {last}",
        )


def _submit(job: Job, script: str) -> str:
    """Submit the script; where Slurm refuses it, nothing is left behind."""
    folder, path = job.run_folder, job.run_folder / SCRIPT
    made = [one for one in (path, folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, script)
        return sbatch.submit(path)
    except BaseException as error:
        for one in made:
            with contextlib.suppress(OSError):
                one.unlink() if one.is_file() else one.rmdir()
        if isinstance(error, OSError):
            raise SettingError(
                f"the job of {job.name} was to be kept in {job.runs_folder}",
                f"nothing can be written there ({error.strerror})",
                "set another --runs-folder",
            ) from None
        raise
