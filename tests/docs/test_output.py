"""The output and the tables that pages show are what stormo prints and has; `UPDATE_GOLDEN=1` renews the output."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest

from stormo import optim
from stormo.cli import main
from stormo.commands import new
from stormo.commands.monitor import COLUMNS, make_parser
from stormo.config.schema import OPTIMIZER_DEFAULTS
from stormo.telemetry.prometheus import METRICS
from tests.docs.pages import DOCS, ROOT, check_plan, check_shown, read
from tests.parallel.pipeline.simulation import as_text, pipeline_order, simulate

README, STRATEGIES, MONITOR = ROOT / "README.md", DOCS / "strategies.md", DOCS / "monitor.md"
BEHIND_A_DRY_RUN = r"```console\n\$ stormo (train [^\n]*--dry-run)\n```\n\n```\n(.*?)\n```"


@pytest.fixture(autouse=True)
def _folder_with_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")


def _plan(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*words.split(), "--device", "cpu", "--dry-run"]) == 0
    return capsys.readouterr().out


def test_plans(capsys: pytest.CaptureFixture[str]) -> None:
    for name, num_plans in (("exactness", 1), ("strategies", 1), ("large-batches", 4), ("optimizers", 2)):
        shown = re.findall(BEHIND_A_DRY_RUN, read(DOCS / f"{name}.md"), re.DOTALL)
        assert len(shown) == num_plans
        for command, lines in shown:
            check_plan(DOCS / f"{name}.md", lines, _plan(command, capsys))
    compression = read(DOCS / "compression.md")
    (line,) = re.findall(r"```\n(compression .*)\n```", compression)
    check_plan(DOCS / "compression.md", line, _plan(re.findall(r"\$ stormo (train .*)", compression)[0], capsys))
    first, line = re.findall(
        r"\$ stormo (train .*--dry-run)\n\.\.\.\n(.*?)\n\.\.\.\n", read(DOCS / "train.md"), re.DOTALL
    )[0]
    check_plan(DOCS / "train.md", line, _plan(first, capsys))


def test_the_plan_of_the_readme_but_for_its_device(capsys: pytest.CaptureFixture[str]) -> None:
    ((command, shown),) = re.findall(
        r"\$ stormo (train fashion-mnist .*?) \| cat\n(.*?)\n\.\.\.\n", read(README), re.DOTALL
    )
    lines = [line for line in shown.splitlines() if not line.startswith(("workers", "precision"))]
    check_plan(README, "\n".join(lines), _plan(command.replace("\\\n", ""), capsys))


def test_the_plan_of_the_first_screen_but_for_its_device(capsys: pytest.CaptureFixture[str]) -> None:
    new.write_task("my_task.py", "classification")
    first = read(README).partition("## ")[0]
    assert len(first.splitlines()) <= 40
    ((command, shown),) = re.findall(r"\$ stormo (train .*?) +#[^\n]*\n\.\.\.\n(.*?)\n\.\.\.\n", first, re.DOTALL)
    check_plan(README, "\n".join(shown.splitlines()[1:]), _plan(command, capsys))


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    rows = re.findall(r"^\| `(--.*?)` \| (.* was set.*) \|$", read(STRATEGIES), re.MULTILINE)
    assert len(rows) >= 5
    for flags, shown in rows:
        assert (
            main(["train", "examples/wide.py", "--device", "cpu", "--num-gpus", "4", *flags.split(), "--dry-run"]) == 2
        )
        check_shown(STRATEGIES, shown, capsys.readouterr().err.strip().removeprefix("stormo: "))
    Path("results.csv").write_text("epoch,loss\n")
    (shown,) = re.findall(r"^stormo: --csv .*$", read(MONITOR), re.MULTILINE)
    assert main(["monitor", "--csv", "results.csv"]) == 2
    check_shown(MONITOR, shown, capsys.readouterr().err.strip())


def test_a_study_of_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "scaling-study.md"
    ((command, shown),) = re.findall(r"\$ stormo (scale --from .*)\n```\n\n```\n(.*?)\n```", read(page), re.DOTALL)
    monkeypatch.setattr("stormo.study.results.draw", lambda path, results: None)
    assert main(shlex.split(command)) == 0
    check_shown(page, shown, capsys.readouterr().out.strip("\n"))


def test_the_picture_of_a_schedule() -> None:
    (shown,) = re.findall(r"```\n(worker 0 .*?)```", read(STRATEGIES), re.DOTALL)
    check_shown(STRATEGIES, shown, as_text(simulate(pipeline_order("1f1b", 4, 4, 8))) + "\n")


def test_columns_and_options_of_the_monitor() -> None:
    text = read(MONITOR)
    (table,) = re.findall(r"\| column \|.*?\n\|[-|]+\n(.*?)\n\n", text, re.DOTALL)
    first_cells = [line.split("|")[1] for line in table.splitlines()]
    assert re.findall(r"`(\w+)`", " ".join(first_cells)) == list(COLUMNS)
    assert ",".join(COLUMNS) in text.splitlines()
    options = set(re.findall(r"--[a-z]+", make_parser().format_help())) - {"--help"}
    assert set(re.findall(r"^\| `(--[a-z]+)", text, re.MULTILINE)) == options


def test_metrics_for_prometheus() -> None:
    page = DOCS / "prometheus.md"
    (shown,) = re.findall(r"^(\| `stormo_.*? \|)\n\n", read(page), re.MULTILINE | re.DOTALL)
    rows = [
        f"| `{name}` | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |"
        for name, metric in METRICS.items()
    ]
    check_shown(page, shown, "\n".join(rows))
    for name in re.findall(r"\bstormo_[a-z0-9_]+", read(page)):
        assert any(metric.startswith(name) for metric in METRICS), name


def test_optimizers_with_their_defaults() -> None:
    text = read(DOCS / "optimizers.md")
    names = {"beta2": "beta2", "eps": "eps", "trust_coefficient": "trust coefficient"}
    rows = dict(re.findall(r"^\| `([\w-]+)` \|(.*)\|$", text, re.MULTILINE))
    assert OPTIMIZER_DEFAULTS.keys() == rows.keys() - {"LAMB", "Muon", "NovoGrad"}
    for name, defaults in OPTIMIZER_DEFAULTS.items():
        assert "arxiv.org/abs/" in rows[name] or name == "larc"
        for setting in defaults.keys() & names.keys():
            shown = re.search(rf"{names[setting]} (\S+?),? ", rows[name])
            assert shown is not None, (name, setting)
            assert float(shown[1]) == defaults[setting]
    classes = re.findall(r"^\| ((?:`[A-Z]\w+`(?:, )?)+) \| (.*) \|$", text, re.MULTILINE)
    shown = {name: re.findall(r"`([^`]*)`", cell) for cells, cell in classes for name in re.findall(r"\w+", cells)}
    assert sorted(shown) == sorted(optim.__all__)
    for name, arguments in shown.items():
        parameters = list(inspect.signature(getattr(optim, name)).parameters.values())[2:]
        assert arguments == [f"{parameter.name}={parameter.default!r}" for parameter in parameters]
