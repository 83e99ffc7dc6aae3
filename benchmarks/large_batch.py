"""Validation accuracy after the same epochs, by batch and by recipe: what a large batch loses, and what saves it.

    python -m benchmarks.large_batch [--batches 512,4096,16384] [--recipes lars,lamb] [--seeds 1] [--budget-s 540]
                                     [--cells sgd:512:1,lars:4096:1] [--cells-at-once 3] [--samples-at-once 21000]

Every cell is one `stormo train fashion-mnist`. A measured cell is kept in the results file and not measured again, so
the table can be filled over several short runs; --budget-s starts no cell that would probably not end in time, and
--cells measures just these (recipe:batch:seed). Recipes that come to the same settings at a batch, as all rules of the
rate do at 512, are one cell. Cells share the GPU as long as their batches together stay within --samples-at-once, so
that one starts while another trains; only accuracies are compared. Other flags are handed on to every cell. A run that
diverges counts with the accuracy of its last whole epoch, or 10 %, which is chance, where it had none; the table marks
it. `tuned` is the best of the grid in `TUNED` by its first seed, with all seeds of that point (Nado et al., arXiv
2102.06356): an ordinary optimizer deserves a search as well. The last line is
`RESULT accuracy_512=… best_accuracy_16384=… plain_accuracy_16384=…`, `nan` for what was not measured.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.command import train_command

BATCHES = (512, 1024, 2048, 4096, 8192, 16384)
FIRST = (512, 4096, 16384)  # what is measured first
BASE = 512
CHANCE = 0.1
_LOST = 0.5  # below it a run has learned next to nothing
_LARGEST_GRAPH = 2048  # a CUDA graph saves nothing at a large batch, and holds memory
RESULTS = Path(__file__).with_name("results") / "large_batch.jsonl"
# Beside --global-batch-size, --epochs and --seed. The network bears no full rate from the first step.
_ALWAYS = "--weight-decay 0.0005 --task.augment --target-accuracy 2 --checkpoint-every 0"
_NESTEROV = f"{_ALWAYS} --nesterov --decay linear --warmup-from 0.01"
_LINEAR, _SQRT = (f"--lr-rule {rule} --base-batch-size {BASE}" for rule in ("linear", "sqrt"))
_LAYER_WISE = f"{_ALWAYS} {_SQRT} --warmup-epochs 5 --decay linear"
_LARS = f"{_LAYER_WISE} --optimizer lars --nesterov --base-lr 2"
RECIPES = {
    "sgd": f"{_NESTEROV} --base-lr 0.05 --lr-rule none --warmup-epochs 2",
    "linear": f"{_NESTEROV} --base-lr 0.05 {_LINEAR} --warmup-epochs 2",
    "sqrt": f"{_NESTEROV} --base-lr 0.05 {_SQRT} --warmup-epochs 2",
    "linear+warm-up": f"{_NESTEROV} --base-lr 0.05 {_LINEAR} --warmup-epochs 5",
    "lars": _LARS,
    "larc": f"{_LAYER_WISE} --optimizer larc --nesterov --base-lr 0.1 --trust-coefficient 0.005",
    "lamb": f"{_LAYER_WISE} --optimizer lamb --base-lr 0.004 --weight-decay 0.01",
    "novograd": f"{_LAYER_WISE} --optimizer novograd --momentum 0.95 --base-lr 0.01 --weight-decay 0.001",
    "lars+ghost norm": f"{_LARS} --ghost-batch-size 128",
    "lars+noise": _LARS,
    "growth": f"{_NESTEROV} --base-lr 0.05 --decay none --warmup-epochs 1 --warmup-from 0.1",
}
# (rate, warm-up epochs) that are tried for plain Nesterov momentum at every batch.
TUNED = ((0.05, 2), (0.05, 5), (0.1, 2), (0.1, 5), (0.2, 5), (0.2, 10))


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured run."""

    recipe: str
    batch: int
    seed: int
    epochs: int
    flags: str
    accuracy: float
    stopped_by: str
    steps: int
    train_time_s: float
    wall_time_s: float
    device: str

    @property
    def key(self) -> tuple[str, int]:
        """What makes it this cell, whatever its name was."""
        return settings_of(self.flags), self.seed


class CellError(Exception):
    """A run that ended without a result."""


class NotBegunError(CellError):
    """There was no time left for it."""


Wanted = tuple[str, int, int]  # recipe, batch, seed
Table = dict[tuple[str, int], list[Cell]]  # the seeds of a recipe at a batch


def flags_of(recipe: str, batch: int, epochs: int) -> str:
    """The flags of a recipe at a batch."""
    if recipe not in RECIPES:  # of the grid
        rate, warmup = recipe.split()[1:]
        flags = f"{_NESTEROV} --base-lr {rate} --lr-rule none --warmup-epochs {warmup}"
    else:
        flags = RECIPES[recipe]
    start = batch
    if batch == BASE:  # no rule changes the learning rate here
        flags = flags.replace(_LINEAR, "--lr-rule none").replace(_SQRT, "--lr-rule none")
    if recipe == "growth" and batch > BASE:
        # In two strides from the batch at which the learning rate is right, where a decay would have fallen.
        start, stride = BASE, math.sqrt(batch / BASE)
        flags += f" --grow-batch {epochs // 3}:{stride:.6g}x,{2 * epochs // 3}:{stride:.6g}x --max-batch-size {batch}"
    if recipe == "lars+noise" and batch > BASE:
        flags += f" --gradient-noise-batch {BASE}"
    if batch > _LARGEST_GRAPH:
        flags += " --no-graph"
    return f"--global-batch-size {start} --epochs {epochs} {flags}"


_SCALED = re.compile(r"^(--global-batch-size (\d+) .*)--base-lr (\S+) --lr-rule (linear|sqrt) --base-batch-size (\d+)")


def settings_of(flags: str) -> str:
    """The flags with the learning rate that a rule gives: 0.05 of 512 is 0.1 at 1,024, and a point of the grid."""

    def resolved(match: re.Match[str]) -> str:
        before, batch, rate, rule, base = match.groups()
        factor = int(batch) / int(base)
        rate = float(rate) * (factor if rule == "linear" else math.sqrt(factor))
        return f"{before}--base-lr {rate:g} --lr-rule none"

    return _SCALED.sub(resolved, flags)


def nesterov(rate: float, warmup_epochs: int) -> str:
    """The name of a point of the grid."""
    return f"nesterov {rate:g} {warmup_epochs}"


_GRID = [nesterov(*point) for point in TUNED]


def wanted(recipes: Sequence[str], batches: Sequence[int], seeds: int) -> Iterator[Wanted]:
    """The cells in the order in which they are measured: all recipes once, before any second seed."""
    names = [name for recipe in recipes for name in (_GRID if recipe == "tuned" else [recipe])]
    for seed in range(seeds):
        for batch in sorted(batches, key=lambda size: (size not in FIRST, size)):
            yield from ((name, batch, seed) for name in names)


def measure(recipe: str, batch: int, seed: int, epochs: int, extra: Sequence[str]) -> Cell:
    """Train once."""
    flags = flags_of(recipe, batch, epochs)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        where = ["--runs-folder", folder, "--run-name", "cell", "--seed", str(seed), "--no-tensorboard"]
        command = train_command("fashion-mnist", *flags.split(), *where, *extra)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        summary_file = Path(folder, "cell", "summary.json")
        summary = json.loads(summary_file.read_text()) if summary_file.is_file() else {}
    stopped_by = summary.get("stopped_by", "nothing")
    if stopped_by not in ("epochs", "divergence"):
        raise CellError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return Cell(
        recipe=recipe,
        batch=batch,
        seed=seed,
        epochs=epochs,
        flags=" ".join([flags, *extra]),
        accuracy=summary["validation_accuracy"] if summary["validation_accuracy"] is not None else CHANCE,
        stopped_by=stopped_by,
        steps=summary["steps"],
        train_time_s=summary["train_time_s"],
        wall_time_s=time.perf_counter() - began,
        device=summary["device"],
    )


def fill(
    todo: Sequence[Wanted], cells_at_once: int, samples_at_once: int, run: Callable[[Wanted], Cell]
) -> Iterator[Cell | CellError]:
    """The cells as they end, and what went wrong where one had no result.

    `run` is called in a thread for as many as fit, the first ones first; one that is too large waits until
    it would be alone.
    """
    waiting, running = list(todo), dict[concurrent.futures.Future[Cell], int]()
    with concurrent.futures.ThreadPoolExecutor(max_workers=cells_at_once) as threads:
        while waiting or running:
            for cell in list(waiting):
                fits = len(running) < cells_at_once and sum(running.values()) + cell[1] <= samples_at_once
                if not running or fits:
                    running[threads.submit(run, cell)] = cell[1]
                    waiting.remove(cell)
            for ended in concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED).done:
                del running[ended]
                try:
                    yield ended.result()
                except CellError as error:
                    yield error


def read(path: Path) -> list[Cell]:
    """All cells that were measured so far."""
    return [Cell(**json.loads(line)) for line in path.read_text().splitlines()] if path.is_file() else []


def tabulate(cells: Sequence[Cell], epochs: int, extra: Sequence[str] = ()) -> Table:
    """The cells in their places; one of a recipe that has been changed since, or with other flags, has none.

    `tuned` is the best of its grid at each batch by the first seed: further ones are of some points only, and what has
    been measured more often would lose to what was lucky once.
    """
    runs: dict[str, list[Cell]] = {}
    for cell in cells:
        runs.setdefault(settings_of(cell.flags), []).append(cell)
    table: Table = {}
    for batch in sorted({cell.batch for cell in cells}):
        for recipe in [*RECIPES, *_GRID]:
            settings = settings_of(" ".join([flags_of(recipe, batch, epochs), *extra]))
            if settings in runs:
                table[recipe, batch] = runs[settings]
        if tried := [table.pop((name, batch)) for name in _GRID if (name, batch) in table]:
            table["tuned", batch] = max(tried, key=lambda seeds: min(seeds, key=lambda cell: cell.seed).accuracy)
    return table


def mean(seeds: Sequence[Cell]) -> float:
    """The mean accuracy over the seeds."""
    return statistics.fmean(cell.accuracy for cell in seeds)


def table_lines(table: Table) -> list[str]:
    """A Markdown table: a row for each recipe, a column for each batch."""
    batches = sorted({batch for _, batch in table})
    lines = ["| recipe | " + " | ".join(str(batch) for batch in batches) + " |", "|---" * (len(batches) + 1) + "|"]
    for recipe in [*RECIPES, "tuned"]:
        if any((recipe, batch) in table for batch in batches):
            texts = [_text(table.get((recipe, batch), [])) for batch in batches]
            lines.append(f"| {recipe} | {' | '.join(texts)} |")
    return lines


def _text(seeds: Sequence[Cell]) -> str:
    if not seeds:
        return ""
    text = f"{100 * mean(seeds):.2f}"
    if len(seeds) > 1:
        text += f" ± {100 * statistics.stdev(cell.accuracy for cell in seeds):.2f}"
    num_lost = sum(cell.stopped_by == "divergence" for cell in seeds)
    return text + (f" ({num_lost} of {len(seeds)} diverged)" if num_lost else "")


def result_line(table: Table) -> str:
    """The figures that the claim rests on."""
    accuracies = {key: mean(seeds) for key, seeds in table.items()}
    largest = [accuracy for (_, batch), accuracy in accuracies.items() if batch == BATCHES[-1]]
    return (
        f"RESULT accuracy_512={accuracies.get(('sgd', BASE), math.nan):.4f} "
        f"best_accuracy_16384={max(largest, default=math.nan):.4f} "
        f"plain_accuracy_16384={accuracies.get(('sgd', BATCHES[-1]), math.nan):.4f}"
    )


def draw(table: Table, path: Path) -> None:
    """The same table as curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    accuracies = {key: mean(seeds) for key, seeds in table.items()}
    # Diverged runs are drawn on the lower edge, or the others could not be distinguished.
    good = [accuracy for accuracy in accuracies.values() if accuracy > _LOST]
    floor = min(good, default=0.0) - 0.01
    for index, recipe in enumerate([*RECIPES, "tuned"]):
        points = sorted((batch, accuracy) for (name, batch), accuracy in accuracies.items() if name == recipe)
        if points:
            style, colour = "osv^D*XP<>ph"[index % 12] + ("-" if index % 2 else "--"), f"C{index % 10}"
            if index >= 10:
                colour = ("black", "olive")[index % 2]
            sizes, heights = zip(*[(batch, 100 * max(accuracy, floor)) for batch, accuracy in points], strict=True)
            axes.plot(sizes, heights, style, color=colour, label=recipe)
    if len(good) < len(accuracies):
        axes.axhline(100 * floor, color="grey", linewidth=0.8)
        axes.annotate("diverged", (0.01, 100 * floor), xycoords=("axes fraction", "data"), va="bottom", color="grey")
    axes.set_xscale("log", base=2)
    batches = sorted({batch for _, batch in table})
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.set(xlabel="global batch", ylabel="validation accuracy, %")
    figure.legend(fontsize="small", loc="outside right center")
    figure.savefig(path)


def _places(options: argparse.Namespace) -> list[Wanted]:
    if options.cells:
        words = [cell.split(":") for cell in options.cells.split(",")]
        if wrong := [cell for cell in words if len(cell) != 3 or cell[0] not in [*RECIPES, *_GRID]]:
            raise ValueError(f"{':'.join(wrong[0])} is no cell; sgd:512:0 is one, and so is {_GRID[0]}:512:0")
        return [(recipe, int(batch), int(seed)) for recipe, batch, seed in words]
    recipes = options.recipes.split(",")
    if unknown := [name for name in recipes if name not in RECIPES and name != "tuned"]:
        raise ValueError(f"there is no recipe {unknown[0]}; there are {', '.join([*RECIPES, 'tuned'])}")
    return list(wanted(recipes, [int(size) for size in options.batches.split(",")], options.seeds))


def main(arguments: list[str] | None = None) -> int:
    """Measure what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--recipes", default=",".join([*RECIPES, "tuned"]))
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--budget-s", type=float, default=math.inf)
    parser.add_argument("--cells", help="just these: RECIPE:BATCH:SEED,…")
    parser.add_argument("--cells-at-once", type=int, default=3, help="that share the GPU")
    parser.add_argument("--samples-at-once", type=int, default=21000, help="in all cells that share the GPU")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path, help="FILE.png or .svg")
    options, extra = parser.parse_known_args(arguments)
    try:
        places = _places(options)
    except ValueError as error:
        parser.error(str(error))
    cells = read(options.results)
    known, began, longest_s = {cell.key for cell in cells}, time.perf_counter(), 0.0
    todo = []
    for recipe, batch, seed in places:
        key = settings_of(" ".join([flags_of(recipe, batch, options.epochs), *extra])), seed
        if key not in known:
            known.add(key)
            todo.append((recipe, batch, seed))
    options.results.parent.mkdir(parents=True, exist_ok=True)

    def run(cell: Wanted) -> Cell:
        recipe, batch, seed = cell
        if time.perf_counter() - began + longest_s > options.budget_s:
            raise NotBegunError
        return measure(recipe, batch, seed, options.epochs, extra)

    num_later = 0
    for ended in fill(todo, options.cells_at_once, options.samples_at_once, run):
        if isinstance(ended, NotBegunError):
            num_later += 1
            continue
        if isinstance(ended, CellError):
            print(ended, flush=True)
            continue
        longest_s = max(longest_s, ended.wall_time_s)
        cells.append(ended)
        with options.results.open("a") as file:
            file.write(json.dumps(asdict(ended)) + "\n")
        outcome = f"{100 * ended.accuracy:.2f} % ({ended.stopped_by}), {ended.wall_time_s:.0f} s"
        print(f"{ended.recipe} at {ended.batch}, seed {ended.seed}: {outcome}", flush=True)
    if num_later:
        print(f"--budget-s {options.budget_s:g} is spent; {num_later} of {len(todo)} cells are for another run")
    table = tabulate(cells, options.epochs, extra)
    for line in table_lines(table):
        print(line)
    if options.plot:
        draw(table, options.plot)
    print(result_line(table))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
