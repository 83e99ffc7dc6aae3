"""Several workers against one process, to the last digits: the same weights, the same validation.

    python -m benchmarks.exactness [--width 1] [--world-sizes 2,3,4]
    python -m benchmarks.exactness --strategies all [--quick]

With --strategies every parallel setup is compared: see `benchmarks.strategy_exactness`. Without, the
real command trains in float64 for 20 optimizer steps, with momentum, Nesterov, weight decay, clipping, warm-up,
decay and augmentation on, dropout off; the checkpoints are then read back. Neither the 103 samples nor the batches
of 25 divide by the worker counts, and the last batch of 3 leaves one of 4 workers without any sample.
First the WideResNet with synchronised batch norm; then a network without batch norm, where two micro-batches a step are
compared with one. A control without synchronisation must differ, or the comparison would see nothing.
The difference of two states is max |a - b| / max |b| of each tensor, then the largest over parameters, running
statistics and momentum. The command fails above 1e-10, or when a validation loss differs within 12 digits or an
accuracy at all.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import strategy_exactness
from benchmarks.command import (
    aligned,
    data_folder,
    largest,
    numbers,
    relative_difference,
    result_line,
    run_to_end,
    small_task,
    train_command,
)

LIMIT = 1e-10
CONTROL_LIMIT = 1e-6  # batch norm over other samples is another function: far above any rounding

_RECIPE = (
    *("--precision", "fp64", "--momentum", "0.9", "--nesterov", "--weight-decay", "0.0005", "--clip-norm", "1"),
    *("--base-lr", "0.1", "--warmup-epochs", "1.5", "--warmup-from", "0.1", "--decay", "cosine"),
    *("--task.dropout", "0", "--task.augment", "--target-accuracy", "1.1", "--checkpoint-every", "0"),
    *("--no-tensorboard",),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One configuration; the others of its group are compared with the reference."""

    group: str
    num_workers: int
    accumulate: int = 1
    sync_batch_norm: bool = True
    is_control: bool = False
    is_reference: bool = False

    @property
    def name(self) -> str:
        """The configuration in words."""
        workers = f"{self.num_workers} worker{'s' * (self.num_workers > 1)}"
        micro_batches = f", {self.accumulate} micro-batches a step" if self.accumulate > 1 else ""
        control = ", statistics not synchronised (control)" if self.is_control else ""
        return f"{self.group}: {workers}{micro_batches}{control}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """How a configuration compares with its reference; losses and accuracies of all epochs."""

    case: Case
    difference: float
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    validation_equal: bool

    @property
    def is_good(self) -> bool:
        """Whether it is as it should be: equal, or, for a control, clearly not."""
        if self.case.is_control:
            return self.difference > CONTROL_LIMIT
        return self.difference <= LIMIT and self.validation_equal


def cases(world_sizes: Sequence[int]) -> list[Case]:
    """Every configuration, references first."""
    norm, plain = "WideResNet, synchronised batch norm", "no batch norm"
    parts = f"{norm} of each micro-batch"
    return [
        Case(group=norm, num_workers=1, is_reference=True),
        *(Case(group=norm, num_workers=size) for size in world_sizes),
        Case(group=norm, num_workers=world_sizes[0], sync_batch_norm=False, is_control=True),
        Case(group=plain, num_workers=1, is_reference=True),
        *(Case(group=plain, num_workers=size, accumulate=2) for size in (1, *world_sizes)),
        Case(group=parts, num_workers=1, accumulate=2, is_reference=True),
        *(Case(group=parts, num_workers=size, accumulate=2) for size in world_sizes),
    ]


def flags(case: Case, options: argparse.Namespace) -> list[str]:
    """The words of a case on the command line."""
    if case.group == "no batch norm":
        task = [small_task("Small"), "--no-task.norm"]
    else:
        task = ["fashion-mnist", "--task.width", str(options.width)]
    task += ["--task.data-folder", options.data_folder]
    return [
        *task,
        *("--task.train-samples", str(options.train_samples)),
        *("--task.validation-samples", str(options.validation_samples)),
        *("--validation-batch-size", str(options.global_batch_size)),
        *("--global-batch-size", str(options.global_batch_size)),
        *("--accumulate", str(case.accumulate)),
        *("--epochs", str(options.epochs)),
        *("--device", "cpu", "--num-gpus", str(case.num_workers)),
        "--sync-batch-norm" if case.sync_batch_norm else "--no-sync-batch-norm",
        *_RECIPE,
    ]


def run(case: Case, name: str, folder: Path, options: argparse.Namespace) -> None:
    """Train one configuration in its folder."""
    print(f"training {case.name} ...", file=sys.stderr, flush=True)
    run_to_end(train_command(*flags(case, options), "--runs-folder", str(folder), "--run-name", name))


def compare(case: Case, path: Path, reference_path: Path) -> Compared:
    """Read two finished runs and compare their last checkpoints and the validation of every epoch."""
    from stormo import checkpoint
    from stormo.telemetry.events import read_events
    from stormo.telemetry.folder import RunFolder

    states, losses, accuracies = [], [], []
    for folder in (RunFolder(path), RunFolder(reference_path)):
        snapshot = checkpoint.load(checkpoint.find(folder.checkpoints)[0].path)
        states.append({**snapshot.model, **{f"optimizer/{name}": t for name, t in snapshot.optimizer.items()}})
        epochs = [event["validation"] for event in read_events(folder.events) if event["event"] == "epoch_done"]
        losses.append(tuple(float(validation["loss"]) for validation in epochs))
        accuracies.append(tuple(float(validation["accuracy"]) for validation in epochs))
    same_losses = all(math.isclose(a, b, rel_tol=1e-12, abs_tol=0) for a, b in zip(*losses, strict=True))
    return Compared(
        case=case,
        difference=relative_difference(*states),
        losses=losses[0],
        accuracies=accuracies[0],
        validation_equal=same_losses and accuracies[0] == accuracies[1],
    )


def lines(compared: Sequence[Compared]) -> list[str]:
    """The table."""
    head = ["configuration", "max relative difference", "validation loss", "validation accuracy", "equal"]
    rows = [
        [
            one.case.name,
            "reference" if one.case.is_reference else f"{one.difference:.2e}",
            f"{one.losses[-1]:.17g}",
            f"{one.accuracies[-1]:.17g}",
            "" if one.case.is_reference else "yes" if one.validation_equal else "no",
        ]
        for one in compared
    ]
    return aligned([head, *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, compare, print a table and the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1, help="of the WideResNet (default: 1)")
    parser.add_argument("--world-sizes", type=numbers, default=(2, 3, 4), help="worker counts (default: 2,3,4)")
    parser.add_argument("--train-samples", type=int, default=103)
    parser.add_argument("--validation-samples", type=int, default=131)
    parser.add_argument("--global-batch-size", type=int, default=25)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--data-folder", help="with the files of Fashion-MNIST; default: where stormo keeps them")
    parser.add_argument("--strategies", type=strategy_exactness.names, help="all, or some, such as fsdp,tensor,mesh")
    parser.add_argument("--quick", action="store_true", help="with --strategies: on 2 and 4 ranks, one optimizer")
    options = parser.parse_args(arguments)
    if options.strategies:
        return strategy_exactness.main(options.strategies, quick=options.quick)
    if options.quick:
        parser.error("--quick is for --strategies")
    options.data_folder = data_folder(options.data_folder)
    began_s = time.perf_counter()
    compared: list[Compared] = []
    references: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for index, case in enumerate(cases(options.world_sizes)):
            path = Path(temporary) / f"case-{index}"
            run(case, path.name, path.parent, options)
            reference = references.setdefault(case.group, path)
            compared.append(compare(case, path, reference))
    print("\n".join(lines(compared)))
    print(f"{time.perf_counter() - began_s:.0f} s in all; equal: every epoch, losses to 12 digits, accuracies exactly")
    checked = [one for one in compared if not one.case.is_control and not one.case.is_reference]
    figures = {
        "max_relative_difference": largest(one.difference for one in checked),
        "validation_equal": all(one.validation_equal for one in checked),
        "configurations": len(checked),
        "control_difference": min(one.difference for one in compared if one.case.is_control),
    }
    print(result_line(figures))
    return 0 if all(one.is_good for one in compared) else 1


if __name__ == "__main__":
    sys.exit(main())
