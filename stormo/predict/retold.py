"""The command line that follows from an advice: the user's own words, and what has to be added to them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from stormo.config.layout import resolve_layout
from stormo.config.options import without_flags
from stormo.config.plan import Facts, resolve
from stormo.config.plan.batch import per_worker
from stormo.config.schema import TrainConfig
from stormo.predict.ways import OF_COPIES, OF_ONE, Way
from stormo.system.hardware import Gpu

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
