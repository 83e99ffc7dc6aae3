"""A rank without torch: does what the scenario on its command line says for its rank, then ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from stormo.errors import SettingError
from stormo.launch import Lifeline, open_lifeline
from stormo.launch.detect import detect


def publish(text: str) -> None:
    """Under a foreign launcher the ranks meet in a file here; the product uses torch's store."""
    target = Path(os.environ["STORMO_TEST_STORE"])
    target.with_suffix(".new").write_text(text)
    target.with_suffix(".new").rename(target)


def lookup(timeout_s: float) -> str:
    target, deadline = Path(os.environ["STORMO_TEST_STORE"]), time.monotonic() + timeout_s
    while not target.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return target.read_text()


def main() -> None:
    place = detect(os.environ)
    assert place is not None
    scenario: dict[str, list[list[Any]]] = json.loads(sys.argv[1])
    actions = scenario.get(str(place.rank), scenario.get("*", []))
    timeout_s = float(os.environ.get("STORMO_TEST_TIMEOUT_S", "30"))
    options = {"--lr": os.environ.get("STORMO_TEST_LR", "0.1")}
    line: Lifeline = open_lifeline(
        place, publish=publish, lookup=lookup, timeout_s=timeout_s, digest=options["--lr"], options=options
    )
    asked_to_stop = threading.Event()
    for action, *arguments in actions:
        if action == "out":
            print(arguments[0], flush=True)
        elif action == "unflushed out":
            sys.stdout.write(arguments[0])
        elif action == "err":
            os.write(2, arguments[0].encode("latin-1"))
        elif action == "sleep":
            time.sleep(arguments[0])
        elif action == "kill":
            os.kill(os.getpid(), arguments[0])
        elif action == "exit":
            if arguments[0] in (0, 75, 130):
                line.close()
            sys.exit(arguments[0])
        elif action in ("raise", "complain", "setting"):
            error = SettingError(*arguments) if action == "setting" else ValueError(arguments[0])
            try:
                raise error
            except ValueError as caught:
                line.report_failure(caught, secondary=action == "complain")
                if "and linger" in arguments:
                    time.sleep(60)
                sys.exit(getattr(caught, "exit_code", 1))
        elif action == "stop on":
            signal.signal(getattr(signal, arguments[0]), lambda *_: asked_to_stop.set())
        elif action == "wait for stop":
            print("ready", flush=True)
            while not asked_to_stop.wait(0.05):
                pass
        elif action == "helper":  # what a data loader does: a child in the same process group, holding the pipes
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        elif action == "forked helper":  # shares every descriptor of this process
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            print("helper", pid, flush=True)
        elif action == "environ":
            print(json.dumps({name: os.environ.get(name) for name in arguments}), flush=True)
        else:
            raise AssertionError(action)
    line.close()


if __name__ == "__main__":
    main()
