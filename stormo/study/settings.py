"""The command line of `stormo scale`: its own options, and what every run of the study is told."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stormo.config import options
from stormo.config.layout import OF_SEVERAL
from stormo.config.mesh import Mesh, parse_mesh
from stormo.config.options import Parser, flat_settings, train_options, without_effect, without_flags
from stormo.config.schema import EFFECTIVE, OF_ONE_CALL, Command, TrainConfig
from stormo.errors import SettingError, counted
from stormo.launch.nodes import find_place
from stormo.system.hardware import visible_gpus
from stormo.tasks.task import Task
from stormo.training.settings import read_settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run of a study."""

    mode: str
    workers: int
    num_nodes: int = 1
    repeat: int = 1

    @property
    def name(self) -> str:
        """The name of its run, which no other run of the study has."""
        nodes = f"-on-{self.num_nodes}-nodes" if self.num_nodes > 1 else ""
        return f"{self.mode}-{self.workers}-workers{nodes}-{self.repeat}"

    @property
    def words(self) -> str:
        """The run as users read it."""
        kind = "strong and weak" if self.mode == "both" else self.mode
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        return f"repeat {self.repeat}, {kind}, {self.workers} worker{'s' * (self.workers > 1)}{nodes}"


def make_cells(
    workers: Sequence[int], num_nodes: Sequence[int], modes: Sequence[str], repeats: int, seed: int
) -> list[Cell]:
    """Every run in its order: repeat after repeat, so that a machine that warms up or slows down meets all alike.

    Within a repeat the order is random but always the same for one seed. One worker is the same run in both modes.
    """
    ordered: list[Cell] = []
    for repeat in range(1, repeats + 1):
        cells = []
        for count, nodes in zip(workers, num_nodes, strict=True):
            for mode in ("both",) if count == 1 and len(modes) > 1 else modes:
                cells.append(Cell(mode=mode, workers=count, num_nodes=nodes, repeat=repeat))
        random.Random(f"{seed}/{repeat}").shuffle(cells)
        ordered += cells
    return ordered


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


def lone_note(config: TrainConfig) -> str:
    """What one worker has instead of what was set, and why; nothing where it can have it."""
    workers = config.workers
    if workers.mesh is not None:
        return "" if Mesh(**parse_mesh(workers.mesh)).size == 1 else _note(f"--mesh {workers.mesh}")
    return _note(f"--strategy {workers.strategy}") if workers.strategy in OF_SEVERAL else ""


def _note(asked: str) -> str:
    return f"strategy single, as one worker cannot have {asked}"


def lone_arguments(arguments: Sequence[str], config: TrainConfig) -> tuple[str, ...]:
    """What `stormo train` is told for one worker instead."""
    alone = {"strategy": "single", "mesh": None}
    theirs = {*alone, *without_effect({**flat_settings(config), **alone})}
    flags = {option.flag: int(option.kind is not bool) for option in train_options() if option.key in theirs}
    return (*without_flags(arguments, flags), "--strategy", "single")  # over what a file of settings says of another


def read_sizes(own: argparse.Namespace) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of workers, fewest first, and the nodes of each."""
    if own.workers is None:
        raise SettingError("no --workers was set", "a study compares numbers of workers", "set --workers 1,2,4")
    workers = _wholes(own.workers, "--workers")
    nodes = _wholes(own.num_nodes or "1", "--num-nodes")
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
    for count, spread in pairs:
        if count % spread:
            raise SettingError(
                f"--workers {count} was set on {counted(spread, 'node')}",
                f"{count} / {spread} is no whole number and every node starts equally many",
                f"set {count + spread - count % spread}, or fewer --num-nodes",
            )
    return tuple(count for count, _ in pairs), tuple(spread for _, spread in pairs)


def read_batches(own: argparse.Namespace, config: TrainConfig, smallest: int) -> tuple[int, int]:
    """The global batch of strong scaling and a worker's of weak scaling: with the fewest workers they are the same."""
    passes = smallest * config.batch.accumulate
    total, each = own.global_batch_size, own.batch_size
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
            raise SettingError("--batch-size auto was set", "the runs must have batches that compare", "set a number")
        size = whole(str(each), "--batch-size")
        return size * passes, size
    size = whole(str(total), "--global-batch-size")
    if size % passes:
        raise SettingError(
            f"--global-batch-size {size} was set",
            f"{counted(smallest, 'worker')} × {config.batch.accumulate} accumulation cut it unevenly",
            f"set a multiple of {passes}",
        )
    return size, size // passes


def _wholes(text: str, flag: str) -> list[int]:
    return [whole(part.strip(), flag) for part in text.split(",")]


def whole(text: str, flag: str) -> int:
    """The number from 1 on that a flag gives."""
    if not text.isdecimal() or int(text) < 1:
        raise SettingError(f"{flag} was set to {text!r}", "it takes whole numbers from 1 on", f"set {flag} 4")
    return int(text)


def positive(text: str, flag: str, example: float) -> float:
    """The number above 0 that a flag gives."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise SettingError(f"{flag} was set to {text!r}", "it takes a number above 0", f"set {flag} {example:g}")
    return value


MODES = {"strong": ("strong",), "weak": ("weak",), "both": ("strong", "weak")}
_EPOCHS = 3  # where nothing says how long to train: a warm-up and two that are measured
_SECONDS = 60.0
_NO_TARGET = "2"  # an accuracy that no run reaches
# Of the settings, what differs between the runs of a study or is compared by itself, what is said of one call, and
# what belongs to the machine.
_NOT_COMPARED = {
    *(*ITS_OWN, "num_nodes", *BATCHES, "seed"),
    *({field.name for field in fields(Command)} - {"profile"}),  # which takes time
    *("node_id", "master_addr", "master_port", "timeout", "prometheus", "prometheus_host"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """What is to be measured, and how."""

    typed: tuple[str, ...]  # of `train_arguments`, as the user wrote them
    train_arguments: tuple[str, ...]  # the same for every run; what a file says is spelled out
    settings: Mapping[str, Any]  # that they come to, as far as they make the runs what they are
    workers: tuple[int, ...]
    num_nodes: tuple[int, ...]  # for each of `workers`
    modes: tuple[str, ...]
    repeats: int
    seed: int
    seconds: float | None  # of training after the warm-up, before a run is ended; None: to its end
    global_batch_size: int  # strong
    batch_size: int  # of one worker in one pass, weak
    node_id: int
    output: Path
    keeps_checkpoints: bool
    on_cpus: bool
    lone_arguments: tuple[str, ...]  # of the one worker, instead of `train_arguments`
    lone_note: str = ""  # why they are others

    def arguments(self, cell: Cell) -> list[str]:
        """What `stormo train` is told for one run."""
        batch = ["--batch-size", str(self.batch_size)]
        if cell.mode != "weak":
            batch = ["--global-batch-size", str(self.global_batch_size)]
        nodes = ["--num-nodes", str(cell.num_nodes), "--node-id", str(self.node_id)]
        return [
            *(self.lone_arguments if cell.workers == 1 else self.train_arguments),
            *batch,
            *("--num-gpus", str(cell.workers // cell.num_nodes)),
            *(nodes if max(self.num_nodes) > 1 else ()),
            *("--seed", str(self.seed + cell.repeat - 1)),  # another seed each repeat, the same for all workers
            *("--run-name", cell.name),
            *("--runs-folder", str(self.output / "runs")),
        ]

    def identity(self) -> dict[str, Any]:
        """What must be the same for runs to belong to one study; workers, modes and repeats may be added later."""
        return {
            "train_arguments": list(self.typed),
            "settings": dict(self.settings),
            "seed": self.seed,
            "seconds": self.seconds,
            "global_batch_size": self.global_batch_size,
            "batch_size": self.batch_size,
        }


def make_parser() -> argparse.ArgumentParser:
    """The options of `stormo scale` itself."""
    parser = Parser(
        prog="stormo scale",
        usage="stormo scale TASK --workers 1,2,4 [options] [any option of stormo train]\n"
        "       stormo scale --from table.csv [--mode strong|weak] [--output FOLDER]",
        description="Train TASK at several numbers of workers and say whether more of them pay.",
        epilog="With --target-accuracy or --target-loss, time and energy to the target are compared too.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110),
    )
    add = parser.add_argument
    add("--workers", metavar="N,N,...", help="numbers of workers to compare, over all nodes: 1,2,4")
    add("--num-nodes", metavar="N[,N...]", help="nodes they are spread over: one for all, or one for each")
    add("--repeats", metavar="R", help="runs of each, for intervals; 3 or more tell something (default: 1)")
    add(
        "--mode", metavar="|".join(MODES), help="global batch fixed, batch of a worker fixed, or both (default: strong)"
    )
    add("--seconds", metavar="S", help="measured seconds after which a run is ended; default 60, or none with a target")
    add("--output", metavar="FOLDER", help="where everything goes; the same folder again goes on with the study")
    add("--from", dest="table", metavar="FILE.csv", help="a table measured elsewhere, instead of training")
    add("--batch-size", metavar="N", help="samples of one worker in one pass, with the fewest workers")
    add("--global-batch-size", metavar="N", help="samples of all workers in one step, with the fewest workers")
    return parser


def read_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The study's own options, and what is for `stormo train`."""
    return make_parser().parse_known_args([_dashed(argument) for argument in arguments])


def read_study(own: argparse.Namespace, rest: Sequence[str]) -> Study:
    """Everything that was asked for, checked before any process starts."""
    _refuse_resume(own, rest)
    told = list(rest)
    config, task_class = read_settings(told)
    if config.command.config is not None:
        own, told = spell_out(own, rest, config.command.config, task_class)
        config, task_class = read_settings(told)
    _refuse(own, config)
    workers, num_nodes = read_sizes(own)
    _check_alone(config, num_nodes, own.output)
    smallest = workers[0]
    global_batch_size, batch_size = read_batches(own, config, smallest)
    wants_target = bool(config.given & {*TARGETS})
    more = [] if wants_target else ["--target-accuracy", _NO_TARGET]
    epochs = config.stop.epochs
    if not wants_target and "epochs" not in config.given:
        epochs = _EPOCHS
        more += ["--epochs", str(epochs)]
    if epochs < 2:
        raise SettingError(
            f"--epochs {epochs} was set", "the first epoch is the warm-up and is not measured", "set --epochs 2 or more"
        )
    for key, flags in {"checkpoint_every": ("--checkpoint-every", "0"), "tensorboard": ("--no-tensorboard",)}.items():
        if key not in config.given:
            more += flags
    told += more
    seconds = positive(own.seconds, "--seconds", 60.0) if own.seconds else None if wants_target else _SECONDS
    note = lone_note(config) if smallest == 1 else ""
    name = f"scale-{task_class.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Study(
        typed=(*rest, *more),
        train_arguments=tuple(told),
        settings=_compared(read_settings(told)[0]),
        workers=workers,
        num_nodes=num_nodes,
        modes=read_mode(own.mode),
        repeats=whole(own.repeats or "1", "--repeats"),
        seed=config.run.seed,
        seconds=seconds,
        global_batch_size=global_batch_size,
        batch_size=batch_size,
        node_id=config.workers.node_id,
        output=Path(own.output) if own.output else Path("runs") / name,
        keeps_checkpoints="checkpoint_every" in config.given,
        on_cpus=config.workers.device == "cpu" or (config.workers.device == "auto" and not visible_gpus()),
        lone_arguments=lone_arguments(told, config) if note else tuple(told),
        lone_note=note,
    )


def read_mode(asked: str | None) -> tuple[str, ...]:
    """The modes that a word stands for."""
    if asked is None:
        return MODES["strong"]
    if asked not in MODES:
        raise SettingError(f"--mode {asked} was set", f"it is one of {', '.join(MODES)}", "set one of them")
    return MODES[asked]


def _compared(config: TrainConfig) -> dict[str, Any]:
    return {key: value for key, value in flat_settings(config).items() if key not in _NOT_COMPARED}


def _refuse_resume(own: argparse.Namespace, rest: Sequence[str]) -> None:
    if any(argument.partition("=")[0] == "--resume" for argument in rest):
        raise SettingError(
            "--resume was set for a scaling study",
            "a study goes on by its folder",
            f"leave it out: --output {own.output} is enough" if own.output else "set --output FOLDER instead",
        )


def _refuse(own: argparse.Namespace, config: TrainConfig) -> None:
    sizes = f": --workers {own.workers} says how many there are" if own.workers else ", and set --workers"
    for key in ITS_OWN:
        if key in config.given:
            raise SettingError(
                f"{key} was set for a scaling study",
                "it sets that itself for every run" if key != "grow_batch" else "its epochs must be alike",
                "leave it out" + (sizes if key == "num_gpus" else ""),
            )


def _check_alone(config: TrainConfig, num_nodes: Sequence[int], output: str | None) -> None:
    place = find_place(config, is_meant_alone=True)
    if place is not None:
        raise SettingError(
            f"stormo scale was started by {place.launcher}",
            f"a launch has a fixed number of workers (here {place.world_size}) and a study starts its own",
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


def _dashed(argument: str) -> str:
    # Both spellings name the same option, as for `stormo train`.
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value
