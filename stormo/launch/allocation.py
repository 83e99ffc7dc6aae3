"""What a Slurm job was given against what somebody has started in it; every difference has its sentence."""

from __future__ import annotations

from collections.abc import Mapping

from stormo.errors import SettingError, counted
from stormo.launch.environments.slurm import is_step, num_groups, step_tasks
from stormo.launch.place import Place

_BATCH_STEP = str(0xFFFF_FFFB)


def check_alone(environ: Mapping[str, str], *, num_gpus: int | None, num_nodes: int | None) -> str | None:
    """Look at a process that no launcher started, inside a Slurm job; None stands for a flag not given.

    In the body of a batch script a single process of a job of several tasks is a mistake; in a shell it may be meant,
    and a hint is returned.
    """
    if "SLURM_JOB_ID" not in environ:
        return None
    num_nodes_given = _sum(environ, "SLURM_JOB_NUM_NODES")
    if num_nodes is not None and num_nodes_given is not None and num_nodes > num_nodes_given:
        raise SettingError(
            f"--num-nodes {num_nodes} was set",
            f"this Slurm job has {counted(num_nodes_given, 'node')}",
            f"set --num-nodes {num_nodes_given}, or ask Slurm for --nodes {num_nodes}",
        )
    num_tasks = _sum(environ, "SLURM_NTASKS") or num_nodes_given or 1
    if is_step(environ) or num_tasks == 1 or num_gpus is not None or num_nodes is not None:
        return None
    where = f"{counted(num_tasks, 'task')} on {counted(num_nodes_given or 1, 'node')}"
    if "SLURM_PROCID" in environ and environ.get("SLURM_STEP_ID", _BATCH_STEP) == _BATCH_STEP:
        raise SettingError(
            "stormo was started in the body of a Slurm batch script without srun",
            f"the job asks for {where} and only this one process would train",
            "write srun in front of it, or set --num-gpus for the workers that it starts on this node by itself",
        )
    return f"this Slurm job has {where}, and this is one process; srun in front of the command starts all of them"


def hints(environ: Mapping[str, str], place: Place, pid: int) -> list[str]:
    """What a user of srun would want to know of a step that is as it was asked for, but hardly as it was meant."""
    found = []
    tasks = step_tasks(environ)
    if len(set(tasks)) > 1:
        shown = ", ".join(map(str, tasks[:8])) + (", …" if len(tasks) > 8 else "")
        each, rest = divmod(place.world_size, place.num_nodes)
        found.append(
            f"srun put {shown} tasks on the {place.num_nodes} nodes"
            + ("" if rest else f"; --ntasks-per-node={each} puts the same number on each")
        )
    if "SLURM_PTY_PORT" in environ and environ.get("SLURM_TASK_PID") != str(pid):
        found.append(
            f"srun --pty started {counted(place.world_size, 'task')}, of which only this one has a terminal, and waits "
            "for the others; for a shell, start one task (srun --pty --ntasks 1), and srun --overlap in it"
        )
    num_nodes = _sum(environ, "SLURM_JOB_NUM_NODES")
    if num_groups(environ) > 1 and num_nodes is not None and place.num_nodes < num_nodes:
        groups = ",".join(str(group) for group in range(num_groups(environ)))
        found.append(
            f"srun started tasks on {counted(place.num_nodes, 'node')} of the {num_nodes} of this heterogeneous job; "
            f"--het-group={groups} takes all"
        )
    return found


def gpus_on_node(environ: Mapping[str, str]) -> int | None:
    """GPUs that all tasks of this node have together, where Slurm counts them."""
    text = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(text) if text.isdecimal() else None


def _sum(environ: Mapping[str, str], name: str) -> int | None:
    """A count of the job, over all groups of a heterogeneous one; None where Slurm does not tell."""
    parts = [environ.get(f"{name}_HET_GROUP_{group}", "") for group in range(num_groups(environ))]
    numbers = [int(text) for text in parts if text.isdecimal()] or [
        int(text) for text in [environ.get(name, "")] if text.isdecimal()
    ]
    return sum(numbers) if numbers else None
