"""Stop signals become a flag that the loop reads between steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stormo.system.signals import BY_SCRIPT, STOP_SIGNALS, SignalQueue, StopFlag, stop_flag
from tests import programs


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_sets_the_flag_and_nothing_else_happens(number: signal.Signals) -> None:
    with stop_flag() as flag:
        assert flag.signal_number == 0
        os.kill(os.getpid(), number)
        assert flag.signal_number == number


_WARNED = """
import os, signal
os.kill(os.getpid(), signal.SIGUSR1)  # by a scheduler, while the task is found and torch imported
from tests.tiny_task import Tiny
class Warned(Tiny): name = "warned"
"""


def test_a_warning_that_comes_before_anybody_listens_is_heard_later(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(_WARNED)
    words = ["-m", "stormo", "train", "task.py:Warned", "--device", "cpu", "--run-name", "one"]
    done = programs.run(words, tmp_path, PYTHONPATH=str(Path(__file__).parents[1]))
    assert (done.returncode, done.stderr) == (75, "")
    assert "stopped at step 1, saved" in done.stdout


def test_what_ctrl_c_says_is_true_before_the_first_step_too(capfd: pytest.CaptureFixture[str]) -> None:
    said = []
    for is_training in (False, True):
        with stop_flag(announces=True) as flag:
            assert not flag.is_training
            flag.is_training = is_training
            os.kill(os.getpid(), signal.SIGINT)
        said.append(capfd.readouterr().err.strip().partition(";")[0])
    assert said == ["stormo: stopping after the first step at the latest", "stormo: stopping after this step"]


def test_a_second_ctrl_c_gives_up_at_once() -> None:
    with stop_flag() as flag:
        os.kill(os.getpid(), signal.SIGINT)
        assert flag.signal_number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_other_signals_may_come_twice() -> None:
    with stop_flag() as flag:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert flag.signal_number == signal.SIGUSR1
        with pytest.raises(KeyboardInterrupt):  # somebody at the keyboard who has waited long enough
            signal.raise_signal(signal.SIGINT)


def test_a_queue_keeps_stop_signals_in_order_and_takes_a_closed_terminal_for_sigterm() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it may be ignored here, as under nohup
    try:
        with SignalQueue() as queue:
            for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGCHLD):
                signal.raise_signal(number)
            assert queue.read() == [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT]
            assert queue.read() == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_late_signal_changes_nothing() -> None:
    with stop_flag():
        pass
    assert all(signal.getsignal(number) is signal.SIG_IGN for number in STOP_SIGNALS)


def test_a_script_may_ask_for_a_stop_which_a_signal_overrides() -> None:
    flag = StopFlag()
    flag.listen()
    flag.request()
    assert flag.signal_number == BY_SCRIPT
    signal.raise_signal(signal.SIGINT)  # the first one, which gives nothing up
    flag.request()
    assert flag.signal_number == signal.SIGINT


def test_a_flag_listens_once_and_leaves_later_handlers_alone() -> None:
    flag = StopFlag()
    flag.listen()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    flag.listen()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    other = StopFlag()
    thread = threading.Thread(target=other.listen)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR1) == flag.handle
