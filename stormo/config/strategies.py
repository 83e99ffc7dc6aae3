"""The table of strategies: what settings, plan, forecast and launcher must know of each.

The classes are in `stormo/parallel`; `stormo/parallel/table.py` maps names to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

StrategyName = Literal[
    "auto",
    "single",
    "dp",
    "ddp",
    "local",
    "server",
    "zero1",
    "zero2",
    "fsdp",
    "hsdp",
    "tensor",
    "hybrid",
    "pipeline",
    "naive",
]
SINGLE, DDP, MESH = "single", "ddp", "mesh"  # what `auto` and --mesh resolve to


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategySpec:
    """One strategy."""

    name: str
    meaning: str
    axis: str | None = None  # the mesh axis of all workers; None: every worker has the whole model
    zero: int = 0  # ZeRO stage of the axis shard
    replicates_nodes: bool = False  # shards within a node, replicas between nodes
    cuts_classifier: bool = False  # the axis tensor cuts the classifier alone, and workers take different samples
    schedule: str | None = None  # its only pipeline schedule, with one micro-batch
    options: tuple[str, ...] = ()  # settings of this strategy alone
    least_workers: int = 1
    is_one_process: bool = False  # one process uses all GPUs of its node
    is_sharded: bool = False  # a worker may hold less than the whole model
    sharded_checkpoint: bool = False  # every worker writes its own file of a checkpoint, so all must see the run folder
    local_updates: bool = False  # workers step with their own gradients; their weights are averaged periodically
    averages_gradients: bool = True  # in buckets, during backward
    takes_compression: bool = False
    takes_fp16: bool = True
    takes_cuda_graph: bool = False
    no_noise_scale: str | None = None  # why the gradient noise scale cannot be measured

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes of the mesh along which workers take different samples."""
        return ("tensor",) if self.cuts_classifier else ("replicate", "shard")

    @property
    def is_kept_on_resume(self) -> bool:
        """Whether a run resumes with it unless the user sets another one; replicas are chosen anew."""
        return self.is_sharded or bool(self.options)


def _sharded(name: str, axis: str | None, meaning: str, **fields: object) -> StrategySpec:
    reason = "no worker of a sharded model has the whole gradient of its samples to compare"
    made = {"is_sharded": True, "sharded_checkpoint": True, "no_noise_scale": reason, **fields}
    return StrategySpec(name=name, axis=axis, meaning=meaning, **made)  # type: ignore[arg-type]


_PIPELINE = ("schedule", "micro_batches")
SPECS: dict[str, StrategySpec] = {
    row.name: row
    for row in (
        StrategySpec(name=SINGLE, meaning="one device", takes_compression=True, takes_cuda_graph=True),
        StrategySpec(name="dp", meaning="DataParallel, threads of one process", is_one_process=True),
        StrategySpec(
            name=DDP, meaning="replicas of the model, gradients averaged", takes_compression=True, takes_cuda_graph=True
        ),
        StrategySpec(
            name="local",
            meaning="every worker steps with the gradient of its own samples",
            options=("average_every", "outer_lr", "outer_momentum"),
            sharded_checkpoint=True,
            local_updates=True,
            averages_gradients=False,
            no_noise_scale="its workers never exchange their gradients",
        ),
        StrategySpec(
            name="server",
            meaning="workers send their gradients to servers",
            options=("servers", "staleness"),
            least_workers=2,
            sharded_checkpoint=True,
            averages_gradients=False,
            takes_fp16=False,
            no_noise_scale="each server sees only its shard of the gradients",
        ),
        _sharded("zero1", "shard", "optimizer state sharded", zero=1),
        _sharded("zero2", "shard", "optimizer state and gradients sharded", zero=2),
        _sharded("fsdp", "shard", "weights, gradients and optimizer state sharded", zero=3, takes_cuda_graph=True),
        _sharded(
            "hsdp",
            "shard",
            "shards within a node, replicas between nodes",
            zero=3,
            replicates_nodes=True,
            least_workers=2,
        ),
        _sharded("tensor", "tensor", "every large layer split over the workers", least_workers=2),
        _sharded(
            "hybrid",
            "tensor",
            "replicas of all layers except the classifier, which is split",
            cuts_classifier=True,
            least_workers=2,
        ),
        _sharded("pipeline", "pipeline", "layers in stages, one after the other", options=_PIPELINE, least_workers=2),
        _sharded("naive", "pipeline", "layers in stages, one after the other", schedule="naive", least_workers=2),
        _sharded(MESH, None, "the axes of --mesh"),
    )
}


def names(holds: Callable[[StrategySpec], object]) -> frozenset[str]:
    """The strategies whose row fulfils a condition."""
    return frozenset(name for name, row in SPECS.items() if holds(row))


def with_option(option: str) -> frozenset[str]:
    """The strategies that have this setting."""
    return names(lambda row: option in row.options)
