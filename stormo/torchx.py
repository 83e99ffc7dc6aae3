# ruff: noqa: UP006, UP035, UP045 - TorchX takes no other types
"""A component of TorchX: `torchx run -s SCHEDULER stormo.train` takes `stormo train` to every scheduler that it knows.

Each replica is a node: it runs `stormo train` with its number and the address of replica 0, and starts the workers of
its GPUs itself. TorchX reads the signature as it is written here, so annotations are not postponed.
"""

import shlex
from typing import Dict, List, Optional

from torchx import specs
from torchx.specs import macros

from stormo.errors import SettingError

_ROLE = "stormo"
# What tells a node where replica 0 is. Some schedulers do not say it to replica 0 itself: AWS Batch leaves the variable
# empty there, and for Kubernetes TorchX says localhost, where no other node could come in; Volcano tells all of them.
# A dollar that the shell is to see is written twice, for TorchX.
_ADDRESS = f"$${{VC_{_ROLE.upper()}_0_HOSTS:-$${{{macros.rank0_env}:-$$(hostname -i | cut -d' ' -f1)}}}}"
_OWN = ("--num-nodes", "--node-id", "--master-addr", "--master-port", "--num-gpus", "--run-name", "--resume")


def train(
    *options: str,
    task: str = "fashion-mnist",
    nodes: int = 1,
    gpus: int = 0,
    workers: int = 0,
    cpus: int = -1,
    memory_mb: int = -1,
    host: Optional[str] = None,
    run_name: str = f"torchx-{macros.app_id}",
    max_retries: int = 0,
    port: int = 29500,
    image: str = "stormo",
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    """Train a task with stormo on one node or many.

    Args:
        options: flags of stormo train, behind --
        task: name of a built-in task, file.py or package.module:Class
        nodes: how many nodes take part
        gpus: GPUs of each node, one worker for each
        workers: processes on each node, where they are not one for each GPU
        cpus: CPUs of each node
        memory_mb: memory of each node in MB
        host: a named resource of TorchX, instead of gpus, cpus and memory_mb; -1 there is what the scheduler gives
        run_name: name of the run, which goes on where it has begun; ${app_id} is the id of the job
        max_retries: how often the scheduler may start a failed job again; it goes on from its last checkpoint
        port: of the first node, where the others meet it
        image: container image with stormo, for schedulers that run containers
        env: environment variables, NAME=value,NAME=value
        mounts: for containers, such as type=bind,src=/data,dst=/data,readonly
    """
    for word in options:
        if word.partition("=")[0].replace("_", "-") in _OWN:
            raise SettingError(
                f"{word} was given to stormo train",
                "the component sets it",
                "use the component's --nodes, --gpus, --workers, --run_name or --port in front of --",
            )
    resource = specs.resource(cpu=cpus, gpu=gpus, memMB=memory_mb, h=host)
    num_workers = workers or max(resource.gpu, 0) or 1
    words = [_quoted(word) for word in ("stormo", "train", task)]
    words += ["--run-name", _quoted(run_name, macros.app_id), "--resume", "--num-gpus", str(num_workers)]
    if nodes > 1:
        words += ["--num-nodes", str(nodes), "--node-id", macros.replica_id]
        words += ["--master-addr", f'"{_ADDRESS}"', "--master-port", str(port)]
    words += [_quoted(word) for word in options if word != "--"]
    # The tasks of TorchX's Slurm job are nodes, which srun's number of a task would make workers; and they write into
    # files, though by way of terminals.
    script = f"unset SLURM_PROCID; export TERM=dumb; exec {' '.join(words)}"
    role = specs.Role(
        name=_ROLE,
        image=image,
        entrypoint="bash",
        args=["-c", script],
        num_replicas=nodes,
        resource=resource,
        env=dict(env or {}),
        max_retries=max_retries,
        port_map={"stormo": port},
        mounts=specs.parse_mounts(mounts) if mounts else [],
    )
    return specs.AppDef(name=_ROLE, roles=[role])


def _quoted(word: str, macro: str = "") -> str:
    """A word for the shell in which TorchX finds no macro but the given one."""
    parts = word.split(macro) if macro else [word]
    return macro.join(shlex.quote(part).replace("$", "$$") if part else "" for part in parts) or "''"
