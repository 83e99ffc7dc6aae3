"""How the benchmarks compare two states and print their result."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError

import pytest
import torch

from benchmarks.command import aligned, numbers, relative_difference, result_line


def test_difference_is_relative_to_the_largest_value_of_each_tensor() -> None:
    reference = {"large": torch.tensor([1000.0, 1.0]), "small": torch.tensor([0.5])}
    ours = {"large": torch.tensor([1000.0, 2.0]), "small": torch.tensor([0.75])}
    assert relative_difference(reference, reference) == 0
    assert relative_difference(ours, reference) == 0.5
    assert relative_difference(ours | {"small": reference["small"]}, reference) == pytest.approx(1e-3)


def test_difference_of_whole_numbers_shapes_names_and_nan_is_never_small() -> None:
    reference = {"weight": torch.ones(2), "count": torch.tensor(3)}
    assert relative_difference(reference | {"count": torch.tensor(4)}, reference) == math.inf
    assert relative_difference(reference | {"weight": torch.ones(3)}, reference) == math.inf
    assert relative_difference({"weight": torch.ones(2)}, reference) == math.inf
    assert relative_difference({"weight": torch.ones(1)}, {"weight": torch.zeros(1)}) == math.inf
    assert math.isnan(relative_difference(reference | {"weight": torch.tensor([1.0, math.nan])}, reference))


def test_nan_in_one_tensor_is_not_hidden_by_a_later_one() -> None:
    reference = {"a": torch.ones(1), "b": torch.ones(1)}
    ours = {"a": torch.tensor([math.nan]), "b": torch.tensor([2.0])}
    assert math.isnan(relative_difference(ours, reference))


def test_result_is_plain_numbers_by_name() -> None:
    assert result_line({"ratio": 0.98765432, "pairs": 40, "equal": True}) == "RESULT ratio=0.987654 pairs=40 equal=1"


def test_world_sizes_are_whole_numbers_above_zero() -> None:
    assert numbers("2,3,4") == (2, 3, 4)
    for text in ("2,0", "a", ""):
        with pytest.raises(ArgumentTypeError, match="whole numbers above 0"):
            numbers(text)


def test_columns_are_aligned() -> None:
    assert aligned([["a", "long"], ["wide", "b"]]) == ["a     long", "wide     b"]
