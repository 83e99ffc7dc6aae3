"""The witness writes down what entered the gradients that were applied, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.lineage import read_log
from benchmarks.small_tasks import WITNESS_FOLDER, Small, SmallOptions, Witness, parameter_digest


@pytest.fixture
def witness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Witness, nn.Module]]:
    monkeypatch.setenv(WITNESS_FOLDER, str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    torch.manual_seed(0)
    task = Witness(SmallOptions())
    yield task, task.model()
    task.watch.remove()


def batch(*samples: int) -> tuple[Tensor, Tensor, Tensor]:
    images = torch.full((len(samples), 28, 28), 9, dtype=torch.uint8)
    return images, torch.zeros(len(samples), dtype=torch.int64), torch.tensor(samples)


def test_passes_whose_gradients_were_thrown_away_leave_no_trace(
    witness: tuple[Witness, nn.Module], tmp_path: Path
) -> None:
    task, model = witness
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    task.loss(model, batch(7, 8)).backward()
    optimizer.zero_grad(set_to_none=True)
    before = parameter_digest(model)
    task.loss(model, batch(1, 2)).backward()
    task.loss(model, batch(3)).backward()
    optimizer.step()
    (line,) = read_log(tmp_path / "rank-0.jsonl")
    assert line["samples"] == [1, 2, 3]
    assert (line["before"], line["after"]) == (before, parameter_digest(model))
    assert line["before"] != line["after"]


def test_digest_tells_the_last_bit_of_a_parameter() -> None:
    model = nn.Linear(3, 2)
    before = parameter_digest(model)
    with torch.no_grad():
        model.bias[0] = torch.nextafter(model.bias[0], torch.tensor(9.0))
    assert parameter_digest(model) != before


def test_small_network_has_batch_norm_unless_told_otherwise() -> None:
    kinds = {type(layer) for layer in Small(SmallOptions()).model().children()}
    assert nn.BatchNorm2d in kinds
    assert {type(layer) for layer in Small(SmallOptions(norm=False)).model().children()} == kinds - {nn.BatchNorm2d}
