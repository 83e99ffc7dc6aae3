"""Times several sides in turns in the same two processes, so that other load on the machine affects all equally."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.command import one_thread

if TYPE_CHECKING:
    from stormo.distributed.world import World

NUM_WORKERS = 2
_NUM_WARM_UP_PAIRS = 2
_TIMEOUT_S = 120.0
_FILE = "times.json"

Turn = Callable[[int], object]  # so many steps


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of a turn of each side, pair after pair, on rank 0."""

    wall_s: list[list[float]]
    cpu_s: list[list[float]]

    def save(self, folder: Path) -> None:
        """Leave them for the process that has started the workers."""
        (folder / _FILE).write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")


def take_turns(world: World, turns: Sequence[Turn], num_pairs: int, num_steps: int) -> Times:
    """Time every side once in a pair, in random order within it."""
    draw = random.Random(0)  # the same order on both workers
    times = Times(wall_s=[], cpu_s=[])
    for pair in range(-_NUM_WARM_UP_PAIRS, num_pairs):
        wall_s, cpu_s = [0.0] * len(turns), [0.0] * len(turns)
        for side in draw.sample(range(len(turns)), len(turns)):
            world.barrier()
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            turns[side](num_steps)
            wall_s[side], cpu_s[side] = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        if pair >= 0:
            times.wall_s.append(wall_s)
            times.cpu_s.append(cpu_s)
    return times


def work(folder: Path, measure: Callable[[World], Times]) -> int:
    """Be one of the workers that `times_of_workers` has started."""
    import torch

    from stormo.distributed.store import Store
    from stormo.distributed.world import World
    from stormo.launch import open_failure_reporter
    from stormo.launch.environments import local

    rank_info = local.rank_info(os.environ)
    reporter = open_failure_reporter(rank_info)
    world = World(rank_info, torch.device("cpu"), store=Store(rank_info, _TIMEOUT_S), timeout_s=_TIMEOUT_S)
    times = measure(world)
    if world.is_main:
        times.save(folder)
    world.close()
    reporter.close()
    return 0


def times_of_workers(module: str, arguments: Sequence[str]) -> Times:
    """Run a benchmark as two workers, which leave their times in --worker-folder; exit if they fail."""
    from stormo.launch import Node, run_node

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module, *arguments, "--worker-folder", folder]
        code = run_node(command, Node(num_workers=NUM_WORKERS), environ=one_thread())
        if code:
            sys.exit(code)
        return Times(**json.loads((Path(folder) / _FILE).read_text(encoding="utf-8")))


def ratios(times_s: Sequence[Sequence[float]], side: int) -> tuple[float, float, float]:
    """Median and quartiles of a side's time over that of the first, pair by pair."""
    lower, median, upper = statistics.quantiles([pair[side] / pair[0] for pair in times_s], n=4, method="inclusive")
    return median, lower, upper
