"""Memory for a while: modules whose tensors have none compute with made-up values, to learn how long they take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_SPREAD = 0.02  # about the size of a weight: neither denormal nor overflowing


@contextmanager
def lent(
    modules: Iterable[nn.Module], device: torch.device, own: Iterable[tuple[nn.Module, str]] = ()
) -> Iterator[None]:
    """While it is open, what these modules have on the device meta is on a real one; afterwards it is as before.

    `own` names single parameters and buffers of other modules.
    """
    tables: list[tuple[dict[str, Any], str]] = [
        (module._parameters if name in module._parameters else module._buffers, name) for module, name in own
    ]
    for module in {id(child): child for root in modules for child in root.modules()}.values():
        tables += [(table, name) for table in (module._parameters, module._buffers) for name in table]
    before = [(table, name, table[name]) for table, name in tables]
    found: dict[int, Tensor] = {}
    for table, name, tensor in before:
        if tensor is not None and tensor.is_meta:
            if id(tensor) not in found:
                found[id(tensor)] = _like(tensor, device)
            table[name] = found[id(tensor)]
    try:
        yield
    finally:
        for table, name, tensor in before:
            table[name] = tensor


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    value = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    if value.is_floating_point():
        value.normal_(std=_SPREAD).abs_()  # a variance among them may be put under a root
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
