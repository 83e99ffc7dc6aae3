"""The subprocesses of checks: those that hang, fail, crash or print, and a doctor that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stormo.doctor.check_runner import run_checks
from stormo.doctor.finding import exit_code

TABLE = "tests.doctor.strange_checks:CHECKS"


@pytest.fixture(autouse=True)
def _subprocesses_find_stormo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The subprocess of a check does not import from the current folder."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def test_checks_that_hang_fail_crash_or_print_are_findings() -> None:
    names = ["hangs", "fails", "crashes", "prints"]
    found = run_checks(names, {"runs_folder": "/some/runs"}, table=TABLE)
    assert [(one.group, one.check, one.level, one.text) for one in found[1:]] == [
        ("hangs", "hangs", "error", "the check took longer than 0.5 s and was ended"),
        ("fails", "fails", "error", "the check failed: KeyError: 'speed'"),
        ("crashes", "crashes", "error", "the check crashed: exit code 3, libdriver: assertion failed"),
        ("prints", "fine", "ok", "/some/runs"),
    ]
    assert exit_code(found) == 1
    assert not Path(found[0].text).exists()  # what the check that hung had written is deleted
    assert all("--skip" in one.fix for one in found if one.level == "error")
    pids = {one.facts["pid"] for one in found if one.facts}
    assert not any(psutil.pid_exists(int(str(pid))) for pid in pids)


@pytest.mark.parametrize(
    ("name", "number"), [("waits", signal.SIGKILL), ("waits", signal.SIGINT), ("stuck", signal.SIGKILL)]
)
def test_a_doctor_that_is_killed_leaves_no_file_and_no_process(
    tmp_path: Path, name: str, number: signal.Signals
) -> None:
    pid = tmp_path / ("scratch/pid" if name == "waits" else "pid")
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "from stormo.doctor.check_runner import run_checks\n"
    program += f"run_checks([{name!r}], {{'runs_folder': {str(tmp_path)!r}}}, table={TABLE!r})"
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as doctor:
        while not pid.exists():
            assert doctor.poll() is None
            time.sleep(0.05)
        started = psutil.Process(int(pid.read_text()))
        doctor.send_signal(number)
    deadline_s = time.monotonic() + 60.0
    while (tmp_path / "scratch").exists() or started.is_running():
        assert time.monotonic() < deadline_s, (list(tmp_path.rglob("*")), started)
        time.sleep(0.05)
