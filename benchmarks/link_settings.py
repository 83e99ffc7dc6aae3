"""A step of `ddp` under every setting of NCCL's sockets that `stormo train` may try, on slices of one GPU.

    python -m benchmarks.link_settings [--workers 4] [--rounds 2] [--data-folder FOLDER]

`bucket_ms` is an all-reduce of 25 MiB by itself, by which `stormo train` chooses; `step_ms` is what a training gets of
it. The settings take turns, each in new processes, as NCCL reads its variables once; medians are shown. In the RESULT
line, `chosen` is the setting with the fastest bucket among those tried on such a GPU, and `best` the one with the
fastest step. Neither should be slower than NCCL's defaults.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.command import aligned, data_folder, result_line
from benchmarks.rank_pool import RankPool
from benchmarks.slice_devices import Devices, cpu_processes, find_devices
from benchmarks.strategy_worker import batches, build
from stormo.config.link import CANDIDATES, Link, candidates
from stormo.distributed.world import World
from stormo.tasks.fashion_mnist import FashionMnist, FashionMnistOptions

_BUCKET_VALUES = 25 * 2**20 // 4
_BATCH_SIZE = 512
_WARM_STEPS, _CALLS = 10, 5
_TIMEOUT_S = 120.0
Times = tuple[float, float, int]  # of a bucket and of a step in milliseconds, and the GPU's multiprocessors


def measure(world: World, width: float, folder: str, num_steps: int) -> Times:
    """The times of one rank."""
    is_gpu = world.device.type == "cuda"
    settings: dict[str, Any] = {"width": width, "data_folder": folder, "train_samples": 100 * _BATCH_SIZE}
    task = FashionMnist(FashionMnistOptions(**settings))
    built = build(world, task, {"strategy": "ddp", "global_batch_size": _BATCH_SIZE})
    strategy, every = built.strategy, batches(built.loader)
    strategy.warm_up(built.loader)
    bucket = torch.zeros(_BUCKET_VALUES, device=world.device)

    def milliseconds(run: Callable[[int], None], warm: int, count: int) -> float:
        run(warm)
        dist.barrier()
        if is_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        run(count)
        if is_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3 / count

    def all_reduce(count: int) -> None:
        for _ in range(count):
            dist.all_reduce(bucket)

    def train(count: int) -> None:
        for _ in range(count):
            strategy.micro_step(next(every))
            strategy.step(0.01)

    times = milliseconds(all_reduce, 2, _CALLS), milliseconds(train, _WARM_STEPS, num_steps)
    strategy.close()
    return *times, torch.cuda.get_device_properties(world.device).multi_processor_count if is_gpu else 0


def under(setting: Mapping[str, str], devices: Devices, *arguments: Any) -> Times:
    """The times of the slowest rank under one setting, in new processes; the arguments are those of `measure`."""
    size = len(devices)
    with RankPool(_TIMEOUT_S, [{**devices.of_rank(rank), **setting} for rank in range(size)]) as pool:
        buckets, steps, multiprocessors = zip(*pool.run(measure, size, *arguments), strict=True)
    return max(buckets), max(steps), min(multiprocessors)


def main(arguments: list[str] | None = None) -> int:
    """Measure all settings in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="that are timed in a round")
    parser.add_argument("--width", type=float, default=10.0, help="of the WideResNet (default: 10)")
    parser.add_argument("--data-folder", help="with the files of Fashion-MNIST; default: where stormo keeps them")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the benchmark itself")
    options = parser.parse_args(arguments)
    if min(options.workers - 1, options.rounds, options.steps) < 1:
        parser.error(
            "a link needs 2 workers, and a median a round and a step: set --workers 2, --rounds 1, --steps 1 or more"
        )
    data = data_folder(options.data_folder)
    devices = find_devices() if options.device == "cuda" else cpu_processes(options.workers)
    if devices.are_shared or len(devices) < options.workers:
        print(
            f"stormo: slices are needed and this is {devices.machine}: cut a GPU with `stormo doctor --slices 7`",
            file=sys.stderr,
        )
        return 2
    devices = devices.take(0, options.workers)
    settings: list[dict[str, str]] = [{}, *CANDIDATES]
    found: list[list[Times]] = [[] for _ in settings]
    for _ in range(options.rounds):
        for setting, times in zip(settings, found, strict=True):
            times.append(under(setting, devices, options.width, data, options.steps))
    print("\n".join(table(settings, found)))
    print(result_line({"workers": options.workers, **figures(settings, found)}))
    return 0


def table(settings: list[dict[str, str]], found: list[list[Times]]) -> list[str]:
    """A line for each setting."""
    rows = [["setting", "bucket_ms", "step_ms", "rounds"]]
    for setting, times in zip(settings, found, strict=True):
        bucket_ms, step_ms = _medians(times)
        steps = " / ".join(f"{one:.1f}" for _, one, _ in times)
        rows.append([str(Link(world_size=1, variables=setting)), f"{bucket_ms:.1f}", f"{step_ms:.1f}", steps])
    return aligned(rows)


def figures(settings: list[dict[str, str]], found: list[list[Times]]) -> dict[str, Any]:
    """The steps under NCCL's defaults, under the setting with the fastest bucket, and under the best one."""
    medians = [_medians(times) for times in found]
    tried = candidates({}, found[0][0][2])
    of_tried = [times for setting, times in zip(settings, medians, strict=True) if setting in tried]
    default_ms, chosen_ms = medians[0][1], min([medians[0], *of_tried])[1]
    return {"default_ms": default_ms, "chosen_ms": chosen_ms, "best_ms": min(step for _, step in medians)}


def _medians(times: list[Times]) -> tuple[float, float]:
    buckets, steps, _ = zip(*times, strict=True)
    return statistics.median(buckets), statistics.median(steps)


if __name__ == "__main__":
    sys.exit(main())
