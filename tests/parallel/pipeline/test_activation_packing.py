"""What one stage sends to the next keeps values, layouts and gradients; hostile JSON is only an error."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from stormo.errors import SettingError
from stormo.parallel.pipeline.activation_packing import (
    TensorSpec,
    list_specs,
    pack,
    specs_from_json,
    specs_of,
    specs_to_json,
    unpack,
)

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def send(value: Any) -> tuple[Any, Any, list[Tensor]]:
    """A value that was sent, the anchor of the receiving stage, and the wire tensors."""
    specs = specs_of(value, "a test")
    sent = pack(specs, value, torch.zeros(0, requires_grad=True), "a test")
    wires = [wire.detach().clone().requires_grad_() for wire in sent]
    anchor, received = unpack(specs, wires)
    return received, anchor, wires


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_layout_is_kept(dtype: torch.dtype) -> None:
    numbers = torch.arange(-60, 60).reshape(2, 3, 4, 5)
    plain = numbers.to(dtype)
    for value in (
        plain,
        plain.contiguous(memory_format=torch.channels_last),
        plain.transpose(1, 3),
        plain[:, :, ::2],
        plain.sum() > 0,
    ):
        received, _, wires = send({"here": (value, 3, None)})
        found, three, nothing = received["here"]
        assert found.dtype == value.dtype
        assert torch.equal(found, value)
        assert (three, nothing) == (3, None)
        assert all(wire.is_contiguous() and wire.is_floating_point() for wire in wires)
    received, _, _ = send(plain.contiguous(memory_format=torch.channels_last))
    assert received.is_contiguous(memory_format=torch.channels_last)


def test_every_wire_tensor_gets_a_gradient() -> None:
    used, unused, whole = torch.randn(2, 3), torch.randn(4), torch.arange(3)
    (one, _, _), anchor, wires = send((used, unused, whole))
    one.mul_(2)  # a received tensor may be changed in place
    specs = specs_of((one, whole), "a test")
    out = pack(specs, (one, whole), anchor, "a test")
    torch.autograd.backward(out, [torch.ones_like(tensor) for tensor in out])
    assert torch.equal(wires[0].grad, torch.full((2, 3), 2.0))  # type: ignore[arg-type]
    assert torch.equal(wires[1].grad, torch.zeros(4))  # type: ignore[arg-type]
    assert wires[2].grad is not None


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(SettingError, match="complex64 is in a test, but it cannot be sent from one worker to the next"):
        specs_of([torch.zeros(2, dtype=torch.complex64)], "a test")
    with pytest.raises(SettingError, match="a Linear is in a test"):
        specs_of([nn.Linear(1, 1)], "a test")
    # A number that was taken from the data would be that of the first micro-batch for ever.
    specs = specs_of((torch.zeros(2), 3.0), "a test")
    with pytest.raises(SettingError, match="in another micro-batch of the same shape"):
        pack(specs, (torch.zeros(2), 4.0), torch.zeros(0), "a test")
    assert len(list_specs(specs)) == 1


SPEC = TensorSpec((2, 3), torch.bfloat16, (1, 0))


class Pair(NamedTuple):
    first: Any
    second: Any


class Subclass(dict[str, Any]):
    """Not flattened by torch."""


@pytest.mark.parametrize(
    "specs",
    [
        SPEC,
        (SPEC, [SPEC, None], {"a": 1, "b": (True, 2.5, "text")}),
        Pair(SPEC, {"mask": None}),
        OrderedDict(b=SPEC, a=1),
        {1: SPEC, "1": SPEC},
        (torch.Size([2, 3]), torch.float64, torch.device("cpu"), slice(1, None, 2), ..., b"\x00\xff"),
        ((), [], {}),
        (float("inf"), -0.0),
    ],
    ids=str,
)
def test_specs_survive_json(specs: Any) -> None:
    again = specs_from_json(json.loads(json.dumps(specs_to_json(specs))))
    assert again == specs
    assert type(again) is type(specs)


def test_a_class_that_torch_does_not_flatten_is_refused() -> None:
    with pytest.raises(SettingError, match="Subclass"):
        specs_to_json(Subclass(a=SPEC))


@pytest.mark.parametrize(
    "data",
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
        ["tensor", [[-1], "torch.float32", [0]]],
        ["tensor", [[2, 2], "torch.float32", [0, 0]]],
        ["tensor", [[2], "torch.load", [0]]],
        ["dtype", "torch.load"],
        ["unknown", 1],
    ],
    ids=str,
)
def test_hostile_json_is_an_error(data: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        specs_from_json(data)
