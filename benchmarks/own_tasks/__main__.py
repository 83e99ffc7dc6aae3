"""Tasks and scripts as users write them, on 1, 2 and 3 workers and with several micro-batches a step.

    python -m benchmarks.own_tasks

Each is trained in float64 by the real command, and its final weights are compared with those of one process. What would
differ must be refused with exit code 2 and a sentence that says what to do. The command fails where something differs
without a word, or is refused or fails for no reason.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import result_line
from benchmarks.own_tasks import scripts, tasks
from benchmarks.own_tasks.tasks import Outcome


def lines(outcomes: Sequence[Outcome]) -> list[str]:
    """The table."""
    width = max((len(one.name) for one in outcomes), default=0)
    return [f"{one.name.ljust(width)}  {one.verdict.ljust(7)}  {one.detail}" for one in outcomes]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, compare, print a table and the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        outcomes = [*tasks.run(Path(temporary)), *scripts.run(Path(temporary))]
    print("\n".join(lines(outcomes)))
    print(f"{time.perf_counter() - began_s:.0f} s in all")
    counts = {verdict: sum(one.verdict == verdict for one in outcomes) for verdict in ("equal", "refused", "silent")}
    figures = {"tasks": len(outcomes), "equal": counts["equal"], "refused_rightly": counts["refused"]}
    print(result_line({**figures, "silent": counts["silent"]}))
    return 1 if counts["silent"] else 0


if __name__ == "__main__":
    sys.exit(main())
