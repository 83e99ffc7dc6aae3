"""Ranks started as the tasks of one `srun` step: who a task is, from the variables srun's manual page documents.

The body of an sbatch script, a salloc shell and `srun --pty bash` with one task carry SLURM variables too, but nobody
started several ranks there: they are no launch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from stormo.errors import SettingError, counted
from stormo.launch.place import Place, derived_port, host_name, read_int

# Slurm numbers the steps nobody asked for (batch script, interactive shell, extern, pending) from the top of 32 bits.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
_MAX_HOSTS = 1_000_000
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def detect(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks of an srun step."""
    if "SLURM_PROCID" not in environ:
        return False
    step_id = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not step_id.isdecimal() or int(step_id) >= _FIRST_SPECIAL_STEP:
        return False
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", ""))
    return num_tasks.isdecimal() and int(num_tasks) > 1


def place(environ: Mapping[str, str]) -> Place:
    """Who this process is, according to srun; MASTER_ADDR and MASTER_PORT are taken where the user set them."""
    num_nodes = read_int(environ, _present(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES"))
    node_id = read_int(environ, "SLURM_NODEID")
    tasks_name = _present(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    tasks_per_node = expand_tasks(environ.get(tasks_name, ""), tasks_name)
    if not 0 <= node_id < len(tasks_per_node):
        raise SettingError(
            f"{tasks_name}={environ.get(tasks_name)!r} was set",
            f"it lists {counted(len(tasks_per_node), 'node')} and this is node {node_id}",
            "start again with srun, which sets both",
        )
    step_name = _present(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    job_name = _present(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    return Place(
        launcher="slurm",
        rank=read_int(environ, "SLURM_PROCID"),
        world_size=read_int(environ, _present(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
        local_rank=read_int(environ, "SLURM_LOCALID"),
        local_size=tasks_per_node[node_id],
        node_id=node_id,
        num_nodes=num_nodes,
        master_addr=environ.get("MASTER_ADDR") or _first_host(environ, num_nodes),
        master_port=read_int(environ, "MASTER_PORT")
        if environ.get("MASTER_PORT")
        else derived_port(read_int(environ, job_name), read_int(environ, step_name)),
        host=environ.get("SLURMD_NODENAME") or host_name(),
    )


def _first_host(environ: Mapping[str, str], num_nodes: int) -> str:
    """The host of task 0: srun numbers nodes in the order of its node list."""
    if num_nodes == 1:
        return "127.0.0.1"
    name = _present(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST")
    hosts = expand_hosts(environ.get(name, ""))
    if not hosts:
        raise SettingError(
            f"{name} is empty", f"the first of {num_nodes} nodes must be known", "set --master-addr to its name"
        )
    return hosts[0]


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


def expand_hosts(text: str) -> tuple[str, ...]:
    """Host names, in order, out of Slurm's short form: `n[1-3,07-09],gpu5-[1-2]a`."""
    hosts: list[str] = []
    for expression in _split_outside_brackets(text):
        for host in _expand_expression(expression, text):
            hosts.append(host)
            if len(hosts) > _MAX_HOSTS:
                raise _bad_host_list(text, f"it names more than {_MAX_HOSTS} hosts")
    return tuple(hosts)


def _split_outside_brackets(text: str) -> Iterator[str]:
    start, depth = 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _bad_host_list(text, "its brackets do not match")
        if character == "," and depth == 0:
            yield text[start:position]
            start = position + 1
    if depth != 0:
        raise _bad_host_list(text, "its brackets do not match")
    if text:
        yield text[start:]


def _expand_expression(expression: str, text: str) -> Iterator[str]:
    """Every name of one expression; of several bracket groups the last one varies fastest, as Slurm counts."""
    match = _BRACKETS.search(expression)
    if match is None:
        if not expression.strip():
            raise _bad_host_list(text, "a name in it is empty")
        yield expression.strip()
        return
    head, tail = expression[: match.start()].strip(), expression[match.end() :]
    tails = tuple(_expand_expression(tail, text)) if tail.strip() else ("",)
    for number in _expand_ranges(match[1], text):
        for end in tails:
            yield head + number + end


def _expand_ranges(ranges: str, text: str) -> Iterator[str]:
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise _bad_host_list(text, f"{part!r} is no range of numbers")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + _MAX_HOSTS:
            raise _bad_host_list(text, f"the range {part!r} runs from {first} to {last}")
        for number in range(first, last + 1):
            yield f"{number:0{len(match[1])}d}"  # leading zeros of the first bound are part of the name


def _bad_host_list(text: str, why: str) -> SettingError:
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return SettingError(f"The Slurm node list {shown!r} was given", why, "set --master-addr to the first node's name")
