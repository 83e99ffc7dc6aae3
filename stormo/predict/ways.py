"""The ways to spread a model over given workers that a forecast compares, each with the plan that it comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stormo.config.layout import resolve_layout
from stormo.config.plan import Facts, Plan, resolve
from stormo.config.schema import TrainConfig
from stormo.errors import SettingError
from stormo.system.hardware import Gpu

_OF_PIPELINE = {"schedule", "micro_batches"}
OF_ONE = {"servers", "staleness", "average_every", "outer_lr", "outer_momentum"}  # settings of a strategy alone
OF_COPIES = {"compress", "compress_rank"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One row of the comparison."""

    key: str  # by which the advice knows it
    flags: tuple[str, ...]  # of `stormo train`
    plan: Plan | None = None  # None where it cannot be, for the reason
    reason: str = ""
    config: TrainConfig
    is_as_set: bool = False  # what the settings alone would do

    @property
    def label(self) -> str:
        """The flags as a user types them, without the longest word."""
        return " ".join(self.flags).replace("--strategy ", "").replace("--mesh ", "") or self.key


def every_way(config: TrainConfig, gpus: Sequence[Gpu], facts: Facts) -> list[Way]:
    """All that are worth comparing for these workers; what was set is among them, and first where it is none of these.

    What training would refuse is refused in its words.

    Args:
        config: as set.
        gpus: of one node.
        facts: of the task.
    """
    asked = _way("as set", {}, config, gpus, facts)
    if asked.plan is None:
        resolve(config, resolve_layout(config, gpus), facts)  # says why not
    elif asked.plan.layout.spec.is_one_process:
        raise SettingError(
            f"--strategy {config.workers.strategy} was set",
            "the memory of several GPUs in one process is not forecast, and the first holds more than the others",
            "set --strategy ddp, which is faster and holds less, or leave it out to compare strategies",
        )
    num_nodes, per_node = int(config.workers.num_nodes), len(gpus)
    rows = _one() if num_nodes * per_node == 1 else _several(num_nodes, per_node)
    found = [_way(key, fields, config, gpus, facts) for key, fields in rows]
    if not any(_is_same(asked, other) for other in found):
        found.insert(0, asked)
    unique: list[Way] = []
    for way in found:
        if not any(_is_same(way, other) for other in unique):
            unique.append(replace(way, is_as_set=_is_same(way, asked)))
    return unique


def _one() -> list[tuple[str, dict[str, Any]]]:
    plain: dict[str, Any] = {"strategy": "auto", "mesh": None, "zero": None, "offload": False}
    offload = {**plain, "strategy": "fsdp", "offload": True}
    return [
        ("single", plain),
        ("single, recomputed", {**plain, "checkpoint_activations": True}),
        ("offload", offload),
        ("offload, recomputed", {**offload, "checkpoint_activations": True}),
    ]


def _several(num_nodes: int, per_node: int) -> list[tuple[str, dict[str, Any]]]:
    plain: dict[str, Any] = {"strategy": "auto", "mesh": None, "zero": None, "offload": False}
    again = {"checkpoint_activations": True}

    def named(strategy: str, **others: Any) -> dict[str, Any]:
        return {**plain, "strategy": strategy, **others}

    rows = [
        ("ddp", named("ddp")),
        ("ddp, recomputed", named("ddp", **again)),
        ("zero1", named("zero1")),
        ("zero2", named("zero2")),
        ("fsdp", named("fsdp")),
        ("fsdp, recomputed", named("fsdp", **again)),
        ("offload", named("fsdp", offload=True)),
        ("offload, recomputed", named("fsdp", offload=True, **again)),
    ]
    if num_nodes == 1:
        return [*rows, ("tensor", named("tensor")), ("pipeline", named("pipeline"))]
    if per_node > 1:
        rows += [
            ("hsdp", named("hsdp")),
            ("hsdp, recomputed", named("hsdp", **again)),
            ("tensor", {**plain, "mesh": f"replicate={num_nodes},tensor={per_node}"}),
        ]
        return [*rows, ("pipeline", {**plain, "mesh": f"pipeline={num_nodes},shard={per_node}"})]
    return [*rows, ("pipeline", named("pipeline"))]


def _way(key: str, fields: Mapping[str, Any], config: TrainConfig, gpus: Sequence[Gpu], facts: Facts) -> Way:
    given = config.given
    if "pipeline" not in key and key != "as set":
        given -= _OF_PIPELINE
    if key != "as set":
        given -= OF_ONE
        if not key.startswith(("single", "ddp")):
            fields, given = {**fields, "compress": "none"}, given - OF_COPIES
    parts = {name: {k: v for k, v in fields.items() if hasattr(getattr(config, name), k)} for name in _SECTIONS}
    sections = {name: replace(getattr(config, name), **own) for name, own in parts.items()}
    changed = replace(config, given=given, **sections)
    if changed.sharding.offload and key != "as set":
        changed = replace(changed, given=given | {"offload"})
    try:
        layout = resolve_layout(changed, gpus)
        plan = resolve(changed, layout, facts)
    except SettingError as error:
        return Way(key=key, flags=_flags(changed), reason=_why(error), config=changed)
    return Way(key=key, flags=_flags(changed), plan=plan, config=changed)


_SECTIONS = ("workers", "sharding")


def _why(error: SettingError) -> str:
    """The middle of the sentence: what stands against it."""
    return str(error).partition(", but ")[2].partition("; ")[0] or str(error)


def _flags(config: TrainConfig) -> tuple[str, ...]:
    workers, sharding = config.workers, config.sharding
    flags: list[str] = []
    if workers.mesh is not None:
        flags += ["--mesh", workers.mesh]
    elif workers.strategy != "auto":
        flags += ["--strategy", workers.strategy]
    if workers.zero is not None:
        flags += ["--zero", str(workers.zero)]
    flags += ["--checkpoint-activations"] if sharding.checkpoint_activations else []
    flags += ["--offload"] if sharding.offload else []
    return tuple(flags)


def _is_same(one: Way, other: Way) -> bool:
    if one.plan is None or other.plan is None:
        return one.plan is other.plan and one.flags == other.flags
    return _essence(one.config, one.plan) == _essence(other.config, other.plan)


def _essence(config: TrainConfig, plan: Plan) -> tuple[Any, ...]:
    """What tells two ways apart, by whichever flags they were asked for."""
    layout, sharding = plan.layout, config.sharding
    spec = layout.spec
    is_special = spec.schedule or spec.cuts_classifier or not spec.averages_gradients
    special = layout.strategy if is_special else ""
    return layout.mesh, layout.zero, special, sharding.checkpoint_activations, sharding.offload
