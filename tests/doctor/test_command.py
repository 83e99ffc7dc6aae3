"""The verb `doctor` on one machine: its flags, and one real run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stormo import cli
from stormo.doctor import command
from stormo.doctor.check_runner import CHECKS, FLAG_CHECKS, run_checks
from stormo.doctor.finding import Finding
from tests.programs import run

ROOT = str(Path(__file__).parents[2])
FOUND = [Finding(check="cores", level="error", text="none", fix="buy some", group="limits")]


@pytest.fixture(autouse=True)
def _subprocesses_find_stormo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The subprocess of a check does not import from the current folder."""
    monkeypatch.setenv("PYTHONPATH", ROOT)


def test_all_checks_of_this_machine(tmp_path: Path) -> None:
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
    """What would be checked; the one finding is an error."""
    calls: list[tuple[list[str], dict[str, str]]] = []

    def record(names: list[str], folders: dict[str, str], **table: str) -> list[Finding]:
        if table:  # whether a flag can hold
            return run_checks(names, folders, **table)
        calls.append((names, folders))
        return FOUND

    monkeypatch.setattr(command, "run_checks", record)
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
    for arguments in commands:
        assert cli.main(arguments.split()) == 1  # the one finding is an error
    assert len(asked) == 4
    monkeypatch.setattr(command, "run_checks", run_checks)
    capsys.readouterr()
    (real,) = [arguments for arguments in commands if "--only" in arguments]
    assert cli.main(real.split()) in (0, 1)
    headings = [line for line in capsys.readouterr().out.splitlines() if line.isalpha()]
    assert headings == real.rpartition(" ")[2].split(",")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--only", "limit"], "did you mean limits?"),
        (["--skip", ","], "it names no check"),
        (["--only", "limits", "--skip", "limits"], "it leaves no check"),
        (["--data-folder", "/no/such"], "there is no such folder"),
        (
            ["--num-gpus", "2", "--limit-s", "1e10"],
            "--limit-s 10000000000 was set, but it must lie between 1 and 2592000",
        ),
        (["--quick"], "unrecognized arguments: --quick"),
    ],
)
def test_bad_flags_are_refused_before_any_check(
    asked: list[tuple[list[str], dict[str, str]]], capsys: pytest.CaptureFixture[str], flags: list[str], text: str
) -> None:
    assert cli.main(["doctor", *flags]) == 2
    assert text in capsys.readouterr().err
    assert not asked


_DEAD = """
import os, time
real = os.stat
os.stat = lambda path, **options: time.sleep(600) if "/dead" in str(path) else real(path, **options)
"""


def test_a_file_system_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_DEAD)  # for the subprocesses of checks
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    for table in (FLAG_CHECKS, CHECKS):
        for name, check in table.items():
            monkeypatch.setitem(table, name, check._replace(limit_s=0.5))
    arguments = ["--only", "storage", "--runs-folder", "/dead/runs", "--data-folder", "/dead/data"]
    assert cli.main(["doctor", *arguments]) == 1
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
def test_several_workers_are_checked_as_a_job(
    asked: list[tuple[list[str], dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    environ: dict[str, str],
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(command, "check_job", lambda arguments: seen.append(arguments) or 0)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor", *flags]) == 0
    assert seen == [flags]
    assert not asked


def test_flags_of_a_job_may_have_underscores() -> None:
    config, _ = command._parse_job(["--num_gpus=2", "--limit_s", "30"])
    assert (config.workers.num_gpus, config.workers.timeout) == (2, 30.0)
