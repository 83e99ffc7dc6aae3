"""Machines made of Linux namespaces: each has a host name, a network card, a hosts file and a /dev/shm of its own.

What runs on one is known exactly, and so is what it leaves behind. Needs root; touches nothing of the real machine.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests import forked

_NAMESPACES = ("--net", "--uts", "--mount")
_NOTES = tempfile.TemporaryDirectory(prefix="stormo-hosts-")


def run(*words: str) -> str:
    """Run a command to its end; its output."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str | Callable[[], str]) -> None:
    """Look again and again until something holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(0.02)


def why_not() -> str | None:
    """Why no machines can be made here, or None."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "ip", "link", "add", "switch", "type", "bridge"], capture_output=True, check=False
    )
    return None if tried.returncode == 0 else tried.stderr.decode().strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """A listening TCP socket, as `ss` shows it."""

    address: str
    port: int
    program: str

    @property
    def is_loopback(self) -> bool:
        """Whether no other machine can reach it."""
        return self.address.startswith("127.") or self.address == "[::1]"

    @property
    def is_wildcard(self) -> bool:
        """Whether every network of the machine reaches it."""
        return self.address in ("0.0.0.0", "*", "[::]")


class Job:
    """A command on a host; its output goes to files, so that it never waits for a reader.

    What follows `enter` is executed. Without, it is a Python program, forked by `tests.forked`.
    """

    def __init__(
        self, enter: Sequence[str] | Callable[[], None], command: Sequence[str], environ: dict[str, str], folder: Path
    ) -> None:
        folder.mkdir(parents=True)
        self._out, self._err = folder / "out", folder / "err"
        self.process: subprocess.Popen[Any]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            if callable(enter):
                environ = environ | {forked.NOTES: _NOTES.name}
                self.process = forked.Popen(command, env=environ, preexec_fn=enter, **streams)
            else:
                self.process = subprocess.Popen([*enter, *command], env=environ, **streams)

    @property
    def out(self) -> str:
        """What it has written to stdout so far."""
        return self._out.read_bytes().decode("utf-8", "replace")

    @property
    def err(self) -> str:
        """What it has written to stderr so far."""
        return self._err.read_bytes().decode("utf-8", "replace")

    @property
    def first_line(self) -> str:
        """The first line on stderr but for srun's own, which may overtake what the tasks have written before."""
        return next((line for line in self.err.splitlines() if not line.startswith("srun: ")), "")

    def wait(self, timeout_s: float = 120.0) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {timeout_s:g} s; {self._both()}") from None

    def wait_for(self, words: str, timeout_s: float = 120.0) -> None:
        """Wait until it has printed something."""

        def came_or_never_will() -> bool:
            has_ended = self.process.poll() is not None  # asked first: then nothing is printed in between
            return words in self.out + self.err or has_ended

        wait_until(came_or_never_will, timeout_s, lambda: f"{words!r} did not come in time; {self._both()}")
        assert words in self.out + self.err, f"ended before {words!r} came; {self._both()}"

    def _both(self) -> str:
        return f"out:\n{self.out}\nerr:\n{self.err}"


class Switch:
    """What the hosts are plugged into."""

    def __init__(self) -> None:
        self.holder = _holder("--net")
        self.command("ip", "link", "add", "switch", "type", "bridge")
        self.command("ip", "link", "set", "switch", "up")

    def command(self, *words: str) -> None:
        """Run a command in the switch's network."""
        run("nsenter", "--target", str(self.holder.pid), "--net", *words)

    def close(self) -> None:
        """Let go of the namespace."""
        _release(self.holder)


class Host:
    """One machine."""

    def __init__(self, switch: Switch, name: str, address: str, hosts_file: str, folder: Path) -> None:
        self.name, self.address = name, address
        self.switch, self._folder = switch, folder
        self._port = f"port-{name}"
        self.holder = _holder(*_NAMESPACES, "--propagation", "private")
        self._enter = ["nsenter", "--target", str(self.holder.pid), *_NAMESPACES, f"--wd={Path.cwd()}"]
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._own_processes = {self.holder.pid}
        self._own_listeners: list[Listener] = []
        self.jobs: list[Job] = []
        folder.mkdir()
        (folder / "hosts").write_text(hosts_file)
        (folder / "resolv.conf").touch()  # no name server to wait for
        pid = str(self.holder.pid)
        switch.command("ip", "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", pid)
        switch.command("ip", "link", "set", self._port, "master", "switch", "up")
        for words in (
            f"hostname {name}",
            "ip link set lo up",
            f"ip address add {address}/24 dev eth0",
            "ip link set eth0 up",
            f"mount --bind {folder / 'hosts'} /etc/hosts",
            f"mount --bind {folder / 'resolv.conf'} /etc/resolv.conf",
            "mount -t tmpfs tmpfs /dev/shm",
        ):
            self.command(*words.split())

    def command(self, *words: str) -> str:
        """Run a command on this host to its end; its output."""
        return run(*self._enter, *words)

    def start(self, *command: str, **environ: str) -> Job:
        """Start a command on this host."""
        is_python = command[0] in (sys.executable, forked.STORMO)
        enter = partial(_enter, self.holder.pid) if is_python else self._enter
        self.jobs.append(Job(enter, command, {**_environ(), **environ}, self._folder / f"job-{len(self.jobs)}"))
        return self.jobs[-1]

    def start_daemon(self, *command: str, **environ: str) -> None:
        """Start what belongs to the host and runs until it is closed; it does not outlive the tests."""
        words = [*self._enter, "setpriv", "--pdeathsig", "KILL", *command]
        with (self._folder / f"daemon-{len(self._daemons)}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**_environ(), **environ})
            )

    def keep_daemons(self) -> None:
        """From now on what the daemons have started and opened belongs to the host, not to its jobs."""
        self._own_processes |= set(self.processes())
        self._own_listeners += self.listeners()

    def leave_network(self) -> None:
        """The cable still looks plugged in, but no packet passes: nobody is told."""
        self.switch.command("ip", "link", "set", self._port, "nomaster")

    def join_network(self) -> None:
        """Undo `leave_network`."""
        self.switch.command("ip", "link", "set", self._port, "master", "switch")

    def listeners(self) -> list[Listener]:
        """Every listening TCP socket of this host, without those of its daemons."""
        found = []
        for line in self.command("ss", "-H", "-l", "-t", "-n", "-p").splitlines():
            fields = line.split()
            address, _, port = fields[3].rpartition(":")
            program = re.search(r'"([^"]+)"', line)
            found.append(
                Listener(address=address.partition("%")[0], port=int(port), program=program[1] if program else "")
            )
        return [listener for listener in found if listener not in self._own_listeners]

    def processes(self) -> dict[int, str]:
        """Every process of this host by id, without its daemons; ended ones that nobody has reaped yet count too."""
        namespace = _namespace_of(self.holder.pid)
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return {
            pid: command_of(pid) for pid in pids if pid not in self._own_processes and _namespace_of(pid) == namespace
        }

    def shared_memory(self) -> list[str]:
        """What lies in /dev/shm."""
        return sorted(entry.name for entry in Path(f"/proc/{self.holder.pid}/root/dev/shm").iterdir())

    def leftovers(self) -> str:
        """What is still there of the jobs, in words; empty when there is nothing."""
        kinds = {"processes": self.processes(), "listening": self.listeners(), "in /dev/shm": self.shared_memory()}
        return "; ".join(f"{kind}: {found}" for kind, found in kinds.items() if found)

    def end_jobs(self) -> None:
        """Kill whatever of the jobs still runs, and clear what it has left."""
        for pid in self.processes():
            _kill(pid)
        for name in self.shared_memory():
            Path(f"/proc/{self.holder.pid}/root/dev/shm/{name}").unlink()
        for job in self.jobs:
            job.process.wait(10.0)

    def close(self) -> None:
        """End everything on this host, and the host."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._own_processes = {self.holder.pid}
        self.end_jobs()
        wait_until(lambda: not self.processes(), 10.0, lambda: f"{self.name} still runs {self.processes()}")
        _release(self.holder)


def _enter(pid: int) -> None:
    """Enter the namespaces of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    for fd in [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt")]:
        assert libc.setns(fd, 0) == 0, os.strerror(ctypes.get_errno())
        os.close(fd)


def command_of(pid: int) -> str:
    """The command line of a process, or nothing."""
    if note := forked.noted(_NOTES.name, pid):
        return " ".join(note[0])
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def process_of_rank(host: Host, rank: int) -> int:
    """The process of a rank, whoever started it; helpers inherit its variables, but not its command."""
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    for pid, command in host.processes().items():
        variables = environment_of(pid)
        told = next((variables[name] for name in names if name in variables), None)
        if "stormo train" in command and told == str(rank):
            return pid
    raise AssertionError(f"no rank {rank} on {host.name}: {host.processes()}")


def environment_of(pid: int) -> dict[str, str]:
    """The environment a process was started with."""
    if note := forked.noted(_NOTES.name, pid):
        return note[1]
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def _holder(*namespaces: str) -> subprocess.Popen[bytes]:
    """A process that keeps namespaces open until its input ends, at the latest when the tests do."""
    holder = subprocess.Popen(["unshare", *namespaces, "cat"], stdin=subprocess.PIPE)
    comm = Path(f"/proc/{holder.pid}/comm")
    wait_until(lambda: comm.read_text() == "cat\n", 10.0, "no namespace was made")
    return holder


def _release(holder: subprocess.Popen[bytes]) -> None:
    assert holder.stdin is not None
    holder.stdin.close()
    holder.wait(10.0)


def _namespace_of(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        return


def _environ() -> dict[str, str]:
    """This process's environment without anything that a launcher, or these tests, may have put there."""
    foreign = ("SLURM", "OMPI", "PMI", "MPI_", "TORCHELASTIC", "STORMO", "GLOO_", "NCCL_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in names and not name.startswith(foreign)}
    # The bits of a sum depend on the number of threads, for which every launcher has a default of its own.
    return {**kept, "OMP_NUM_THREADS": "1"}
