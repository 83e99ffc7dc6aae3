"""Memory for a while: modules whose tensors have none compute with made-up values, to learn how long they take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_VALUE = 0.02  # about the size of a weight: neither denormal nor overflowing


@contextmanager
def lent(
    modules: Iterable[nn.Module], device: torch.device, own: Iterable[tuple[nn.Module, str]] = ()
) -> Iterator[None]:
    """While it is open, what these modules have on the device meta is on a real one; afterwards it is as before.

    `own` names single parameters of other modules.
    """
    lent: dict[int, Tensor] = {}
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in {id(child): child for root in modules for child in root.modules()}.values():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    before.append((table, name, tensor))
    singles = ((module._parameters, name) for module, name in own)
    before += [
        (table, name, tensor) for table, name in singles if (tensor := table[name]) is not None and tensor.is_meta
    ]
    for table, name, tensor in before:
        if id(tensor) not in lent:
            lent[id(tensor)] = _like(tensor, device)
        table[name] = lent[id(tensor)]
    try:
        yield
    finally:
        for table, name, tensor in before:
            table[name] = tensor


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    value = torch.full(tensor.shape, _VALUE if tensor.is_floating_point() else 0, dtype=tensor.dtype, device=device)
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
