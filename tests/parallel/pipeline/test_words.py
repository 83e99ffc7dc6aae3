"""What a stage gives, described in JSON and back; and that hostile words make nothing but an error."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

from stormo.errors import SettingError
from stormo.parallel.pipeline.handover import Slot
from stormo.parallel.pipeline.words import from_words, to_words

SLOT = Slot((2, 3), torch.bfloat16, (1, 0))


class Pair(NamedTuple):
    first: Any
    second: Any


class Subclass(dict[str, Any]):
    """Not taken apart by torch."""


@pytest.mark.parametrize(
    "described",
    [
        SLOT,
        (SLOT, [SLOT, None], {"a": 1, "b": (True, 2.5, "text")}),
        Pair(SLOT, {"mask": None}),
        OrderedDict(b=SLOT, a=1),
        {1: SLOT, "1": SLOT},
        (torch.Size([2, 3]), torch.float64, torch.device("cpu"), slice(1, None, 2), ..., b"\x00\xff"),
        ((), [], {}),
        (float("inf"), -0.0),
    ],
    ids=str,
)
def test_a_description_comes_back_as_it_was(described: Any) -> None:
    again = from_words(json.loads(json.dumps(to_words(described))))
    assert again == described
    assert type(again) is type(described)


def test_a_class_that_torch_does_not_take_apart_is_refused() -> None:
    with pytest.raises(SettingError, match="Subclass"):
        to_words(Subclass(a=SLOT))


@pytest.mark.parametrize(
    "words",
    [
        None,
        "os:system",
        [],
        ["value", ["nested"]],
        ["node", "os:system", ["value", None], [["value", "true"]]],
        ["node", "subprocess:Popen", ["value", None], [["value", "true"]]],
        ["node", "builtins:eval", ["value", None], [["value", "1"]]],
        ["node", "builtins:type", ["value", None], []],
        ["node", "no.such.module:Class", ["value", None], []],
        ["node", "torch.utils._pytree:sys.modules", ["value", None], []],
        ["slot", [[-1], "torch.float32", [0]]],
        ["slot", [[2, 2], "torch.float32", [0, 0]]],
        ["slot", [[2], "torch.load", [0]]],
        ["dtype", "torch.load"],
        ["unknown", 1],
    ],
    ids=str,
)
def test_hostile_words_are_an_error(words: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        from_words(words)
