"""docs/optimizers.md: its script is run, and its tables are held against the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from stormo import optim
from stormo.config.schema import OPTIMIZER_DEFAULTS
from tests import programs

PAGE = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")
WORDS = {"beta2": "beta2", "eps": "eps", "trust_coefficient": "trust coefficient"}


def test_the_script_learns(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    done = programs.run(["train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.1 * losses[0]


def test_the_table_has_every_optimizer_with_its_defaults() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE, re.MULTILINE))
    assert OPTIMIZER_DEFAULTS.keys() == rows.keys() - {"LAMB", "NovoGrad"}
    for name, defaults in OPTIMIZER_DEFAULTS.items():
        assert "arxiv.org/abs/" in rows[name] or name == "larc"
        for setting, value in defaults.items():
            if setting in WORDS:
                shown = re.search(rf"{WORDS[setting]} (\S+?),? ", rows[name])
                assert shown is not None, (name, setting)
                assert float(shown[1]) == value


def test_arguments_and_defaults_of_the_classes() -> None:
    rows = re.findall(r"^\| ((?:`[A-Z]\w+`(?:, )?)+) \| (.*) \|$", PAGE, re.MULTILINE)
    told = {name: re.findall(r"`([^`]*)`", text) for names, text in rows for name in re.findall(r"\w+", names)}
    assert sorted(told) == sorted(optim.__all__)
    for name, arguments in told.items():
        parameters = list(inspect.signature(getattr(optim, name)).parameters.values())[2:]
        assert arguments == [f"{parameter.name}={parameter.default!r}" for parameter in parameters]
