"""The real command `stormo train`, as the benchmarks start it, and what it leaves behind, as they compare it."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_SMALL_TASKS = Path(__file__).with_name("small_tasks.py")


def small_task(name: str) -> str:
    """How a task of small_tasks.py is named on a command line."""
    return f"{_SMALL_TASKS}:{name}"


def train_command(*arguments: str | int | float) -> list[str]:
    """The command line of `stormo train`."""
    return [sys.executable, "-m", "stormo", "train", *map(str, arguments)]


def one_thread(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment with one thread for each worker: the order of sums must not depend on the worker count."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}


def run_to_end(command: list[str]) -> None:
    """Run a command; end the benchmark with its output when it fails."""
    done = subprocess.run(command, env=one_thread(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def data_folder(given: str | None) -> str:
    """The folder with Fashion-MNIST; ends the benchmark where it is not on this machine, as none asks a network."""
    from stormo.data.fashion_mnist import find_or_fetch
    from stormo.errors import StormoError

    try:
        return str(find_or_fetch(Path(given) if given else None, offline=True))
    except StormoError as error:
        print(
            f"stormo: Fashion-MNIST is not on this machine ({error}); carry its four files here and name their folder "
            "by --data-folder.",
            file=sys.stderr,
        )
        sys.exit(2)


def free_port() -> int:
    """A port of this machine that nobody uses, below those that the kernel gives to connections."""
    while True:
        port = secrets.choice(range(12_000, 32_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def torchrun_variables(rank: int, size: int, port: int, num_nodes: int = 1) -> dict[str, str]:
    """The variables that torchrun gives a rank; none for a single process."""
    if size == 1:
        return {}
    node, local_rank = divmod(rank, size // num_nodes)
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node, "GROUP_WORLD_SIZE": num_nodes}
    numbers |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size // num_nodes, "MASTER_PORT": port}
    names = {"TORCHELASTIC_RUN_ID": "benchmark", "MASTER_ADDR": "127.0.0.1"}
    return {**names, **{name: str(value) for name, value in numbers.items()}}


def relative_difference(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """max |a - b| / max |b| of each tensor, then the largest; infinite where whole numbers or names differ."""
    if ours.keys() != reference.keys():
        return math.inf
    quotients = [0.0]
    for name, b in reference.items():
        a = ours[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return math.inf
        if not b.is_floating_point():
            if not a.equal(b):
                return math.inf
            continue
        distance, scale = float((a - b).abs().max()), float(b.abs().max())
        if distance != 0:
            quotients.append(distance / scale if scale else math.inf)
    return largest(quotients)


def largest(values: Iterable[float]) -> float:
    """The maximum, which is not-a-number as soon as one value is."""
    listed = list(values)
    return math.nan if any(map(math.isnan, listed)) else max(listed)


def result_line(figures: Mapping[str, Any]) -> str:
    """The last line of a benchmark: plain numbers by name."""
    return "RESULT " + " ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={int(value)}" for name, value in figures.items()
    )


def numbers(text: str) -> tuple[int, ...]:
    """`2,3,4` as whole numbers above 0, for argparse."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers above 0, such as 2,3,4")
    return tuple(int(part) for part in parts)


def aligned(rows: Iterable[Iterable[str]]) -> list[str]:
    """Rows as lines of aligned columns, the first to the left and the others to the right."""
    table = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
