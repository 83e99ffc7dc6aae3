"""The strategies: one row each, with all that settings, plan, forecast and launcher must know of one.

What a strategy computes is in its own file of `stormo/parallel`; `stormo/parallel/table.py` says in which.
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
SINGLE, DDP, MESH = "single", "ddp", "mesh"  # what the plan chooses by itself: one device, copies, the axes of --mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategySpec:
    """One strategy."""

    name: str
    meaning: str
    axis: str | None = None  # of the mesh, which takes all workers; None: every worker has the whole model
    zero: int = 0  # ZeRO stage: what the axis shard cuts
    replicates_nodes: bool = False  # the axis shard ends at the node, and nodes are copies
    cuts_classifier: bool = False  # the axis tensor cuts the classifier alone, and workers take different samples
    schedule: str | None = None  # the only one it has, with one micro-batch
    options: tuple[str, ...] = ()  # settings that no other strategy has
    least_workers: int = 1
    is_one_process: bool = False  # one process drives all GPUs of its node
    is_sharded: bool = False  # a worker may hold less than the whole model
    sharded_checkpoint: bool = False  # every worker writes its own file of a checkpoint, so all must see the run folder
    local_updates: bool = False  # workers step by themselves, and their weights are averaged now and then
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
        """A run resumes with it unless another one is named; copies of the model are chosen anew."""
        return self.is_sharded or bool(self.options)


def _sharded(name: str, axis: str | None, meaning: str, **fields: object) -> StrategySpec:
    reason = "a model that is spread has no gradient of one worker's samples to compare"
    made = {"is_sharded": True, "sharded_checkpoint": True, "no_noise_scale": reason, **fields}
    return StrategySpec(name=name, axis=axis, meaning=meaning, **made)  # type: ignore[arg-type]


_PIPELINE = ("schedule", "micro_batches")
SPECS: dict[str, StrategySpec] = {
    row.name: row
    for row in (
        StrategySpec(name=SINGLE, meaning="one device", takes_compression=True, takes_cuda_graph=True),
        StrategySpec(name="dp", meaning="DataParallel, threads of one process", is_one_process=True),
        StrategySpec(name=DDP, meaning="copies of the model, gradients averaged", takes_compression=True),
        StrategySpec(
            name="local",
            meaning="every worker steps by itself, with the gradient of its own samples",
            options=("average_every", "outer_lr", "outer_momentum"),
            sharded_checkpoint=True,
            local_updates=True,
            averages_gradients=False,
            no_noise_scale="workers that step by themselves never bring their gradients together",
        ),
        StrategySpec(
            name="server",
            meaning="workers send their gradients to servers",
            options=("servers", "staleness"),
            least_workers=2,
            sharded_checkpoint=True,
            averages_gradients=False,
            takes_fp16=False,
            no_noise_scale="gradients are brought together by servers, each of which sees its own part of them alone",
        ),
        _sharded("zero1", "shard", "optimizer state cut into parts", zero=1),
        _sharded("zero2", "shard", "optimizer state and gradients cut into parts", zero=2),
        _sharded("fsdp", "shard", "weights, gradients and optimizer state cut into parts", zero=3),
        _sharded(
            "hsdp",
            "shard",
            "shards within a node, copies between nodes",
            zero=3,
            replicates_nodes=True,
            least_workers=2,
        ),
        _sharded("tensor", "tensor", "every large layer cut into parts that compute together", least_workers=2),
        _sharded(
            "hybrid",
            "tensor",
            "copies of all layers but the classifier, which is cut into parts",
            cuts_classifier=True,
            least_workers=2,
        ),
        _sharded("pipeline", "pipeline", "layers in stages, one after the other", options=_PIPELINE, least_workers=2),
        _sharded("naive", "pipeline", "layers in stages, one after the other", schedule="naive", least_workers=2),
        _sharded(MESH, None, "the axes of --mesh"),
    )
}
PRESETS = {name: row.axis for name, row in SPECS.items() if row.axis is not None}


def names(holds: Callable[[StrategySpec], object]) -> frozenset[str]:
    """The strategies for whose rows this holds."""
    return frozenset(name for name, row in SPECS.items() if holds(row))


def with_option(option: str) -> frozenset[str]:
    """The strategies that have this setting."""
    return names(lambda row: option in row.options)
