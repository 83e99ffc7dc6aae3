"""The verb `doctor`: its flags, its processes, and one real run on this machine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from stormo import cli
from stormo.doctor import command
from stormo.doctor.command import CHECKS, examine
from stormo.doctor.finding import Finding, exit_code
from tests.doctor.strange_checks import CHECKS as STRANGE
from tests.programs import run

ROOT = str(Path(__file__).parents[2])
FOUND = [Finding(check="cores", level="error", text="none", fix="buy some", group="limits")]


@pytest.fixture(autouse=True)
def _processes_find_this_stormo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of a check does not look into the current folder."""
    monkeypatch.setenv("PYTHONPATH", ROOT)


def test_a_real_machine_is_examined_wholly(tmp_path: Path) -> None:
    done = run(["-m", "stormo", "doctor", "--json", "--runs-folder", "here/runs"], tmp_path)
    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"] == int(document["counts"]["error"] > 0)
    assert done.stderr == ""
    findings = document["findings"]
    assert list(dict.fromkeys(one["group"] for one in findings)) == list(CHECKS)
    assert {"group", "check", "level", "where", "text", "fix", "facts"} == set(findings[0])
    assert not any("the check" in one["text"] for one in findings)  # none failed or took too long
    by_name = {one["check"]: one for one in findings}
    assert by_name["gloo"]["level"] == "ok"
    assert by_name["torch"]["facts"]["torch"]
    assert by_name["storage-runs"]["facts"]["folder"] == "here/runs"
    assert by_name["storage-runs"]["facts"]["write_bytes_per_s"] > 0
    assert not list(tmp_path.iterdir())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """What would be examined; the one finding is an error."""
    calls: list[tuple[list[str], dict[str, str]]] = []

    def note(names: list[str], folders: dict[str, str], **table: str) -> list[Finding]:
        if table:  # whether a flag can hold
            return examine(names, folders, **table)
        calls.append((names, folders))
        return FOUND

    monkeypatch.setattr(command, "examine", note)
    for name in ("STORMO_DATA", "XDG_CACHE_HOME", "STORMO_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_flags(asked: list[tuple[list[str], dict[str, str]]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 1
    assert asked.pop() == (list(CHECKS), {"runs_folder": "runs", "data_folder": "~/.cache/stormo"})
    assert "to fix\n  error    cores: none\n           → buy some\n\n1 error, 0 ok\n" in capsys.readouterr().out
    assert cli.main(["doctor", "--only", "limits,devices", "--json"]) == 1
    assert asked.pop()[0] == ["devices", "limits"]
    assert json.loads(capsys.readouterr().out)["exit_code"] == 1
    cli.main(["doctor", "--skip", "storage"])
    assert asked.pop()[0] == [name for name in CHECKS if name != "storage"]


def test_the_commands_of_the_page(
    asked: list[tuple[list[str], dict[str, str]]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs/clusters/doctor.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ stormo (doctor.*)$", page.partition("## Across a job")[0], re.MULTILINE)
    assert len(commands) == 4
    for words in commands:
        assert cli.main(words.split()) == 1  # the one finding is an error
    assert len(asked) == 4
    monkeypatch.setattr(command, "examine", examine)
    capsys.readouterr()
    (real,) = [words for words in commands if "--only" in words]
    assert cli.main(real.split()) in (0, 1)
    headings = [line for line in capsys.readouterr().out.splitlines() if line.isalpha()]
    assert headings == real.rpartition(" ")[2].split(",")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--only", "limit"], "did you mean limits?"),
        (["--skip", ","], "it names no check"),
        (["--only", "limits", "--skip", "limits"], "leaves nothing"),
        (["--only", "clock"], "stormo no longer has this check"),
        (["--data-folder", "/no/such"], "there is no such folder"),
        (["--quick"], "unrecognized arguments: --quick"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_looked_at(
    asked: list[tuple[list[str], dict[str, str]]], capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert cli.main(["doctor", *flags]) == 2
    assert words in capsys.readouterr().err
    assert not asked


_DEAD = """
import os, time
real = os.stat
os.stat = lambda path, *words, **more: time.sleep(600) if "/dead" in str(path) else real(path, *words, **more)
"""


def test_a_file_system_that_does_not_answer_is_named_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_DEAD)  # for the processes that look
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    for table in (command.ASKED, CHECKS):
        for name, check in table.items():
            monkeypatch.setitem(table, name, check._replace(limit_s=0.5))
    words = ["--only", "storage", "--runs-folder", "/dead/runs", "--data-folder", "/dead/data"]
    assert cli.main(["doctor", *words]) == 1
    assert (
        "error    storage: the check took longer than 0.5 s and was ended (at /dead/runs)\n" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        (["--num-nodes", "2", "--node-id", "0"], {}),
        (["--num_gpus=2"], {}),
        ([], {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}),
    ],
)
def test_several_workers_are_the_jobs_doctor(
    asked: list[tuple[list[str], dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    environ: dict[str, str],
) -> None:
    seen: list[list[str]] = []
    job = ModuleType("stormo.doctor.job")
    job.main = lambda arguments: seen.append(arguments) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stormo.doctor.job", job)
    monkeypatch.setattr("stormo.doctor.job", job, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor", *flags]) == 0
    assert seen == [flags]
    assert not asked


def test_checks_that_hang_fail_die_or_print_are_findings() -> None:
    names = ["hangs", "fails", "dies", "prints", "fine"]
    found = examine(names, {"runs_folder": "/some/runs"}, table="tests.doctor.strange_checks:CHECKS")
    assert [(one.group, one.check, one.level, one.text) for one in found[1:]] == [
        ("hangs", "hangs", "error", "the check took longer than 2 s and was ended"),
        ("fails", "fails", "error", "the check failed: KeyError: 'speed'"),
        ("dies", "dies", "error", "the check ended its process: exit code 3, libdriver: assertion failed"),
        ("prints", "fine", "ok", "/some/runs"),
        ("fine", "fine", "ok", "/some/runs"),
    ]
    assert exit_code(found) == 1
    assert not Path(found[0].text).exists()  # what the check that hung had written is deleted
    assert all("--skip" in one.fix for one in found if one.level == "error")
    pids = {one.facts["pid"] for one in found if one.facts}
    assert not any(psutil.pid_exists(int(str(pid))) for pid in pids)
    assert set(STRANGE) == {*names, "waits"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_doctor_that_is_killed_leaves_no_file_and_no_process(tmp_path: Path, number: signal.Signals) -> None:
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "from stormo.doctor.command import examine; examine(['waits'], {'runs_folder': %r}, table=%r)"
    words = program % (str(tmp_path), "tests.doctor.strange_checks:CHECKS")
    with subprocess.Popen([sys.executable, "-c", words], stderr=subprocess.DEVNULL) as doctor:
        while not (tmp_path / "scratch" / "pid").exists():
            assert doctor.poll() is None
            time.sleep(0.05)
        started = psutil.Process(int((tmp_path / "scratch" / "pid").read_text()))
        doctor.send_signal(number)
    deadline_s = time.monotonic() + 60.0
    while (tmp_path / "scratch").exists() or started.is_running():
        assert time.monotonic() < deadline_s, (list(tmp_path.rglob("*")), started)
        time.sleep(0.05)
