"""Checks that all workers have the same samples, as where files are listed in another order on one node.

A few samples are compared by a few numbers each, as last bits may differ between machines. A data set that draws other
numbers than those of the seeded generators changes from one reading to the next, and is not compared.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from stormo.data.reading import SeededDataset
from stormo.distributed.world import World
from stormo.errors import SettingError

_TOLERANCE = 1e-3  # of a tensor's mean size
_Digest = list[list[Any]]  # shape, mean size, mean and weighted mean of every value


def require_same_samples(world: World, data: Any, *, may_read: bool) -> None:
    """Raise on every worker where one has other samples than rank 0."""
    if world.size == 1:
        return
    indices = sorted({0, len(data) // 2, len(data) - 1})

    read = partial(SeededDataset(data).read_seeded, [(index, index) for index in indices])

    def digests() -> list[_Digest] | None:
        return _digests(read) if may_read else None

    found = _first_difference(world, digests(), digests)
    if found is not None:
        number, rank = found
        raise SettingError(
            f"sample {indices[number]} of the data set passed to world.loader() differs between rank 0 and rank {rank}",
            "each worker takes its share of one and the same data",
            "let it not depend on the worker (sort the files it lists), or say sharded=True if every worker "
            "has its own part",
        )


def _stream_differs(rank: int) -> SettingError:
    return SettingError(
        f"the stream passed to world.loader() starts with different batches on rank 0 and rank {rank}",
        "each worker reads the whole stream and takes its share of every batch",
        "let it not depend on the worker, or say sharded=True if every worker has its own part",
    )


def require_same_start(
    world: World,
    batch: Any,
    read_again: Callable[[], Any] | None,
    refusal: Callable[[int], SettingError] = _stream_differs,
) -> None:
    """Raise on every worker where the stream of one starts with another batch than rank 0's.

    Args:
        world: of the workers.
        batch: the first one.
        read_again: gives it a second time; None where a stream can be read but once.
        refusal: the error, for the rank whose stream differs.
    """
    if world.size == 1:
        return

    def again() -> list[_Digest] | None:
        assert read_again is not None
        second = read_again()  # an error here is the user's to see
        return _digests(lambda: [second])

    found = _first_difference(world, _digests(lambda: [batch]), again if read_again is not None else None)
    if found is not None:
        raise refusal(found[1])


def _digests(read: Callable[[], list[Any]]) -> list[_Digest] | None:
    """Those of some samples; None where they cannot be read so: the error shows when their turn comes."""
    try:
        return [list(_digest(sample)) for sample in read()]
    except Exception:
        return None


def _first_difference(
    world: World, here: list[_Digest] | None, again: Callable[[], list[_Digest] | None] | None
) -> tuple[int, int] | None:
    """Sample and rank that differ from rank 0's, if all read the same a second time; ranks that cannot read pass."""
    every = world.gather_objects(here)
    differences = [
        (number, rank)
        for rank, theirs in enumerate(every or [])
        if every and every[0] is not None and theirs is not None
        for number, (main, other) in enumerate(zip(every[0], theirs, strict=True))
        if not _same(main, other)
    ]
    found = world.broadcast_object(differences[0] if differences else None)
    if found is None:
        return None
    second = here if again is None else again()
    is_stable = here is not None and second is not None and all(map(_same, here, second))
    is_certain = all(world.broadcast_object(world.gather_objects(is_stable)))
    return (found[0], found[1]) if is_certain else None


def _same(first: _Digest, second: _Digest) -> bool:
    return len(first) == len(second) and all(
        a[0] == b[0] and all(abs(x - y) <= _TOLERANCE * max(a[1], b[1]) for x, y in zip(a[1:], b[1:], strict=True))
        for a, b in zip(first, second, strict=True)
    )


def _digest(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _digest(part)
    elif (
        isinstance(value, numbers.Real)
        or (isinstance(value, Tensor) and not value.is_complex())
        or (isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biuf")
    ):
        wide = torch.as_tensor(value).detach().to("cpu", torch.float64).flatten().nan_to_num()
        weighted = wide * torch.linspace(0, 1, len(wide), dtype=torch.float64)
        means = [float(each.sum()) / max(len(wide), 1) for each in (wide.abs(), wide, weighted)]
        yield [list(getattr(value, "shape", [])), *means]
