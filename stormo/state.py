"""Everything a run needs to go on, collected from all workers into one checkpoint and handed out again.

The main worker writes and reads; what each worker has of its own (random generators, running statistics, its part of
the loss) travels to and from it. So any worker count can resume what any other has saved, and no worker but the main
one needs to see the run folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from stormo.checkpoint import (
    Snapshot,
    collect_random_state,
    flatten_optimizer,
    restore_optimizer,
    restore_random_state,
)
from stormo.data.order import derive_seed, seed_generators
from stormo.progress import Progress
from stormo.strategies.strategy import Strategy
from stormo.world.world import World

_BUFFER, _RANDOM, _LOSS = "buffer/", "random/", "loss"


@dataclass(kw_only=True)
class RunState:
    """What changes while a run goes on."""

    progress: Progress
    strategy: Strategy
    loss_sum: Tensor  # this worker's part of the epoch's summed loss, on the device

    def __post_init__(self) -> None:
        self.strategy.clock = self.progress

    def snapshot(self, world: World, seed: int) -> Snapshot | None:
        """The state of all workers, on the main one; None on the others. Every worker must call it."""
        strategy = self.strategy
        noise_scale = strategy.noise_scale.state() if strategy.noise_scale is not None else None
        random_tensors, random_json = collect_random_state()
        own = {_RANDOM + name: tensor for name, tensor in random_tensors.items()}
        own |= {_BUFFER + name: buffer.detach() for name, buffer in strategy.module.named_buffers()}
        own[_LOSS] = self.loss_sum.detach().double()
        gathered = world.gather_bytes(safetensors.torch.save(_on_cpu(own)))
        random_states = world.gather_json(random_json)
        if gathered is None:
            return None
        ranks = {
            f"{rank}/{name}": tensor
            for rank, payload in enumerate(gathered)
            for name, tensor in safetensors.torch.load(payload).items()
        }
        model = {name: tensor.detach() for name, tensor in strategy.module.state_dict().items()}
        model |= {name: mean for name, mean in _mean_buffers(ranks, world.size).items() if name in model}
        return Snapshot(
            model=model,
            optimizer=flatten_optimizer(strategy.optimizer, _names(strategy)),
            ranks=ranks,
            state={
                "progress": self.progress.to_json(),
                "world_size": world.size,
                "seed": seed,
                "random": random_states,
                "scaler": strategy.scaler_state(),
                "noise_scale": noise_scale,
            },
        )

    def restore(self, world: World, snapshot: Snapshot | None, seed: int) -> None:
        """Take over a saved state; the main worker gives it, and every worker must call it."""
        state = world.share_json(snapshot.state if snapshot else None)
        model = world.share_tensors(snapshot.model if snapshot else None)
        optimizer = world.share_tensors(snapshot.optimizer if snapshot else None)
        ranks = world.share_tensors(snapshot.ranks if snapshot else None)
        strategy = self.strategy
        strategy.module.load_state_dict(model)
        restore_optimizer(strategy.optimizer, _names(strategy), optimizer)
        if state["scaler"]:
            strategy.scaler.load_state_dict(state["scaler"])
        if strategy.noise_scale is not None and state.get("noise_scale"):
            strategy.noise_scale.take(state["noise_scale"])
        self.progress.take(state["progress"])
        self.progress.num_resumes += 1
        if state["world_size"] == world.size:
            own = {name.partition("/")[2]: t for name, t in ranks.items() if name.startswith(f"{world.rank}/")}
            for name, buffer in strategy.module.named_buffers():
                buffer.copy_(own[_BUFFER + name])
            self.loss_sum.copy_(own[_LOSS])
            random_tensors = {n.removeprefix(_RANDOM): t for n, t in own.items() if n.startswith(_RANDOM)}
            restore_random_state(random_tensors, state["random"][world.rank])
        else:
            # Another number of workers: their generators start anew, from the same seed and this very step.
            seed_generators(derive_seed(seed, "resume", self.progress.step, world.rank))
            losses = [tensor for name, tensor in ranks.items() if name.endswith("/" + _LOSS)]
            self.loss_sum.copy_(torch.stack(losses).sum() / world.size)


def _names(strategy: Strategy) -> dict[Any, str]:
    return {parameter: name for name, parameter in strategy.module.named_parameters()}


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _mean_buffers(ranks: Mapping[str, Tensor], num_ranks: int) -> dict[str, Tensor]:
    """The floating-point buffers, averaged over the workers: what a worker count that differs goes on with."""
    names = [name.removeprefix("0/" + _BUFFER) for name in ranks if name.startswith("0/" + _BUFFER)]
    means = {}
    for name in names:
        copies = [ranks[f"{rank}/{_BUFFER}{name}"] for rank in range(num_ranks)]
        if copies[0].is_floating_point():
            means[name] = torch.stack(copies).double().mean(dim=0).to(copies[0].dtype)
    return means
