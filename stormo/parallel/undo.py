"""Puts a worker back to where it was after steps that are not to count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stormo.data.generators import host_states, set_host_states
from stormo.parallel.strategy import Strategy


class Before:
    """The weights, the optimizer and the random generators as they were, to be put back to the last bit.

    Copies are kept on the host, so that they take nothing from what is measured on a GPU.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        module, optimizer = strategy.module, strategy.optimizer
        self._modes = [(layer, layer.training) for layer in module.modules()]
        self._gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        self._weights = [(parameter, _copy(parameter)) for parameter in module.parameters()]
        self._buffers = [
            (layer, name, buffer, _copy(buffer))
            for layer in module.modules()
            for name, buffer in layer._buffers.items()
            if buffer is not None
        ]
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._rates = strategy.rates
        self._states = {
            owner: {key: (value, _copy(value) if isinstance(value, Tensor) else None) for key, value in state.items()}
            for owner, state in optimizer.state.items()
        }
        self._gpus = [device for device in strategy.devices() if device.type == "cuda"]
        self._random = host_states()
        self._gpu_random = [torch.cuda.get_rng_state(device) for device in self._gpus]
        optimizer.zero_grad(set_to_none=True)  # none may be added to

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo whatever was done since."""
        optimizer = self._strategy.optimizer
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for parameter, before in self._weights:
            parameter.copy_(before)
        for layer, name, buffer, before in self._buffers:
            layer._buffers[name] = buffer.copy_(before)
        optimizer.state.clear()
        for owner, state in self._states.items():
            optimizer.state[owner] = {key: _put_back(*saved) for key, saved in state.items()}
        for group, values in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(values)
        self._strategy.rates = self._rates
        for layer, mode in self._modes:
            layer.training = mode
        set_host_states(self._random)
        for device, gpu_random in zip(self._gpus, self._gpu_random, strict=True):
            torch.cuda.set_rng_state(gpu_random, device)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _put_back(value: Any, before: Tensor | None) -> Any:
    return value if before is None else value.copy_(before)
