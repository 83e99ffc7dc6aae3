"""The verb `run`: starts a user's own script once for each worker, or becomes it for a single one."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from stormo.config import options
from stormo.config.layout import resolve_layout
from stormo.config.plan.steps import parse_profile
from stormo.config.schema import Command, TrainConfig, Workers
from stormo.errors import SettingError, suggestion
from stormo.launch import AgentTimeouts, run_node
from stormo.launch.environments.local import fix_hash_seed
from stormo.launch.hosts import hosts_of, start_on_hosts
from stormo.launch.nodes import BACKEND, DEVICE, PROFILE, TIMEOUT, equal_settings, find_rank_info, launched_by, node_of
from stormo.launch.slices import take_slice
from stormo.system.hardware import visible_gpus
from stormo.tasks.find import check_module

# How workers are started; the other settings of workers are a task's, as a script shards its model by world.wrap.
_SCRIPT_KEYS = (
    *("num_gpus", "num_nodes", "max_restarts", "launcher", "hosts", "hostfile", "print_commands"),
    *("node_id", "master_addr", "master_port", "device", "backend", "timeout"),
)
_ALL = options.options_of("workers", Workers)
_PROFILE = [option for option in options.options_of("command", Command) if option.name == "profile"]
_OPTIONS = options.all_common([*(option for option in _ALL if option.name in _SCRIPT_KEYS), *_PROFILE])
_TASK_FLAGS = {option.flag for option in _ALL if option.name not in _SCRIPT_KEYS}
_SCRIPT = options.Positional(
    name="script",
    metavar="SCRIPT",
    help="file.py, or package.module; its own flags follow after --",
    description="Run a script that uses stormo.World on all workers: stormo run train.py --num-gpus 4 -- --its-own 1.",
    once="one script is run at a time, and what is its own follows after --",
)


def main(arguments: list[str]) -> int:
    """Read the flags, find out who this process is, and go."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    own, script_flags = arguments[:at], arguments[at + 1 :]
    _require_own_flags(own)
    settings = options.parse_flags("stormo run", own, _OPTIONS, "", _SCRIPT)
    command = _command(settings.pop("script", None), script_flags)
    config = options.make_config(settings, None)
    if config.workers.max_restarts:
        raise SettingError(
            f"--max-restarts {config.workers.max_restarts} was set",
            "stormo run starts a script once, and only the script could resume what it has saved",
            "start it by torchrun, whose workers stormo.World joins, or train a task with stormo train",
        )
    if config.command.profile is not None:
        parse_profile(config.command.profile)
    rank_info = find_rank_info(config)
    take_slice(rank_info, config.workers.device)
    if hosts := hosts_of(config):
        return start_on_hosts(config, hosts, "run", arguments)
    layout = resolve_layout(config, visible_gpus(), launched_by(rank_info))
    os.environ |= _environment(config)
    fix_hash_seed(os.environ)
    if rank_info is not None or layout.world_size == 1:
        sys.stdout.flush()
        os.execv(command[0], command)
    equal = equal_settings({"the script and its flags": " ".join(command[1:])}, layout)
    timeouts = AgentTimeouts(first_sign_s=None)  # a script may prepare data for an hour before it joins
    return run_node(command, node_of(config, layout), timeout_s=config.workers.timeout, timeouts=timeouts, **equal)


def _command(script: str | None, flags: list[str]) -> list[str]:
    if not script:
        raise SettingError("stormo run was given no script", "there is nothing to run", "name one: stormo run train.py")
    if script.endswith(".py") or "/" in script or script.startswith("."):
        if not Path(script).is_file():
            raise SettingError(f"stormo run {script} was typed", "there is no such file", "check the path")
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
            raise SettingError("-m was set", "a module needs no flag", f"leave it out: stormo run {following}")
        if flag in _TASK_FLAGS:
            raise SettingError(
                f"{argument} was set",
                "stormo run does not change the model of a script",
                "leave it out, or train a task with stormo train, which shards its model",
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
    if config.command.profile is not None:
        variables[PROFILE] = config.command.profile
    # torch also raises the errors that it logs with traces. Set here, as a script imports torch before World().
    return variables | {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")}
