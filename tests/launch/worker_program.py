"""A rank without torch: does what the scenario on its command line says for its rank, then ends."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from stormo.errors import SettingError
from stormo.launch import FailureReporter, RankInfo, failure_reporter
from stormo.launch.control import ChannelTimeouts
from stormo.launch.environments.detect import detect
from stormo.launch.failure_reporter import PeerReporter
from stormo.launch.root_cause import SettleTimes
from stormo.launch.torch_errors import PeerLoss

stops: list[int] = []


def note_stop(number: int, frame: FrameType | None) -> None:
    stops.append(number)  # and no lock: this thread may hold it


class FileAddressBook:
    """Under a foreign launcher the ranks find rank 0 by a file here; the product uses torchrun's store."""

    def write(self, text: str) -> None:
        file = Path(os.environ["STORMO_TEST_STORE"])
        file.with_suffix(".new").write_text(text)
        file.with_suffix(".new").rename(file)

    def read(self) -> str:
        file = Path(os.environ["STORMO_TEST_STORE"])
        return file.read_text() if file.exists() else ""


def open_reporter(info: RankInfo) -> FailureReporter:
    timeout_s = float(os.environ.get("STORMO_TEST_TIMEOUT_S", "30"))
    options = {"--lr": os.environ.get("STORMO_TEST_LR", "0.1")}
    same: dict[str, Any] = {"timeout_s": timeout_s, "digest": options["--lr"], "options": options}
    if info.launcher == "local":
        return failure_reporter.open_failure_reporter(info, **same)
    lost_after_s = float(os.environ.get("STORMO_TEST_LOST_AFTER_S", "10"))
    heartbeat_s = min(1.0, lost_after_s / 5)
    timeouts = ChannelTimeouts(
        join_s=timeout_s, heartbeat_s=heartbeat_s, lost_after_s=lost_after_s, stalled_after_s=timeout_s
    )
    settle = SettleTimes(other_nodes_s=float(os.environ.get("STORMO_TEST_SETTLE_S", "20")))
    return PeerReporter(info, address_book=FileAddressBook(), timeouts=timeouts, settle=settle, **same)


def end(reporter: FailureReporter, code: int) -> None:
    if code in (0, 75, 130):
        reporter.close()
    sys.exit(code)


def fail(reporter: FailureReporter, error: ValueError, *, secondary: bool = False, linger: bool = False) -> None:
    try:
        raise error
    except ValueError as caught:
        reporter.report_failure(caught, secondary=secondary)
        if linger:
            time.sleep(60)
        sys.exit(getattr(caught, "exit_code", 1))


def give_up(reporter: FailureReporter, waited_s: float, at: str) -> None:
    """Fail as one that has waited in vain."""
    error = ValueError("another rank has not come")
    error.peer_loss = PeerLoss(waited_s, at)  # type: ignore[attr-defined]
    fail(reporter, error, secondary=True)


def break_channel(reporter: FailureReporter, num_errors: int) -> None:
    """Have the channel raise for a while, as where no descriptors are left."""
    assert isinstance(reporter, PeerReporter)
    inner, left = reporter._control.poll, [OSError(24, "Too many open files")] * num_errors

    def poll(timeout_s: float = 0.0) -> Any:
        if left:
            raise left.pop()
        return inner(timeout_s)

    reporter._control.poll = poll  # type: ignore[method-assign]
    while left:
        time.sleep(0.05)


def wait_for_stop(reporter: FailureReporter) -> None:
    print("ready", flush=True)
    while not stops:
        time.sleep(0.05)


def wait_for_file(reporter: FailureReporter, path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.02)


def fork_helper(reporter: FailureReporter) -> None:
    """A child that shares every descriptor of this process."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    print("helper", pid, flush=True)


def start_helper(reporter: FailureReporter) -> None:
    """What a data loader does: a child in the same process group that holds the same pipes."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


ACTIONS: dict[str, Callable[..., Any]] = {
    "out": lambda reporter, text: print(text, flush=True),
    "unflushed out": lambda reporter, text: sys.stdout.write(text),
    "err": lambda reporter, text: os.write(2, text.encode("latin-1")),
    "step": lambda reporter, number: reporter.alive(number),
    "touch": lambda reporter, path: Path(path).touch(),
    "wait for": wait_for_file,
    "sleep": lambda reporter, seconds: time.sleep(seconds),
    "hold the interpreter": lambda reporter, seconds: ctypes.PyDLL(None).sleep(seconds),  # no other thread runs
    "kill": lambda reporter, number: os.kill(os.getpid(), number),
    "exit": end,
    "leave": lambda reporter: reporter.close(),
    "vanish": lambda reporter: os._exit(0),
    "raise": lambda reporter, text: fail(reporter, ValueError(text)),
    "raise and linger": lambda reporter, text: fail(reporter, ValueError(text), linger=True),
    "complain": lambda reporter, text: fail(reporter, ValueError(text), secondary=True),
    "give up": give_up,
    "break the channel": break_channel,
    "setting": lambda reporter, *parts: fail(reporter, SettingError(*parts)),
    "stop on": lambda reporter, name: signal.signal(getattr(signal, name), note_stop),
    "stops": lambda reporter: print(f"asked {len(stops)} time", flush=True),
    "terminal": lambda reporter: print(f"rank {os.environ['RANK']}: terminal {os.isatty(1)}", flush=True),
    "wait for stop": wait_for_stop,
    "helper": start_helper,
    "forked helper": fork_helper,
    "environ": lambda reporter, *names: print(json.dumps({name: os.environ.get(name) for name in names}), flush=True),
}


def main(scenario: dict[str, list[list[Any]]]) -> None:
    info = detect(os.environ)
    assert info is not None
    actions = scenario.get(str(info.rank), scenario.get("*", []))
    if actions[:1] == [["never join"]]:
        sys.exit(0)
    if actions[:1] == [["join late"]]:
        print("ready", flush=True)
        time.sleep(60)
    failure_reporter._LINGER_S = float(os.environ.get("STORMO_TEST_LINGER_S", failure_reporter._LINGER_S))
    reporter = open_reporter(info)
    for action, *arguments in actions:
        ACTIONS[action](reporter, *arguments)
    reporter.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
