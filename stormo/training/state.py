"""The state of a run: saved from all ranks into a checkpoint, and restored on any number of ranks.

Where every rank has the whole model, rank 0 writes and reads. What differs between ranks (random generators, running
statistics) is sent to and from it, so that no other rank needs to see the run folder. Of a sharded model every rank
writes and reads its own chunks. With local updates or error feedback, each rank also writes its own values.
"""

from __future__ import annotations

import hashlib
import math
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from stormo import checkpoint
from stormo.checkpoint.format import OWN, Snapshot
from stormo.checkpoint.ranks import (
    BUFFER,
    BUFFERS,
    ERROR_FEEDBACK,
    LOSSES,
    error_feedback_chunks,
    local_chunks,
    local_state,
    restore_error_feedback,
    restore_local,
    restore_sharded,
)
from stormo.checkpoint.state import (
    aliases,
    average_chunks,
    chunks_of,
    collect_random_state,
    flatten_optimizer,
    restore_average,
    restore_optimizer,
    restore_random_state,
    stored_buffers,
)
from stormo.checkpoint.writer import Shard, whole_chunk
from stormo.config.mesh import Mesh
from stormo.data.generators import seed_generators
from stormo.data.order import derive_seed
from stormo.distributed.world import World
from stormo.errors import StormoError, pluralize
from stormo.parallel.base import Strategy
from stormo.parallel.weight_average import EMA
from stormo.system.files import fits, printable
from stormo.training.divergence import Trend

_RANDOM, _ITEMS = "random/", "items"
_MAX_COUNT = 2**62


@dataclass(kw_only=True)
class Progress:
    """The counters of a run: JSON-able, and the same on every rank."""

    epoch: int = 1  # the current one
    position: int = 0  # samples of it that are done
    step: int = 0  # optimizer steps since the start
    samples_seen: int = 0
    samples_trained: int = 0  # with those that a rollback has undone
    train_time_s: float = 0.0  # without validation and checkpoints
    epoch_time_s: float = 0.0  # the part of it in the current epoch
    wait_s: float = 0.0  # for the loaders
    wall_time_s: float = 0.0  # of earlier attempts
    num_resumes: int = 0
    num_rollbacks: int = 0
    rate_factor: float = 1.0  # of the learning rate; every rollback lowers it
    diverged_rate: float | None = None  # the lowest learning rate after warm-up that has diverged
    trend: Trend = field(default_factory=Trend)  # of the training loss
    stable_steps: list[int] = field(default_factory=list)  # of the last two checkpoints with a stable loss
    peak_memory_bytes: int | None = None
    peak_reserved_memory_bytes: int | None = None  # of a GPU
    epochs_done: int = 0  # validated ones
    target_streak: int = 0  # epochs in a row that reached the target
    time_to_target_s: float | None = None
    target_unix_s: float | None = None  # when it was reached
    validation: dict[str, float] | None = None  # of the last validated epoch
    best_validation: dict[str, float] | None = None
    sample_order_sha256: str = ""  # chain over every sample trained on, in order
    stream: dict[str, Any] | None = None  # a bookmark in the training stream

    def advance(self, samples: Tensor) -> None:
        """Count one global batch of these samples."""
        chain = hashlib.sha256(bytes.fromhex(self.sample_order_sha256))
        chain.update(samples.numpy().data)
        self.sample_order_sha256 = chain.hexdigest()
        self.step += 1
        self.position += len(samples)
        self.samples_seen += len(samples)
        self.samples_trained += len(samples)

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Restore what `asdict` gave; what was not saved keeps its default."""
        hints = typing.get_type_hints(Progress)
        for name, value in values.items():
            if name not in hints:
                continue
            if not fits(value, hints[name]) or (hints[name] is int and not 0 <= value < _MAX_COUNT):
                shown = "out of range" if type(value) is int else printable(repr(value)[:40])
                raise StormoError(f"The checkpoint cannot be resumed: its counter {name} is {shown}.")
            setattr(self, name, Trend(**value) if name == "trend" else value)


@dataclass(kw_only=True)
class RunState:
    """What changes while a run trains."""

    progress: Progress
    strategy: Strategy
    loss_sum: Tensor  # this rank's part of the epoch's summed loss, on the device
    num_items: Tensor = field(init=False)  # and of the items that the loss is a mean of: samples, tokens

    def __post_init__(self) -> None:
        self.num_items = torch.zeros_like(self.loss_sum)
        self.strategy.clock = self.progress

    def add_loss(self, part: Tensor, num_samples: int) -> Tensor:
        """Add this rank's part of a step's loss; return its part of the mean loss."""
        mean, loss_sum, num_items = self.strategy.loss_weights.of_step(part, num_samples)
        self.loss_sum += loss_sum
        self.num_items += num_items
        later = self.strategy.later_losses
        return mean if later is None else mean + 0 * later  # not finite where one of them is not

    def content(self, world: World, seed: int) -> Snapshot | Shard | None:
        """What this rank gives to a checkpoint. All ranks call it."""
        return self.shard(world, seed) if self.strategy.sharded_checkpoint else self.snapshot(world, seed)

    def snapshot(self, world: World, seed: int) -> Snapshot | None:
        """The state of all ranks, on rank 0; None on the others. All ranks call it."""
        strategy, buffers = self.strategy, stored_buffers(world, self.strategy)
        random_tensors, state = self._plain(world, seed, buffers.sources)
        own = random_tensors | {BUFFER + name: tensor for name, tensor in buffers.own.items()}
        on_cpu = {name: tensor.cpu().contiguous() for name, tensor in own.items()}
        gathered = world.gather_bytes(safetensors.torch.save(on_cpu))
        if state is None or gathered is None:
            return None
        ranks = {
            f"{rank}/{name}": tensor
            for rank, payload in enumerate(gathered)
            for name, tensor in safetensors.torch.load(payload).items()
        }
        model = {name: tensor.detach() for name, tensor in strategy.module.state_dict().items()} | buffers.model
        optimizer = flatten_optimizer(strategy.optimizer, _names(strategy))
        optimizer |= {chunk.name: chunk.tensor for chunk in average_chunks(strategy.average)}
        optimizer |= {
            n + EMA: optimizer[first + EMA] for n, first in aliases(strategy).items() if first + EMA in optimizer
        }
        optimizer |= {name: model.pop(name) for name in buffers.model if name.endswith(EMA)}
        return Snapshot(model=model, optimizer=optimizer, ranks=ranks, state=state)

    def shard(self, world: World, seed: int) -> Shard:
        """This rank's chunks of a checkpoint, and the plain values on rank 0."""
        strategy, buffers = self.strategy, stored_buffers(world, self.strategy)
        random_tensors, state = self._plain(world, seed, buffers.sources)
        if strategy.local_updates:
            chunks, local = local_chunks(world, strategy), local_state(world, strategy)
        else:
            chunks, local = chunks_of(strategy.shards(), strategy.optimizer), None
        chunks += error_feedback_chunks(world, strategy)
        chunks += average_chunks(strategy.average)
        for name, tensor in buffers.model.items():
            chunks.append(whole_chunk("optimizer" if name.endswith(EMA) else "model", name, tensor))
        chunks += [whole_chunk(OWN, BUFFER + name, tensor) for name, tensor in buffers.own.items()]
        chunks += [whole_chunk(OWN, name, tensor) for name, tensor in random_tensors.items()]
        if state is not None:
            if local is not None:
                state["local"] = local
            if strategy.powersgd is not None:
                state[ERROR_FEEDBACK] = strategy.powersgd.rank
            state["mesh"] = _mesh(world)
        return Shard(chunks=chunks, aliases=aliases(strategy), state=state)

    def _plain(
        self, world: World, seed: int, sources: Mapping[str, int]
    ) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        """This rank's generators as tensors, and all plain values on rank 0."""
        strategy = self.strategy
        own_values = strategy.state_dict()
        random_tensors, random_json = collect_random_state()
        own = {_RANDOM + name: tensor for name, tensor in random_tensors.items()}
        sums = [float(self.loss_sum.detach().double()), float(self.num_items.detach().double())]
        gathered = world.gather_objects([random_json, *sums])
        if gathered is None:
            return own, None
        return own, {
            "progress": asdict(self.progress),
            "world_size": world.size,
            "seed": seed,
            "random": [each for each, _, _ in gathered],
            LOSSES: [loss for _, loss, _ in gathered],
            _ITEMS: [num_items for _, _, num_items in gathered],
            BUFFERS: dict(sources),
            **own_values,
        }

    def restore(self, world: World, path: Path, seed: int) -> None:
        """Restore a checkpoint of either version, whatever mesh has saved it. All ranks call it.

        Only ranks that save their own part must see the path; else rank 0 is enough.
        """
        if self.strategy.sharded_checkpoint:
            state, own = restore_sharded(world, path, self.strategy, lambda state: _is_same_mesh(state, world))
            self._restore_rest(world, state, own, seed)
            is_same = _is_same_mesh(state, world)
            if self.strategy.local_updates:
                restore_local(world, path, self.strategy, state, is_same=is_same)
            restore_error_feedback(world, path, self.strategy, state, is_same=is_same)
        else:
            self.restore_snapshot(world, checkpoint.load(path) if world.is_main else None, seed)

    def restore_snapshot(self, world: World, snapshot: Snapshot | None, seed: int) -> None:
        """Restore a snapshot that rank 0 has. All ranks call it."""
        state = world.broadcast_object(None if snapshot is None else snapshot.state)
        model = world.broadcast_tensors(snapshot.model if snapshot else None)
        optimizer = world.broadcast_tensors(snapshot.optimizer if snapshot else None)
        strategy = self.strategy
        strategy.module.load_state_dict(model)
        averages = {name: optimizer.pop(name) for name in list(optimizer) if name.endswith(EMA)}
        restore_optimizer(strategy.optimizer, _names(strategy), optimizer)
        if strategy.average is not None:
            restore_average(strategy.average, averages)
        own = _scatter_own(world, snapshot, state) if _is_same_mesh(state, world) else {}
        self._restore_rest(world, state, own, seed)

    def _restore_rest(self, world: World, state: Mapping[str, Any], own: Mapping[str, Tensor], seed: int) -> None:
        """Restore all but weights and optimizer; `own` is what this rank had, on the same mesh."""
        strategy = self.strategy
        if problem := _problem(state):
            raise StormoError(f"The checkpoint cannot be resumed: its state.json {problem}.")
        is_own = strategy.local_updates and _is_same_mesh(state, world)
        if "local" in state and state["world_size"] > 1 and not is_own:
            strategy.notices.append(
                f"The checkpoint is of {pluralize(state['world_size'], 'worker')} with local updates: the run resumes "
                "from the mean of their weights and of the state of their optimizers."
            )
        strategy.load_state_dict(state)
        self.progress.load_state_dict(state["progress"])
        self.progress.num_resumes += 1
        if _is_same_mesh(state, world):
            averages = {} if strategy.average is None else strategy.average.buffers
            for name, buffer in (*strategy.named_buffers(), *((name + EMA, each) for name, each in averages.items())):
                if BUFFER + name in own:  # the others are in the model's state
                    buffer.copy_(own[BUFFER + name])
            self.loss_sum.fill_(state[LOSSES][world.rank])
            self.num_items.fill_(state[_ITEMS][world.rank])
            random_tensors = {n.removeprefix(_RANDOM): t for n, t in own.items() if n.startswith(_RANDOM)}
            restore_random_state(random_tensors, state["random"][world.rank])
        else:
            # Another mesh: new generators, seeded with the run's seed and this step.
            seed_generators(derive_seed(seed, "resume", self.progress.step, world.random_stream))
            self.loss_sum.fill_(math.fsum(state[LOSSES]) / world.size)
            self.num_items.fill_(math.fsum(state[_ITEMS]) / world.size)


def _problem(state: Mapping[str, Any]) -> str | None:
    """What is wrong with the plain values."""
    hints = {"world_size": int, "progress": dict[str, Any], "random": list[Any], "scaler": dict[str, Any] | None}
    hints |= {LOSSES: list[float], _ITEMS: list[float]}
    for key, hint in hints.items():
        if key not in state or not fits(state[key], hint):
            return f"has no valid {key}"
    if not 0 < state["world_size"] <= 2**31:
        return "has no valid world_size"
    ages = state.get("stale_gradients", {})
    is_valid = fits(ages, dict[str, int]) and fits(state.get("noise_scale"), list[float] | None)
    is_valid &= fits(state.get("schedule_free"), list[dict[str, float]] | None)
    return None if is_valid else "has no valid stale_gradients, noise_scale or schedule_free"


def _names(strategy: Strategy) -> dict[Any, str]:
    return {parameter: name for name, parameter in strategy.module.named_parameters()}


def _scatter_own(world: World, snapshot: Snapshot | None, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """What this rank had of its own: rank 0 broadcasts replicas, and sends the rest to each rank."""
    by_rank: dict[int, dict[str, Tensor]] = {}
    for full_name, tensor in (snapshot.ranks if snapshot else {}).items():
        rank, _, name = full_name.partition("/")
        by_rank.setdefault(int(rank), {})[name] = tensor
    replicas = {
        BUFFER + name: by_rank[rank].pop(BUFFER + name) for name, rank in state.get(BUFFERS, {}).items() if by_rank
    }
    shared = world.broadcast_tensors(replicas)
    own = world.scatter_bytes(lambda rank: safetensors.torch.save(by_rank.get(rank, {})))
    return shared | safetensors.torch.load(own)


def _mesh(world: World) -> dict[str, int]:
    """The mesh, and among how many ranks a batch is divided."""
    return {**asdict(world.mesh), "data_size": world.data.size}


def _is_same_mesh(state: Mapping[str, Any], world: World) -> bool:
    """Whether the mesh is the saved one; a run without a mesh had replicas."""
    size = state["world_size"]
    copies = {**asdict(Mesh(replicate=size)), "data_size": size}
    return bool(state.get("mesh", copies) == _mesh(world))
