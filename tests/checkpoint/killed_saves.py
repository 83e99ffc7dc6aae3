"""Run by test_writer.py: saves in a child process that is killed, then looks at what is left.

`every-operation FOLDER`: the child is killed before its first, second, ... file-system operation.
`every-operation-of-shards FOLDER`: the same of one save by two workers, who write into one folder.
`random FOLDER COUNT SEED`: the child saves for ever and is killed at random moments.
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

sys.path.insert(0, str(Path(__file__).parent))

import torch
from conftest import assert_same, make_snapshot

from stormo.checkpoint import RetentionPolicy, Shard, find, load, newest_good, save, whole_chunk
from stormo.checkpoint.writer import Chunk, Publisher, ShardWriter, make_temp_dir

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"}


def store(folder: Path, step: int, seed: int) -> None:
    save(folder, make_snapshot(seed), RetentionPolicy(step=step, identity="run", keep_last=2))


def store_shards(folder: Path, step: int, seed: int) -> None:
    """The same snapshot, of which each of two workers has every other row, and the first what has none."""
    snapshot, chunks = make_snapshot(seed), ([], [])
    for section in ("model", "optimizer"):
        for name, tensor in getattr(snapshot, section).items():
            rows = range(tensor.shape[0]) if tensor.ndim else [None]
            for row in rows:
                part = tensor if row is None else tensor[row : row + 1]
                offset = () if row is None else (row, *[0] * (tensor.ndim - 1))
                one = Chunk(section=section, name=name, whole_shape=tuple(tensor.shape), offset=offset, tensor=part)
                chunks[(row or 0) % 2].append(one)
            if not rows:
                chunk = Chunk(section=section, name=name, whole_shape=tuple(tensor.shape), offset=(0, 0), tensor=tensor)
                chunks[0].append(chunk)
    for full_name, tensor in snapshot.ranks.items():
        rank, _, name = full_name.partition("/")
        chunks[int(rank)].append(whole_chunk("own", name, tensor))
    main = Shard(chunks=chunks[0], state=snapshot.state)
    saving = RetentionPolicy(step=step, identity="run", keep_last=2)
    new = make_temp_dir(folder, step, 0)
    for rank, shard in ((1, Shard(chunks=chunks[1])), (0, main)):
        ShardWriter(rank, shard).write(new.path, step)
    Publisher(folder, main, saving, 2).publish(new.path, new.notices)


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

    def hook(event: str, _: object) -> None:
        if event in OPERATIONS and next(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def every_operation(folder: Path) -> int:
    """Step 3 is saved and, at once, saved again with other weights; returns how many kills there were."""
    for number in itertools.count(1):
        shutil.rmtree(folder, ignore_errors=True)
        for step in (1, 2):
            store(folder, step, seed=step)

        def work(number: int = number) -> None:
            kill_before_operation(number)
            store(folder, 3, seed=3)
            store(folder, 3, seed=33)

        _, status = os.waitpid(in_child(work), 0)
        good, problems = newest_good(folder)
        assert problems == (), problems
        assert good is not None
        seed = load(good.path).state["step"]
        assert (good.step, seed) in {(2, 2), (3, 3), (3, 33)}, (good, seed)
        assert_same(load(good.path), make_snapshot(seed))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            assert seed == 33
            return number - 1
        assert os.WTERMSIG(status) == signal.SIGKILL
        # The next save cleans up whatever the killed one left.
        store(folder, 4, seed=4)
        assert sorted(path.name for path in folder.iterdir()) == sorted(found.path.name for found in find(folder))
        assert [found.step for found in find(folder)] == ([4, 3] if good.step == 3 else [4, 2])
    raise AssertionError


def every_operation_of_shards(folder: Path) -> int:
    """Step 3 is saved by two workers, beside a checkpoint of each version; returns how many kills there were."""
    before = folder.with_name("before")
    store(before, 1, seed=1)
    store_shards(before, 2, seed=2)
    for number in itertools.count(1):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)

        def work(number: int = number) -> None:
            kill_before_operation(number)
            store_shards(folder, 3, seed=3)

        _, status = os.waitpid(in_child(work), 0)
        good, problems = newest_good(folder)
        assert problems == (), problems
        assert good is not None
        assert_same(load(good.path), make_snapshot(good.step))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            assert [found.step for found in find(folder)] == [3, 2]
            return number - 1
        assert os.WTERMSIG(status) == signal.SIGKILL
        store_shards(folder, 4, seed=4)
        assert sorted(path.name for path in folder.iterdir()) == sorted(found.path.name for found in find(folder))
        assert [found.step for found in find(folder)] == ([4, 3] if good.step == 3 else [4, 2])
    raise AssertionError


def at_random_moments(folder: Path, count: int, seed: int) -> int:
    choose = random.Random(seed)
    step = 0
    for _ in range(count):
        read_end, write_end = os.pipe()

        def work(first: int = step, write_end: int = write_end) -> None:
            for step in itertools.count(first + 1):
                store(folder, step, seed=step)
                os.write(write_end, step.to_bytes(8, "little"))
                store(folder, step, seed=step)

        pid = in_child(work)
        os.close(write_end)
        time.sleep(choose.uniform(0.0, 0.12))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with open(read_end, "rb") as told:  # noqa: PTH123
            acknowledged = told.read()
        promised = int.from_bytes(acknowledged[-8:], "little") if acknowledged else step
        good, problems = newest_good(folder)
        assert problems == (), problems
        if promised:
            assert good is not None
            # What `save` returned for is there; at most one more was published without the word getting out.
            assert promised <= good.step <= promised + 1
        if good is not None:
            step = good.step
            assert_same(load(good.path), make_snapshot(step))
    assert len([path for path in folder.iterdir() if path.name.startswith(".")]) <= 3
    return step


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "every-operation":
        print(every_operation(Path(sys.argv[2])))
    elif sys.argv[1] == "every-operation-of-shards":
        print(every_operation_of_shards(Path(sys.argv[2])))
    else:
        print(at_random_moments(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
