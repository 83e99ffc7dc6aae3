"""Checks in a process of their own: one that hangs or dies is a finding, and the others are made."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stormo.doctor.apart import examine
from stormo.doctor.finding import exit_code
from tests.doctor.strange_checks import CHECKS


@pytest.fixture(autouse=True)
def _module_of_these_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process does not look into the current folder."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


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
    assert all("--skip" in one.mend for one in found if one.level == "error")
    pids = {one.facts["pid"] for one in found if one.facts}
    assert len(pids) == 2  # the last two shared a process
    assert not any(psutil.pid_exists(int(str(pid))) for pid in pids)
    assert set(CHECKS) == {*names, "waits"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_doctor_that_is_killed_leaves_no_file_and_no_process(tmp_path: Path, number: signal.Signals) -> None:
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "from stormo.doctor.apart import examine; examine(['waits'], {'runs_folder': %r}, table=%r)"
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
