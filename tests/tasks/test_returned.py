"""What the methods of a task return; the table in tests/mistakes has the commoner mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from stormo.data import TensorData
from stormo.errors import SettingError
from stormo.tasks.returned import check_data, check_loss, check_model, without_gradient


class Net:
    """Stands for the task."""


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Empty(Dataset[int]):
    def __len__(self) -> int:
        return 3


class AtOnce(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def test_a_model_of_which_some_part_is_trained_passes() -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    assert check_model(Net(), model) is model


@pytest.mark.parametrize(
    "data",
    [
        [(torch.ones(2), 1)],
        (torch.ones(2), torch.zeros(2)),  # two samples of the same shape
        TensorData(torch.ones(3, 2)),
        np.ones((3, 2)),
        range(4),
        Stream(),
        AtOnce(),
    ],
)
def test_whatever_gives_samples_is_a_data_set(data: Any) -> None:
    assert check_data(Net(), "train_data", data) is data


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            {"x": torch.ones(3)},
            "Net.train_data() returned a dict of 1 part, but a data set gives one sample for each ",
        ),
        (
            3,
            "Net.train_data() returned an int, but a data set has __len__ and __getitem__; ",
        ),
        (Empty(), "Net.train_data() returned an Empty, but a data set has __len__ and __getitem__; "),
        (
            Endless(),
            "Net.train_data() returned an Endless, but a data set has __len__ and __getitem__; ",
        ),
        (Endless, "Net.train_data() returned the class Endless, but a data set has __len__ and __getitem__"),
        (
            iter([1]),
            "Net.train_data() returned a list_iterator, which can be read once, but every epoch",
        ),
        ([], "Net.train_data() returned a data set without samples, but an epoch takes at least one; "),
    ],
)
def test_what_gives_no_samples_is_refused(data: Any, sentence: str) -> None:
    with pytest.raises(SettingError) as caught:
        check_data(Net(), "train_data", data)
    assert str(caught.value).startswith(sentence)


def test_a_scalar_with_a_gradient_is_a_loss_in_any_precision() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        loss = torch.ones((), dtype=dtype, requires_grad=True)
        assert check_loss(Net(), loss) is loss


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (torch.ones(1, requires_grad=True), "Net.loss() returned a tensor of shape [1], but the gradient is taken of "),
        (
            (torch.ones(()), {}),
            "Net.loss() returned a tuple, but the gradient is taken of a tensor; return the mean lo",
        ),
        (True, "Net.loss() returned a bool, but the gradient is taken of a tensor; return the loss itself, without "),
        (torch.ones(()), "Net.loss() returned a tensor without a gradient, but it must lead back to the parameters of"),
    ],
)
def test_what_has_no_gradient_is_no_loss(loss: Any, sentence: str) -> None:
    with pytest.raises(SettingError) as caught:
        check_loss(Net(), loss)
    assert str(caught.value).startswith(sentence)


def test_parameters_that_backward_has_not_reached_are_found() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "spare": nn.Linear(2, 1), "frozen": nn.Linear(2, 1)})
    model["frozen"].requires_grad_(False)
    total: Tensor = model["used"](torch.ones(1, 2)).sum()
    total.backward()
    assert without_gradient(model) == ["spare.weight", "spare.bias"]


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(SettingError, match="a model on the device meta, but its weights have no values"):
        check_model(object(), nn.Linear(2, 2, device="meta"))
