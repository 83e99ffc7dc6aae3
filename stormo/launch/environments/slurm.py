"""Ranks started as the tasks of one `srun` step, from the variables that srun documents; and what the job was given.

The body of an sbatch script, a salloc shell and `srun --pty bash` with one task have SLURM variables too, but
they are no launch of several ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from stormo.errors import SettingError, pluralize
from stormo.launch.rank_info import RankInfo, derived_port, host_name, read_int

# Slurm numbers its own steps (batch script, interactive shell, extern, pending) from the top of 32 bits.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
_MAX_HOSTS = 1_000_000
_TASKS_NAMES = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_LIST_NAMES = ("SLURM_STEP_NODELIST", "SLURM_NODELIST")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_BATCH_STEP = str(0xFFFF_FFFB)


def detect(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks of an srun step."""
    if "SLURM_PROCID" not in environ or not is_step(environ):
        return False
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", ""))
    return num_tasks.isdecimal() and int(num_tasks) > 1


def is_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process; a batch script and a salloc shell are steps of Slurm itself."""
    step_id = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return step_id.isdecimal() and int(step_id) < _FIRST_SPECIAL_STEP


def rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Who this process is, according to srun; MASTER_ADDR and MASTER_PORT are taken where the user set them."""
    num_nodes = read_int(environ, _present(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES"))
    node_id = read_int(environ, "SLURM_NODEID")
    tasks_per_node = step_tasks(environ)
    if not 0 <= node_id < len(tasks_per_node):
        name = _present(environ, *_TASKS_NAMES)
        raise SettingError(
            f"{name}={environ.get(name)!r} was set",
            f"it lists {pluralize(len(tasks_per_node), 'node')} and this is node {node_id}",
            "start again with srun, which sets both",
        )
    step_name = _present(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    job_name = _present(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    return RankInfo(
        launcher="slurm",
        rank=read_int(environ, "SLURM_PROCID"),
        world_size=read_int(environ, _present(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
        local_rank=read_int(environ, "SLURM_LOCALID"),
        local_size=tasks_per_node[_listed_at(environ, node_id, len(tasks_per_node))],
        node_id=node_id,
        num_nodes=num_nodes,
        master_addr=environ.get("MASTER_ADDR") or _first_host(environ, num_nodes, node_id),
        master_port=read_int(environ, "MASTER_PORT")
        if environ.get("MASTER_PORT")
        else derived_port(read_int(environ, job_name), read_int(environ, step_name)),
        host=environ.get("SLURMD_NODENAME") or host_name(),
        peer=next((host for host in _hosts(environ) if host != environ.get("SLURMD_NODENAME")), ""),
    )


def step_tasks(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Tasks of the step on each node, in the order of its node list."""
    name = _present(environ, *_TASKS_NAMES)
    return expand_tasks(environ.get(name, ""), name)


def _listed_at(environ: Mapping[str, str], node_id: int, num_listed: int) -> int:
    """Where the list of nodes names this one: a step over several groups of a job sorts it, and not the node ids."""
    hosts, own = _hosts(environ), environ.get("SLURMD_NODENAME")
    return hosts.index(own) if own in hosts and len(hosts) == num_listed else node_id


def _hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    return expand_hosts(environ.get(_present(environ, *_LIST_NAMES), ""))


def _first_host(environ: Mapping[str, str], num_nodes: int, node_id: int) -> str:
    """The host of task 0, which is on node 0 unless the user has placed every task by hand."""
    if num_nodes == 1:
        return "127.0.0.1"
    if environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        raise SettingError(
            "srun was given --distribution=arbitrary and no --master-addr was set",
            "Slurm then does not say where task 0 is",
            "set --master-addr to the name of the host of task 0",
        )
    hosts, own = _hosts(environ), environ.get("SLURMD_NODENAME")
    if not hosts:
        raise SettingError(
            f"{_present(environ, *_LIST_NAMES)} is empty",
            f"the first of {num_nodes} nodes must be known",
            "set --master-addr to its name",
        )
    for order in (hosts, _by_group(environ, hosts)):
        if own not in hosts or order[node_id : node_id + 1] == (own,):
            return order[0]
    raise SettingError(
        f"Slurm made host {own} node {node_id} and lists the nodes as {', '.join(hosts)}",
        "it does not say which of them is node 0",
        "set --master-addr to the name of the host of task 0",
    )


def _by_group(environ: Mapping[str, str], hosts: tuple[str, ...]) -> tuple[str, ...]:
    """The hosts of a step in the order of the groups of a heterogeneous job, which is that of the node ids."""
    groups = (environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", "") for group in range(num_groups(environ)))
    return tuple(host for group in groups for host in expand_hosts(group) if host in hosts)


def num_groups(environ: Mapping[str, str]) -> int:
    """Groups of a heterogeneous job; 1 for any other."""
    size = environ.get("SLURM_HET_SIZE", "")
    return int(size) if size.isdecimal() else 1


def _present(environ: Mapping[str, str], *names: str) -> str:
    """The first of several names (new ones first) that is set, or the newest."""
    return next((name for name in names if name in environ), names[0])


def expand_tasks(text: str, name: str = "SLURM_STEP_TASKS_PER_NODE") -> tuple[int, ...]:
    """Tasks on each node out of Slurm's short form: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None or int(match[2] or 1) + len(counts) > _MAX_HOSTS:
            raise SettingError(
                f"{name}={text!r} was set", "it does not read like 2(x3),1", "start again with srun, which sets it"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def expand_hosts(text: str, *, source: str | None = None, instead: str | None = None) -> tuple[str, ...]:
    """Host names, in order, out of Slurm's short form: `n[1-3,07-09],gpu5-[1-2]a`.

    Args:
        source: where the text stands, and
        instead: what to set instead, for the sentence about a broken one.
    """
    hosts: list[str] = []
    try:
        for expression in _split_outside_brackets(text):
            for host in _expand_expression(expression):
                hosts.append(host)
                if len(hosts) > _MAX_HOSTS:
                    raise _BrokenListError(f"it names more than {_MAX_HOSTS} hosts, which are the most")
    except _BrokenListError as error:
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        raise SettingError(
            source or f"The Slurm node list {shown!r} was given",
            str(error),
            instead or "set --master-addr to the first node's name",
        ) from None
    return tuple(hosts)


class _BrokenListError(Exception):
    """Why a list of hosts cannot be read."""


def _split_outside_brackets(text: str) -> Iterator[str]:
    start, depth = 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _BrokenListError("its brackets do not match")
        if character == "," and depth == 0:
            yield text[start:position]
            start = position + 1
    if depth != 0:
        raise _BrokenListError("its brackets do not match")
    if text:
        yield text[start:]


def _expand_expression(expression: str) -> Iterator[str]:
    """Every name of one expression; of several bracket groups the last one varies fastest, as Slurm counts."""
    match = _BRACKETS.search(expression)
    if match is None:
        if not expression.strip():
            raise _BrokenListError("a name in it is empty")
        yield expression.strip()
        return
    head, tail = expression[: match.start()].strip(), expression[match.end() :]
    tails = tuple(_expand_expression(tail)) if tail.strip() else ("",)
    for number in _expand_ranges(match[1]):
        for end in tails:
            yield head + number + end


def _expand_ranges(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise _BrokenListError(f"{part!r} is no range of numbers")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _BrokenListError(f"the range {part!r} runs backwards: {last} is less than {first}")
        if (count := last - first + 1) > _MAX_HOSTS:
            raise _BrokenListError(
                f"the range {part!r} alone names {last} - {first} + 1 = {count} hosts, and {_MAX_HOSTS} are the most"
            )
        for number in range(first, last + 1):
            yield f"{number:0{len(match[1])}d}"  # leading zeros of the first bound are part of the name


def check_without_srun(environ: Mapping[str, str], *, num_gpus: int | None, num_nodes: int | None) -> str | None:
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
            f"this Slurm job has {pluralize(num_nodes_given, 'node')}",
            f"set --num-nodes {num_nodes_given}, or ask Slurm for --nodes {num_nodes}",
        )
    num_tasks = _sum(environ, "SLURM_NTASKS") or num_nodes_given or 1
    if is_step(environ) or num_tasks == 1 or num_gpus is not None or num_nodes is not None:
        return None
    where = f"{pluralize(num_tasks, 'task')} on {pluralize(num_nodes_given or 1, 'node')}"
    if "SLURM_PROCID" in environ and environ.get("SLURM_STEP_ID", _BATCH_STEP) == _BATCH_STEP:
        raise SettingError(
            "stormo was started in the body of a Slurm batch script without srun",
            f"the job asks for {where} and only this one process would train",
            "write srun in front of it, or set --num-gpus for the workers that it starts on this node",
        )
    return f"this Slurm job has {where}, and this is one process; srun in front of the command starts all of them"


def hints(environ: Mapping[str, str], info: RankInfo, pid: int) -> list[str]:
    """Hints for a step that was probably meant otherwise."""
    found = []
    tasks = step_tasks(environ)
    if len(set(tasks)) > 1:
        shown = ", ".join(map(str, tasks[:8])) + (", …" if len(tasks) > 8 else "")
        each, rest = divmod(info.world_size, info.num_nodes)
        found.append(
            f"srun put {shown} tasks on the {info.num_nodes} nodes"
            + ("" if rest else f"; --ntasks-per-node={each} puts the same number on each")
        )
    if "SLURM_PTY_PORT" in environ and environ.get("SLURM_TASK_PID") != str(pid):
        found.append(
            f"srun --pty started {pluralize(info.world_size, 'task')}, of which only this one has a terminal, and "
            "waits for the others; for a shell, start one task (srun --pty --ntasks 1), and srun --overlap in it"
        )
    num_nodes = _sum(environ, "SLURM_JOB_NUM_NODES")
    if num_groups(environ) > 1 and num_nodes is not None and info.num_nodes < num_nodes:
        groups = ",".join(str(group) for group in range(num_groups(environ)))
        found.append(
            f"srun started tasks on {pluralize(info.num_nodes, 'node')} of the {num_nodes} of this heterogeneous job; "
            f"--het-group={groups} takes all"
        )
    return found


def gpus_on_node(environ: Mapping[str, str]) -> int | None:
    """GPUs that all tasks of this node have together, where Slurm counts them."""
    text = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(text) if text.isdecimal() else None


def _sum(environ: Mapping[str, str], name: str) -> int | None:
    """A count of the job, over all groups of a heterogeneous one; None if unknown."""
    parts = [environ.get(f"{name}_HET_GROUP_{group}", "") for group in range(num_groups(environ))]
    numbers = [int(text) for text in parts if text.isdecimal()] or [
        int(text) for text in [environ.get(name, "")] if text.isdecimal()
    ]
    return sum(numbers) if numbers else None
