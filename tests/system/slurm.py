"""A Slurm cluster of its own on two hosts: controller, one node daemon on each, and their shared secret."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from tests.system.hosts import Host, Job, wait_until

_CONF = """\
ClusterName=tests
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,builtin_interval=1
EnforcePartLimits=ALL
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10
PartitionName=physics Nodes=ALL State=UP AllowAccounts=physics
"""


class Cluster:
    """Takes commands on its first host."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self._hosts = hosts
        self._folder = folder
        nodes = "\n".join(f"NodeName={host.name} NodeAddr={host.address} CPUs=4 RealMemory=1000" for host in hosts)
        (folder / "state").mkdir(parents=True)
        (folder / "slurm.conf").write_text(_CONF.format(first=hosts[0], folder=folder, nodes=nodes))
        self.environ = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._start()

    def _start(self) -> None:
        folder, first = self._folder, self._hosts[0]
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = ("key-file", "munge.key"), ("socket", "munge.socket"), ("pid-file", "munge.pid")
        more = ("log-file", "munge.log"), ("seed-file", "munge.seed")
        words = [f"--{name}={folder / file}" for name, file in (*files, *more)]
        first.start_daemon("munged", "--foreground", "--force", *words)
        wait_until((folder / "munge.socket").exists, 10.0, "munged did not start")
        first.start_daemon("slurmctld", "-D", **self.environ)
        for host in self._hosts:
            (folder / f"spool-{host.name}").mkdir()
            host.start_daemon("slurmd", "-D", **self.environ)
        wait_until(lambda: self._num_idle() == len(self._hosts), 30.0, self._logs)
        for host in self._hosts:
            host.keep_daemons()

    def start(self, *command: str) -> Job:
        """Start a command of Slurm's where a user would type it."""
        return self._hosts[0].start(*command, **self.environ)

    def command(self, *words: str) -> str:
        """Run a command of Slurm's to its end; its output."""
        settings = [f"{name}={value}" for name, value in self.environ.items()]
        return self._hosts[0].command("env", *settings, *words)

    def step(self) -> str:
        """The one step that runs, as `scancel` names it."""
        (found,) = [name for name in self.command("squeue", "--steps", "--noheader", "--format=%i").split() if name]
        return found

    def _num_idle(self) -> int:
        job = self.start("sinfo", "--noheader", "--Node", "--partition=all", "--format=%t")
        return job.out.split().count("idle") if job.wait(20.0) == 0 else 0

    def _logs(self) -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in self._folder.glob("*.log"))
