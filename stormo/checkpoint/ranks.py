"""Restores a checkpoint on all ranks at once, each its own chunks, whatever mesh has saved it.

The section `local` holds what differs between ranks: the weights of local SGD, and the error feedback of compressed
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stormo.checkpoint.format import LOCAL, CorruptCheckpointError
from stormo.checkpoint.index import TensorEntry
from stormo.checkpoint.reader import Reader, ReadItem, with_newest_good
from stormo.checkpoint.state import (
    ModelMismatchError,
    aliases,
    average_items,
    chunks_of,
    restore_parts,
    stepped_names,
)
from stormo.checkpoint.writer import Chunk, whole_chunk
from stormo.distributed.store import PeerFailedError
from stormo.distributed.world import World
from stormo.errors import EXIT_FAILURE, SettingError, StormoError
from stormo.parallel.base import Strategy
from stormo.parallel.coalesced import means
from stormo.parallel.weight_average import EMA

# Keys of the plain values: every rank's part of the loss, and which rank has stored a replicated buffer.
LOSSES, BUFFERS = "losses", "buffers"
BUFFER = "buffer/"  # prefix of buffers in the section `own`
ERROR_FEEDBACK = "error_feedback"  # key of the plain values: the rank of PowerSGD's matrices

_OUTER = "outer/"


# A failure of one rank becomes that of all: no rank waits for one that has given up.


def raise_on_all_ranks(world: World, failure: Exception | None) -> None:
    """Raise on every rank the error that one of them passes; all ranks call it."""
    if not world.any(failure is not None):
        return
    described = None
    if failure is not None:
        described = [str(failure) or type(failure).__name__, getattr(failure, "exit_code", EXIT_FAILURE)]
    gathered = world.gather_objects(described)
    first = next(([rank, *one] for rank, one in enumerate(gathered or []) if one is not None), None)
    rank, text, exit_code = world.broadcast_object(first)
    if failure is not None and (rank == world.rank or not isinstance(failure, StormoError)):
        raise failure  # where it happened, with its traceback
    error = PeerFailedError(text)
    error.exit_code = exit_code
    raise error


@contextmanager
def _read_on_all_ranks(world: World, path: Path) -> Iterator[None]:
    """Read a checkpoint on every rank; an error of one is raised by all, and names a good checkpoint."""
    failure: Exception | None = None
    try:
        yield
    except CorruptCheckpointError as error:
        failure = with_newest_good(error, path)
    except Exception as error:
        failure = error
    raise_on_all_ranks(world, failure)


def require_seen(world: World, folder: Path) -> None:
    """Raise on every rank if one of them does not see a folder; all ranks call it."""
    failure = None
    if not folder.is_dir():
        failure = SettingError(
            f"{folder} was to be shared by all workers, each with its part of the model",
            f"rank {world.rank} on host {world.rank_info.host} does not see it",
            "set --runs-folder to a folder that all nodes see",
        )
    raise_on_all_ranks(world, failure)


# Parameters and buffers


def restore_sharded(
    world: World, path: Path, strategy: Strategy, is_same: Callable[[Mapping[str, Any]], bool]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read weights, buffers and optimizer state. Every rank calls it; an error of one is raised by all.

    Returns the plain values and, if `is_same` says that they were saved on the same mesh, the generators and buffers of
    this rank.
    """
    require_seen(world, path)
    state, own, stored = dict[str, Any](), dict[str, Tensor](), dict[str, set[str]]()
    with _read_on_all_ranks(world, path), Reader(path) as reader:
        buffers = strategy.persistent_buffers()
        if missing := sorted(buffers.keys() - reader.entries("model").keys()):
            raise ModelMismatchError(f"The checkpoint {path} has no {missing[0]}, which the model has.")
        items = [
            ReadItem(section="model", name=name, offset=(0,) * buffer.ndim, into=buffer)
            for name, buffer in buffers.items()
        ]
        items += average_items(reader, strategy.average)
        restore_parts(reader, strategy.shards(), strategy.optimizer, items)
        state = reader.state()
        if is_same(state):
            for name, rank in state.get(BUFFERS, {}).items():
                own |= reader.rank_tensors(rank, [BUFFER + name])
            own |= reader.rank_tensors(world.rank)
        stored = {
            "model": set(reader.entries("model")),
            "optimizer": {n.rpartition("|")[0] for n in reader.entries("optimizer") if not n.endswith(EMA)},
        }
    raise_on_all_ranks(world, _left_over(world, path, strategy, stored))
    strategy.shards_changed()
    return state, own


def _left_over(world: World, path: Path, strategy: Strategy, stored: dict[str, set[str]]) -> Exception | None:
    """An error on rank 0 if no rank has restored something: it belongs to another model."""
    # Of the ranks that hold something of a parameter, one names it.
    parts = [part for part in strategy.shards() if part.is_saved and not any(part.offset)]
    here = {
        "model": [*(part.name for part in parts), *strategy.persistent_buffers(), *aliases(strategy)],
        "optimizer": sorted(stepped_names(parts, strategy.optimizer)),
    }
    gathered: Sequence[dict[str, list[str]]] | None = world.gather_objects(here)
    for section, names in stored.items() if gathered is not None else ():
        taken = {name for each in gathered or [] for name in each[section]}
        if more := sorted(names - taken):
            what = "" if section == "model" else "the optimizer's state for "
            return ModelMismatchError(f"The checkpoint {path} has {what}{more[0]}, which this {section} lacks.")
    return None


# Local SGD. Rank 3 stores `3/model/…`, if the replicas differ, and `3/optimizer/…` in the section `local`. Rank 0
# stores `outer/…` of the outer optimizer. The sections `model` and `optimizer` hold the mean, for other strategies,
# other numbers of ranks and exports. Each rank stores the means of some tensors.


def local_chunks(world: World, strategy: Strategy) -> list[Chunk]:
    """This rank's own weights and optimizer state, and its share of the means. Every rank calls it."""
    own = chunks_of([replace(part, is_saved=True) for part in strategy.shards()], strategy.optimizer)
    trained = [part.name for part in strategy.shards() if part.local.requires_grad]
    # Replicas that were just averaged are the mean.
    is_own = set(trained) if strategy.replicas_differ else set()
    chunks = [
        replace(chunk, section=LOCAL, name=f"{world.rank}/{chunk.section}/{chunk.name}")
        for chunk in own
        if chunk.section == "optimizer" or chunk.name in is_own
    ]
    for number, (name, mean) in enumerate(zip(trained, strategy.mean_weights(), strict=True)):
        if number % world.size == world.rank:
            chunks.append(whole_chunk("model", name, mean.detach().to("cpu", copy=True)))
    optimizer = _mean_state(world, {chunk.name: chunk.tensor for chunk in own if chunk.section == "optimizer"})
    chunks += [whole_chunk("optimizer", name, tensor) for name, tensor in optimizer.items()]
    if world.is_main:
        chunks += [chunk for chunk in own if chunk.section == "model" and chunk.name not in trained]
        chunks += [whole_chunk(LOCAL, _OUTER + name, tensor) for name, tensor in strategy.outer_state().items()]
    return chunks


def local_state(world: World, strategy: Strategy) -> dict[str, Any] | None:
    """The plain values of local SGD, on rank 0. Every rank calls it."""
    scalers = world.gather_objects(dict(strategy.scaler.state_dict()))
    return None if scalers is None else {"replicas_differ": strategy.replicas_differ, "scalers": scalers}


def restore_local(world: World, path: Path, strategy: Strategy, state: Mapping[str, Any], *, is_same: bool) -> None:
    """Restore each rank's own state, after `restore_sharded` has restored the mean. Every rank calls it.

    Another mesh than the one that saved it (`is_same`) resumes from the mean.
    """
    if LOCAL not in state:
        return
    with _read_on_all_ranks(world, path), _LocalReader(path, world.rank) as reader:
        stored = reader.local_entries(0)
        reader.fill(
            ReadItem(section=LOCAL, name=_OUTER + name, offset=(0,) * tensor.ndim, into=tensor)
            for name, tensor in strategy.outer_state().items()
            if _OUTER + name in stored
        )
        if is_same:
            restore_parts(reader, strategy.shards(), strategy.optimizer)
            strategy.replicas_differ = state[LOCAL]["replicas_differ"]
            if strategy.scaler.is_enabled() and state[LOCAL]["scalers"][world.rank]:
                strategy.scaler.load_state_dict(dict(state[LOCAL]["scalers"][world.rank]))


class _LocalReader(Reader):
    """Reads the weights and optimizer state that one rank has saved."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path)
        self._rank = rank
        self._own: dict[str, dict[str, TensorEntry]] = {}

    def entries(self, section: str) -> Mapping[str, TensorEntry]:
        if section not in self._own:
            prefix = f"{self._rank}/{section}/"
            found = self.local_entries(self._rank).items()
            own = {name.removeprefix(prefix): entry for name, entry in found if name.startswith(prefix)}
            # Weights that are equal on all ranks are stored once.
            self._own[section] = {**super().entries(section), **own} if section == "model" else own
        return self._own[section]


def _mean_state(world: World, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's share of the means of the optimizers' state, each over the ranks that have it."""
    union = _all_state(
        world,
        {
            name: [str(t.dtype).removeprefix("torch."), list(t.shape)]
            for name, t in own.items()
            if not _is_unstepped(name)
        },
    )
    found: dict[str, Tensor] = {}
    unstepped = {n: t for n, t in own.items() if _is_unstepped(n) and world.is_main}
    for is_counted in (True, False):
        names = [name for name, (dtype, shape, _) in union.items() if is_counted == (not shape or not _has_mean(dtype))]
        # A rank without a gradient so far adds zeros.
        tensors = [
            own[name] if name in own else torch.zeros(union[name][1], dtype=getattr(torch, union[name][0]))
            for name in names
        ]
        # Counts of steps and the like in float64: the mean of equal counts is exact.
        found_means = means(world, tensors, torch.float64 if is_counted else None)
        for number, (name, mean) in enumerate(zip(names, found_means, strict=True)):
            if number % world.size == world.rank:
                dtype, _, count = union[name]
                over_some = mean.to("cpu", copy=True).mul_(world.size / count)
                found[name] = (over_some if _has_mean(dtype) else over_some.round()).to(getattr(torch, dtype))
    stepped = {name.rpartition("|")[0] for name in union}
    return found | {n: t for n, t in unstepped.items() if n.removesuffix("|") not in stepped}


def _all_state(world: World, described: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """All state that some rank has: its dtype, its shape, and how many ranks have it."""
    is_other = world.broadcast_object(described) != described
    if not world.any(is_other):
        return {name: [*each, world.size] for name, each in described.items()}
    union: dict[str, list[Any]] = {}
    for each in world.gather_objects(described) or []:
        for name, (dtype, shape) in each.items():
            union.setdefault(name, [dtype, shape, 0])[2] += 1
    for name in [name for name in union if name.endswith("=none") and name.removesuffix("=none") in union]:
        del union[name]  # others have values there
    shared: dict[str, list[Any]] = world.broadcast_object(union)
    return shared


def _is_unstepped(name: str) -> bool:
    """Whether it says that a parameter has no state."""
    return name.endswith("|")


def _has_mean(dtype: str) -> bool:
    """Whether numbers of this dtype have a mean of this dtype."""
    return bool(getattr(torch, dtype).is_floating_point or getattr(torch, dtype).is_complex)


# Error feedback of compressed gradients: `3/error/…` of rank 3 in the section `local`, and `basis/…`, which is equal on
# all ranks. On another number of ranks, each gets an equal part of the sum of all errors.


def error_feedback_chunks(world: World, strategy: Strategy) -> list[Chunk]:
    """This rank's error feedback; on rank 0 also the bases."""
    if strategy.powersgd is None:
        return []
    own = {f"{world.rank}/error/{name}": tensor for name, tensor in strategy.powersgd.errors.items()}
    if world.is_main:
        own |= {f"basis/{name}": tensor for name, tensor in strategy.powersgd.bases.items()}
    return [whole_chunk(LOCAL, name, tensor) for name, tensor in own.items()]


def restore_error_feedback(
    world: World, path: Path, strategy: Strategy, state: Mapping[str, Any], *, is_same: bool
) -> None:
    """Restore the error feedback, or start with none. Every rank calls it."""
    if strategy.powersgd is None:
        return
    errors: dict[str, Tensor] = {}
    bases: dict[str, Tensor] = {}
    with _read_on_all_ranks(world, path):
        if ERROR_FEEDBACK in state:
            # For another mesh, rank 0 reads the errors of all ranks.
            ranks = [world.rank] if is_same else range(state["world_size"] if world.is_main else 0)
            with Reader(path) as reader:
                bases = _read_local(reader, 0, "basis/")
                for rank in ranks:
                    for name, tensor in _read_local(reader, rank, f"{rank}/error/").items():
                        errors[name] = errors[name].add_(tensor) if name in errors else tensor
            for error in [] if is_same else errors.values():
                error.div_(world.size)
    strategy.powersgd.load_error_feedback(errors if is_same else world.broadcast_tensors(errors), bases)


def _read_local(reader: Reader, rank: int, prefix: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    items = []
    for name, entry in reader.local_entries(rank).items():
        if name.startswith(prefix):
            into = found[name.removeprefix(prefix)] = torch.empty(entry.shape, dtype=entry.dtype)
            items.append(ReadItem(section=LOCAL, name=name, offset=(0,) * into.ndim, into=into))
    reader.fill(items)
    return found
