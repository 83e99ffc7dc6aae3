"""What `stormo.World` is before anything is trained: who this worker is, and what all workers do together."""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from stormo.data.staging.nodes import local_folder, stage_on_nodes
from stormo.data.staging.shelf import Hold
from stormo.distributed.world import World as Workers
from stormo.errors import SettingError
from stormo.script import joining
from stormo.script.agreement import call_site
from stormo.script.energy import Energy, ScriptMeter
from stormo.script.loop import Loop
from stormo.script.plain import pack, unpack
from stormo.script.reductions import described, divided, reduced, weighed
from stormo.script.sharing import share_bytes

_A = TypeVar("_A")


class Together:
    """One worker among the others of a script."""

    _workers: Workers
    _loop: Loop
    _meter: ScriptMeter | None
    _staged: list[Hold]

    # Who am I

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._workers.rank

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self._workers.size

    @property
    def local_rank(self) -> int:
        """This worker's number on its node."""
        return self._workers.place.local_rank

    @property
    def node_id(self) -> int:
        """Which node this worker is on."""
        return self._workers.place.node_id

    @property
    def device(self) -> torch.device:
        """Where this worker computes."""
        return self._workers.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the worker that prints and writes."""
        return self._workers.is_main

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the main worker."""
        if self.is_main:
            builtins.print(*values, **{"flush": True} | options)  # noqa: T201

    # What the workers do together

    def sum(self, value: _A) -> _A:
        """The sum over all workers: of a number, a tensor, or a dict, list or tuple of them."""
        return self._reduce("world.sum", value)

    def mean(self, value: _A, *, count: float = 1.0) -> _A:
        """The mean over all workers: of a number, a tensor, or a dict, list or tuple of them.

        Args:
            value: this worker's mean, such as the loss of its share.
            count: what that is a mean over, such as `loader.num_samples`; where it is 0 the value does not matter.
        """
        if not (math.isfinite(count) and count >= 0):
            raise SettingError(f"world.mean(count={count:g}) was called", "it is no count", "set 0 or more")
        described(value)  # which refuses what cannot be added up
        sums, total = self._reduce("world.mean", (weighed(value, count), float(count)))
        if not total:
            raise SettingError(
                "world.mean() was called with counts that add up to 0", "a mean of nothing is no number", "leave it out"
            )
        found: _A = divided(sums, total, value)
        return found

    def max(self, value: _A) -> _A:
        """The largest over all workers: of a number, a tensor, or a dict, list or tuple of them."""
        return self._reduce("world.max", value)

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any worker."""
        return bool(self._agree("world.any", int(bool(flag))).numbers.count(1))

    def share(self, value: Any) -> Any:
        """The main worker's value, on all workers: numbers, text, tensors, lists, tuples, sets and dicts."""
        self._agree("world.share")
        return unpack(share_bytes(self._workers, [pack(value, "shared")] if self.is_main else None)[0])

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, by rank, on all workers: numbers, text, tensors, lists, tuples, sets and dicts."""
        self._agree("world.gather")
        payloads = self._workers.gather_bytes(pack(value, "gathered"))
        return [unpack(payload) for payload in share_bytes(self._workers, payloads)]

    def barrier(self) -> None:
        """Wait until all workers are here."""
        self._agree("world.barrier")

    def energy(self) -> Energy:
        """What all nodes drew since `World()`: joules, with an error bound; printed, it is a sentence.

        The difference of two is what was drawn in between.
        """
        if self._meter is None:
            raise SettingError(
                "world.energy() was called", "World(energy=False) measures nothing", "leave energy=False out"
            )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._agree("world.energy")
        return self._meter.total()

    @contextmanager
    def once_per_node(self) -> Iterator[bool]:
        """`with world.once_per_node() as mine:` mine is True in one process of each node; the others wait for it."""
        self._agree("world.once_per_node")
        with self._workers.once_per_node() as mine:
            self._loop.agreement.is_barred = mine and self._workers.place.local_size > 1
            try:
                yield mine
            finally:
                self._loop.agreement.is_barred = False

    def stage(self, path: str | Path, folder: str | Path = "", *, keep: bool = False) -> Path:
        """Copy a data set to this node's own storage, once for all its workers; the path of the copy.

        A verified copy that is there already is used. It is removed when the last script that uses it ends.

        Args:
            path: a folder or a file.
            folder: on this node; default $SLURM_TMPDIR, $TMPDIR or /tmp.
            keep: leave the copy for later scripts on the node.
        """
        self._agree("world.stage")
        near = stage_on_nodes(self._workers, path, local_folder(str(folder)), keep=keep)
        joining.at_any_end(near.hold.release)
        self._staged.append(near.hold)
        if near.sentence is not None:
            self.print(near.sentence)
        return near.path

    # Within

    def _agree(self, what: str, number: int = 0) -> Any:
        return self._loop.agreement.exchange(f"{what} in {call_site()}", number=number)

    def _reduce(self, what: str, value: _A) -> _A:
        self._agree(f"{what} of {described(value)}")
        workers, is_sum = self._workers, what != "world.max"
        found: _A = reduced(value, workers.sum, workers.max, self.device, is_sum=is_sum)
        return found
