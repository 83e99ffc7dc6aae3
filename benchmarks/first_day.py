"""A newcomer's first day: from the wheel in an empty folder to a model that is trained, reported, resumed and exported.

    python -m benchmarks.first_day [--folder FOLDER] [--fresh] [--extras notebook,onnx]

Every step is a command or a short program that a newcomer would type, in a fresh virtual environment, and is checked by
what it leaves behind. To save minutes, torch and the other packages come from the environment that runs this, by a .pth
file; `--fresh` installs them all instead, with the versions of constraints.txt. `--extras` installs more of stormo's
extras. A step whose packages are not installed is skipped, by name. The last line is `RESULT steps=… failed=…
skipped=… seconds=…`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import aligned, one_thread, result_line

ROOT = Path(__file__).parents[1]
_TIMEOUT_S = 240.0
_EXTRAS = ("report", "plot", "prometheus")
_NEEDED = ("pyproject.toml", "README.md", "LICENSE")  # by the build, beside the package
_CELLS = (
    "import stormo\nfrom my_task import Classification",
    "run = stormo.train(Classification(width=16), device='cpu', num_gpus=2, epochs=1, run_name='cell')",
    "print(run.state, sorted(run.history())[:1])",
)


class StepError(Exception):
    """A step did not do what it should; the text says what."""


@dataclass(frozen=True)
class Outcome:
    """How a step ended."""

    name: str
    state: str  # ok, failed or skipped
    seconds: float
    said: str


@dataclass(frozen=True)
class Step:
    """What a newcomer does: `run` returns what came of it, or raises StepError."""

    name: str
    run: Callable[[], str]
    needs: tuple[str, ...] = ()  # packages, without which it is skipped
    is_vital: bool = False  # nothing can follow if it fails


def walk(
    steps: Sequence[Step], is_installed: Callable[[str], bool], clock: Callable[[], float] = time.monotonic
) -> list[Outcome]:
    """Take the steps one after the other; one that fails does not keep the next from being tried."""
    outcomes: list[Outcome] = []
    for step in steps:
        if missing := [name for name in step.needs if not is_installed(name)]:
            outcomes.append(Outcome(step.name, "skipped", 0.0, f"not installed: {', '.join(missing)}"))
            continue
        began = clock()
        try:
            state, said = "ok", step.run()
        except StepError as error:
            state, said = "failed", str(error)
        outcomes.append(Outcome(step.name, state, clock() - began, said))
        if state == "failed" and step.is_vital:
            break
    return outcomes


def table(outcomes: Iterable[Outcome]) -> list[str]:
    """A line for each step, and what failed in full below."""
    rows = list(outcomes)
    lines = aligned([["step", "", "seconds"], *([one.name, one.state, f"{one.seconds:.1f}"] for one in rows)])
    said = ["", *(one.said if one.state != "failed" else "see below" for one in rows)]
    shown = [f"{line}  {text}".rstrip() for line, text in zip(lines, said, strict=True)]
    return [*shown, *(f"\n{one.name} failed: {one.said}" for one in rows if one.state == "failed")]


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Those of the last line."""
    count = {state: sum(one.state == state for one in outcomes) for state in ("failed", "skipped")}
    return {"steps": len(outcomes), **count, "seconds": float(sum(one.seconds for one in outcomes))}


class Day:
    """The folder of a day, its environment, and the steps in it."""

    def __init__(self, folder: Path, is_fresh: bool, extras: Sequence[str] = ()) -> None:
        self.folder, self.is_fresh, self.extras = folder / "project", is_fresh, tuple(extras)
        self._wheels, self._bin = folder / "wheels", folder / "venv" / "bin"
        self.folder.mkdir(parents=True)

    def steps(self) -> list[Step]:
        """All of them, in order."""
        return [
            Step("build the wheel", self._wheel, is_vital=True),
            Step("install it", self._install, is_vital=True),
            Step("stormo new", self._new, is_vital=True),
            Step("train on two workers", self._train, is_vital=True),
            Step("list the runs", self._runs),
            Step("TensorBoard", self._tensorboard, needs=("tensorboard",)),
            Step(
                "MLflow", lambda: self._tracker("mlflow"), needs=("mlflow", "sqlalchemy")
            ),  # mlflow-skinny has no store
            Step("Weights & Biases", lambda: self._tracker("wandb"), needs=("wandb",)),
            Step("plot", self._plot, needs=("matplotlib",)),
            Step("report", self._report, needs=("plotly",)),
            Step("notebook", self._notebook, needs=("nbclient", "nbformat", "ipykernel")),
            Step("resume for an epoch more", self._resume),
            Step("evaluate", self._evaluate),
            Step("export safetensors", self._safetensors),
            Step("export torch-export", self._program),
            Step("export onnx", self._onnx, needs=("onnx", "onnxruntime", "onnxscript")),
            Step("load the model in Python", self._load),
        ]

    def is_installed(self, package: str) -> bool:
        """Whether the new environment has a package."""
        found = self._call(
            [str(self._bin / "python"), "-c", f"import importlib.util as u; print(u.find_spec({package!r}))"]
        )
        return found.strip() != "None"

    def _call(self, command: list[str]) -> str:
        variables = one_thread()
        variables.pop("PYTHONPATH", None)
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise StepError(f"{' '.join(command)} did not end within {_TIMEOUT_S:g} s") from None
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip())[-2000:]
            raise StepError(f"{' '.join(command)} ended with {done.returncode}:\n{last}")
        return done.stdout

    def _stormo(self, *words: str) -> str:
        return self._call([str(self._bin / "stormo"), *words])

    def _python(self, code: str) -> str:
        """Run a program of some lines; as a file, since workers import its module."""
        (self.folder / "day.py").write_text(code, encoding="utf-8")
        return self._call([str(self._bin / "python"), "day.py"]).strip()

    def _summary(self, run: str) -> dict[str, Any]:
        file = self.folder / "runs" / run / "summary.json"
        summary: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return summary

    def _wheel(self) -> str:
        with tempfile.TemporaryDirectory() as source:  # a build leaves files behind
            for name in _NEEDED:
                shutil.copy(ROOT / name, source)
            shutil.copytree(ROOT / "stormo", Path(source, "stormo"), ignore=shutil.ignore_patterns("__pycache__"))
            how = [] if self.is_fresh else ["--no-build-isolation"]
            pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *how]
            self._call([*pip, "--wheel-dir", str(self._wheels), source])
        (wheel,) = self._wheels.glob("stormo-*.whl")
        return f"{wheel.name}, {wheel.stat().st_size / 1e3:.0f} kB"

    def _install(self) -> str:
        venv.create(self._bin.parent, with_pip=True, symlinks=True)
        (wheel,) = self._wheels.glob("stormo-*.whl")
        pip = [str(self._bin / "python"), "-m", "pip", "install", "--quiet"]
        constraints = ["-c", str(ROOT / "constraints.txt")]
        if self.is_fresh:
            extras = ",".join((*_EXTRAS, *self.extras))
            self._call([*pip, *constraints, f"{wheel}[{extras}]", "tensorboard"])
        else:
            self._call([*pip, "--no-deps", str(wheel)])
            site = Path(self._python("import sysconfig; print(sysconfig.get_path('purelib'))"))
            (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
            if self.extras:
                self._call([*pip, *constraints, f"stormo[{','.join(self.extras)}]"])
        where = self._python("import stormo; print(stormo.__file__)")
        _check(where.startswith(str(self._bin.parent)), f"stormo is imported from {where}")
        return self._stormo("--version").strip() + ("" if self.is_fresh else ", torch borrowed")

    def _new(self) -> str:
        self._stormo("new", "my_task.py")
        _check((self.folder / "my_task.py").is_file(), "there is no my_task.py")
        return "my_task.py"

    def _train(self) -> str:
        self._stormo(*_train_words("day"), "--epochs", "2")
        summary = self._summary("day")
        _check((summary.get("world_size"), summary.get("epochs_run")) == (2, 2), f"the summary is {summary}")
        accuracy = summary["validation_accuracy"]
        _check(accuracy > 0.8, f"an accuracy of {accuracy} after two epochs")
        return f"accuracy {accuracy:.3f} after 2 epochs"

    def _runs(self) -> str:
        listed = self._stormo("runs")
        _check("day" in listed and "day" in self._stormo("show", "day"), f"stormo runs printed\n{listed}")
        return "and stormo show"

    def _tensorboard(self) -> str:
        code = """\
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from stormo import open_run
folder = next(open_run("day").folder.rglob("events.out.*")).parent
events = EventAccumulator(str(folder)).Reload()
print(len(events.Tags()["scalars"]))
"""
        count = self._python(code)
        _check(int(count) > 3, f"TensorBoard finds {count} curves")
        return f"{count} curves"

    def _tracker(self, name: str) -> str:
        self._stormo(*_train_words(name), "--epochs", "1", f"--{name}")
        note = self.folder / "runs" / name / f"sink-{name}.json"
        _check(note.is_file(), f"there is no {note}")
        return " ".join(note.read_text(encoding="utf-8").split())[:60]

    def _plot(self) -> str:
        self._python('import stormo\nstormo.open_run("day").plot().savefig("day.png")')
        return _size(self.folder / "day.png")

    def _report(self) -> str:
        self._stormo("report", "day")
        return _size(self.folder / "runs" / "day" / "report.html")

    def _notebook(self) -> str:
        code = f"""\
import nbclient, nbformat
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in {_CELLS!r}])
nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
print("".join(output.get("text", "") for output in notebook.cells[-1].outputs))
"""
        printed = self._python(code)
        _check(printed.startswith("done"), f"the last cell printed {printed}")
        return f"{len(_CELLS)} cells"

    def _resume(self) -> str:
        self._stormo("train", "--resume", "day", "--epochs", "3")
        summary = self._summary("day")
        _check((summary.get("epochs_run"), summary.get("num_resumes")) == (3, 1), f"the summary is {summary}")
        return f"accuracy {summary['validation_accuracy']:.3f} after 3 epochs"

    def _evaluate(self) -> str:
        text = self._stormo("evaluate", "day", "--device", "cpu", "--num-gpus", "2", "--json")
        found, trained = json.loads(text), self._summary("day")["validation_accuracy"]
        accuracy = found["validation"]["accuracy"]
        _check(abs(accuracy - trained) < 1e-6, f"{accuracy} instead of {trained}")
        return f"accuracy {accuracy:.3f}, as in training"

    def _safetensors(self) -> str:
        self._stormo("export", "day", "day.safetensors")
        count = self._python('from safetensors.torch import load_file\nprint(len(load_file("day.safetensors")))')
        _check(count == "4", f"the file has {count} tensors, the model 4")
        return f"{count} tensors, {_size(self.folder / 'day.safetensors')}"

    def _program(self) -> str:
        self._stormo("export", "day", "day.pt2", "--format", "torch-export")
        code = 'import torch\nprint(tuple(torch.export.load("day.pt2").module()(torch.zeros(5, 16)).shape))'
        return _of_five(self._python(code))

    def _onnx(self) -> str:
        self._stormo("export", "day", "day.onnx", "--format", "onnx")
        code = """\
import numpy, onnxruntime
session = onnxruntime.InferenceSession("day.onnx")
(scores,) = session.run(None, {session.get_inputs()[0].name: numpy.zeros((5, 16), "float32")})
print(scores.shape)
"""
        return _of_five(self._python(code))

    def _load(self) -> str:
        code = 'import stormo, torch\nprint(tuple(stormo.open_run("day").load_model()(torch.zeros(5, 16)).shape))'
        return _of_five(self._python(code))


def _train_words(run: str) -> list[str]:
    return ["train", "my_task.py", "--device", "cpu", "--num-gpus", "2", "--run-name", run]


def _check(is_good: bool, otherwise: str) -> None:
    if not is_good:
        raise StepError(otherwise)


def _size(file: Path) -> str:
    _check(file.is_file() and file.stat().st_size > 1000, f"{file} is missing or empty")
    return f"{file.name}, {file.stat().st_size / 1e3:.0f} kB"


def _of_five(printed: str) -> str:
    _check(printed == "(5, 4)", f"five samples gave {printed}, not (5, 4)")
    return "scores of five samples"


def main() -> int:
    """Take all steps; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder to make and keep; default: a temporary one")
    parser.add_argument("--fresh", action="store_true", help="install torch and all other packages too")
    parser.add_argument("--extras", default="", help="extras of stormo to install, such as notebook,onnx")
    options = parser.parse_args()
    extras = [name for name in options.extras.split(",") if name]
    with tempfile.TemporaryDirectory() as temporary:
        day = Day((options.folder or Path(temporary, "day")).absolute(), options.fresh, extras)
        outcomes = walk(day.steps(), day.is_installed)
    print(*table(outcomes), result_line(figures(outcomes)), sep="\n")
    return 1 if any(one.state == "failed" for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
