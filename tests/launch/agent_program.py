"""Runs one node as the command line would: JSON arguments in, sentence and exit code out."""

from __future__ import annotations

import json
import sys

from stormo.errors import StormoError
from stormo.launch import Node, Patience, run_node
from stormo.launch.control import Timing
from stormo.launch.verdict import Settling


def main() -> None:
    arguments = json.loads(sys.argv[1])
    patience = dict(arguments.pop("patience", {}))
    patience["timing"] = Timing(**patience.get("timing", {}))
    patience["settling"] = Settling(**patience.get("settling", {}))
    try:
        code = run_node(
            arguments.pop("command"),
            Node(**arguments.pop("node")),
            patience=Patience(**patience),
            **arguments,
        )
    except StormoError as error:
        print(f"stormo: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
