"""The tables of docs/coming-from.md count the changed lines that the page shows, and the changed job runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import programs
from tests.docs.pages import DOCS, read

PAGE = read(DOCS / "coming-from.md")
CHANGES = dict(re.findall(r"<!-- (\w+) -->\n```diff\n(.*?)```", PAGE, re.DOTALL))
ROWS = {"ddp": "DDP", "accelerate": "Accelerate", "stormo": "stormo", "mnist": "mnist", "vae": "vae"}
JOB = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset


def Net():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))


def images():
    random = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(130, 1, 4, 4, generator=random), torch.randint(4, (130,), generator=random))
"""


def _changed(change: str) -> tuple[list[str], list[str]]:
    lines = change.splitlines()
    return [line for line in lines if line[:1] == "+" != line], [line for line in lines if line[:1] == "-"]


@pytest.mark.parametrize("name", ROWS)
def test_the_table_counts_what_is_shown(name: str) -> None:
    row = re.findall(rf"^\| {re.escape(ROWS[name])}.*$", PAGE, re.MULTILINE)[0]
    cells = [cell.strip() for cell in row.split("|")]
    new, old = _changed(CHANGES[name])
    assert [str(len(new)), str(len(old))] in (cells[2:4], cells[3:5])


def test_the_job_is_the_same_on_two_workers(tmp_path: Path) -> None:
    (plain,) = re.findall(r"```python\n(import torch\n.*?)```", PAGE, re.DOTALL)
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    (tmp_path / "plain.py").write_text(plain, encoding="utf-8")
    (tmp_path / "train.py").write_text(_apply(CHANGES["stormo"], plain), encoding="utf-8")
    one, two = programs.run(["plain.py"], tmp_path), programs.run(["train.py"], tmp_path, 2)
    assert one.stdout.count("epoch") == 2, one.stderr
    assert two.stdout == one.stdout, two.stderr


def _apply(change: str, text: str) -> str:
    """The text after a change, whose parts have a line of context."""
    for part in change.split("@@\n"):
        old, new = ([line[1:] for line in part.splitlines() if line[:1] != sign] for sign in "+-")
        assert text.count("\n".join(old)) == 1
        text = text.replace("\n".join(old), "\n".join(new))
    return text
