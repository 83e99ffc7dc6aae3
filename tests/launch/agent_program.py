"""Runs one node as the command line would: JSON arguments in, sentence and exit code out."""

from __future__ import annotations

import json
import sys

from stormo.errors import StormoError
from stormo.launch import AgentTimeouts, Node, run_node
from stormo.launch.control import ChannelTimeouts
from stormo.launch.root_cause import SettleTimes


def main() -> None:
    arguments = json.loads(sys.argv[1])
    patience = dict(arguments.pop("patience", {}))
    patience["channel"] = ChannelTimeouts(**patience.get("channel", {}))
    patience["settle"] = SettleTimes(**patience.get("settle", {}))
    try:
        code = run_node(
            arguments.pop("command"),
            Node(**arguments.pop("node")),
            patience=AgentTimeouts(**patience),
            **arguments,
        )
    except StormoError as error:
        print(f"stormo: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
