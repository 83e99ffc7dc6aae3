"""Runs one node as the command line would: arguments in, message and exit code out."""

from __future__ import annotations

import json
import sys
from typing import Any

from stormo.errors import StormoError
from stormo.launch import AgentTimeouts, Node, run_node
from stormo.launch.control import ChannelTimeouts
from stormo.launch.root_cause import SettleTimes


def main(arguments: dict[str, Any]) -> None:
    timeouts = dict(arguments.pop("timeouts", {}))
    timeouts["channel"] = ChannelTimeouts(**timeouts.get("channel", {}))
    timeouts["settle"] = SettleTimes(**timeouts.get("settle", {}))
    try:
        code = run_node(
            arguments.pop("command"),
            Node(**arguments.pop("node")),
            timeouts=AgentTimeouts(**timeouts),
            **arguments,
        )
    except StormoError as error:
        print(f"stormo: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
