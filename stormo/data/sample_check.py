"""Whether the workers have the same samples: files listed in another order on one node are found out here.

Three samples are read and summed up in a few numbers; last bits may differ between machines. What a data set draws for
itself, apart from the seeded generators, changes from one reading to the next and is not compared.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from stormo.data.generators import generators_kept, seed_host
from stormo.data.streaming import read_one
from stormo.distributed.world import World
from stormo.errors import SettingError

_TOLERANCE = 1e-3  # of a tensor's mean size
_Look = dict[str, list[list[Any]]]  # sample -> shape, size, mean and weighted mean of everything in it


def require_same_samples(world: World, data: Any, *, may_read: bool) -> None:
    """Raise the same sentence on every worker where one of them has other samples than the main one."""
    if world.size == 1:
        return
    here = _look(data) if may_read else None
    found = world.broadcast_object(_first_difference(world.gather_objects(here)))
    if found is None:
        return
    is_still = here is not None and _same(here, _look(data))
    if not all(world.broadcast_object(world.gather_objects(is_still))):
        return
    sample, rank = found
    raise SettingError(
        f"a data set was passed to world.loader() whose sample {sample} is another one on rank {rank} than on rank 0",
        "each worker takes its share of one and the same data",
        "let it not depend on the worker (sort the files it lists), or say sharded=True if every worker has a part of "
        "its own",
    )


def _of_loader(rank: int) -> SettingError:
    return SettingError(
        f"a stream was passed to world.loader() that starts with another batch on rank {rank} than on rank 0",
        "each worker reads the whole stream and takes its share of every batch",
        "let it not depend on the worker, or say sharded=True if every worker has a part of its own",
    )


def require_same_start(
    world: World,
    batch: Any,
    read_again: Callable[[], Any] | None,
    refusal: Callable[[int], SettingError] = _of_loader,
) -> None:
    """Raise the same sentence on every worker where the stream of one starts with another batch than the main one's.

    Args:
        world: of the workers.
        batch: the first one.
        read_again: gives it a second time; None where a stream can be read but once.
        refusal: the sentence, for the rank whose stream differs.
    """
    if world.size == 1:
        return
    here = _summed_up_or_none(batch)
    found = world.broadcast_object(_first_difference(world.gather_objects(here)))
    if found is None:
        return
    is_still = here is not None and (read_again is None or _same(here, _summed_up_or_none(read_again())))
    if all(world.broadcast_object(world.gather_objects(is_still))):
        raise refusal(found[1])


def _summed_up_or_none(batch: Any) -> _Look | None:
    try:
        return {"batch": list(_summed_up(batch))}
    except Exception:
        return None  # what cannot be summed up is not compared


def _first_difference(looks: list[_Look | None] | None) -> tuple[str, int] | None:
    """Sample and rank, on the main worker; a worker that could not look is passed over."""
    for rank, look in enumerate(looks or []):
        assert looks is not None
        main = looks[0]
        for sample in main or ():
            if main is not None and look is not None and not _same({sample: main[sample]}, {sample: look[sample]}):
                return sample, rank
    return None


def _same(first: _Look, second: _Look | None) -> bool:
    return second is not None and all(
        len(values) == len(second[sample])
        and all(
            a[0] == b[0] and all(abs(x - y) <= _TOLERANCE * max(a[1], b[1]) for x, y in zip(a[1:], b[1:], strict=True))
            for a, b in zip(values, second[sample], strict=True)
        )
        for sample, values in first.items()
    )


def _look(data: Any) -> _Look | None:
    """The first, the middle and the last sample in numbers, or None where they cannot be read so."""
    found: _Look = {}
    try:
        with generators_kept():
            for index in sorted({0, len(data) // 2, len(data) - 1}):
                seed_host(index)
                found[str(index)] = list(_summed_up(read_one(data, index)))
    except Exception:
        return None  # it is read again when its turn comes, and the error shows then
    return found


def _summed_up(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _summed_up(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _summed_up(part)
    elif (
        isinstance(value, numbers.Real)
        or (isinstance(value, Tensor) and not value.is_complex())
        or (isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biuf")
    ):
        wide = torch.as_tensor(value).detach().to("cpu", torch.float64).flatten().nan_to_num()
        weighted = wide * torch.linspace(0, 1, len(wide), dtype=torch.float64)
        means = [float(each.sum()) / max(len(wide), 1) for each in (wide.abs(), wide, weighted)]
        yield [list(getattr(value, "shape", [])), *means]
