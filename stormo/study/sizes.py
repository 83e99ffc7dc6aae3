"""Numbers of a study: of its workers, its nodes and its batches."""

from __future__ import annotations

import argparse

from stormo.config.schema import TrainConfig
from stormo.errors import SettingError, counted


def read_sizes(own: argparse.Namespace) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of workers, fewest first, and the nodes of each."""
    if own.workers is None:
        raise SettingError("no --workers was set", "a study compares numbers of workers", "set --workers 1,2,4")
    workers = _wholes(own.workers, "--workers")
    nodes = _wholes(own.num_nodes or "1", "--num-nodes")
    if len(nodes) == 1:
        nodes *= len(workers)
    if len(nodes) != len(workers):
        raise SettingError(
            f"--num-nodes {own.num_nodes} was set with --workers {own.workers}",
            f"{len(nodes)} is not {len(workers)}",
            "give one number of nodes for all, or one for each number of workers",
        )
    if len(set(workers)) != len(workers) or len(workers) < 2:
        raise SettingError(
            f"--workers {own.workers} was set", "a study compares different numbers", "set two or more, such as 1,2,4"
        )
    pairs = sorted(zip(workers, nodes, strict=True))
    for count, spread in pairs:
        if count % spread:
            raise SettingError(
                f"--workers {count} was set on {counted(spread, 'node')}",
                f"{count} / {spread} is no whole number and every node starts equally many",
                f"set {count + spread - count % spread}, or fewer --num-nodes",
            )
    return tuple(count for count, _ in pairs), tuple(spread for _, spread in pairs)


def read_batches(own: argparse.Namespace, config: TrainConfig, smallest: int) -> tuple[int, int]:
    """The global batch of strong scaling and a worker's of weak scaling: with the fewest workers they are the same."""
    passes = smallest * config.batch.accumulate
    total, each = own.global_batch_size, own.batch_size
    if total is not None and each is not None:
        raise SettingError(
            f"--global-batch-size {total} and --batch-size {each} were both set",
            "each follows from the other with the fewest workers",
            "set only one of them",
        )
    if total is None and each is None:
        total, each = config.batch.global_batch_size, config.batch.batch_size
    if total is None:
        if each == "auto":
            raise SettingError("--batch-size auto was set", "the runs must have batches that compare", "set a number")
        size = whole(str(each), "--batch-size")
        return size * passes, size
    size = whole(str(total), "--global-batch-size")
    if size % passes:
        raise SettingError(
            f"--global-batch-size {size} was set",
            f"{counted(smallest, 'worker')} × {config.batch.accumulate} accumulation cut it unevenly",
            f"set a multiple of {passes}",
        )
    return size, size // passes


def _wholes(text: str, flag: str) -> list[int]:
    return [whole(part.strip(), flag) for part in text.split(",")]


def whole(text: str, flag: str) -> int:
    """The number from 1 on that a flag gives."""
    if not text.isdecimal() or int(text) < 1:
        raise SettingError(f"{flag} was set to {text!r}", "it takes whole numbers from 1 on", f"set {flag} 4")
    return int(text)


def positive(text: str, flag: str, example: float) -> float:
    """The number above 0 that a flag gives."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise SettingError(f"{flag} was set to {text!r}", "it takes a number above 0", f"set {flag} {example:g}")
    return value
