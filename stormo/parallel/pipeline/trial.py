"""Passes that must leave no trace: what is run to learn shapes or times, not to train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def trial(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Afterwards buffers, gradients, the random state and the training flags are what they were."""
    listed = list(modules)
    buffers = [(buffer, buffer.clone()) for module in listed for buffer in module.buffers()]
    gradients = [(parameter, parameter.grad) for module in listed for parameter in module.parameters()]
    flags = [(child, child.training) for module in listed for child in module.modules()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for child, was_training in flags:
            child.training = was_training
        # A weight that was cast without gradients would be taken from the cache, and get none.
        torch.clear_autocast_cache()
