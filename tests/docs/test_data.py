"""Every task of docs/data.md trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stormo.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("Words", ("--base-lr", "0.3", "--target-loss", "0.4", "--patience", "1"), "Early stopping"),
        ("Fit", ("--epoch-samples", "400", "--base-lr", "0.1"), "ceil(400 samples / 32)"),
        ("Shards", ("--base-lr", "0.1"), "ceil(828 samples / 32)"),
        ("Points", (), "0.001, 0.003"),
    ],
)
def test_the_tasks_of_the_page_train(
    name: str,
    flags: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (text,) = (block for block in blocks if f"class {name}(Task)" in block)
    file = f"page_{name.lower()}.py"
    (tmp_path / file).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    settings = ["--epochs", "3", "--warmup-epochs", "0", "--loader-workers", "0", "--no-tensorboard"]
    assert main(["train", file, *flags, *settings]) == 0
    printed = capfd.readouterr().out
    assert says in printed
    if name == "Words":  # it stops once its loss is low, maybe at once
        return
    losses = [float(loss) for loss in re.findall(r"Validation Loss = ([\d.]+)", printed)]
    scores = [float(score) for score in re.findall(r"Validation F1 = ([\d.]+)", printed)]
    assert losses[-1:] < losses[:1] or scores[-1] > scores[0]
