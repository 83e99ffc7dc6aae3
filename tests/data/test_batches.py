"""Batches of any shape are moved, counted and cut, and what cannot be is named by its place."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import default_collate

from stormo.data.batches import batch_length, collate, cut, is_opaque, move, tensors_in
from stormo.errors import SettingError
from stormo.tasks import task

META = torch.device("meta")  # a device that every machine has and that is not the CPU
CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass(frozen=True)
class Record:
    x: Tensor
    name: str
    count: int = field(init=False, default=3)


class Encoding(UserDict[str, Any]):
    """A mapping that moves itself, as tokenizers return it."""

    def to(self, device: torch.device) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.items()})


class Graph:
    """Hides its tensors, and moves itself in place."""

    def __init__(self) -> None:
        self.edges = torch.zeros(2)

    def to(self, device: torch.device) -> None:
        self.edges = self.edges.to(device)


class Odd:
    """Cannot be moved."""


class Fixed(dict[str, Any]):
    """A dict that cannot be made from a dict."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__(x=x, y=y)


def _nested() -> dict[str, Any]:
    return {
        "ordered": OrderedDict(b=torch.zeros(4, 2), a=[torch.ones(4), ("text", b"bytes", 1, 2.5, None, True)]),
        "pair": Pair(torch.zeros(4), {"array": np.arange(4), "scalar": np.float32(2.0)}),
        "record": Record(torch.ones(4), "name"),
    }


def test_everything_is_moved_and_every_container_keeps_its_type() -> None:
    moved = move(_nested(), META)
    assert type(moved["ordered"]) is OrderedDict
    assert list(moved["ordered"]) == ["b", "a"]
    assert moved["ordered"]["a"][1] == ("text", b"bytes", 1, 2.5, None, True)
    assert isinstance(moved["pair"], Pair)
    assert isinstance(moved["record"], Record)
    assert (moved["record"].name, moved["record"].count) == ("name", 3)
    tensors = list(tensors_in(moved))
    assert len(tensors) == 5
    assert all(tensor.device == META for tensor in tensors)
    assert moved["pair"].right["array"].dtype == torch.int64
    assert moved["pair"].right["scalar"] == 2.0


def test_what_moves_itself_is_let_do_so() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    graph = Graph()
    batch = {"packed": packed, "encoding": Encoding(ids=torch.zeros(2, 5)), "graph": graph}
    moved = move(batch, META)
    assert isinstance(moved["packed"], PackedSequence)
    assert moved["packed"].data.device == META
    assert isinstance(moved["encoding"], Encoding)
    assert moved["encoding"]["ids"].device == META
    assert moved["graph"] is graph
    assert graph.edges.device == META
    assert is_opaque(batch)  # the graph's tensors are not to be seen
    assert not is_opaque(_nested())
    assert not is_opaque([packed, Encoding(ids=torch.zeros(2))])


def test_a_default_dict_keeps_its_default_and_an_odd_dict_becomes_a_plain_one() -> None:
    moved = move(defaultdict(list, x=torch.zeros(1)), META)
    assert moved["new"] == []
    plain = move(Fixed(torch.zeros(1), 2), META)
    assert type(plain) is dict
    assert plain["y"] == 2


def test_arrays_that_torch_does_not_take_as_they_are_become_tensors_all_the_same() -> None:
    frozen = np.arange(4)[::-1]
    frozen.flags.writeable = False
    assert move(frozen, CPU).tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("batch", "place", "kind"),
    [
        ({"graph": [Odd()]}, "batch['graph'][0]", "of type Odd"),
        ((1, {"a": {1, 2}}), "batch[1]['a']", "of type set"),
        (Pair(torch.zeros(1), Odd()), "batch.right", "of type Odd"),
        (np.array(["a", "b"]), "batch", "an array of <U1 of shape [2]"),
    ],
)
def test_what_cannot_be_moved_is_named_by_its_place(batch: Any, place: str, kind: str) -> None:
    with pytest.raises(SettingError) as raised:
        move(batch, CPU)
    text = str(raised.value)
    assert text.startswith(f"{place} is {kind}, but only tensors can be moved to cpu")
    assert "to(device)" in text
    assert "collate()" in text


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        (_nested(), 4),
        ({"scale": torch.tensor(2.0), "n": 7, "x": np.zeros((5, 2))}, 5),
        ({"names": ["a", "b", "c"]}, 3),
        (pack_sequence([torch.ones(3), torch.ones(2)]), 2),
        (Encoding(ids=torch.zeros(6, 2)), 6),
        (Record(torch.zeros(2), "x"), 2),
    ],
)
def test_samples_are_counted(batch: Any, length: int) -> None:
    assert batch_length(batch) == length


def test_a_batch_without_rows_cannot_be_counted() -> None:
    with pytest.raises(SettingError, match=r"a batch of type Odd was given, but it holds no tensor to count"):
        batch_length(Odd())


def test_rows_are_cut_and_scalars_stay() -> None:
    batch = {
        "x": torch.arange(5),
        "names": ["a", "b", "c", "d", "e"],
        "more": Pair(torch.arange(5) * 10, [np.arange(5)]),
        "scale": torch.tensor(2.0),
        "n": 7,
    }
    rows = cut(batch, 1, 3)
    assert rows["x"].tolist() == [1, 2]
    assert rows["names"] == ["b", "c"]
    assert rows["more"].left.tolist() == [10, 20]
    assert rows["more"].right[0].tolist() == [1, 2]
    assert float(rows["scale"]) == 2.0
    assert rows["n"] == 7


def test_parts_of_different_lengths_are_not_cut() -> None:
    with pytest.raises(SettingError, match=r"batch\['x'\] has 4 rows, but batch\['y'\]\[1\] has 3, so that"):
        cut({"x": torch.zeros(4, 2), "y": [torch.zeros(4), torch.zeros(3)]}, 0, 2)
    with pytest.raises(SettingError, match=r"batch\['p'\] is .*, but it has no rows that could be cut"):
        cut({"p": pack_sequence([torch.ones(3), torch.ones(2)])}, 0, 1)


@pytest.mark.parametrize(
    ("samples", "described"),
    [
        ([{"x": torch.zeros(3)}, {"x": torch.zeros(2)}], "a dict of ['x'] tensor of shape [3]; a dict of ['x'] tensor"),
        ([Odd(), Odd()], "of type Odd"),
        ([[1, 2], [1]], "a list of [0] of type int, [1] of type int; a list of [0] of type int"),
        ([{"a": 1}, {"b": 1}], "a dict of ['a'] of type int; a dict of ['b'] of type int"),
    ],
)
def test_samples_that_do_not_fit_together_are_answered_with_collate(samples: list[Any], described: str) -> None:
    with pytest.raises(SettingError) as raised:
        collate(samples)
    text = str(raised.value)
    assert text.startswith(f"the data set gave samples that are {described}")
    assert "write collate(self, samples) in the task" in text


def test_a_task_without_collate_makes_batches_as_torch_does() -> None:
    assert task.Task(None).collate([{"x": 1}, {"x": 2}])["x"].tolist() == [1, 2]


def test_a_tuple_of_texts_is_cut_as_torch_makes_it_of_a_column() -> None:
    batch = default_collate([(torch.tensor(float(number)), f"file{number}.png") for number in range(4)])
    numbers, names = cut(batch, 1, 3)
    assert numbers.tolist() == [1.0, 2.0]
    assert tuple(names) == ("file1.png", "file2.png")
    size = cut((torch.arange(3), (32, 32)), 0, 1)[1]
    assert size == (32, 32)  # of the batch, not of its samples
