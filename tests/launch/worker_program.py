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
from stormo.launch import FailureReporter, RankInfo, open_failure_reporter
from stormo.launch.control import ChannelTimeouts
from stormo.launch.environments.detect import detect
from stormo.launch.failure_reporter import PeerReporter
from stormo.launch.peer_loss import PeerLoss

stops: list[int] = []


def note_stop(number: int, frame: FrameType | None) -> None:
    stops.append(number)  # and no lock: this thread may hold it


class FileBoard:
    """Under a foreign launcher the ranks find rank 0 by a file here; the product uses torchrun's store."""

    def write(self, text: str) -> None:
        file = Path(os.environ["STORMO_TEST_STORE"])
        file.with_suffix(".new").write_text(text)
        file.with_suffix(".new").rename(file)

    def read(self) -> str:
        file = Path(os.environ["STORMO_TEST_STORE"])
        return file.read_text() if file.exists() else ""


def line_of(place: RankInfo) -> FailureReporter:
    timeout_s = float(os.environ.get("STORMO_TEST_TIMEOUT_S", "30"))
    options = {"--lr": os.environ.get("STORMO_TEST_LR", "0.1")}
    same: dict[str, Any] = {"timeout_s": timeout_s, "digest": options["--lr"], "options": options}
    if "STORMO_TEST_LOST_AFTER_S" in os.environ:
        lost_after_s = float(os.environ["STORMO_TEST_LOST_AFTER_S"])
        timing = ChannelTimeouts(
            join_s=timeout_s, heartbeat_s=0.2, lost_after_s=lost_after_s, stalled_after_s=timeout_s
        )
        return PeerReporter(place, board=FileBoard(), timeouts=timing, **same)
    return open_failure_reporter(place, board=FileBoard(), **same)


def end(line: FailureReporter, code: int) -> None:
    if code in (0, 75, 130):
        line.close()
    sys.exit(code)


def fail(line: FailureReporter, error: ValueError, *, secondary: bool = False, linger: bool = False) -> None:
    try:
        raise error
    except ValueError as caught:
        line.report_failure(caught, secondary=secondary)
        if linger:
            time.sleep(60)
        sys.exit(getattr(caught, "exit_code", 1))


def give_up(line: FailureReporter, waited_s: float, at: str) -> None:
    """Fail as one that has waited in vain."""
    error = ValueError("another rank has not come")
    error.peer_loss = PeerLoss(waited_s, at)  # type: ignore[attr-defined]
    fail(line, error, secondary=True)


def break_channel(line: FailureReporter, num_errors: int) -> None:
    """Have the channel raise for a while, as where no descriptors are left."""
    assert isinstance(line, PeerReporter)
    inner, left = line._control.poll, [OSError(24, "Too many open files")] * num_errors

    def poll(timeout_s: float = 0.0) -> Any:
        if left:
            raise left.pop()
        return inner(timeout_s)

    line._control.poll = poll  # type: ignore[method-assign]
    while left:
        time.sleep(0.05)


def wait_for_stop(line: FailureReporter) -> None:
    print("ready", flush=True)
    while not stops:
        time.sleep(0.05)


def fork_helper(line: FailureReporter) -> None:
    """A child that shares every descriptor of this process."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    print("helper", pid, flush=True)


def start_helper(line: FailureReporter) -> None:
    """What a data loader does: a child in the same process group that holds the same pipes."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


ACTIONS: dict[str, Callable[..., Any]] = {
    "out": lambda line, text: print(text, flush=True),
    "unflushed out": lambda line, text: sys.stdout.write(text),
    "err": lambda line, text: os.write(2, text.encode("latin-1")),
    "step": lambda line, number: line.alive(number),
    "sleep": lambda line, seconds: time.sleep(seconds),
    "hold the interpreter": lambda line, seconds: ctypes.PyDLL(None).sleep(seconds),  # no other thread runs
    "kill": lambda line, number: os.kill(os.getpid(), number),
    "exit": end,
    "leave": lambda line: line.close(),
    "vanish": lambda line: os._exit(0),
    "raise": lambda line, text: fail(line, ValueError(text)),
    "raise and linger": lambda line, text: fail(line, ValueError(text), linger=True),
    "complain": lambda line, text: fail(line, ValueError(text), secondary=True),
    "give up": give_up,
    "break the channel": break_channel,
    "setting": lambda line, *parts: fail(line, SettingError(*parts)),
    "stop on": lambda line, name: signal.signal(getattr(signal, name), note_stop),
    "stops": lambda line: print(f"asked {len(stops)} time", flush=True),
    "terminal": lambda line: print(f"rank {os.environ['RANK']}: terminal {os.isatty(1)}", flush=True),
    "wait for stop": wait_for_stop,
    "helper": start_helper,
    "forked helper": fork_helper,
    "environ": lambda line, *names: print(json.dumps({name: os.environ.get(name) for name in names}), flush=True),
}


def main() -> None:
    place = detect(os.environ)
    assert place is not None
    scenario: dict[str, list[list[Any]]] = json.loads(sys.argv[1])
    actions = scenario.get(str(place.rank), scenario.get("*", []))
    if actions[:1] == [["never join"]]:
        sys.exit(0)
    line = line_of(place)
    for action, *arguments in actions:
        ACTIONS[action](line, *arguments)
    line.close()


if __name__ == "__main__":
    main()
