"""Hostile peers against real jobs: on one node, on two nodes, under torchrun, and before any of them has begun.

Where there is root, the attacker is the user nobody. Where somebody else was first (at a port, with a folder), or
writes into the store that torch opens between nodes, a job holds when it says so in one sentence and goes no further;
in every other case when it continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from benchmarks.command import one_thread, train_command
from benchmarks.hostile import intruder
from benchmarks.hostile.intruder import NOBODY, Address, Verdict
from benchmarks.hostile.task import PROGRESS
from stormo.launch.control import PROTOCOL

_TASK = f"{Path(__file__).with_name('task.py')}:Patient"
_STARTS_WITHIN_S, _PROGRESS_WITHIN_S, _ENDS_WITHIN_S = 90.0, 20.0, 40.0
_MOST_GROWTH_BYTES = 500_000_000
_FLOOD = 300
_RESUMABLE, _USAGE = 75, 2

_SURROGATE = b'{"type":"hello","token":"\\ud800","nonce":"\\ud800","code":"\\ud800"}\n'
_MISFIT = {
    "type": "hello",
    "protocol": PROTOCOL,
    "member": 1,
    "num_members": 9,
    "host": "h",
    "digest": "",
    "options": {},
}
_FAILURE = {
    "type": "failure",
    "kind": "exception",
    "who": "rank 1",
    "host": "h",
    "what": "failed",
    "details": "",
    "exit_code": 1,
    "secondary": False,
    "printed": False,
}
_ANSWER = json.dumps({"type": "answer", "nonce": "NONCE", "code": "0" * 64})
_CHALLENGE = json.dumps({"type": "challenge", "protocol": PROTOCOL, "nonce": "a" * 64}) + "\n"
Attack = Callable[..., Any]


class Attacker:
    """Another account, which does one thing after another."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def does(self, attack: Attack, *arguments: Any) -> Any:
        """What came of it."""
        return self.begins(attack, *arguments).result(120)

    def begins(self, attack: Attack, *arguments: Any) -> Future[Any]:
        """The same, without waiting."""
        return self._pool.submit(attack, *arguments)


class Job:
    """A job under attack: the processes that a user has started, and what they write."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.marker = folder / "marker"  # exists once code of the attacker has run
        self.precious = folder / "precious"  # what must stay
        self.verdicts: list[Verdict] = []
        self._folder = folder
        self._output: list[Path] = []
        self._progress = folder / "progress"
        self._environ = {**environ, PROGRESS: str(self._progress)}

    def start(self, command: Sequence[str]) -> None:
        """Start one more command of the job."""
        self._output.append(self._folder / f"output{len(self._output)}")
        with self._output[-1].open("wb") as target:
            self.processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=target,
                    stderr=subprocess.STDOUT,
                    env=self._environ,
                    cwd=self._folder,
                    start_new_session=True,
                )
            )

    def pids(self) -> list[int]:
        """Every process of the job."""
        found: list[int] = []
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                found += [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        return found

    def ports(self, pids: Sequence[int] | None = None) -> list[Address]:
        """Every TCP port that the job listens on."""
        found: set[Address] = set()
        for pid in self.pids() if pids is None else pids:
            with contextlib.suppress(psutil.Error):
                for each in psutil.Process(pid).net_connections("tcp"):
                    if each.status == psutil.CONN_LISTEN:
                        found.add((each.laddr[0], each.laddr[1]))
        return sorted(found)

    def text(self) -> str:
        """Everything that it has written."""
        return "".join(file.read_text(errors="replace") for file in self._output)

    def num_steps(self) -> int:
        """Steps so far."""
        return self._progress.stat().st_size if self._progress.exists() else 0

    def has_ended(self) -> bool:
        """Whether one of its processes has."""
        return any(process.poll() is not None for process in self.processes)

    def memory(self) -> int:
        """Bytes in use."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(psutil.Error):
                total += psutil.Process(pid).memory_info().rss
        return total

    def makes_progress(self, within_s: float = _PROGRESS_WITHIN_S) -> bool:
        """Whether it takes more steps."""
        before, deadline = self.num_steps(), time.monotonic() + within_s
        while time.monotonic() < deadline and not self.has_ended():
            if self.num_steps() > before + 2:
                return True
            time.sleep(0.05)
        return False

    def suffers(self, name: str, attack: Callable[[], Any]) -> None:
        """Let something be done to the job, and judge what came of it; `attack` returns what should not be, if any."""
        ended_before, num_errors = self.has_ended(), self.text().count("Traceback")
        memory = self.memory() if self.num_steps() else None  # which grows while it starts
        found = attack()
        makes_progress = self.makes_progress()
        ended = self.has_ended()
        self.verdicts.append(
            Verdict(
                name=name,
                code_run=self.marker.exists(),
                deleted=not self.precious.exists(),
                job_ended=ended,
                hang=not makes_progress and not ended,
                traceback=self.text().count("Traceback") > num_errors,
                memory_exceeded=memory is not None and self.memory() - memory > _MOST_GROWTH_BYTES,
                wrongly_accepted=bool(found),
                detail="had ended before" if ended_before else str(found or (self.text()[-300:] if ended else "")),
            )
        )

    def end(self, name: str, code: int | None = _RESUMABLE) -> list[Verdict]:
        """Ask all to save and stop; judge how they do."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        codes = [_wait(process, _ENDS_WITHIN_S) for process in self.processes]
        is_wrong = code is not None and any(found != code for found in codes)
        verdict = Verdict(
            name=name,
            code_run=self.marker.exists(),
            deleted=not self.precious.exists(),
            hang=None in codes,
            job_ended=is_wrong,
            detail=f"exit codes {codes}: {self.text()[-300:]}" if is_wrong else "",
        )
        return [*self.verdicts, verdict]


def run(folder: Path) -> list[Verdict]:
    """Every case; the folder must be one that others may enter."""
    with ProcessPoolExecutor(8, mp_context=get_context("fork"), initializer=intruder.become) as pool:
        for started in [pool.submit(time.sleep, 0.2) for _ in range(8)]:  # before there are threads
            started.result()
        attacker = Attacker(pool)
        groups = (_one_node, _two_nodes, _under_torchrun, _before_the_start)
        with ThreadPoolExecutor(2) as threads:
            begun = []
            for group in groups:
                own = folder / group.__name__.strip("_")
                own.mkdir()
                begun.append(threads.submit(group, own, attacker))
            return [verdict for one in begun for verdict in one.result()]


# --- jobs ----------------------------------------------------------------------------------------------------------


@contextmanager
def _job(folder: Path, commands: Sequence[Sequence[str]], **environ: str) -> Iterator[Job]:
    """Start the commands of one job; nothing of it outlives the block."""
    job = Job(folder, one_thread({"HOME": str(folder / "home"), **environ}))
    job.precious.mkdir(exist_ok=True)
    try:
        for command in commands:
            job.start(command)
        yield job
    finally:
        for process in job.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _train(*arguments: str | int | Path) -> list[str]:
    common = ("--device", "cpu", "--epochs", 1000, "--no-energy", "--runs-folder", "runs")
    return train_command(_TASK, *map(str, (*common, *arguments)))


def _node(number: int, address: Address, *arguments: str | int | Path) -> list[str]:
    where = ("--master-addr", address[0], "--master-port", address[1])
    run_name = ("--run-name", "two") if "--run-name" not in arguments else ()
    return _train("--num-gpus", 1, "--num-nodes", 2, "--node-id", number, *where, *run_name, *arguments)


def _free(host: str = "127.0.0.1") -> Address:
    """A port that is free, below what the system gives to outgoing connections."""
    while True:
        address = host, 10_000 + secrets.randbelow(22_000)
        if not _is_taken(address):
            return address


def _wait(process: subprocess.Popen[bytes], within_s: float) -> int | None:
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        return None


def _wait_for(condition: Callable[[], Any], within_s: float = _STARTS_WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _everywhere(job: Job, attacker: Attacker) -> dict[str, Callable[[], Any]]:
    """What can be tried at every port of any job."""
    ports = job.ports()
    pickled = intruder.planted(str(job.marker))
    keys = dict.fromkeys(("stormo/distributed/x", "stormo/world/node/2/0", "init/", "torch.rendezvous.x"), pickled)
    return {
        "garbage at every port": lambda: attacker.does(intruder.send_to_all, ports, os.urandom(4096)),
        "pickles at every port": lambda: attacker.does(intruder.send_to_all, ports, pickled * 10),
        "pickles for a store": lambda: attacker.does(intruder.write_to_store, ports, keys) and None,
        "idle connections at every port": lambda: attacker.does(intruder.hold, ports, 100, 1.0) and None,
        "private files of every process": lambda: (
            attacker.does(intruder.open_private, job.pids(), ["environ", "mem"]) if os.geteuid() == 0 else None
        ),
    }


def _at_control(address: Address, attacker: Attacker) -> dict[str, Callable[[], Any]]:
    """What can be tried at a control channel; the return value is what an attacker should not have heard."""
    messages = {
        "garbage": b"\xff\xfe\n",
        "an endless line": b"x" * 1_000_000,
        "nested brackets": b"[" * 100_000 + b"\n",
        "a lone surrogate": _SURROGATE,
        "a hello that does not fit": json.dumps(_MISFIT).encode() + b"\n",
        "a failure of a rank": json.dumps(_FAILURE).encode() + b"\n",
        "two lines at once": _ANSWER.encode() + b"\n" + json.dumps(_MISFIT).encode() + b"\n",
    }
    attacks: dict[str, Callable[[], Any]] = {
        name: lambda said=said: _leaked(attacker.does(intruder.send, address, said))  # type: ignore[misc]
        for name, said in messages.items()
    }
    attacks["a wrong code"] = lambda: _leaked(attacker.does(intruder.converse, address, [_ANSWER, json.dumps(_MISFIT)]))
    attacks["the server's nonce sent back"] = lambda: _leaked(
        attacker.does(intruder.converse, address, [json.dumps({"type": "answer", "nonce": "NONCE", "code": "NONCE"})])
    )
    attacks["idle connections"] = lambda: attacker.does(intruder.hold, [address], _FLOOD, 1.0) and None
    attacks["bytes that trickle"] = lambda: attacker.does(intruder.hold, [address], 50, 2.0, b'{"type":"an') and None
    attacks["a storm of connections"] = lambda: attacker.does(intruder.storm, address, 2000)
    return attacks


def _leaked(heard: str) -> str:
    """What an attacker has heard beyond the greeting."""
    for line in heard.splitlines():
        with contextlib.suppress(ValueError):
            if json.loads(line).get("type") not in ("challenge", "unauthenticated"):
                return line[:200]
    return ""


# --- groups of cases -----------------------------------------------------------------------------------------------


def _one_node(folder: Path, attacker: Attacker) -> list[Verdict]:
    """Two workers of one node, which show their metrics and have staged their data."""
    metrics, (data, near) = _free(), _staging(folder)
    command = _train("--num-gpus", 2, "--prometheus", metrics[1], "--stage", near, "--task.data-folder", data)

    def is_shown() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics[1]}/metrics", timeout=10) as answer:
            return "" if b"stormo_step" in answer.read() else "no metrics are shown any more"

    def then_shown(attack: Attack, *arguments: Any) -> Callable[[], str]:
        def both() -> str:
            begun = attacker.begins(attack, *arguments)
            time.sleep(0.5)
            shown = is_shown()
            begun.result(60)
            return shown or is_shown()

        return both

    with _job(folder, [command]) as job:
        _wait_for(lambda: job.num_steps() or job.has_ended())
        for name, attack in _everywhere(job, attacker).items():
            job.suffers(f"one node: {name}", attack)
        for name, attack in {
            "idle connections": then_shown(intruder.hold, [metrics], 100, 2.0),
            "a request that trickles": then_shown(intruder.hold, [metrics], 30, 2.0, b"GET /metrics HT"),
            "a long head": then_shown(intruder.send, metrics, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 500_000),
            "garbage": then_shown(intruder.send, metrics, os.urandom(100_000)),
        }.items():
            job.suffers(f"metrics: {name}", attack)
        return job.end("one node: it ends in order after all this")


def _staging(folder: Path) -> tuple[Path, Path]:
    """Data to be staged, and a folder for it that all users may write to."""
    data, near = folder / "data", folder / "near"
    for each in (data, near):
        each.mkdir()
    (data / "file").write_bytes(b"x" * 1000)
    near.chmod(0o1777)
    return data, near


def _two_nodes(folder: Path, attacker: Attacker) -> list[Verdict]:
    """Two agents on loopback: first one waits for the other, then both train; and a second job, whose store is open."""
    address = _free("127.0.0.2")
    verdicts: list[Verdict] = []
    with _job(folder, [_node(0, address)]) as job:
        _wait_for(lambda: address in job.ports() or job.has_ended())
        for name, attack in _at_control(address, attacker).items():
            found = attack()
            verdicts.append(
                Verdict(
                    name=f"node 0 waits: {name}",
                    job_ended=job.has_ended(),
                    traceback="Traceback" in job.text(),
                    wrongly_accepted=bool(found),
                    detail=str(found or "") + (job.text()[-300:] if job.has_ended() else ""),
                )
            )
        flood = attacker.begins(intruder.hold, [address], _FLOOD, 5.0)
        job.start(_node(1, address))
        job.suffers("two nodes: the second comes through a flood", lambda: _wait_for(job.num_steps))
        flood.result(60)
        for name, attack in (_at_control(address, attacker) | _everywhere(job, attacker)).items():
            job.suffers(f"two nodes train: {name}", attack)
        verdicts += job.end("two nodes: they end in order after all this")
    own = folder / "open_store"
    own.mkdir()
    return [*verdicts, _entry_in_open_store(own, attacker)]


def _entry_in_open_store(folder: Path, attacker: Attacker) -> Verdict:
    """Another entry to be staged, and removed at the end, written into the store between nodes."""
    address, (data, near) = _free("127.0.0.2"), _staging(folder)
    staged = ("--stage", near, "--task.data-folder", data)
    commands = [_node(number, address, *staged) for number in (0, 1)]
    with _job(folder, commands) as job:
        named = {"name": "../precious", "path": str(job.precious), "entry": str(job.precious), "num_bytes": 1}
        entry = json.dumps({**named, "copied_bytes": 1, "seconds": 1.0}).encode()
        keys = {f"stormo/world/node/{number}/{node}" for number in (1, 2) for node in (0, 1)}
        done = folder / "done"
        _wait_for(lambda: job.has_ended() or len(job.ports()) > 1)
        ports = [port for port in job.ports() if port != address]
        for port in ports[:1]:
            attacker.begins(intruder.write_often, port, dict.fromkeys(keys, entry), _STARTS_WITHIN_S, str(done))
        _wait_for(lambda: job.has_ended() or job.num_steps())
        done.touch()
        if not job.has_ended():
            job.processes[0].terminate()
            job.processes[1].terminate()
        codes = [_wait(process, _ENDS_WITHIN_S) for process in job.processes]
        text = job.text()
        return Verdict(
            name="two nodes: an entry to be removed, in the open store",
            code_run=job.marker.exists(),
            deleted=not job.precious.exists(),
            hang=None in codes,
            traceback="Traceback" in text,
            wrongly_accepted=str(job.precious) in text,
            # That it says so and goes no further is all it can do: torch's store lets everybody write.
            job_ended=any(code != _RESUMABLE for code in codes) and "no worker of this job" not in text,
            detail=f"exit codes {codes}, {'refused' if 'no worker of this job' in text else 'went on'}",
        )


def _under_torchrun(folder: Path, attacker: Attacker) -> list[Verdict]:
    """Two ranks of torchrun, whose agent's store is open from the start."""
    address, squatter = _free(), _free()
    where = {"stormo/where": f"{squatter[0]} {squatter[1]}".encode()}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--master-addr", address[0], "--master-port", str(address[1])]
    with _job(folder, [[*torchrun, "-m", "stormo", *_train()[3:]]]) as job:
        done, lines = folder / "done", [_CHALLENGE, '{"type":"proof","code":"CODE"}\n']
        said = attacker.begins(intruder.listen, squatter, lines, _STARTS_WITHIN_S, str(done))
        attacker.begins(intruder.write_once, address, where, _STARTS_WITHIN_S)
        job.suffers(
            "torchrun: rank 0 is said to be elsewhere", lambda: _wait_for(lambda: job.num_steps() or job.has_ended())
        )
        done.touch()
        heard = said.result(60)
        if '"hello"' in heard or "options" in heard:
            job.verdicts[-1] = replace(job.verdicts[-1], wrongly_accepted=True, detail=heard[:200])
        controls = [port for port in job.ports() if "challenge" in attacker.does(intruder.send, port, b"\n")]
        for control in controls[:1]:
            for name, attack in _at_control(control, attacker).items():
                job.suffers(f"torchrun: {name}", attack)
        if not controls:
            job.verdicts.append(Verdict(name="torchrun: no control channel was found", hang=True))
        job.suffers(
            "torchrun: rank 0 is said to be elsewhere, later",
            lambda: attacker.does(intruder.write_to_store, [address], where) and None,
        )
        return job.end("torchrun: it ends after all this", code=None)


def _before_the_start(folder: Path, attacker: Attacker) -> list[Verdict]:
    """Somebody else was first: at the port, with a folder, or with the user's key."""
    cases: dict[str, tuple[int, Sequence[str]]] = {
        "a silent program": (0, []),
        "a program that speaks as stormo does": (
            1,
            [_CHALLENGE, json.dumps({"type": "proof", "code": "0" * 64}) + "\n"],
        ),
        "a program that sends back what it hears": (1, [_CHALLENGE, '{"type":"proof","code":"CODE"}\n']),
        "a program that gives orders at once": (
            1,
            [_CHALLENGE, '{"type":"go","payload":{"store_addr":"127.0.0.1"}}\n'],
        ),
        "a web server": (1, ["HTTP/1.1 400 Bad Request\r\n\r\n"]),
        "a program that says too much": (1, ["x" * 100_000]),
    }

    def squat(number: int) -> Verdict:
        name, (node, lines) = list(cases.items())[number]
        own, address = folder / str(number), _free("127.0.0.2")
        own.mkdir()
        done = own / "done"
        begun = attacker.begins(intruder.listen, address, lines, _STARTS_WITHIN_S, str(done))
        _wait_for(lambda: _is_taken(address), 10.0)
        verdict = _refused(own, f"at the port: {name}", _node(node, address), "--master-port")
        done.touch()
        return replace(verdict, wrongly_accepted=verdict.wrongly_accepted or "options" in begun.result(60))

    with ThreadPoolExecutor(2) as threads:
        return [*threads.map(squat, range(len(cases))), *_folders_made_first(folder)]


def _folders_made_first(folder: Path) -> list[Verdict]:
    """Folders and files that an attacker has made where the user's own would be; all of them need root to be tried."""
    if os.geteuid() != 0:
        return []
    verdicts = []
    address = _free("127.0.0.2")
    taken = folder / "temporary"
    (taken / f"stormo-{os.geteuid()}").mkdir(parents=True)
    (taken / f"stormo-{os.geteuid()}" / "secret").write_bytes(secrets.token_bytes(32))
    (folder / "no_home").touch()
    for path in (taken / f"stormo-{os.geteuid()}", taken / f"stormo-{os.geteuid()}" / "secret"):
        os.chown(path, NOBODY, NOBODY)
    environ = {"TMPDIR": str(taken), "HOME": str(folder / "no_home")}
    verdicts.append(_refused(folder, "a folder for the key", _node(0, address), "STORMO_SECRET", **environ))
    key = folder / "readable" / ".config" / "stormo" / "secret"
    key.parent.mkdir(parents=True)
    key.write_bytes(secrets.token_bytes(32))
    key.chmod(0o644)
    environ = {"HOME": str(folder / "readable")}
    verdicts.append(_refused(folder, "a key that all can read", _node(0, address), "STORMO_SECRET", **environ))
    data, near = _staging(folder)
    root = near / f"stormo-staged-{os.geteuid()}"
    root.mkdir()
    (root / "data-0123456789abcdef").symlink_to(folder / "precious")
    os.chown(root, NOBODY, NOBODY)
    command = _train("--num-gpus", 2, "--stage", near, "--task.data-folder", data)
    return [*verdicts, _refused(folder, "a folder for staged data", command, "--stage")]


def _refused(folder: Path, name: str, command: Sequence[str], remedy: str, **environ: str) -> Verdict:
    """A job that cannot be: it must say so in one sentence, and what to set instead."""
    with _job(folder, [command], **environ) as job:
        code, text = _wait(job.processes[0], _STARTS_WITHIN_S), job.text()
        return Verdict(
            name=f"there first: {name}",
            code_run=job.marker.exists(),
            deleted=not job.precious.exists(),
            hang=code is None,
            traceback="Traceback" in text,
            wrongly_accepted=code != _USAGE or remedy not in text,
            detail=f"exit code {code}: {text.strip()[-300:]}",
        )


def _is_taken(address: Address) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(address)
        except OSError:
            return True
    return False
