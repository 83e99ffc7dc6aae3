"""Run by test_writer.py with a folder: saves in a child process that is killed, then checks what is left.

The child is killed before its first, second, ... change of the file system; in a save by two ranks alike; and at random
moments while it saves for ever. Prints the number of kills of the first two.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from conftest import assert_same, make_snapshot

from stormo.checkpoint import RetentionPolicy, Shard, find, load, newest_good, save, whole_chunk
from stormo.checkpoint.writer import Chunk, Publisher, ShardWriter, make_temp_dir

OPERATIONS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def store(folder: Path, step: int, seed: int) -> None:
    save(folder, make_snapshot(seed), RetentionPolicy(step=step, identity="run", keep_last=2))


def store_shards(folder: Path, step: int, seed: int) -> None:
    """The same snapshot, of which each of two workers has half of the rows, and the first what has none."""
    snapshot, chunks = make_snapshot(seed), ([], [])
    for section in ("model", "optimizer"):
        for name, tensor in getattr(snapshot, section).items():
            if not tensor.ndim:
                chunks[0].append(whole_chunk(section, name, tensor))
                continue
            half = len(tensor) // 2
            for rank, (row, part) in enumerate(((0, tensor[:half]), (half, tensor[half:]))):
                offset = (row, *[0] * (tensor.ndim - 1))
                one = Chunk(section=section, name=name, whole_shape=tuple(tensor.shape), offset=offset, tensor=part)
                chunks[rank].append(one)
    for full_name, tensor in snapshot.ranks.items():
        rank, _, name = full_name.partition("/")
        chunks[int(rank)].append(whole_chunk("own", name, tensor))
    main = Shard(chunks=chunks[0], state=snapshot.state)
    policy = RetentionPolicy(step=step, identity="run", keep_last=2)
    new = make_temp_dir(folder, step, 0)
    for rank, shard in ((1, Shard(chunks=chunks[1])), (0, main)):
        ShardWriter(rank, shard).write(new.path, step)
    Publisher(folder, main, policy, 2).publish(new.path, new.notices)


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def kill_before_operation(number: int) -> None:
    seen = itertools.count(1)

    def hook(event: str, arguments: Any) -> None:
        changes = event in OPERATIONS or (event == "open" and arguments[2] & WRITES)
        if changes and next(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def every_operation(folder: Path, work: Callable[[Path], None], seeds: set[tuple[int, int]]) -> int:
    """Kill before each operation of `work`, beside a checkpoint of each version; return how many kills there were.

    `seeds`: the steps with the seeds of their weights that may be the newest then.
    """
    before = folder.with_name(f"{folder.name}-before")
    store(before, 1, seed=1)
    store_shards(before, 2, seed=2)
    for number in itertools.count(1):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)

        def killed(number: int = number) -> None:
            kill_before_operation(number)
            work(folder)

        _, status = os.waitpid(in_child(killed), 0)
        good, problems = newest_good(folder)
        assert problems == (), problems
        assert good is not None
        seed = load(good.path).state["step"]
        assert (good.step, seed) in seeds, (good, seed)
        assert_same(load(good.path), make_snapshot(seed))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            assert (good.step, seed) == max(seeds)
            return number - 1
        assert os.WTERMSIG(status) == signal.SIGKILL
        # The next save cleans up whatever the killed one left.
        store(folder, 4, seed=4)
        assert sorted(path.name for path in folder.iterdir()) == sorted(found.path.name for found in find(folder))
        assert [found.step for found in find(folder)] == ([4, 3] if good.step == 3 else [4, 2])
    raise AssertionError


def store_twice(folder: Path) -> None:
    """Save step 3 and, at once, save it again with other weights."""
    store(folder, 3, seed=3)
    store(folder, 3, seed=33)


def at_random_moments(folder: Path, num_kills: int, num_steps: int, seed: int) -> None:
    """Kill at least so often, until so many steps are saved."""
    choose = random.Random(seed)
    step, longest_s = 0, 0.12
    for number in itertools.count(1):
        read_end, write_end = os.pipe()

        def work(first: int = step, write_end: int = write_end) -> None:
            for step in itertools.count(first + 1):
                store(folder, step, seed=step)
                os.write(write_end, step.to_bytes(8, "little"))
                store(folder, step, seed=step)

        pid = in_child(work)
        os.close(write_end)
        time.sleep(choose.uniform(0.0, longest_s))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with open(read_end, "rb") as pipe:  # noqa: PTH123
            acknowledged = pipe.read()
        if not acknowledged:
            longest_s *= 1.05  # a busy machine gets more time
        promised = int.from_bytes(acknowledged[-8:], "little") if acknowledged else step
        good, problems = newest_good(folder)
        assert problems == (), problems
        if promised:
            assert good is not None
            # What `save` returned for is there; at most one more was published without an acknowledgement.
            assert promised <= good.step <= promised + 1
        if good is not None:
            step = good.step
            assert_same(load(good.path), make_snapshot(step))
        if number >= num_kills and step >= num_steps:
            break
    assert len([path for path in folder.iterdir() if path.name.startswith(".")]) <= 3


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    print(every_operation(folder / "whole", store_twice, {(2, 2), (3, 3), (3, 33)}))
    print(every_operation(folder / "shards", lambda path: store_shards(path, 3, seed=3), {(2, 2), (3, 3)}))
    at_random_moments(folder / "random", num_kills=40, num_steps=10, seed=1)
