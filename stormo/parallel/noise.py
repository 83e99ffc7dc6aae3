"""Gradient noise in the passes of a run: the same for every sample and step, however many workers and passes there are.

A task's loss is one mean, so that a sample's factor is put on the gradient of its row of the model's output. That is
the gradient of the weighted losses exactly, as long as the loss of a sample depends on its own output alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from stormo.config.schema import TrainConfig
from stormo.data.loaders import Batch, with_ghost
from stormo.data.order import derive_seed
from stormo.errors import SettingError, counted
from stormo.optim.noise import (
    Box,
    ScaleRows,
    add_noise,
    add_noise_to_boxes,
    annealed_sigma,
    factor_sigma,
    sample_factors,
)


class GradientNoise:
    """What the settings ask for; where they ask for none, every call returns at once."""

    def __init__(self, settings: TrainConfig, device: torch.device) -> None:
        self._seed = settings.run.seed
        self._settings = settings.optimizer
        self._is_pinned = device.type == "cuda"
        self._drawn: tuple[tuple[int, int], Tensor] | None = None  # seed and samples of a step, and its factors

    def sigma(self, num_samples: int) -> float:
        """The spread of the samples' factors in a global batch of this size; 0 without them."""
        small = self._settings.gradient_noise_batch
        return 0.0 if small is None else factor_sigma(num_samples, small)

    @contextmanager
    def on_samples(self, model: nn.Module, batch: Batch, epoch: int) -> Iterator[None]:
        """While it holds, what the model returns carries the factors of the pass's samples into backward."""
        small, span = self._settings.gradient_noise_batch, batch.span
        if small is None or not self.sigma(span.step_samples):
            yield
            return
        start, stop = (position - span.step_start for position in with_ghost(span))
        seed = derive_seed(self._seed, "gradient noise", epoch, span.step_start)
        outputs = _Outputs(self._factors(span.step_samples, small, seed)[start:stop])
        # On the outermost object, so that nothing of it is compiled or captured.
        hook = model.register_forward_hook(outputs)
        try:
            yield
        finally:
            hook.remove()
        if not outputs.num_calls:
            raise SettingError(
                f"--gradient-noise-batch {small} was set",
                "loss() did not call the model that it was given, whose output the noise is put on",
                "call model(...) itself in loss(), not a part or a method of it",
            )

    def _factors(self, num_samples: int, small: int, seed: int) -> Tensor:
        """Those of the whole step, of which every pass takes its part."""
        if self._drawn is None or self._drawn[0] != (seed, num_samples):
            factors = sample_factors(num_samples, small, seed).to(torch.get_default_dtype())
            # Pinned, as the host would wait for the device when it sends them otherwise.
            self._drawn = (seed, num_samples), factors.pin_memory() if self._is_pinned else factors
        return self._drawn[1]

    def add(self, gradients: Iterable[Tensor | None], step: int) -> None:
        """Add the term of this step to the gradient of the whole batch, one a parameter, alike on all workers."""
        if self._settings.gradient_noise is not None:
            add_noise(gradients, *self._term(self._settings.gradient_noise, step))

    def add_to_boxes(self, boxes: Iterable[Box], step: int) -> None:
        """The same where a worker holds boxes of the gradients."""
        if self._settings.gradient_noise is not None:
            add_noise_to_boxes(boxes, *self._term(self._settings.gradient_noise, step))

    def _term(self, eta: float, step: int) -> tuple[float, int]:
        """Its spread and its seed."""
        sigma = annealed_sigma(eta, self._settings.gradient_noise_decay, step)
        return sigma, derive_seed(self._seed, "added noise", step)


class _Outputs:
    """A forward hook that passes every output through `ScaleRows`; of several calls each has the same factors."""

    def __init__(self, factors: Tensor) -> None:
        self._factors = factors
        self.num_calls = 0

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        self.num_calls += 1
        if not torch.is_grad_enabled():
            return output
        leaves, structure = tree_flatten_with_path(output)
        if not any(_is_trained(leaf) for _, leaf in leaves):
            raise _refusal(f"a {type(output).__name__} in which there is no tensor that has a gradient", self._factors)
        # One tensor returned twice remains one: the gradients of both places are summed before they meet the model.
        return tree_unflatten([self._scaled(keystr(path), leaf) for path, leaf in leaves], structure)

    def _scaled(self, place: str, leaf: Any) -> Any:
        if not _is_trained(leaf):
            return leaf
        if not leaf.ndim or len(leaf) != len(self._factors):
            shape = "x".join(map(str, leaf.shape)) or "a single number"
            raise _refusal(f"a tensor of {shape}{f' in {place}' if place else ''}", self._factors)
        self._factors = self._factors.to(leaf.device, non_blocking=True)
        return ScaleRows.apply(leaf, self._factors)  # type: ignore[no-untyped-call]


def _is_trained(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _refusal(returned: str, factors: Tensor) -> SettingError:
    return SettingError(
        "--gradient-noise-batch was set",
        f"the model returned {returned} for {counted(len(factors), 'sample')}, and every sample's row gets its factor",
        "let the model return tensors whose first dimension is the samples, or leave the noise out",
    )
