"""What users can rely on: each promise with the command that shows it, and where and when it was last run.

python -m benchmarks.promises             # writes docs/promises.md from benchmarks/results/promises.json
python -m benchmarks.promises --run KEY   # runs the commands of one promise and stores what came of them
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STORED = ROOT / "benchmarks" / "results" / "promises.json"
PAGE = ROOT / "docs" / "promises.md"
_HEAD = """# Promises

What you can rely on, the command that shows it, and where it was last run. This page is written by
`python -m benchmarks.promises` from `benchmarks/results/promises.json`. Figures in depth: [speed](speed.md). What has
not been run (several whole GPUs, real RAPL counters, Grafana itself) is named where it matters.

| promise | command | last run |
|---|---|---|
"""


def read_promises() -> list[dict[str, Any]]:
    """The stored ones, in the order of the page."""
    promises: list[dict[str, Any]] = json.loads(STORED.read_text(encoding="utf-8"))
    return promises


def row(promise: dict[str, Any]) -> str:
    """One line of a table, without the last run."""
    return f"| {promise['promise']} | {', '.join(f'`{command}`' for command in promise['commands'])} |"


def page(promises: list[dict[str, Any]]) -> str:
    """The whole page."""
    return _HEAD + "".join(f"{row(one)} {one['machine']}; {one['commit']}, {one['date']} |\n" for one in promises)


def run(promise: dict[str, Any]) -> None:
    """Run its commands and store machine, commit, date and the result lines."""
    promise["results"] = []
    for command in promise["commands"]:
        arguments = [sys.executable if word == "python" else word for word in shlex.split(command)]
        if arguments[0] == "pytest":
            arguments = [sys.executable, "-m", *arguments, "-q"]
        print(f"$ {command}", flush=True)
        done = subprocess.run(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout, flush=True)
        if done.returncode:
            sys.exit(f"{command} ended with {done.returncode}: nothing was stored")
        promise["results"].append(done.stdout.rstrip().splitlines()[-1])
    promise |= {"machine": _machine(), "commit": _commit(), "date": datetime.date.today().isoformat()}


def _commit() -> str:
    arguments = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _machine() -> str:
    import torch

    cpu = f"{os.cpu_count()} {platform.machine()} cores"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return f"{device}, torch {torch.__version__.partition('+')[0]}"


def main() -> None:
    """Run one, or only write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", metavar="KEY", help="run the commands of this promise first")
    key, promises = parser.parse_args().run, read_promises()
    if key is not None:
        found = [one for one in promises if one["key"] == key]
        if not found:
            sys.exit(f"{key} is no promise; choose from {', '.join(one['key'] for one in promises)}")
        run(found[0])
        STORED.write_text(json.dumps(promises, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(promises), encoding="utf-8")


if __name__ == "__main__":
    main()
