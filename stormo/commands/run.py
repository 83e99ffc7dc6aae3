"""The verb `run`: starts a user's own script once for each worker, or becomes it for a single one."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from stormo.config import options
from stormo.config.layout import Layout, resolve_layout
from stormo.config.schema import TrainConfig, Workers
from stormo.errors import SettingError, suggestion
from stormo.launch import AgentTimeouts, run_node
from stormo.launch.environments.local import fix_hash_seed
from stormo.launch.hosts import hosts_of, start_on_hosts
from stormo.launch.nodes import BACKEND, DEVICE, TIMEOUT, find_place, launched_by, node_of
from stormo.system.hardware import visible_gpus
from stormo.tasks.find import check_module, refuse_task
from stormo.version import __version__

# How workers are started; other settings of workers need a task, as stormo does not shard a script's model.
_OF_SCRIPTS = (
    *("num_gpus", "num_nodes", "max_restarts", "launcher", "hosts", "hostfile", "print_commands"),
    *("node_id", "master_addr", "master_port", "device", "backend", "timeout"),
)
_ALL = options.options_of("workers", Workers)
_OPTIONS = [option for option in _ALL if option.name in _OF_SCRIPTS]
_FLAGS_OF_TASKS = {option.flag for option in _ALL if option.name not in _OF_SCRIPTS}
_SCRIPT = options.Positional(
    name="script",
    metavar="SCRIPT",
    help="file.py, or package.module; its own flags follow after --",
    description="Run a script that uses stormo.World on all workers: stormo run train.py --num-gpus 4 -- --its-own 1.",
    once="one script is run at a time, and what is its own follows after --",
)


def main(arguments: list[str]) -> int:
    """Read the flags, find out who this process is, and go."""
    own, theirs = _split(arguments)
    _require_own_flags(own)
    settings = options.parse_flags("stormo run", own, _OPTIONS, "", _SCRIPT)
    command = _command(settings.pop("script", None), theirs)
    config = options.make_config(settings, None)
    if config.workers.max_restarts:
        raise SettingError(
            f"--max-restarts {config.workers.max_restarts} was set",
            "stormo run starts a script once, and only the script could resume what it has saved",
            "start it by torchrun, whose workers stormo.World joins, or train a task with stormo train",
        )
    place = find_place(config)
    if hosts := hosts_of(config):
        return start_on_hosts(config, hosts, "run", arguments)
    layout = resolve_layout(config, visible_gpus(), launched_by(place))
    os.environ |= _environment(config)
    fix_hash_seed(os.environ)
    if place is not None or layout.world_size == 1:
        sys.stdout.flush()
        os.execv(command[0], command)
    same = _same(command, layout)
    patience = AgentTimeouts(first_sign_s=None)  # a script may prepare data for an hour before it joins
    return run_node(command, node_of(config, layout), timeout_s=config.workers.timeout, patience=patience, **same)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _command(script: str | None, flags: list[str]) -> list[str]:
    if not script:
        raise SettingError("stormo run was given no script", "there is nothing to run", "name one: stormo run train.py")
    if script.endswith(".py") or "/" in script or script.startswith("."):
        if not Path(script).is_file():
            raise SettingError(f"stormo run {script} was typed", "there is no such file", "check the path")
        refuse_task(Path(script))
        return [sys.executable, script, *flags]
    check_module(script, f"stormo run {script} was typed")
    top = script.partition(".")[0]
    if not (Path(top).is_dir() or Path(f"{top}.py").is_file() or importlib.util.find_spec(top)):
        raise SettingError(
            f"stormo run {script} was typed",
            "there is no such module, here or among the installed ones",
            "name a file that ends in .py, or a module",
        )
    folder = Path(script.replace(".", "/"))
    if folder.is_dir() and not (folder / "__main__.py").is_file():
        raise SettingError(
            f"stormo run {script} was typed", "that folder has no __main__.py to run", "name a file that ends in .py"
        )
    return [sys.executable, "-m", script, *flags]


def _require_own_flags(arguments: list[str]) -> None:
    """Refuse flags that belong to the script or to a task, and say where they go."""
    known = {option.flag for option in _OPTIONS} | {"--help"}
    known |= {f"--no-{option.flag[2:]}" for option in _OPTIONS if option.kind is bool}
    for argument, following in zip(arguments, [*arguments[1:], "MODULE"], strict=False):
        flag = argument.partition("=")[0].replace("_", "-")
        if flag == "-m":
            raise SettingError("-m was set", "a module is named as it is", f"leave it out: stormo run {following}")
        if flag in _FLAGS_OF_TASKS:
            raise SettingError(
                f"{argument} was set",
                "stormo run leaves the model of a script as it is",
                "leave it out, or train a task by stormo train, which spreads its model",
            )
        if flag.startswith("--") and flag not in known:
            raise SettingError(
                f"{argument} was set",
                f"stormo run has no such flag (it has {', '.join(sorted(known))})",
                f"{suggestion(flag, known)}put the script's own flags after --, as in: "
                f"stormo run train.py -- {argument}",
            )


def _environment(config: TrainConfig) -> dict[str, str]:
    """The environment variables that tell workers of the flags."""
    workers = config.workers
    variables = {DEVICE: workers.device, BACKEND: workers.backend, TIMEOUT: str(workers.timeout)}
    # torch's sockets warn of every name they cannot look up; a script imports torch before it asks for the world.
    return variables | {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}


def _same(command: list[str], layout: Layout) -> dict[str, Any]:
    """What all nodes must agree on, as a digest and in words."""
    words = {
        "the script and its flags": " ".join(command[1:]),
        "the release of stormo": __version__,
        "the device": layout.device_type,
        "the communication library": layout.backend,
    }
    return {"digest": hashlib.sha256(repr(sorted(words.items())).encode()).hexdigest(), "options": words}
