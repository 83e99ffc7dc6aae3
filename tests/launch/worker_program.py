"""A worker without torch: does what the scenario on its command line says for its rank, then ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from stormo.errors import SettingError
from stormo.launch import Lifeline, open_lifeline
from stormo.launch.detect import detect


def main() -> None:
    place = detect(os.environ)
    assert place is not None
    scenario: dict[str, list[list[Any]]] = json.loads(sys.argv[1])
    actions = scenario.get(str(place.rank), scenario.get("*", []))
    line: Lifeline | None = None if ["no lifeline"] in actions else open_lifeline(place)
    asked_to_stop = threading.Event()
    for action, *arguments in actions:
        if action == "out":
            print(arguments[0], flush=True)
        elif action == "err":
            os.write(2, arguments[0].encode("latin-1"))
        elif action == "sleep":
            time.sleep(arguments[0])
        elif action == "kill":
            os.kill(os.getpid(), arguments[0])
        elif action == "exit":
            if line is not None and arguments[0] in (0, 75, 130):
                line.close()
            sys.exit(arguments[0])
        elif action in ("raise", "complain", "setting"):
            error = SettingError(*arguments) if action == "setting" else ValueError(arguments[0])
            try:
                raise error
            except ValueError as caught:
                assert line is not None
                line.report_failure(caught, secondary=action == "complain")
                sys.exit(1)
        elif action == "stop on":
            signal.signal(getattr(signal, arguments[0]), lambda *_: asked_to_stop.set())
        elif action == "wait for stop":
            print("ready", flush=True)
            while not asked_to_stop.wait(0.05):
                pass
        elif action == "helper":  # what a data loader does: a child in the same process group, holding the pipes
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        elif action == "environ":
            print(json.dumps({name: os.environ.get(name) for name in arguments}), flush=True)
    if line is not None:
        line.close()


if __name__ == "__main__":
    main()
