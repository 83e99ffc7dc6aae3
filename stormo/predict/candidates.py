"""The strategies that a forecast compares on given GPUs, each with its plan and its command line."""

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

_PIPELINE_SETTINGS = {"schedule", "micro_batches"}
STRATEGY_SETTINGS = {"servers", "staleness", "average_every", "outer_lr", "outer_momentum"}  # of one strategy
COPY_SETTINGS = {"compress", "compress_rank"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A strategy with its options: a row of the comparison."""

    key: str  # its name in the advice
    flags: tuple[str, ...]  # of `stormo train`
    plan: Plan | None = None  # None where it is not possible, for `reason`
    reason: str = ""
    config: TrainConfig
    is_as_set: bool = False  # what the user set

    @property
    def label(self) -> str:
        """The flags, without `--strategy` and `--mesh`."""
        return " ".join(self.flags).replace("--strategy ", "").replace("--mesh ", "") or self.key


def list_candidates(config: TrainConfig, gpus: Sequence[Gpu], facts: Facts) -> list[Candidate]:
    """All candidates for the GPUs of each node, without duplicates; what the user set is first where it is not listed.

    Raises the error of `stormo train` where it would refuse what the user set.
    """
    asked = _candidate("as set", {}, config, gpus, facts)
    if asked.plan is None:
        resolve(config, resolve_layout(config, gpus), facts)  # raises the reason
    elif asked.plan.layout.spec.is_one_process:
        raise SettingError(
            f"--strategy {config.workers.strategy} was set",
            "several GPUs in one process hold different amounts, which is not forecast",
            "set --strategy ddp, which is faster and holds less, or leave it out to compare strategies",
        )
    elif asked.plan.layout.spec.cuts_classifier:
        why = "the features that its workers exchange are not forecast"
        raise SettingError(f"--strategy {config.workers.strategy} was set", why, "leave it out to compare strategies")
    rows = _rows(int(config.workers.num_nodes), len(gpus))
    found = [_candidate(key, fields, config, gpus, facts) for key, fields in rows]
    if not any(_is_same(asked, other) for other in found):
        found.insert(0, asked)
    unique: list[Candidate] = []
    for candidate in found:
        if not any(_is_same(candidate, other) for other in unique):
            unique.append(replace(candidate, is_as_set=_is_same(candidate, asked)))
    return unique


def _rows(num_nodes: int, per_node: int) -> list[tuple[str, dict[str, Any]]]:
    """The key and the settings of each candidate."""
    again = {"checkpoint_activations": True}

    def named(strategy: str, **others: Any) -> dict[str, Any]:
        return {"strategy": strategy, "mesh": None, "zero": None, "offload": False, **others}

    offload = [
        ("offload", named("fsdp", offload=True)),
        ("offload, recomputed", named("fsdp", offload=True, **again)),
    ]
    if num_nodes * per_node == 1:
        return [("single", named("auto")), ("single, recomputed", named("auto", **again)), *offload]
    rows = [
        ("ddp", named("ddp")),
        ("ddp, recomputed", named("ddp", **again)),
        ("zero1", named("zero1")),
        ("zero2", named("zero2")),
        ("fsdp", named("fsdp")),
        ("fsdp, recomputed", named("fsdp", **again)),
        *offload,
    ]
    if num_nodes == 1:
        return [*rows, ("tensor", named("tensor")), ("pipeline", named("pipeline"))]
    if per_node == 1:
        return [*rows, ("pipeline", named("pipeline"))]
    return [
        *rows,
        ("hsdp", named("hsdp")),
        ("hsdp, recomputed", named("hsdp", **again)),
        ("tensor", named("auto", mesh=f"replicate={num_nodes},tensor={per_node}")),
        ("pipeline", named("auto", mesh=f"pipeline={num_nodes},shard={per_node}")),
    ]


def _candidate(
    key: str, fields: Mapping[str, Any], config: TrainConfig, gpus: Sequence[Gpu], facts: Facts
) -> Candidate:
    given = config.given
    if "pipeline" not in key and key != "as set":
        given -= _PIPELINE_SETTINGS
    if key != "as set":
        given -= STRATEGY_SETTINGS
        if not key.startswith(("single", "ddp")):
            fields, given = {**fields, "compress": "none"}, given - COPY_SETTINGS
    parts = {name: {k: v for k, v in fields.items() if hasattr(getattr(config, name), k)} for name in _SECTIONS}
    sections = {name: replace(getattr(config, name), **own) for name, own in parts.items()}
    changed = replace(config, given=given, **sections)
    if changed.sharding.offload and key != "as set":
        changed = replace(changed, given=given | {"offload"})
    try:
        layout = resolve_layout(changed, gpus)
        plan = resolve(changed, layout, facts)
    except SettingError as error:
        return Candidate(key=key, flags=_flags(changed), reason=error.why, config=changed)
    return Candidate(key=key, flags=_flags(changed), plan=plan, config=changed)


_SECTIONS = ("workers", "sharding")


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


def _is_same(one: Candidate, other: Candidate) -> bool:
    if one.plan is None or other.plan is None:
        return one.plan is other.plan and one.flags == other.flags
    return _identity(one.config, one.plan) == _identity(other.config, other.plan)


def _identity(config: TrainConfig, plan: Plan) -> tuple[Any, ...]:
    """What distinguishes two candidates, whatever flags led to them."""
    layout, sharding = plan.layout, config.sharding
    spec = layout.spec
    is_special = spec.schedule or not spec.averages_gradients
    special = layout.strategy if is_special else ""
    return layout.mesh, layout.zero, special, sharding.checkpoint_activations, sharding.offload


# Flags that the advice replaces, with the number of values of each.
_CANDIDATE_FLAGS = {"--strategy": 1, "--mesh": 1, "--zero": 1, "--checkpoint-activations": 0, "--offload": 0}
_CANDIDATE_FLAGS |= {f"--{name.replace('_', '-')}": 1 for name in STRATEGY_SETTINGS}
_COPY_FLAGS = {f"--{name.replace('_', '-')}": 1 for name in COPY_SETTINGS}
_NEGATIONS = {"--no-checkpoint-activations": "checkpoint_activations", "--no-offload": "offload"}
_BATCH_FLAGS = {"--batch-size": 1, "--accumulate": 1}


def command_line(
    arguments: Sequence[str],
    config: TrainConfig,
    candidate: Candidate,
    num_splits: int,
    gpus: Sequence[Gpu],
    facts: Facts,
) -> str:
    """The command to type for a candidate, from the arguments that the user typed.

    Each micro-batch is split into `num_splits`; the global batch and the learning rate stay the same.
    """
    if candidate.is_as_set and "--no-graph" not in candidate.flags:
        kept, added = list(arguments), []
    else:
        kept, added = without_flags(arguments, _CANDIDATE_FLAGS), list(candidate.flags)
        if candidate.config.workers.compress != config.workers.compress:
            plain = without_flags(kept, _COPY_FLAGS)
            added += ["--compress", "none"] * (plain == kept)  # set in a config file
            kept = plain
        added += [flag for flag in _NEGATIONS if _needs_negation(flag, arguments, config, candidate)]
    if "num_gpus" not in config.given:
        added += ["--num-gpus", str(len(gpus))]
    if num_splits > 1:
        kept = without_flags(kept, _BATCH_FLAGS)
        added += _accumulation_flags(candidate, num_splits, gpus, facts)
    return shlex.join(["stormo", "train", *kept, *added])


def _needs_negation(flag: str, arguments: Sequence[str], config: TrainConfig, candidate: Candidate) -> bool:
    """True where a flag is off in the candidate although the user, or a config file, set it."""
    name = _NEGATIONS[flag]
    is_said = getattr(config.sharding, name) or flag in (word.replace("_", "-") for word in arguments)
    return is_said and not getattr(candidate.config.sharding, name)


def remarks(config: TrainConfig, candidate: Candidate) -> list[str]:
    """Sentences to print beside the command line."""
    sentences = []
    if "--no-graph" in candidate.flags:
        sentences.append("A CUDA graph would keep its own memory, and does not fit.")
    if int(config.workers.num_nodes) > 1:
        sentences.append("Start it on every node (docs/launching.md), or as a job (stormo submit).")
    return sentences


def _accumulation_flags(candidate: Candidate, num_splits: int, gpus: Sequence[Gpu], facts: Facts) -> list[str]:
    """Flags of smaller micro-batches that keep the global batch and the learning rate of the plan."""
    config, before = candidate.config, candidate.plan
    assert before is not None
    accumulate = config.batch.accumulate * num_splits
    flags = ["--accumulate", str(accumulate)]
    if config.batch.global_batch_size is not None or config.resumed is not None:
        return flags
    size = per_worker(config)
    flags = ["--batch-size", str(size // num_splits), *flags]
    optimizer = config.optimizer
    if optimizer.base_batch_size is None and optimizer.lr_rule != "none":
        optimizer = replace(optimizer, base_batch_size=size)
        flags += ["--base-batch-size", str(size)]  # for which the learning rate was set
    batch = replace(config.batch, batch_size=size // num_splits, accumulate=accumulate)
    changed = replace(config, batch=batch, optimizer=optimizer)
    after = resolve(changed, resolve_layout(changed, gpus), facts)
    if after.warmup_start != before.warmup_start:
        flags += ["--warmup-from", repr(before.warmup_start / before.learning_rate)]
    return flags
