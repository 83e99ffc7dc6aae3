"""A command on several hosts over something like ssh, and every way in which it can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stormo.errors import SettingError, StormoError
from stormo.launch.ssh import Connection, HostCommand, run_on_hosts

ROOT = Path(__file__).parents[2]
# What ssh does, on this machine: a login says something, then a shell runs the last word. One host cannot be reached.
FAKE_SSH = """\
#!/bin/sh
for word; do host=$last; last=$word; done
[ "$host" = far ] && { echo "ssh: connect to host far port 22: No route to host" >&2; exit 255; }
[ "$host" = mute ] && { echo "This account is closed"; exit 0; }
echo "Welcome to $host"; echo "quota: 7 %" >&2
exec sh -c "$last"
"""
# Waits until it is asked to stop, and notes it.
WAITS = """\
import signal, sys, time
def stop(number, frame):
    open(sys.argv[1], "w").write(signal.Signals(number).name)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop), signal.signal(signal.SIGUSR1, stop)
print("waiting", flush=True)
open(sys.argv[1] + ".waits", "w")
time.sleep(120)
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    program = tmp_path / "fake-ssh"
    program.write_text(FAKE_SSH)
    program.chmod(0o755)
    return {"STORMO_SSH": str(program)}


def on(host: str, program: str, *arguments: str, **variables: str) -> HostCommand:
    command = (sys.executable, "-c", program, *arguments)
    return HostCommand(host=host, command=command, folder=str(ROOT), environ=variables)


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 60.0
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)
    time.sleep(0.05)
    return path.read_text()


def test_arguments_and_variables_arrive_as_they_are(environ: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    odd = 'it\'s "ü" $HOME\n`x` \\ ;'
    program = "import os, sys; print(repr((sys.argv[1:], os.environ['ODD'], os.getcwd(), sys.stdin.read())))"
    assert run_on_hosts([on("a", program, odd, "", ODD=odd)], environ) == 0
    assert capfd.readouterr() == (f"{([odd, ''], odd, str(ROOT), '')!r}\n", "")


def test_lines_are_whole_and_name_their_host_where_they_need_one(
    environ: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import sys; print(sys.argv[1]); print('[rank 7] own'); sys.stderr.write("
        "'stormo: all say this\\nstormo: rank 1 on host b failed\\nstormo: only ' + sys.argv[1] + '\\nno end')"
    )
    assert run_on_hosts([on("a", program, "first"), on("b", program, "second")], environ) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[b] second", "[rank 7] own", "[rank 7] own", "first"]
    said = [line.removeprefix("[b] ") for line in err.splitlines()]
    assert [said.count(line) for line in ("stormo: all say this", "stormo: rank 1 on host b failed")] == [1, 1]
    assert {"stormo: only first", "[b] stormo: only second", "[b] no end"} < set(err.splitlines())
    assert "Welcome" not in out
    assert "quota" not in err


def test_last_words_without_an_end_are_shown_while_something_keeps_the_output_open(
    environ: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    program = "import subprocess, sys; subprocess.Popen(['sleep', '3']); sys.stderr.write('no end')"
    assert run_on_hosts([on("a", "pass"), on("b", program)], environ) == 0
    assert capfd.readouterr().err == "[b] no end\n"


def test_a_host_that_cannot_be_reached_is_named_and_ends_all(
    environ: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    note = tmp_path / "note"
    assert run_on_hosts([on("a", WAITS, str(note)), on("far", "")], environ) == 1
    assert capfd.readouterr().err == (
        "stormo: host far did not start its workers: ssh: connect to host far port 22: No route to host; "
        f"see whether this works: {environ['STORMO_SSH']} far true\n"
    )
    assert not Path(f"{note}.waits").exists() or wait_for(note) == "SIGTERM"


def test_a_login_that_ends_in_order_without_a_start_is_no_success(
    environ: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_on_hosts([on("mute", "")], environ) == 1
    assert capfd.readouterr().err == "stormo: host mute did not start its workers: This account is closed\n"


def test_connections_that_cannot_all_be_opened_are_ended(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Connection] = []

    def open_one(*arguments: Any, **settings: Any) -> Connection:
        if opened:
            raise OSError(24, "Too many open files")
        opened.append(Connection(*arguments, **settings))
        return opened[0]

    monkeypatch.setattr("stormo.launch.ssh.Connection", open_one)
    with pytest.raises(StormoError, match="Too many open files; 1 of 2 connections were opened"):
        run_on_hosts([on("a", WAITS, str(tmp_path / "note")), on("b", "")], environ)
    assert opened[0].process.returncode is not None


@pytest.mark.parametrize(("codes", "code"), [((0, 75), 75), ((2, 2), 2), ((0, 3), 1)])
def test_the_exit_code_is_that_of_the_whole(codes: tuple[int, int], code: int, environ: dict[str, str]) -> None:
    commands = [on(host, f"import sys; sys.exit({own})") for host, own in zip("ab", codes, strict=True)]
    assert run_on_hosts(commands, environ) == code


def test_a_signal_reaches_every_host(environ: dict[str, str], tmp_path: Path) -> None:
    notes = [tmp_path / "a", tmp_path / "b"]

    def stop() -> None:
        for note in notes:
            wait_for(Path(f"{note}.waits"))
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=stop)
    thread.start()
    assert run_on_hosts([on(note.name, WAITS, str(note)) for note in notes], environ) == 75
    thread.join()
    assert [note.read_text() for note in notes] == ["SIGUSR1", "SIGUSR1"]


def test_a_host_that_a_signal_ends_at_once_was_stopped_too(
    environ: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ends = WAITS.replace("sys.exit(75)", "os._exit(255)").replace("import", "import os,", 1)  # as ssh tells of a signal

    def stop() -> None:
        wait_for(tmp_path / "a.waits")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    assert run_on_hosts([on("a", ends, str(tmp_path / "a"))], environ) == 75
    thread.join()
    assert "stormo: host a was ended by SIGTERM, which reached it before it was ready" in capfd.readouterr().err


def test_what_was_started_ends_when_the_process_that_wanted_it_is_killed(
    environ: dict[str, str], tmp_path: Path
) -> None:
    note = tmp_path / "note"
    program = (
        "import os, sys; from tests.launch.test_ssh import *; run_on_hosts([on('a', WAITS, sys.argv[1])], os.environ)"
    )
    starter = subprocess.Popen([sys.executable, "-c", program, str(note)], env={**os.environ, **environ}, cwd=ROOT)
    wait_for(Path(f"{note}.waits"))
    starter.kill()
    starter.wait()
    assert wait_for(note) == "SIGTERM"


def test_a_command_that_vanishes_is_named(environ: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    # As sshd tells of a signal: ssh ends with 255.
    assert run_on_hosts([on("a", "import os; os._exit(255)")], environ) == 1
    assert capfd.readouterr().err == "stormo: host a: the connection was lost, or the command there was killed\n"


def test_a_folder_that_is_not_there_is_told(environ: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    command = HostCommand(host="a", command=(sys.executable,), folder="/no such", environ={})
    assert run_on_hosts([command], environ) == 1
    err = capfd.readouterr().err
    assert err.startswith("stormo: host a did not start its workers: ")
    assert err.endswith("/no such\n")


def test_more_hosts_than_files_may_be_open_are_refused(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stormo.launch.ssh.allow_open_files", lambda needed: needed - 1)
    with pytest.raises(SettingError, match=r"may open only 66 files; ask for a limit \(ulimit -n\) of at least 67"):
        run_on_hosts([on("a", "")], environ)


def test_an_ssh_that_is_not_there_is_told() -> None:
    with pytest.raises(SettingError, match="STORMO_SSH=/none/ssh was set, but there is no /none/ssh here"):
        run_on_hosts([on("a", "")], {"STORMO_SSH": "/none/ssh"})
