"""One node: how the agent ends a job, what it says first, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stormo.launch import Node, run_node, worker_group
from stormo.system.process import process_stat
from tests.launch import agent_program
from tests.launch.conftest import worker_command

# Each test runs real processes; start_agent comes from conftest.py and returns a Job.
StartAgent = Callable[..., Any]

HERE = Path(__file__).parent
WAIT = ["wait for stop"]
STOP_WITH_75 = [["stop on", "SIGTERM"], ["stop on", "SIGUSR1"], ["stop on", "SIGINT"], WAIT, ["exit", 75]]
FOREVER = [["sleep", 60]]
TWO_WORKERS = {"num_workers": 2}
OF_SCRIPT = {"first_sign_s": None}
SILENT, BACK = "has sent no sign of life", "is back after"


def first_line(job: Any) -> str:
    return str(job.err.splitlines()[0])


def stop_for_a_while(job: Any, pid: int, seconds: float) -> None:
    """Stop a worker until some time after the warning, and wait for its return."""
    warnings, returns = (job.err.count(text) for text in (SILENT, BACK))
    os.kill(pid, signal.SIGSTOP)
    job.wait_for(lambda job: job.err.count(SILENT) == warnings + 1)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)
    job.wait_for(lambda job: job.err.count(BACK) == returns + 1)


def test_all_ranks_ending_with_0_make_0(start_agent: StartAgent) -> None:
    job = start_agent({"*": [["out", "done"], ["exit", 0]]})
    assert job.wait() == 0
    assert sorted(job.out.splitlines()) == ["[rank 1] done", "done"]
    assert job.err == ""


def test_an_exception_is_shown_first_with_its_traceback_and_ends_the_others(start_agent: StartAgent) -> None:
    job = start_agent({"1": [["out", "ready"], ["sleep", 0.3], ["raise", "boom"]], "*": FOREVER})
    job.wait_until_ready(1)
    assert job.wait() == 1
    assert first_line(job).startswith("stormo: rank 1 on host ")
    assert first_line(job).endswith(" failed: ValueError: boom")
    assert "Traceback (most recent call last)" in job.err
    assert "worker_program.py" in job.err


def test_a_rank_that_fails_after_it_has_left_in_order_is_shown_with_its_traceback(start_agent: StartAgent) -> None:
    job = start_agent({"1": [["leave"], ["raise", "boom"]], "*": [["leave"]]})
    assert job.wait() == 1
    assert first_line(job).endswith(" failed: ValueError: boom")
    assert "Traceback (most recent call last)" in job.err


def test_complaints_of_survivors_are_not_shown_even_when_they_come_first(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    complains = str(tmp_path / "complains")
    scenario = {
        "0": [["err", "a noisy library\n"], ["touch", complains], ["complain", "connection reset by peer"]],
        "1": [["wait for", complains], ["sleep", 0.1], ["raise", "boom"]],
    }
    job = start_agent(scenario, timeouts={"hold_s": 10.0, "settle": {"secondary_s": 20.0}})
    assert job.wait() == 1
    assert "failed: ValueError: boom" in first_line(job)
    assert "connection reset" not in job.err
    assert "noisy" not in job.err


def test_a_complaint_without_any_cause_is_shown_after_all(start_agent: StartAgent) -> None:
    settle = {"settle": {"secondary_s": 0.5}}
    job = start_agent(
        {"0": [["err", "hint\n"], ["complain", "connection reset by peer"]], "1": FOREVER}, timeouts=settle
    )
    assert job.wait() == 1
    assert "connection reset by peer" in first_line(job)
    assert "hint" in job.err


def test_a_killed_rank_is_named_with_its_signal_and_its_last_lines(start_agent: StartAgent) -> None:
    lines = [["err", f"line {number}\n"] for number in range(30)]
    job = start_agent({"1": [*lines, ["sleep", 0.6], ["kill", signal.SIGKILL]], "0": [["sleep", 60]]})
    assert job.wait() == 1
    shown, _, report = job.err.partition("stormo: ")
    assert "[rank 1] line 0\n" in shown
    assert report.splitlines()[0].endswith("was killed by SIGKILL (signal 9)")
    assert "out-of-memory killer may have" in report
    assert "line 29" in report
    assert "line 9\n" not in report  # 20 lines are enough


def _watchdog(collective: str, then: str) -> list[list[Any]]:
    """What NCCL's watchdog does to its process, as torch 2.11 writes it."""
    text = "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [Rank 0] Process group "
    text += f"watchdog thread terminated with exception: {collective}{then}\nException raised from checkTimeout at "
    text += "/pytorch/ProcessGroupNCCL.cpp:700 (most recent call first):\nframe #0: c10::Error::Error + 0x57\n"
    return [["err", text], ["kill", signal.SIGABRT]]


def _timeout(number: int, collective: str, num_elements: int) -> list[list[Any]]:
    work = f"WorkNCCL(SeqNum={number}, OpType={collective}, NumelIn={num_elements}, NumelOut=1, Timeout(ms)=20000)"
    then = " ran for 20011 milliseconds before timing out."
    return _watchdog(f"Watchdog caught collective operation timeout: {work}", then)


def test_a_killed_rank_is_named_and_not_those_that_the_watchdog_of_nccl_ends(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    aborts = str(tmp_path / "aborts")
    lost = _watchdog("NCCL error: remote process exited or there was a network error, NCCL version 2.28.9", "")
    scenario = {"0": [*lost[:1], ["touch", aborts], *lost[1:]], "1": [["wait for", aborts], ["sleep", 0.5]]}
    scenario["1"].append(["kill", signal.SIGKILL])
    job = start_agent(scenario)
    assert job.wait() == 1
    assert first_line(job).startswith("stormo: rank 1 on host ")
    assert first_line(job).endswith("was killed by SIGKILL (signal 9)")
    assert "watchdog" not in job.err


def test_an_error_for_which_nccl_ends_a_rank_is_shown_without_its_trace(start_agent: StartAgent) -> None:
    error = "NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9"
    more = "\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    reason = "NET/Socket : message truncated : receiving 64 bytes instead of 32, a mismatch in collective sizes"
    job = start_agent({"0": _watchdog(error, more + reason), "*": FOREVER})
    assert job.wait() == 1
    assert first_line(job).startswith("stormo: rank 0 on host ")
    assert first_line(job).endswith(f" was ended by NCCL's watchdog: {error}: {reason}")
    assert "frame #" not in job.err


def test_a_rank_that_keeps_nccl_waiting_is_named(start_agent: StartAgent) -> None:
    job = start_agent(
        {"0": _timeout(12, "ALLREDUCE", 80), "1": [["step", 4], *FOREVER]}, timeouts={"settle": {"secondary_s": 0.5}}
    )
    assert job.wait() == 1
    assert first_line(job).startswith("stormo: rank 1 on host ")
    assert "within 20 s to where rank 0 waits: allreduce of 80 elements, number 12 of NCCL; rank 1 (pid" in job.err
    assert "frame #" not in job.err


def test_ranks_in_different_collectives_of_nccl_are_named_with_them(start_agent: StartAgent) -> None:
    job = start_agent(
        {"0": _timeout(12, "ALLREDUCE", 80), "1": _timeout(12, "BROADCAST", 1), "2": _timeout(12, "ALLREDUCE", 80)},
        node={"num_workers": 3},
    )
    assert job.wait() == 1
    assert first_line(job).startswith("stormo: rank 1 on host ")
    assert "waited 20 s at: broadcast of 1 elements, number 12 of NCCL; ranks 0, 2 at: allreduce of 80" in first_line(
        job
    )
    assert "let every worker make the same calls" in first_line(job)


def test_all_lines_of_a_burst_before_a_crash_are_kept(start_agent: StartAgent) -> None:
    burst = "".join(f"frame {number}\n" for number in range(60))
    job = start_agent({"1": [["err", burst + "no line end"], ["kill", signal.SIGSEGV]], "0": FOREVER})
    assert job.wait() == 1
    assert "was killed by SIGSEGV (signal 11)" in first_line(job)
    assert job.err.index("frame 0\n") < job.err.index("frame 59\n") < job.err.index("no line end")


def test_a_killed_rank_with_helpers_leaves_nothing_behind(start_agent: StartAgent) -> None:
    job = start_agent({"1": [["helper"], ["sleep", 0.2], ["kill", signal.SIGKILL]], "0": [["helper"], *FOREVER]})
    assert job.wait() == 1
    assert "rank 1 on host" in first_line(job)


def test_helpers_of_ranks_that_ended_in_order_do_not_delay_the_end_for_long(start_agent: StartAgent) -> None:
    job = start_agent({"*": [["helper"], ["exit", 0]]})
    assert job.wait(20) == 0


def test_one_look_at_all_processes_is_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Counter[int]()
    monkeypatch.setattr(worker_group, "process_stat", lambda pid: [looks.update([pid]), *process_stat(pid)][1:])
    environ = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    assert run_node(worker_command({"*": [["exit", 0]]}), Node(num_workers=4), environ=environ) == 0
    assert looks[os.getpid()] <= 2  # before the groups are killed, and after it


@pytest.mark.parametrize("line", ["usage: my.py [-h]", "Traceback (most recent call last):", '  File "my.py", line 3'])
def test_an_exit_code_without_a_report_is_a_failure(start_agent: StartAgent, line: str) -> None:
    # A process with many libraries takes a while to end, and what it wrote must not come before its name.
    job = start_agent({"1": [["err", f"{line}\n"], ["sleep", 0.5], ["exit", 3]], "0": FOREVER})
    assert job.wait() == 1
    assert "ended with exit code 3" in first_line(job)
    assert line in job.err


def test_ranks_that_leave_in_the_middle_without_an_error_have_failed(start_agent: StartAgent) -> None:
    job = start_agent({"*": [["step", 1], ["vanish"]]})
    assert job.wait() == 1
    assert "ended with exit code 0 before its work was done" in first_line(job)


def test_a_rank_that_exits_early_is_the_cause_of_a_complaint(start_agent: StartAgent, tmp_path: Path) -> None:
    left = str(tmp_path / "left")
    scenario = {"1": [["leave"], ["touch", left]], "0": [["wait for", left], ["complain", "connection closed by peer"]]}
    job = start_agent(scenario)
    assert job.wait() == 1
    assert first_line(job).startswith("stormo: rank 1 on host ")
    assert first_line(job).endswith(" ended early with exit code 0")


def test_a_scripts_rank_that_ends_before_the_others_could_meet_it_is_named_at_once(start_agent: StartAgent) -> None:
    job = start_agent({"1": [["never join"]], "0": FOREVER}, timeouts=OF_SCRIPT)
    assert job.wait() == 1
    assert first_line(job).startswith("stormo: rank 1 on host ")
    assert " before it called stormo.World(), in which rank 0 waits for it; " in first_line(job)


def test_a_script_whose_ranks_never_meet_is_fine(start_agent: StartAgent) -> None:
    job = start_agent({"*": [["never join"]]}, timeouts=OF_SCRIPT)
    assert job.wait() == 0
    assert "no worker called stormo.World()" in job.err


def test_a_scripts_rank_that_does_not_come_is_named_and_not_the_one_that_waited(start_agent: StartAgent) -> None:
    waits = ["give up", 8.0, "world.sum in a.py line 3"]
    timeouts = {**OF_SCRIPT, "settle": {"secondary_s": 0.5}}
    job = start_agent({"0": [waits], "1": [["step", 4], *FOREVER]}, timeouts=timeouts)
    assert job.wait() == 1
    assert first_line(job).startswith("stormo: rank 1 on host ")
    assert "did not come within 8 s to where rank 0 waits: world.sum in a.py line 3; rank 1 (pid " in first_line(job)
    assert re.search(r"\) is at step 4: it is [^;]*, in worker_program\.py line \d+; ", first_line(job))
    assert "set a larger --timeout (in a script: World(timeout_s=...))" in first_line(job)


def test_a_rank_that_ends_early_is_fine_when_the_others_end_well(start_agent: StartAgent) -> None:
    job = start_agent({"1": [["exit", 0]], "0": [["sleep", 0.5], ["exit", 0]]})
    assert job.wait() == 0
    assert job.err == ""


@pytest.mark.parametrize(("codes", "expected"), [((0, 75), 75), ((75, 3), 1)])
def test_exit_codes_combine(start_agent: StartAgent, codes: tuple[int, int], expected: int) -> None:
    job = start_agent({str(rank): [["exit", code]] for rank, code in enumerate(codes)})
    assert job.wait() == expected


def test_a_script_chooses_its_exit_code_as_it_does_alone(start_agent: StartAgent) -> None:
    # A process with many libraries takes a while to end.
    wrong = [["err", "usage: my.py [-h]\n"], ["err", "my.py: error: no such flag\n"], ["sleep", 0.5], ["exit", 2]]
    job = start_agent({"*": wrong}, timeouts=OF_SCRIPT)
    assert job.wait() == 2
    assert "ended with exit code 2" in first_line(job)
    for line in ("usage: my.py [-h]", "my.py: error: no such flag"):
        assert job.err.count(line) == 1, "all workers say it"


def test_a_setting_error_on_all_ranks_is_shown_once_without_traceback(start_agent: StartAgent) -> None:
    setting = ["setting", "--batch-size 3 was set", "3 is no multiple of 2", "set 2 or 4"]
    job = start_agent({"*": [setting]})
    assert job.wait() == 2
    assert job.err == "stormo: --batch-size 3 was set, but 3 is no multiple of 2; set 2 or 4.\n"


@pytest.mark.parametrize(
    ("number", "before", "said"),
    [
        (signal.SIGUSR1, [], ""),
        (
            signal.SIGINT,
            [],
            "stormo: stopping after the first step at the latest; press Ctrl-C again to stop at once\n",
        ),
        (signal.SIGINT, [["step", 0]], "stormo: stopping after this step; press Ctrl-C again to stop at once\n"),
    ],
)
def test_a_signal_reaches_every_worker(
    start_agent: StartAgent, number: signal.Signals, before: list[Any], said: str
) -> None:
    job = start_agent({"1": [*before, *STOP_WITH_75], "*": STOP_WITH_75})
    job.wait_until_ready(2)
    job.process.send_signal(number)
    assert job.wait() == 75
    assert job.err == said


@pytest.mark.parametrize("stops", [STOP_WITH_75, [["stop on", "SIGINT"], WAIT, *FOREVER]])
def test_workers_without_work_to_save_are_ended_by_the_first_ctrl_c(start_agent: StartAgent, stops: list[Any]) -> None:
    job = start_agent({"*": stops}, timeouts={"interrupted_s": 0.5})
    job.wait_until_ready(2)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130
    assert job.err.startswith("stormo: node 0 on host ")
    assert job.err.endswith(" was stopped by Ctrl-C\n")
    assert len(job.err.splitlines()) == 1


def test_a_second_ctrl_c_stops_at_once(start_agent: StartAgent) -> None:
    job = start_agent({"*": [["stop on", "SIGINT"], WAIT, *FOREVER]})
    job.wait_until_ready(2)
    job.process.send_signal(signal.SIGINT)
    job.wait_for(lambda job: "press Ctrl-C again" in job.err)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130
    assert "was stopped at once by Ctrl-C" in job.err


def test_ctrl_c_before_a_worker_is_ready_ends_with_130(start_agent: StartAgent) -> None:
    job = start_agent({"*": [["out", "ready"], *FOREVER]})
    job.wait_until_ready(2)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130
    assert "Traceback" not in job.err.split("stormo: rank")[0]


@pytest.mark.parametrize(
    ("timeouts", "why"),
    [({}, ", which reached it before it was ready"), (OF_SCRIPT, ": its script had not read world.stop_requested yet")],
)
def test_a_sigterm_that_ends_an_unready_worker_leaves_nothing_to_save(
    start_agent: StartAgent, timeouts: dict[str, Any], why: str
) -> None:
    job = start_agent({"*": [["out", "ready"], *FOREVER]}, timeouts=timeouts)
    job.wait_until_ready(2)
    job.process.terminate()
    assert job.wait() == 75
    assert f"was ended by SIGTERM{why}" in job.err


def test_a_stopped_worker_is_named_and_killed_after_sigterm(start_agent: StartAgent) -> None:
    job = start_agent({"*": STOP_WITH_75}, timeouts={"stop_s": 1.0})
    job.wait_until_ready(2)
    os.kill(job.worker_pid(1), signal.SIGSTOP)
    job.process.terminate()
    assert job.wait() == 1
    assert "rank 1 on host" in first_line(job)
    assert "did not end within 1 s of SIGTERM" in first_line(job)
    assert "it is stopped (SIGSTOP?)" in first_line(job)


def test_a_silent_worker_is_warned_about_once_and_welcomed_back(start_agent: StartAgent) -> None:
    job = start_agent({"*": STOP_WITH_75}, timeouts={"silent_warning_s": 2.0})
    job.wait_until_ready(2)
    pid = job.worker_pid(1)
    stop_for_a_while(job, pid, 0.5)
    job.process.terminate()
    assert job.wait() == 75
    warning, back = job.err.splitlines()
    assert warning.startswith(f"stormo: rank 1 (pid {pid}) has sent no sign of life for 2 s: it is stopped (SIGSTOP?)")
    assert back.startswith(f"stormo: rank 1 (pid {pid}) is back after ")


def test_a_worker_silent_beyond_the_timeout_ends_the_job(start_agent: StartAgent) -> None:
    job = start_agent({"*": STOP_WITH_75}, timeout_s=3.0)
    job.wait_until_ready(2)
    os.kill(job.worker_pid(1), signal.SIGSTOP)
    assert job.wait() == 1
    assert "has sent no sign of life for 3 s: it is stopped (SIGSTOP?)" in first_line(job)


def test_a_worker_that_stays_stopped_ends_the_job_long_before_the_timeout(start_agent: StartAgent) -> None:
    job = start_agent({"*": STOP_WITH_75}, timeouts={"silent_warning_s": 1.0, "stopped_s": 1.0})
    job.wait_until_ready(2)
    pid = job.worker_pid(1)
    os.kill(pid, signal.SIGSTOP)
    assert job.wait() == 1
    warning, cause, *_ = job.err.splitlines()
    assert warning.startswith(f"stormo: rank 1 (pid {pid}) has sent no sign of life for ")
    assert cause.startswith(f"stormo: rank 1 (pid {pid}) on host ")
    assert cause.endswith(" s: it is stopped (SIGSTOP?)")


def test_a_script_stopped_before_it_joins_ends_the_job_and_one_that_works_does_not(start_agent: StartAgent) -> None:
    timeouts = {**OF_SCRIPT, "silent_warning_s": 2.0, "stopped_s": 0.5}
    job = start_agent({"*": [["join late"]]}, timeouts=timeouts, timeout_s=2.0)
    job.wait_until_ready(2)
    time.sleep(4.0)
    assert job.process.poll() is None
    assert not job.err
    pid = job.worker_pid(1)
    os.kill(pid, signal.SIGSTOP)
    assert job.wait() == 1
    warning, cause, *_ = job.err.splitlines()
    assert warning.startswith(f"stormo: rank 1 (pid {pid}) has sent no sign of life for ")
    assert cause.endswith(": it is stopped (SIGSTOP?)")


def test_a_worker_may_be_stopped_again(start_agent: StartAgent) -> None:
    job = start_agent({"*": STOP_WITH_75}, timeouts={"silent_warning_s": 1.0, "stopped_s": 3.0})
    job.wait_until_ready(2)
    for _ in range(2):
        stop_for_a_while(job, job.worker_pid(1), 1.0)
        time.sleep(1.0)
    job.process.terminate()
    assert job.wait() == 75


def test_a_job_of_one_worker_may_be_stopped_for_a_while(start_agent: StartAgent) -> None:
    job = start_agent(
        {"*": STOP_WITH_75}, node={"num_workers": 1}, timeouts={"silent_warning_s": 0.5, "stopped_s": 0.5}
    )
    job.wait_until_ready(1)
    stop_for_a_while(job, job.worker_pid(0), 2.0)
    job.process.terminate()
    assert job.wait() == 75


def test_a_job_that_is_stopped_as_a_whole_goes_on(start_agent: StartAgent) -> None:
    job = start_agent({"*": STOP_WITH_75}, timeouts={"silent_warning_s": 2.0, "stopped_s": 2.0}, timeout_s=4.0)
    job.wait_until_ready(2)
    pids = [job.process.pid, job.worker_pid(0), job.worker_pid(1)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6.0)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    time.sleep(1.5)
    job.process.terminate()
    assert job.wait() == 75
    assert job.err == ""


def test_no_worker_outlives_a_killed_agent(start_agent: StartAgent) -> None:
    # Rank 1 runs no other thread, which could notice it.
    job = start_agent({"0": [["out", "ready"], ["sleep", 60]], "1": [["out", "ready"], ["hold the interpreter", 60]]})
    job.wait_until_ready(2)
    job.process.kill()
    job.wait()  # the fixture then finds no process left


def test_bytes_that_are_no_text_pass_unchanged(start_agent: StartAgent) -> None:
    job = start_agent({"0": [["err", "caf\xe9 \xff\n"]], "1": [["err", "\xfe half"], ["sleep", 0.1], ["err", " line"]]})
    assert job.wait() == 0
    assert sorted(job.err_bytes.splitlines()) == [b"[rank 1] \xfe half line", b"caf\xe9 \xff"]


def test_the_environment_says_who_a_worker_is(start_agent: StartAgent) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR")
    more = ("STORMO_LAUNCHER", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "STORMO_CHANNEL_FD")
    job = start_agent({"1": [["environ", *names, *more]]}, environ={"NCCL_SOCKET_IFNAME": "ib0"})
    assert job.wait() == 0
    told = json.loads(job.out.removeprefix("[rank 1] "))
    assert told == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "STORMO_LAUNCHER": "local",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "ib0",
        "STORMO_CHANNEL_FD": None,  # taken by the reporter: what a worker starts is no worker
    }


def test_a_command_that_cannot_be_started_is_one_sentence(start_program: Any) -> None:
    arguments = {"command": ["/nowhere/python"], "node": {"num_workers": 2}}
    job = start_program(lambda: agent_program.main(arguments))
    assert job.wait() == 1
    assert job.err.startswith("stormo: The worker command /nowhere/python could not be started")
    assert len(job.err.splitlines()) == 1


def test_on_a_terminal_rank_0_draws_itself_and_ctrl_c_reaches_each_worker_once(mark: str) -> None:
    scenario = {"*": [["terminal"], ["stop on", "SIGINT"], WAIT, ["sleep", 0.5], ["stops"], ["exit", 130]]}
    command = worker_command(scenario)
    agent = [sys.executable, str(HERE / "agent_program.py"), json.dumps({"command": command, "node": TWO_WORKERS})]
    ours, theirs = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "STORMO_TEST_MARK": mark}
    process = subprocess.Popen(["setsid", "-cw", *agent], stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    seen = read_terminal(ours, lambda text: text.count("ready") >= 2)
    os.write(ours, b"\x03")
    seen += read_terminal(ours, lambda text: False)
    os.close(ours)
    assert process.wait(30) == 130
    assert "rank 0: terminal True" in seen
    assert "[rank 1] rank 1: terminal False" in seen
    assert re.search(r"\r\x1b\[Kstormo: stopping .* press Ctrl-C again", seen)  # on a line without rank 0's progress
    assert seen.count("asked 1 time") == 2  # the terminal's own SIGINT goes to the agent alone


def test_on_a_terminal_a_failure_gives_the_cursor_back(mark: str) -> None:
    command = worker_command({"1": [["raise", "boom"]], "0": FOREVER})
    agent = [sys.executable, str(HERE / "agent_program.py"), json.dumps({"command": command, "node": TWO_WORKERS})]
    ours, theirs = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "STORMO_TEST_MARK": mark}
    process = subprocess.Popen(["setsid", "-cw", *agent], stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    seen = read_terminal(ours, lambda text: False)
    os.close(ours)
    assert process.wait(30) == 1
    assert "\x1b[?25h\r\nstormo: rank 1 on host" in seen


def read_terminal(fd: int, condition: Callable[[str], bool]) -> str:
    """What a terminal shows, until a condition holds or its last program has ended."""
    seen = b""
    while not condition(seen.decode("utf-8", "replace")):
        can_be_read, _, _ = select.select([fd], [], [], 60.0)
        assert can_be_read, f"nothing came any more after:\n{seen.decode('utf-8', 'replace')}"
        try:
            chunk = os.read(fd, 4096)
        except OSError:  # how Linux tells that nobody writes to the terminal any more
            break
        if not chunk:
            break
        seen += chunk
    return seen.decode("utf-8", "replace")


@pytest.mark.parametrize(("actions", "code"), [([["exit", 0]], 0), ([["raise", "boom"]], 1)])
def test_the_caller_gets_its_descriptors_and_signal_handlers_back(actions: list[Any], code: int, mark: str) -> None:
    command = worker_command({"*": actions})
    environ = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "STORMO_TEST_MARK": mark}
    numbers = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGTTOU)
    handlers = [signal.getsignal(number) for number in numbers]
    descriptors = open_descriptors()
    assert run_node(command, Node(num_workers=2), environ=environ) == code
    assert open_descriptors() == descriptors
    assert [signal.getsignal(number) for number in numbers] == handlers
    assert signal.set_wakeup_fd(-1) == -1


def open_descriptors() -> dict[str, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[entry.name] = str(entry.readlink())
        except FileNotFoundError:  # the one that lists the others
            continue
    return found
