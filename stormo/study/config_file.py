"""What the file of `--config` says to a study: read once and told every run as flags, so that no edit parts its runs.

The file that a run has left says everything, also what that run was told for itself alone; that much is dropped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from stormo.config import options
from stormo.config.schema import EFFECTIVE, OF_ONE_CALL
from stormo.errors import SettingError
from stormo.tasks.task import Task

# What a study sets itself, for each of its runs.
ITS_OWN = ("num_gpus", "run_name", "runs_folder", "resume", "dry_run", "plot_schedule", "grow_batch", *OF_ONE_CALL)
BATCHES = ("batch_size", "global_batch_size")
TARGETS = ("target_accuracy", "target_loss")
# Of another run, what does not hold for those of a study: where it ran, how its batch grew, what it left behind.
_OF_A_RUN = (
    *(*ITS_OWN, "max_batch_size"),
    *("num_nodes", "node_id", "master_addr", "master_port", "max_restarts"),
    *("checkpoint_every", "tensorboard", "prometheus"),
)


def spell_out(
    own: argparse.Namespace, rest: Sequence[str], path: str, task_class: type[Task]
) -> tuple[argparse.Namespace, list[str]]:
    """The study's own options and those of `stormo train` without `--config`; flags win over what the file says."""
    document = options.read_toml(Path(path))
    every = options.train_options(task_class.Options)
    flags = options.parse_flags("stormo train", rest, every, f"Task {task_class.name}")
    in_file = options.asked_by_file(document, every, path)
    is_of_a_run = EFFECTIVE in document
    if is_of_a_run:
        dropped = {*_OF_A_RUN}
        if flags.keys().isdisjoint(TARGETS):  # a study is as long as it says, unless it goes for a target
            dropped |= {"epochs", *TARGETS}
        in_file = {key: value for key, value in in_file.items() if key not in dropped}
    stronger = flags | {key: getattr(own, key) for key in ("num_nodes", *BATCHES) if getattr(own, key) is not None}
    left = options.left_below(in_file, stronger)
    left = {key: value for key, value in left.items() if key not in stronger}
    batch = {key: left.pop(key) for key in BATCHES if key in left}
    if not stronger.keys().isdisjoint(BATCHES):
        batch = {}  # also an "auto" that would go with a global batch
    if batch and not is_of_a_run:
        raise _for_a_flag(next(iter(batch)), path, "sets the batch of every run from its flags")
    if str(left.pop("num_nodes", 1)) != "1":  # a range is no number
        raise _for_a_flag("num_nodes", path, "spreads its runs over nodes by its flags")
    if "global_batch_size" in batch:
        batch.pop("batch_size", None)
    task = [left.pop("task")] if "task" in left else []
    merged = argparse.Namespace(**{**vars(own), **{key: str(value) for key, value in batch.items()}})
    return merged, [*task, *options.without_flags(rest, {"--config": 1}), *options.as_flags(left)]


def _for_a_flag(key: str, path: str, why: str) -> SettingError:
    return SettingError(f"{key} was set in {path}", f"a study {why}", f"set --{key.replace('_', '-')} instead")
