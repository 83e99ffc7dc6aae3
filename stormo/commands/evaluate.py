"""The verb `evaluate`: the validation metrics of a run's checkpoint, on any number of workers."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stormo.commands.train import equal_options, work
from stormo.commands.trained_run import find_checkpoint, read_run, run_of, split_task_flags
from stormo.config import options
from stormo.config.schema import Run, Speed, Workers, option
from stormo.errors import SettingError
from stormo.launch import FailureReporter, alone, run_node
from stormo.launch.nodes import find_rank_info, node_of
from stormo.launch.slices import take_slice
from stormo.system.process import keep_imported, stormo_command
from stormo.telemetry.console import metric_texts
from stormo.telemetry.text import write_text
from stormo.training.settings import checked

if TYPE_CHECKING:
    from stormo.distributed.store import Store


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Command: what this call does."""

    checkpoint: str = option(
        "last", "which checkpoint: that of the best epoch, the newest, or a folder", metavar="best|last|PATH"
    )
    json: bool = option(False, "print JSON")


_PROGRAM = "stormo evaluate"
_KEYS = (
    *("num_gpus", "num_nodes", "node_id", "master_addr", "master_port", "device", "backend", "timeout"),
    *("precision", "loader_workers", "validation_batch_size", "runs_folder"),
)
_SHARED = [
    one for name, cls in (("workers", Workers), ("speed", Speed), ("run", Run)) for one in options.options_of(name, cls)
]
_OPTIONS = [*(one for one in _SHARED if one.name in _KEYS), *options.options_of("command", Evaluate)]
_RUN = options.Positional(
    name="run",
    metavar="RUN",
    help="name of a run, its folder, or one checkpoint",
    description="Compute the validation metrics of a checkpoint. The run's settings hold; --task.… flags change the "
    "options of its task, such as the data folder. Nothing is written.",
    once="one run is evaluated at a time",
)


def main(arguments: list[str]) -> int:
    """Read the settings of the run, then start the workers of this node or, in a worker, evaluate."""
    own, task_flags = split_task_flags(arguments)
    given = options.parse_flags(_PROGRAM, own, _OPTIONS, "", _RUN)
    source = given.pop("run", None)
    if source is None:
        raise SettingError("stormo evaluate was given no run", "there is nothing to evaluate", "name one: stormo runs")
    which, as_json = given.pop("checkpoint", Evaluate.checkpoint), given.pop("json", Evaluate.json)
    runs_folder = Path(given.get("runs_folder", Run.runs_folder))
    with contextlib.redirect_stdout(sys.stderr):  # whatever a task prints
        config, task_class = read_run(run_of(source, runs_folder), _PROGRAM, given, task_flags)
        rank_info = find_rank_info(config)
        take_slice(rank_info, config.workers.device)
        layout, task = checked(config, task_class, rank_info)
    if rank_info is None and layout.world_size > 1:
        command = [*stormo_command("evaluate"), *arguments]
        equal = equal_options(config, layout)
        return run_node(command, node_of(config, layout), timeout_s=config.workers.timeout, **equal)
    who = rank_info or alone()

    def body(store: Store | None, reporter: FailureReporter) -> int:
        from stormo.training.evaluation import evaluate

        keep_imported()
        with contextlib.redirect_stdout(sys.stderr):
            found = evaluate(
                config, layout, task, lambda: _checkpoint(source, runs_folder, which), who, store, reporter
            )
        if isinstance(found, int):
            return found
        if who.is_main:
            write_text(_shown(found, as_json=as_json), sys.stdout)
        return 0

    return work(config, layout, who, body)


def _checkpoint(source: str, runs_folder: Path, which: str) -> Path:
    if which in ("best", "last"):
        return find_checkpoint(source, runs_folder, is_best=which == "best", step=None)[1]
    if not (Path(which) / "manifest.json").is_file():
        raise SettingError(
            f"--checkpoint {which} was set",
            "that folder is no checkpoint",
            "set best, last, or runs/NAME/checkpoints/step-…",
        )
    return Path(which)


def _shown(found: Mapping[str, Any], *, as_json: bool) -> str:
    if as_json:
        return json.dumps(found, indent=1) + "\n"
    figures = [f"Samples = {found['num_samples']}", *metric_texts(found["validation"])]
    return f"Step = {found['step']}: {', '.join(figures)}\n"
