"""The command line of `stormo scale`: its own options, and what every run of the study is told."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stormo.config.options import Parser, flat_settings
from stormo.config.schema import Command, TrainConfig
from stormo.errors import SettingError
from stormo.launch.nodes import find_place
from stormo.study.cells import Cell
from stormo.study.config_file import BATCHES, ITS_OWN, TARGETS, spell_out
from stormo.study.lone import lone_arguments, lone_note
from stormo.study.sizes import positive, read_batches, read_sizes, whole
from stormo.system.hardware import visible_gpus
from stormo.training.settings import read_settings

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
