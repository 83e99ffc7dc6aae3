"""The order in which a model is transformed, whatever the mesh: each step sees what the one before has left."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from stormo.config.plan import Plan
from stormo.config.schema import TrainConfig
from stormo.distributed.parallel_dims import Grid
from stormo.parallel.blocks import blocks_of
from stormo.parallel.halves import HALVES
from stormo.parallel.hybrid import split_classifier
from stormo.parallel.recompute import recompute
from stormo.parallel.shard import shard
from stormo.parallel.split_layers import Cut
from stormo.parallel.tensor import derive_plan, split_tensor
from stormo.tasks.task import Task


def compose(
    model: nn.Module, roots: Sequence[nn.Module], plan: Plan, settings: TrainConfig, task: Task, grid: Grid
) -> dict[str, Cut]:
    """Tensor, recomputing, compiling, sharding, in this order and in place; a pipeline has cut the model before.

    Returns what the axis tensor has cut, by the names of the parameters.

    Args:
        model: the whole tree, on meta.
        roots: the parts of it that this worker computes: the model itself, or its stages of a pipeline.
        plan: of the run.
        settings: of the run.
        task: whose model it is.
        grid: of the workers.
    """
    layout, sharding = plan.layout, settings.sharding
    cuts: dict[str, Cut] = {}
    if layout.strategy == "hybrid":
        cuts = split_classifier(task, model, grid.line("tensor"))
    elif grid.mesh.tensor > 1:
        cuts = split_tensor(model, derive_plan(task, model, grid.mesh.tensor), grid.line("tensor"))
    for root, units in zip(roots, _units(model, roots, sharding.shard_modules), strict=True):
        if sharding.checkpoint_activations:
            recompute(root, units or [""])
        if plan.compile:
            for path in units or [""]:
                root.get_submodule(path).compile(dynamic=False)
        if layout.zero == 3:
            dtype, on_gpu = HALVES.get(plan.precision), layout.device_type == "cuda"
            # What computes again in backward does so unit by unit, and what was asked for stays as it is.
            merges = grid.mesh.size == 1 and not sharding.checkpoint_activations and sharding.shard_modules is None
            shard(root, units, grid, dtype=dtype, offload=sharding.offload, on_gpu=on_gpu, merges=merges)
    return cuts


def _units(model: nn.Module, roots: Sequence[nn.Module], asked: str | None) -> list[list[str]]:
    """Paths of the blocks in each root; those that are asked for go by their names in the whole model."""
    if asked is None:
        return [blocks_of(root) for root in roots]
    wanted = [model.get_submodule(path) for path in blocks_of(model, asked)]
    found = []
    for root in roots:
        paths = {module: path for path, module in root.named_modules()}
        found.append([paths[module] for module in wanted if module in paths])
    return found
