"""`--launcher`: one command started on several hosts from here, over ssh."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stormo.config.schema import OF_ONE_CALL, TrainConfig
from stormo.errors import SettingError, counted
from stormo.launch.connection import HostCommand
from stormo.launch.hostfile import (
    ListedHost,
    all_here,
    hosts_of_job,
    is_loopback_name,
    parse_hosts,
    read_hostfile,
    slots_of,
)
from stormo.launch.place import derived_port
from stormo.launch.secret import VARIABLE, new_secret
from stormo.launch.ssh import run_on_hosts
from stormo.system.process import own_command

# What of this environment the workers on other hosts get too: what numerical and network libraries read, but not the
# numbers of the GPUs of this host, which may be others there.
_PASSED_ON = ("CUDA_", "FI_", "GLOO_", "MKL_", "NCCL_", "OMP_", "PYTHON", "TORCH", "TRITON_", "UCX_")
_PASSED_ON_WHOLE = ("LD_LIBRARY_PATH", "HF_HOME")
_OF_THIS_HOST = ("CUDA_VISIBLE_DEVICES",)
_PASS = "STORMO_PASS"  # and what the user lists there


def hosts_of(config: TrainConfig) -> tuple[ListedHost, ...]:
    """The hosts on which this command is to be started; none where it is for this node alone."""
    workers = config.workers
    if workers.launcher == "auto":
        given = next((name for name in OF_ONE_CALL[1:] if getattr(workers, name)), None)
        if given is not None and "launcher" not in config.given:
            flag = f"--{given.replace('_', '-')}"
            raise SettingError(f"{flag} was set without --launcher", "it is for ssh", "set --launcher ssh")
        return ()
    if workers.hosts and workers.hostfile:
        raise SettingError("--hosts and --hostfile were set", "one of them names the hosts", "leave one of them out")
    if workers.hosts:
        hosts = parse_hosts(workers.hosts)
    else:
        hosts = read_hostfile(workers.hostfile) if workers.hostfile else hosts_of_job(os.environ)
    if not hosts:
        raise SettingError(
            f"--launcher {workers.launcher} was set", "no host was named", "set --hosts node1,node2 or --hostfile FILE"
        )
    _check_hosts(config, hosts)
    return hosts


def _check_hosts(config: TrainConfig, hosts: tuple[ListedHost, ...]) -> None:
    workers = config.workers
    if "node_id" in config.given:
        raise SettingError(
            f"--node-id {workers.node_id} was set with --launcher {workers.launcher}",
            "every host gets a number of its own",
            "leave it out",
        )
    if "num_nodes" in config.given and workers.num_nodes != len(hosts):
        raise SettingError(
            f"--num-nodes {workers.num_nodes} was set",
            f"{counted(len(hosts), 'host')} {'is' if len(hosts) == 1 else 'are'} named",
            "leave it out",
        )
    if "master_addr" not in config.given and is_loopback_name(hosts[0].address) and not all_here(hosts):
        raise SettingError(
            f"the first of {len(hosts)} hosts was named {hosts[0].address}",
            "the others would look for it on themselves",
            "name it as they know it, or set --master-addr",
        )


def on_hosts(config: TrainConfig, hosts: tuple[ListedHost, ...]) -> TrainConfig:
    """The settings as the hosts will see them."""
    if not hosts:
        return config
    num_gpus = slots_of(hosts, config.workers.num_gpus)
    return replace(config, workers=replace(config.workers, num_nodes=len(hosts), num_gpus=num_gpus))


def start_on_hosts(config: TrainConfig, hosts: tuple[ListedHost, ...], verb: str, arguments: Sequence[str]) -> int:
    """Start this very command on all hosts, and see it to its end; the exit code of the whole."""
    workers = config.workers
    address = workers.master_addr if "master_addr" in config.given else hosts[0].address
    port = workers.master_port or derived_port(f"{hosts[0].name} {os.getpid()} {os.times().elapsed}")
    rest = list(arguments)
    at = rest.index("--") if "--" in rest else len(rest)  # what follows is a script's own
    own, theirs = _without(rest[:at]), rest[at:]
    if config.command.config is not None:
        own += ["--launcher", "auto"]  # the file may say otherwise
    command = [*own_command(verb), *own]
    num_gpus = slots_of(hosts, workers.num_gpus)
    told = [] if num_gpus is None else ["--num-gpus", str(num_gpus)]
    told += ["--master-addr", address, "--master-port", str(port), "--num-nodes", str(len(hosts))]
    environ = {name: os.environ[name] for name in _passed_on()}
    commands = [
        HostCommand(
            host=host.name,
            command=(*command, *told, "--node-id", str(node_id), *theirs),
            folder=str(Path.cwd()),
            environ=environ,
        )
        for node_id, host in enumerate(hosts)
    ]
    if workers.print_commands:
        for one in commands:
            print(f"# on {one.host}\n{one.by_hand()}")  # noqa: T201
        return 0
    shared = {VARIABLE: os.environ.get(VARIABLE) or new_secret()}  # goes through ssh's input, which nobody else sees
    return run_on_hosts([replace(one, environ={**one.environ, **shared}) for one in commands], os.environ)


def _passed_on() -> list[str]:
    more = {*_PASSED_ON_WHOLE, *os.environ.get(_PASS, "").replace(" ", "").split(",")}
    usual = {name for name in os.environ if name.startswith(_PASSED_ON) and name not in _OF_THIS_HOST}
    return sorted(name for name in os.environ if name in usual | more)


def _without(arguments: Sequence[str]) -> list[str]:
    """The command line without what only this call is told, and what every host is told anew."""
    taken = {*OF_ONE_CALL, "num_nodes", "num_gpus", "master_addr", "master_port"}
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, _ = word.partition("=")
        key = name.removeprefix("--").removeprefix("no-").replace("-", "_")
        if not name.startswith("--") or key not in taken:
            kept.append(word)
        elif not equals and key != "print_commands":
            next(words, None)  # its value
    return kept
