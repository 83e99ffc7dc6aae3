"""Everything a run needs to go on, collected from all workers into one checkpoint and handed out again.

Where every worker has the whole model, the main one writes and reads; what each worker has of its own (random
generators, running statistics, its part of the loss) travels to and from it. So any worker count can resume what any
other has saved, and no worker but the main one needs to see the run folder. Where the model is spread, every worker
writes and reads its own boxes of it, and any mesh can resume what any other has saved. Workers that step by themselves
each write what they have, and the mean of all of them besides; so do those that keep a part of their gradients back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from stormo import checkpoint
from stormo.checkpoint import (
    KEPT_BACK,
    Shard,
    Snapshot,
    aliases,
    boxes_of,
    collect_random_state,
    flatten_optimizer,
    kept_boxes,
    kept_buffers,
    local_boxes,
    local_state,
    restore_optimizer,
    restore_random_state,
    take_checkpoint,
    take_kept,
    take_local,
    whole_box,
)
from stormo.data.order import derive_seed, seed_generators
from stormo.errors import StormoError, counted
from stormo.files import fits
from stormo.mesh import Mesh
from stormo.progress import Progress
from stormo.strategies.strategy import Strategy
from stormo.world.world import World

_BUFFER, _RANDOM, _LOSS, _ITEMS = "buffer/", "random/", "loss", "items"


@dataclass(kw_only=True)
class RunState:
    """What changes while a run goes on."""

    progress: Progress
    strategy: Strategy
    loss_sum: Tensor  # this worker's part of the epoch's summed loss, on the device
    num_items: Tensor = field(init=False)  # and of what the loss is a mean of: samples, tokens and the like

    def __post_init__(self) -> None:
        self.num_items = torch.zeros_like(self.loss_sum)
        self.strategy.clock = self.progress

    def add_loss(self, part: Tensor, num_samples: int) -> Tensor:
        """Take in a step's loss, of which this worker's passes have this part; return its part of the mean loss."""
        mean, loss_sum, num_items = self.strategy.weighing.of_step(part, num_samples)
        self.loss_sum += loss_sum
        self.num_items += num_items
        return mean

    def content(self, world: World, seed: int) -> Snapshot | Shard | None:
        """What this worker gives to a checkpoint; every worker must call it."""
        return self.shard(world, seed) if self.strategy.saves_apart else self.snapshot(world, seed)

    def snapshot(self, world: World, seed: int) -> Snapshot | None:
        """The state of all workers, on the main one; None on the others. Every worker must call it."""
        strategy = self.strategy
        ranks, state = self._gather(world, seed)
        if state is None:
            return None
        model = {name: tensor.detach() for name, tensor in strategy.module.state_dict().items()}
        model |= {name: mean for name, mean in _mean_buffers(ranks).items() if name in model}
        return Snapshot(
            model=model, optimizer=flatten_optimizer(strategy.optimizer, _names(strategy)), ranks=ranks, state=state
        )

    def shard(self, world: World, seed: int) -> Shard:
        """This worker's boxes of a checkpoint; the main one has the plain values besides."""
        strategy = self.strategy
        ranks, state = self._gather(world, seed)
        gathered = world.gather_json(list(kept_buffers(strategy)))
        if strategy.steps_alone:
            boxes, local = local_boxes(world, strategy), local_state(world, strategy)
        else:
            boxes, local = boxes_of(strategy.parts(), strategy.optimizer), None
        boxes += kept_boxes(world, strategy)
        if state is not None:
            if local is not None:
                state["local"] = local
            if strategy.low_rank is not None:
                state[KEPT_BACK] = strategy.low_rank.rank
            state["mesh"] = _mesh(world)
            kept = {name for each in gathered or [] for name in each}
            boxes += [whole_box("model", name, mean) for name, mean in _mean_buffers(ranks).items() if name in kept]
        return Shard(boxes=boxes, aliases=aliases(strategy), ranks=ranks, state=state)

    def _gather(self, world: World, seed: int) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        """What each worker has of its own, and the plain values, on the main one."""
        strategy = self.strategy
        noise_scale = strategy.noise_scale.state() if strategy.noise_scale is not None else None
        random_tensors, random_json = collect_random_state()
        own = {_RANDOM + name: tensor for name, tensor in random_tensors.items()}
        own |= {_BUFFER + name: buffer.detach() for name, buffer in strategy.named_buffers()}
        own[_LOSS], own[_ITEMS] = self.loss_sum.detach().double(), self.num_items.detach().double()
        gathered = world.gather_bytes(safetensors.torch.save(_on_cpu(own)))
        random_states = world.gather_json(random_json)
        if gathered is None:
            return {}, None
        ranks = {
            f"{rank}/{name}": tensor
            for rank, payload in enumerate(gathered)
            for name, tensor in safetensors.torch.load(payload).items()
        }
        return ranks, {
            "progress": self.progress.to_json(),
            "world_size": world.size,
            "seed": seed,
            "random": random_states,
            "scaler": strategy.scaler_state(),
            "noise_scale": noise_scale,
            "stale_gradients": {str(age): number for age, number in (strategy.stale_gradients or {}).items()},
        }

    def take_up(self, world: World, path: Path, seed: int) -> None:
        """Go on from a checkpoint of either version, whatever mesh has saved it. Every worker calls it.

        Only where every worker saves its own part must one besides the main one see the path.
        """
        if self.strategy.saves_apart:
            state, ranks = take_checkpoint(world, path, self.strategy)
            self._restore_rest(world, state, ranks, seed)
            is_same = _is_same_mesh(state, world)
            if self.strategy.steps_alone:
                take_local(world, path, self.strategy, state, is_same=is_same)
            take_kept(world, path, self.strategy, state, is_same=is_same)
        else:
            self.restore(world, checkpoint.load(path) if world.is_main else None, seed)

    def restore(self, world: World, snapshot: Snapshot | None, seed: int) -> None:
        """Take over a saved state; the main worker gives it, and every worker must call it."""
        state = world.share_json(snapshot.state if snapshot else None)
        model = world.share_tensors(snapshot.model if snapshot else None)
        optimizer = world.share_tensors(snapshot.optimizer if snapshot else None)
        ranks = world.share_tensors(snapshot.ranks if snapshot else None)
        strategy = self.strategy
        strategy.module.load_state_dict(model)
        restore_optimizer(strategy.optimizer, _names(strategy), optimizer)
        self._restore_rest(world, state, ranks, seed)

    def _restore_rest(self, world: World, state: Mapping[str, Any], ranks: Mapping[str, Tensor], seed: int) -> None:
        """All but the weights and the optimizer's state."""
        strategy = self.strategy
        if problem := _problem(state):
            raise StormoError(f"The checkpoint cannot be resumed: its state.json {problem}.")
        is_own = strategy.steps_alone and _is_same_mesh(state, world)
        if "local" in state and state["world_size"] > 1 and not is_own:
            strategy.notices.append(
                f"The checkpoint is of {counted(state['world_size'], 'worker')} that stepped by themselves: the run "
                "goes on from the mean of their weights and of the state of their optimizers."
            )
        if state["scaler"]:
            strategy.scaler.load_state_dict(dict(state["scaler"]))
        if strategy.noise_scale is not None and state.get("noise_scale"):
            strategy.noise_scale.take(state["noise_scale"])
        strategy.take_stale_gradients(state.get("stale_gradients", {}))
        self.progress.take(state["progress"])
        self.progress.num_resumes += 1
        if _is_same_mesh(state, world):
            own = {name.partition("/")[2]: t for name, t in ranks.items() if name.startswith(f"{world.rank}/")}
            for name, buffer in strategy.named_buffers():
                buffer.copy_(own[_BUFFER + name])
            self.loss_sum.copy_(own[_LOSS])
            self.num_items.copy_(own[_ITEMS] if _ITEMS in own else torch.tensor(self.progress.position / world.size))
            random_tensors = {n.removeprefix(_RANDOM): t for n, t in own.items() if n.startswith(_RANDOM)}
            restore_random_state(random_tensors, state["random"][world.rank])
        else:
            # Other workers: their generators start anew, from the same seed and this very step.
            seed_generators(derive_seed(seed, "resume", self.progress.step, world.draws))
            losses = [tensor for name, tensor in ranks.items() if name.endswith("/" + _LOSS)]
            self.loss_sum.copy_(torch.stack(losses).sum() / world.size)
            items = [tensor for name, tensor in ranks.items() if name.endswith("/" + _ITEMS)]
            # Checkpoints of former releases do not tell: losses were means over samples.
            num_items = torch.stack(items).sum() if items else torch.tensor(float(self.progress.position))
            self.num_items.copy_(num_items / world.size)


def _problem(state: Mapping[str, Any]) -> str | None:
    """What of the plain values is not what a run has saved."""
    hints = {"world_size": int, "progress": dict[str, Any], "random": list[Any], "scaler": dict[str, Any] | None}
    for key, hint in hints.items():
        if key not in state or not fits(state[key], hint):
            return f"has no valid {key}"
    if not 0 < state["world_size"] <= 2**31:
        return "has no valid world_size"
    ages = state.get("stale_gradients", {})
    is_valid = fits(ages, dict[str, int]) and fits(state.get("noise_scale"), list[float] | None)
    return None if is_valid else "has no valid stale_gradients or noise_scale"


def _names(strategy: Strategy) -> dict[Any, str]:
    return {parameter: name for name, parameter in strategy.module.named_parameters()}


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _mean_buffers(ranks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers, those of floating point averaged over the workers that have them: what another mesh goes on with."""
    copies: dict[str, list[Tensor]] = {}
    for full_name, tensor in ranks.items():
        name = full_name.partition("/")[2]
        if name.startswith(_BUFFER):
            copies.setdefault(name.removeprefix(_BUFFER), []).append(tensor)
    return {
        name: torch.stack(each).double().mean(dim=0).to(each[0].dtype) if each[0].is_floating_point() else each[0]
        for name, each in copies.items()
    }


def _mesh(world: World) -> dict[str, int]:
    """How the workers are arranged, and among how many a batch is divided."""
    return {**dataclasses.asdict(world.mesh), "data_size": world.data.size}


def _is_same_mesh(state: Mapping[str, Any], world: World) -> bool:
    """Whether every worker is where it was: those of a run without a mesh were copies."""
    size = state["world_size"]
    copies = {**dataclasses.asdict(Mesh(replicate=size)), "data_size": size}
    return bool(state.get("mesh", copies) == _mesh(world))
