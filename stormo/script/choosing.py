"""Which loader fits what a script passes to `world.loader()`, and whether the numbers can hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset

from stormo.data.sample_check import require_same_samples
from stormo.errors import SettingError, counted
from stormo.script.indexed import IndexedLoader, taken_settings
from stormo.script.loop import Loop
from stormo.script.orders import PlainOrder, SamplerOrder
from stormo.script.streams import ShardedLoader, StreamLoader

Loaded = IndexedLoader | StreamLoader | ShardedLoader


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
    batch_dim: int = 0,
) -> Loaded:
    """The loader for a torch DataLoader, a map-style data set or a stream."""
    _at_least("accumulate", accumulate)
    if batch_dim < 0:
        raise SettingError(
            f"batch_dim={batch_dim} was passed to world.loader()",
            "tensors of a batch may have different numbers of dimensions",
            "count it from the first, which is 0",
        )
    if isinstance(data, DataLoader):
        if batch_size is not None or global_batch_size is not None or shuffle or num_workers or collate_fn is not None:
            raise SettingError(
                "world.loader() was given a DataLoader with settings of its own besides",
                "batch size, order and reading are the DataLoader's",
                "set them there, or pass its data set instead",
            )
        return _of_loader(loop, data, accumulate=accumulate, sharded=sharded, seed=seed, batch_dim=batch_dim)
    total = _global_size(loop, batch_size, global_batch_size, accumulate, sharded=sharded)
    is_read_by_number = hasattr(data, "__getitem__") or hasattr(data, "__getitems__")
    is_stream = isinstance(data, IterableDataset) or not is_read_by_number
    if is_stream or sharded:
        if is_stream and not hasattr(data, "__iter__"):
            raise SettingError(
                f"world.loader() was given a {type(data).__name__}",
                "it has neither __getitem__ nor __iter__",
                "pass a data set or a DataLoader",
            )
        if is_stream and shuffle:
            raise SettingError(
                "world.loader(shuffle=True) was set for a stream",
                "a stream can only be read in its own order",
                "shuffle inside the data set",
            )
        reader: DataLoader[Any] = DataLoader(
            _Stream(data) if is_stream and not isinstance(data, IterableDataset) else data,
            batch_size=total,
            num_workers=num_workers,
            collate_fn=collate_fn,
            shuffle=shuffle or None,
            pin_memory=loop.world.device.type == "cuda",
        )
        kind = ShardedLoader if sharded else StreamLoader
        return kind(loop, reader, data, accumulate=accumulate, seed=seed, batch_dim=batch_dim)
    _require_no_dim(batch_dim)
    _require_samples(loop, data, accumulate, num_workers)
    order = PlainOrder(data, total, shuffle=shuffle, seed=seed)
    settings = {"num_workers": num_workers, "collate_fn": collate_fn, "persistent_workers": num_workers > 0}
    return IndexedLoader(loop, data, order, accumulate=accumulate, seed=seed, **settings)


def _of_loader(
    loop: Loop, data: DataLoader[Any], *, accumulate: int, sharded: bool, seed: int, batch_dim: int
) -> Loaded:
    if sharded:
        return ShardedLoader(loop, data, data.dataset, accumulate=accumulate, seed=seed, batch_dim=batch_dim)
    if isinstance(data.sampler, DistributedSampler):
        raise SettingError(
            "world.loader() was given a DataLoader with a DistributedSampler",
            "it has cut the data already, and drops or repeats some",
            "leave the sampler out (shuffle=True does)",
        )
    if isinstance(data.dataset, IterableDataset) or data.batch_sampler is None:
        return StreamLoader(loop, data, data.dataset, accumulate=accumulate, seed=seed, batch_dim=batch_dim)
    _require_no_dim(batch_dim)
    _require_plain(data)
    _require_samples(loop, data.dataset, accumulate, data.num_workers)
    _require_end(data.batch_sampler)
    order = SamplerOrder(data, loop)
    return IndexedLoader(loop, data.dataset, order, accumulate=accumulate, seed=seed, **taken_settings(data))


def _require_plain(loader: DataLoader[Any]) -> None:
    kind = type(loader)
    # That of torchdata gives the same batches, and notes where it is, which is done here.
    if kind.__iter__ is not DataLoader.__iter__ and not kind.__module__.startswith("torchdata."):
        raise SettingError(
            f"world.loader() was given a {kind.__name__}, a DataLoader with an __iter__ of its own",
            "the workers read their shares of the data set themselves, and what it may do to a batch would be left out",
            "do that in the data set, in collate_fn or in the loop, and pass a DataLoader of torch's own",
        )


def _require_no_dim(batch_dim: int) -> None:
    if batch_dim:
        raise SettingError(
            f"world.loader(batch_dim={batch_dim}) was set for a data set that is read by number",
            "a worker's samples are chosen there before they are put together, so that no batch is cut",
            "leave batch_dim out",
        )


def _require_end(batch_sampler: Any) -> None:
    try:
        len(batch_sampler)
    except (TypeError, NotImplementedError):
        raise SettingError(
            "world.loader() was given a DataLoader with a sampler that has no len",
            "the workers agree on the order of a whole epoch at its start, and it may never end",
            "give the sampler __len__, or make it an iterable data set",
        ) from None


class _Stream(IterableDataset[Any]):
    """Anything that can be iterated, as torch's readers want it."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> Any:
        return iter(self._source)


def _global_size(loop: Loop, batch_size: int | None, total: int | None, accumulate: int, *, sharded: bool) -> int:
    size = loop.world.size
    if (batch_size is None) == (total is None):
        raise SettingError(
            "world.loader() was given "
            + ("neither batch_size nor" if total is None else "both batch_size and")
            + " global_batch_size",
            "one of them says how many samples a step takes",
            "set batch_size for each worker, or global_batch_size for all of them together",
        )
    if batch_size is not None:
        _at_least("batch_size", batch_size)
        return batch_size if sharded else batch_size * size * accumulate
    assert total is not None
    if sharded:
        raise SettingError(
            "world.loader(sharded=True) was given global_batch_size",
            "every worker makes batches of its own part",
            "set batch_size",
        )
    _at_least("global_batch_size", total)
    _require_parts(loop, total, accumulate)
    return total


def _require_parts(loop: Loop, total: int, accumulate: int) -> None:
    parts = loop.world.size * accumulate
    if total < parts:
        product = f"{counted(loop.world.size, 'worker')} × {counted(accumulate, 'pass')}"
        raise SettingError(
            f"global_batch_size {total} was passed to world.loader()",
            f"{product} cut it into {counted(parts, 'part')} of at least one sample",
            f"set {parts} or more, or start fewer workers",
        )


def _require_samples(loop: Loop, data: Any, accumulate: int, num_processes: int) -> None:
    count, parts = len(data), loop.world.size * accumulate
    # Once training has begun every worker draws numbers of its own: a split drawn then differs between them.
    loop.world.require_same({"length of the data set": count, "choice of samples": _chosen(data)})
    if count < parts:
        product = counted(loop.world.size, "worker") + (f" × {accumulate} passes" if accumulate > 1 else "")
        raise SettingError(
            f"a data set of {counted(count, 'sample')} was passed to world.loader()",
            f"it is shared by {product}, and each needs at least one",
            f"start at most {counted(max(count // accumulate, 1), 'worker')}, or give more data",
        )
    # A file that is opened with the first sample must not be shared by all processes that read.
    require_same_samples(loop.world, data, may_read=num_processes == 0)


def _chosen(data: Any) -> str:
    """Stands for the samples that subsets have taken out of a data set."""
    digest = hashlib.sha256()
    while isinstance(data, Subset):
        digest.update(",".join(str(int(index)) for index in data.indices).encode() + b"/")
        data = data.dataset
    return digest.hexdigest()[:12]


def _at_least(name: str, value: int) -> None:
    if value < 1:
        raise SettingError(f"{name}={value} was passed to world.loader()", "it must be at least 1", f"set {name}=1")
