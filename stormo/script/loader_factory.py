"""`world.loader`: makes the loader that fits the data, and checks that the numbers can hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset

from stormo.data.reading import is_stream
from stormo.data.sample_check import require_same_samples
from stormo.errors import SettingError
from stormo.script.loop import Loop
from stormo.script.map_loader import MapLoader, SamplerOrder, SeededOrder, taken_settings
from stormo.script.streams import ShardedLoader, StreamLoader

Loader = MapLoader | StreamLoader | ShardedLoader


class Batches(NamedTuple):
    """How batches are made of a data set; a DataLoader has its own way."""

    batch_size: int | None
    global_batch_size: int | None
    shuffle: bool
    num_workers: int
    collate_fn: Callable[[list[Any]], Any] | None


def make_loader(
    loop: Loop, data: Any, batches: Batches, *, accumulate: int, sharded: bool, seed: int, dim: int
) -> Loader:
    """The loader for a torch DataLoader, a map-style data set or a stream; samples lie along `dim` of its batches."""
    if accumulate < 1:
        raise SettingError(f"world.loader(accumulate={accumulate}) was called", "a step has a batch", "set 1 or more")
    common = {"accumulate": accumulate, "seed": seed}
    stream_class = ShardedLoader if sharded else StreamLoader
    if isinstance(data, DataLoader):
        if any(value not in (None, False, 0) for value in batches):
            raise SettingError(
                "world.loader() was given a DataLoader and further settings",
                "batch size, order and reading are the DataLoader's",
                "set them there, or pass its data set instead",
            )
        if sharded or _is_stream_of_batches(data):
            return stream_class(loop, data, data.dataset, batch_dim=dim, **common)
        _check_own_loader(data)
        _check_samples(loop, data.dataset, data.num_workers)
        return MapLoader(loop, data.dataset, SamplerOrder(data, loop), **common, **taken_settings(data))
    total = _samples_of_a_batch(batches, loop.world.size * accumulate, sharded=sharded)
    reading: dict[str, Any] = {"num_workers": batches.num_workers, "collate_fn": batches.collate_fn}
    if sharded or is_stream(data):
        reader: DataLoader[Any] = DataLoader(
            data if not is_stream(data) or isinstance(data, IterableDataset) else _Iterable(data),
            batch_size=total,
            shuffle=batches.shuffle or None,
            pin_memory=loop.world.device.type == "cuda",
            **reading,
        )
        return stream_class(loop, reader, data, batch_dim=dim, **common)
    _check_samples(loop, data, batches.num_workers)
    order = SeededOrder(data, total, shuffle=batches.shuffle, seed=seed)
    return MapLoader(loop, data, order, **common, **reading, persistent_workers=batches.num_workers > 0)


class _Iterable(IterableDataset[Any]):
    """Anything that can be iterated, as torch's readers want it."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> Any:
        return iter(self._source)


def _is_stream_of_batches(loader: DataLoader[Any]) -> bool:
    if isinstance(loader.sampler, DistributedSampler):
        raise SettingError(
            "world.loader() was given a DataLoader with a DistributedSampler",
            "it has cut the data already, and drops or repeats some",
            "leave the sampler out (shuffle=True does the same)",
        )
    return isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None


def _check_own_loader(loader: DataLoader[Any]) -> None:
    kind = type(loader)
    # That of torchdata gives the same batches, and notes where it is, which is done here.
    if kind.__iter__ is not DataLoader.__iter__ and not kind.__module__.startswith("torchdata."):
        raise SettingError(
            f"world.loader() was given a {kind.__name__}, a DataLoader with its own __iter__",
            "the workers read their shares of the data set themselves, without that __iter__",
            "do its work in the data set, in collate_fn or in the loop, and pass a DataLoader of torch's own",
        )


def _samples_of_a_batch(batches: Batches, num_shares: int, *, sharded: bool) -> int:
    """Of all workers in a step; with `sharded` of one worker in a micro-batch."""
    own, total = batches.batch_size, batches.global_batch_size
    if (own is None) == (total is None) or (sharded and own is None):
        raise SettingError(
            f"world.loader() was given batch_size={own} and global_batch_size={total}",
            "one of them says how many samples a step takes",
            "set batch_size for each worker, or, without sharded=True, global_batch_size for all of them",
        )
    found = (own or 0) * (1 if sharded else num_shares) if total is None else total
    if found < 1:
        raise SettingError(f"world.loader() was given a batch of {found}", "it has no sample", "set 1 or more")
    return found


def _check_samples(loop: Loop, data: Any, num_processes: int) -> None:
    # Once training has begun the workers' generators differ, and so would a split that is drawn then.
    loop.world.require_same({"length of the data set": len(data), "choice of samples": _subset_digest(data)})
    # A file that is opened with the first sample must not be shared by all processes that read.
    require_same_samples(loop.world, data, may_read=num_processes == 0)


def _subset_digest(data: Any) -> str:
    """Stands for the samples that subsets have taken out of a data set."""
    digest = hashlib.sha256()
    while isinstance(data, Subset):
        digest.update(",".join(str(int(index)) for index in data.indices).encode() + b"/")
        data = data.dataset
    return digest.hexdigest()[:12]
