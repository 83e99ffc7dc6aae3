"""The ways to train a model on given GPUs that a forecast compares, each with its plan and its command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stormo.config.layout import resolve_layout
from stormo.config.options import without_flags
from stormo.config.plan import Facts, Plan, resolve
from stormo.config.plan.batch import per_worker
from stormo.config.schema import TrainConfig
from stormo.errors import SettingError
from stormo.system.hardware import Gpu

# All but dp, which cannot be checked without GPUs.
KNOWN = (
    *("single", "ddp", "zero1", "zero2", "fsdp", "hsdp", "tensor", "pipeline", "naive", "mesh"),
    *("local", "server", "hybrid"),
)
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
    elif asked.plan.layout.strategy not in KNOWN:
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
    special = layout.strategy if layout.strategy in ("naive", "local", "server", "hybrid") else ""
    return layout.mesh, layout.zero, special, sharding.checkpoint_activations, sharding.offload


# Flags that an advice replaces, each with so many values.
_OF_WAY = {"--strategy": 1, "--mesh": 1, "--zero": 1, "--checkpoint-activations": 0, "--offload": 0}
_OF_WAY |= {f"--{name.replace('_', '-')}": 1 for name in OF_ONE}
_OF_COPIES = {f"--{name.replace('_', '-')}": 1 for name in OF_COPIES}
_NEGATIONS = {"--no-checkpoint-activations": "checkpoint_activations", "--no-offload": "offload"}
_OF_BATCH = {"--batch-size": 1, "--accumulate": 1}


def command_line(
    words: Sequence[str], config: TrainConfig, way: Way, passes: int, gpus: Sequence[Gpu], facts: Facts
) -> str:
    """What to type.

    Args:
        words: as the user typed them, behind the verb.
        config: what they come to.
        way: to be taken.
        passes: into which each pass is cut; the batch of a step and its rate stay what they are.
        gpus: of one node.
        facts: of the task.
    """
    if way.is_as_set and "--no-graph" not in way.flags:
        kept, added = list(words), []
    else:
        kept, added = without_flags(words, _OF_WAY), list(way.flags)
        if way.config.workers.compress != config.workers.compress:
            plain = without_flags(kept, _OF_COPIES)
            added += ["--compress", "none"] * (plain == kept)  # a file of settings has it
            kept = plain
        added += [flag for flag in _NEGATIONS if _is_to_be_negated(flag, words, config, way)]
    if "num_gpus" not in config.given:
        added += ["--num-gpus", str(len(gpus))]
    if passes > 1:
        kept = without_flags(kept, _OF_BATCH)
        added += _cut(way, passes, gpus, facts)
    return shlex.join(["stormo", "train", *kept, *added])


def _is_to_be_negated(flag: str, words: Sequence[str], config: TrainConfig, way: Way) -> bool:
    """Whether a flag is off in the way although it was set, or is turned off by the user, perhaps against a file."""
    name = _NEGATIONS[flag]
    is_said = getattr(config.sharding, name) or flag in (word.replace("_", "-") for word in words)
    return is_said and not getattr(way.config.sharding, name)


def remarks(config: TrainConfig, way: Way) -> list[str]:
    """What is to be said beside the command line."""
    told = []
    if "--no-graph" in way.flags:
        told.append("A captured pass would keep its memory beside that of others, and does not fit.")
    if int(config.workers.num_nodes) > 1:
        told.append("Start it on every node (docs/launching.md), or as a job (stormo submit).")
    return told


def _cut(way: Way, passes: int, gpus: Sequence[Gpu], facts: Facts) -> list[str]:
    """Flags of smaller passes, under which the plan has the batch and the rate that it had."""
    config, before = way.config, way.plan
    assert before is not None
    accumulate = config.batch.accumulate * passes
    flags = ["--accumulate", str(accumulate)]
    if config.batch.global_batch_size is not None or config.resumed is not None:
        return flags
    size = per_worker(config)
    flags = ["--batch-size", str(size // passes), *flags]
    optimizer = config.optimizer
    if optimizer.base_batch_size is None and optimizer.lr_rule != "none":
        optimizer = replace(optimizer, base_batch_size=size)
        flags += ["--base-batch-size", str(size)]  # for which the rate was meant
    batch = replace(config.batch, batch_size=size // passes, accumulate=accumulate)
    changed = replace(config, batch=batch, optimizer=optimizer)
    after = resolve(changed, resolve_layout(changed, gpus), facts)
    if after.warmup_start != before.warmup_start:
        flags += ["--warmup-from", repr(before.warmup_start / before.learning_rate)]
    return flags
