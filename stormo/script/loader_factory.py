"""`world.loader`: makes the loader that fits the data, and checks that the numbers can hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset

from stormo.data.reading import is_stream
from stormo.data.sample_check import require_same_samples
from stormo.errors import SettingError
from stormo.script.loop import Loop
from stormo.script.map_loader import MapLoader, SamplerOrder, SeededOrder, taken_settings
from stormo.script.streams import ShardedLoader, StreamLoader

Loader = MapLoader | StreamLoader | ShardedLoader


def make_loader(
    loop: Loop,
    data: Any,
    *,
    batch_size: int | None,
    global_batch_size: int | None,
    shuffle: bool,
    accumulate: int,
    sharded: bool,
    num_workers: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    seed: int,
    batch_dim: int,
) -> Loader:
    """The loader for a torch DataLoader, a map-style data set or a stream."""
    if accumulate < 1:
        raise SettingError(f"world.loader(accumulate={accumulate}) was called", "a step has a batch", "set 1 or more")
    common = {"accumulate": accumulate, "seed": seed}
    stream_class = ShardedLoader if sharded else StreamLoader
    if isinstance(data, DataLoader):
        if batch_size is not None or global_batch_size is not None or shuffle or num_workers or collate_fn is not None:
            raise SettingError(
                "world.loader() was given a DataLoader and further settings",
                "batch size, order and reading are the DataLoader's",
                "set them there, or pass its data set instead",
            )
        if sharded or _is_stream_of_batches(data):
            return stream_class(loop, data, data.dataset, batch_dim=batch_dim, **common)
        _check_own_loader(data)
        _check_samples(loop, data.dataset, data.num_workers)
        return MapLoader(loop, data.dataset, SamplerOrder(data, loop), **common, **taken_settings(data))
    total = _samples_of_a_batch(batch_size, global_batch_size, loop.world.size * accumulate, sharded=sharded)
    if sharded or is_stream(data):
        reader: DataLoader[Any] = DataLoader(
            data if not is_stream(data) or isinstance(data, IterableDataset) else _Iterable(data),
            batch_size=total,
            num_workers=num_workers,
            collate_fn=collate_fn,
            shuffle=shuffle or None,
            pin_memory=loop.world.device.type == "cuda",
        )
        return stream_class(loop, reader, data, batch_dim=batch_dim, **common)
    _check_samples(loop, data, num_workers)
    order = SeededOrder(data, total, shuffle=shuffle, seed=seed)
    reading = {"num_workers": num_workers, "collate_fn": collate_fn, "persistent_workers": num_workers > 0}
    return MapLoader(loop, data, order, accumulate=accumulate, seed=seed, **reading)


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
            f"world.loader() was given a {kind.__name__}, a DataLoader with an __iter__ of its own",
            "the workers read their shares of the data set themselves, without that __iter__",
            "do its work in the data set, in collate_fn or in the loop, and pass a DataLoader of torch's own",
        )


def _samples_of_a_batch(batch_size: int | None, total: int | None, num_shares: int, *, sharded: bool) -> int:
    if (batch_size is None) == (total is None) or (sharded and batch_size is None):
        raise SettingError(
            f"world.loader() was given batch_size={batch_size} and global_batch_size={total}",
            "one of them says how many samples a step takes",
            "set batch_size for each worker, or, without sharded=True, global_batch_size for all of them",
        )
    if total is None:
        assert batch_size is not None
        total = batch_size if sharded else batch_size * num_shares
    if total < 1:
        raise SettingError(f"world.loader() was given a batch of {total}", "it has no sample", "set 1 or more")
    return total


def _check_samples(loop: Loop, data: Any, num_processes: int) -> None:
    # Once training has begun every worker draws numbers of its own: a split drawn then differs between them.
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
