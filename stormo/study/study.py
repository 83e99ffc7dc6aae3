"""The command line of `stormo scale`: its own options, the runs they ask for, and the arguments of each run."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from stormo.config import options, precedence, toml
from stormo.config.layout import at_least
from stormo.config.mesh import Mesh, parse_mesh
from stormo.config.schema import CALL_ONLY, EFFECTIVE, Command, TrainConfig, option
from stormo.config.strategies import names
from stormo.errors import SettingError, pluralize
from stormo.launch.nodes import find_rank_info
from stormo.system.hardware import visible_gpus
from stormo.tasks.task import Task
from stormo.training.settings import read_settings

_EPOCHS = 3  # by default: a warm-up and two that are measured
_NO_TARGET = "2"  # an accuracy that no run reaches
# Settings that a study sets for each of its runs.
_SET_BY_STUDY = (
    *("num_gpus", "run_name", "runs_folder", "resume", "dry_run", "plot_schedule", "grow_batch"),
    *CALL_ONLY,
)
_BATCHES = ("batch_size", "global_batch_size")
_TARGETS = ("target_accuracy", "target_loss")
# Dropped from the config file of an earlier run: where it ran, how its batch grew, what it left behind.
_OF_EARLIER_RUN = (
    *(*_SET_BY_STUDY, "max_batch_size", "num_nodes", "node_id", "master_addr", "master_port", "max_restarts"),
    *("checkpoint_every", "tensorboard", "mlflow", "wandb", "sinks", "prometheus"),
)
# Settings that may differ between two calls for one study.
_NOT_COMPARED = {
    *(*_SET_BY_STUDY, "num_nodes", *_BATCHES, "seed"),
    *({field.name for field in fields(Command)} - {"profile"}),  # a profile takes time
    *("node_id", "master_addr", "master_port", "timeout", "prometheus", "prometheus_host", "mlflow", "wandb"),
    "sinks",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of a study."""

    mode: str
    workers: int
    num_nodes: int = 1
    repeat: int = 1

    @property
    def name(self) -> str:
        """Its name, unique in the study."""
        nodes = f"-on-{self.num_nodes}-nodes" if self.num_nodes > 1 else ""
        return f"{self.mode}-{self.workers}-workers{nodes}-{self.repeat}"

    @property
    def label(self) -> str:
        """The run as users read it."""
        mode = "strong and weak" if self.mode == "both" else self.mode
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        return f"repeat {self.repeat}, {mode}, {pluralize(self.workers, 'worker')}{nodes}"


def make_runs(
    workers: Sequence[int], num_nodes: Sequence[int], modes: Sequence[str], repeats: int, seed: int
) -> list[Run]:
    """All runs in order: repeat after repeat, so that a machine that warms up affects all numbers of workers equally.

    The order within a repeat is random and depends on the seed alone. One worker is the same run in both modes.
    """
    ordered: list[Run] = []
    for repeat in range(1, repeats + 1):
        runs = []
        for count, nodes in zip(workers, num_nodes, strict=True):
            for mode in ("both",) if count == 1 and len(modes) > 1 else modes:
                runs.append(Run(mode=mode, workers=count, num_nodes=nodes, repeat=repeat))
        random.Random(f"{seed}/{repeat}").shuffle(runs)
        ordered += runs
    return ordered


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """What to measure, and how."""

    train_arguments: tuple[str, ...]  # the same with the config file spelled out, for every run
    settings: Mapping[str, Any]  # what they resolve to, as far as runs of one study must agree
    workers: tuple[int, ...]
    num_nodes: tuple[int, ...]  # for each of `workers`
    modes: tuple[str, ...]
    repeats: int
    seed: int
    seconds: float | None  # of training after the warm-up, then a run is stopped; None: to its end
    global_batch_size: int  # strong
    batch_size: int  # of one worker in one micro-batch, weak
    node_id: int
    output: Path
    keeps_checkpoints: bool
    on_cpus: bool
    single_worker_arguments: tuple[str, ...]  # for one worker, instead of `train_arguments`
    single_worker_note: str = ""  # why they differ

    def arguments(self, run: Run) -> list[str]:
        """The arguments of `stormo train` for one run."""
        batch = ["--batch-size", str(self.batch_size)]
        if run.mode != "weak":
            batch = ["--global-batch-size", str(self.global_batch_size)]
        nodes = ["--num-nodes", str(run.num_nodes), "--node-id", str(self.node_id)]
        return [
            *(self.single_worker_arguments if run.workers == 1 else self.train_arguments),
            *batch,
            *("--num-gpus", str(run.workers // run.num_nodes)),
            *(nodes if max(self.num_nodes) > 1 else ()),
            *("--seed", str(self.seed + run.repeat - 1)),  # a new seed each repeat, the same for all workers
            *("--run-name", run.name),
            *("--runs-folder", str(self.output / "runs")),
        ]

    def identity(self) -> dict[str, Any]:
        """What all runs of one study share; workers, modes and repeats may be added later."""
        return {
            "settings": dict(self.settings),
            "seed": self.seed,
            "seconds": self.seconds,
            "global_batch_size": self.global_batch_size,
            "batch_size": self.batch_size,
        }


_USAGE = """\
stormo scale TASK --workers 1,2,4 [options] [any option of stormo train]
       stormo scale --from table.csv [--mode strong|weak] [--output FOLDER]"""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Scale: the runs to compare."""

    workers: str | None = option(None, "numbers of workers to compare, over all nodes: 1,2,4", metavar="N,N,...")
    num_nodes: str | None = option(None, "nodes they run on: one number for all, or one for each", metavar="N[,N...]")
    repeats: int = option(1, "runs of each; 3 or more give useful intervals", metavar="R")
    mode: Literal["strong", "weak", "both"] = option("strong", "fix the global batch, the batch of a worker, or both")
    seconds: float = option(60.0, "stop a run after S measured seconds; with a target only if set", metavar="S")
    output: str | None = option(None, "where everything goes; the same again resumes the study", metavar="FOLDER")
    from_: str | None = option(None, "read a table measured elsewhere instead of training", metavar="FILE.csv")
    batch_size: str | None = option(None, "samples per worker in one micro-batch, with the fewest workers", metavar="N")
    global_batch_size: str | None = option(None, "samples of all workers in a step, with the fewest", metavar="N")

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes to run."""
        return ("strong", "weak") if self.mode == "both" else (self.mode,)


def read_arguments(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The study's own options as given, and the arguments for `stormo train`."""
    description = (
        "Train TASK at several numbers of workers and say whether more of them pay. "
        "Time and energy to a target are compared too, with --target-accuracy or --target-loss."
    )
    return options.take_flags("stormo scale", _USAGE, description, arguments, ("scale", Scale))


def read_study(given: Mapping[str, Any], rest: Sequence[str]) -> Study:
    """The study that was asked for, checked before any process starts."""
    own = Scale(**given)
    if any(argument.partition("=")[0] == "--resume" for argument in rest):
        raise SettingError(
            "--resume was set for a scaling study",
            "a study resumes by its folder",
            f"leave it out: --output {own.output} is enough" if own.output else "set --output FOLDER instead",
        )
    train_arguments = list(rest)
    config, task_class = read_settings(train_arguments)
    if config.command.config is not None:
        own, train_arguments = _spell_out_config(own, rest, config.command.config, task_class)
        config, task_class = read_settings(train_arguments)
    _refuse_own_settings(own, config)
    toml.refuse_secrets(config, "a scaling study", "study.json")
    at_least("--repeats", own.repeats, 1)
    if own.seconds <= 0:
        raise SettingError(f"--seconds {own.seconds:g} was set", "it takes a number above 0", "set --seconds 60")
    workers, num_nodes = _read_workers(own)
    _check_nodes(config, num_nodes, own.output)
    global_batch_size, batch_size = _read_batches(own, config, workers[0])
    wants_target = bool(config.given & {*_TARGETS})
    more = [] if wants_target else ["--target-accuracy", _NO_TARGET]
    epochs = config.stop.epochs
    if not wants_target and "epochs" not in config.given:
        epochs = _EPOCHS
        more += ["--epochs", str(epochs)]
    if epochs < 2:
        raise SettingError(
            f"--epochs {epochs} was set", "the first epoch is the warm-up and is not measured", "set --epochs 2 or more"
        )
    more += ["--checkpoint-every", "0"] if "checkpoint_every" not in config.given else []
    more += ["--no-tensorboard"] if "tensorboard" not in config.given else []
    train_arguments += more
    note = _single_worker_note(config) if workers[0] == 1 else ""
    single = _single_worker_arguments(train_arguments, config) if note else train_arguments
    name = f"scale-{task_class.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    resolved = options.flat_settings(read_settings(train_arguments)[0])
    return Study(
        train_arguments=tuple(train_arguments),
        settings={key: value for key, value in resolved.items() if key not in _NOT_COMPARED},
        workers=workers,
        num_nodes=num_nodes,
        modes=own.modes,
        repeats=own.repeats,
        seed=config.run.seed,
        seconds=None if wants_target and "seconds" not in given else own.seconds,
        global_batch_size=global_batch_size,
        batch_size=batch_size,
        node_id=config.workers.node_id,
        output=Path(own.output) if own.output else Path("runs") / name,
        keeps_checkpoints="checkpoint_every" in config.given,
        on_cpus=config.workers.device == "cpu" or (config.workers.device == "auto" and not visible_gpus()),
        single_worker_arguments=tuple(single),
        single_worker_note=note,
    )


def _spell_out_config(own: Scale, rest: Sequence[str], path: str, task_class: type[Task]) -> tuple[Scale, list[str]]:
    """Turn `--config` into flags, so that a later edit of the file cannot change some of the runs; flags win over it.

    The config file of an earlier run also holds what was set for that run alone, which is dropped.
    """
    document = toml.read_toml(Path(path))
    every = options.train_options(task_class.Options)
    flags = options.parse_flags("stormo train", rest, every, f"Task {task_class.name}")
    in_file = toml.file_settings(document, every, path)
    is_of_run = EFFECTIVE in document
    if is_of_run:
        # A study sets its own length, unless it trains to a target.
        length = {"epochs", *_TARGETS} if flags.keys().isdisjoint(_TARGETS) else set()
        in_file = {key: value for key, value in in_file.items() if key not in {*_OF_EARLIER_RUN, *length}}
    stronger = flags | {key: getattr(own, key) for key in ("num_nodes", *_BATCHES) if getattr(own, key) is not None}
    left = precedence.drop_overridden(in_file, stronger)
    left = {key: value for key, value in left.items() if key not in stronger}
    batch = {key: left.pop(key) for key in _BATCHES if key in left}
    if not stronger.keys().isdisjoint(_BATCHES):
        batch = {}  # also an "auto" that would go with a global batch
    if batch and not is_of_run:
        raise _needs_flag(next(iter(batch)), path, "sets the batch of every run from its flags")
    if str(left.pop("num_nodes", 1)) != "1":  # a range is not a number
        raise _needs_flag("num_nodes", path, "places its runs on nodes by its flags")
    if "global_batch_size" in batch:
        batch.pop("batch_size", None)
    task = [left.pop("task")] if "task" in left else []
    merged = Scale(**{**vars(own), **{key: str(value) for key, value in batch.items()}})
    return merged, [*task, *options.without_flags(rest, {"--config": 1}), *options.as_flags(left)]


def _needs_flag(key: str, path: str, why: str) -> SettingError:
    return SettingError(f"{key} was set in {path}", f"a study {why}", f"set --{key.replace('_', '-')} instead")


def _single_worker_note(config: TrainConfig) -> str:
    """Why one worker trains with the strategy single; empty where it can have what was set."""
    workers = config.workers
    needs_several = names(lambda row: row.least_workers > 1)
    asked = f"--strategy {workers.strategy}" if workers.strategy in needs_several else ""
    if workers.mesh is not None:
        asked = "" if Mesh(**parse_mesh(workers.mesh)).size == 1 else f"--mesh {workers.mesh}"
    return f"strategy single, as one worker cannot have {asked}" if asked else ""


def _single_worker_arguments(arguments: Sequence[str], config: TrainConfig) -> list[str]:
    """The arguments for one worker, without the strategy and the options that only it uses."""
    single = {"strategy": "single", "mesh": None}
    unused = {*single, *precedence.unused_settings({**options.flat_settings(config), **single})}
    flags = {one.flag: int(one.kind is not bool) for one in options.train_options() if one.key in unused}
    return [*options.without_flags(arguments, flags), "--strategy", "single"]  # over what a config file says


def _refuse_own_settings(own: Scale, config: TrainConfig) -> None:
    sizes = f": --workers {own.workers} says how many there are" if own.workers else ", and set --workers"
    for key in _SET_BY_STUDY:
        if key in config.given:
            raise SettingError(
                f"--{key.replace('_', '-')} was set for a scaling study",
                "it sets that itself for every run" if key != "grow_batch" else "its epochs must be alike",
                "leave it out" + (sizes if key == "num_gpus" else ""),
            )


def _check_nodes(config: TrainConfig, num_nodes: Sequence[int], output: str | None) -> None:
    rank_info = find_rank_info(config, is_single_process=True)
    if rank_info is not None:
        raise SettingError(
            f"stormo scale was started by {rank_info.launcher}",
            f"a launch has a fixed number of workers (here {rank_info.world_size}) and a study starts its own",
            "start it once on each node, without a launcher",
        )
    if max(num_nodes) > 1 and output is None:
        raise SettingError(
            f"--num-nodes {max(num_nodes)} was set without --output",
            "all nodes must name the same folder",
            "set --output FOLDER, the same on every node",
        )
    if config.workers.node_id >= max(num_nodes):
        raise SettingError(
            f"--node-id {config.workers.node_id} was set with --num-nodes {max(num_nodes)}",
            f"the nodes are counted from 0 to {max(num_nodes) - 1}",
            "give every node its own id from that range",
        )


def _read_workers(own: Scale) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of workers, fewest first, and the nodes of each."""
    if own.workers is None:
        raise SettingError("no --workers was set", "a study compares numbers of workers", "set --workers 1,2,4")
    workers = [_whole(part.strip(), "--workers") for part in own.workers.split(",")]
    nodes = [_whole(part.strip(), "--num-nodes") for part in (own.num_nodes or "1").split(",")]
    if len(nodes) == 1:
        nodes *= len(workers)
    if len(nodes) != len(workers):
        raise SettingError(
            f"--num-nodes {own.num_nodes} was set with --workers {own.workers}",
            f"{len(nodes)} is not {len(workers)}",
            "give one number of nodes for all, or one for each number of workers",
        )
    if len(set(workers)) != len(workers) or len(workers) < 2:
        raise SettingError(
            f"--workers {own.workers} was set", "a study compares different numbers", "set two or more, such as 1,2,4"
        )
    pairs = sorted(zip(workers, nodes, strict=True))
    for count, on_nodes in pairs:
        if count % on_nodes:
            raise SettingError(
                f"--workers {count} was set on {pluralize(on_nodes, 'node')}",
                f"{count} / {on_nodes} is not a whole number, and every node starts equally many",
                f"set {count + on_nodes - count % on_nodes}, or fewer --num-nodes",
            )
    return tuple(count for count, _ in pairs), tuple(on_nodes for _, on_nodes in pairs)


def _read_batches(own: Scale, config: TrainConfig, fewest: int) -> tuple[int, int]:
    """The global batch of strong scaling and the worker's of weak scaling; with the fewest workers they agree."""
    num_micro_batches = fewest * config.batch.accumulate
    total: str | int | None = own.global_batch_size
    each: str | int | None = own.batch_size
    if total is not None and each is not None:
        raise SettingError(
            f"--global-batch-size {total} and --batch-size {each} were both set",
            "each follows from the other with the fewest workers",
            "set only one of them",
        )
    if total is None and each is None:
        total, each = config.batch.global_batch_size, config.batch.batch_size
    if total is None:
        if each == "auto":
            raise SettingError("--batch-size auto was set", "runs of a study need comparable batches", "set a number")
        size = _whole(str(each), "--batch-size")
        return size * num_micro_batches, size
    size = _whole(str(total), "--global-batch-size")
    if size % num_micro_batches:
        raise SettingError(
            f"--global-batch-size {size} was set",
            f"{pluralize(fewest, 'worker')} × {config.batch.accumulate} accumulation split it unevenly",
            f"set a multiple of {num_micro_batches}",
        )
    return size, size // num_micro_batches


def _whole(text: str, flag: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise SettingError(f"{flag} was set to {text!r}", "it takes whole numbers from 1 on", f"set {flag} 4")
    return int(text)
