"""Layers that the workers of a line compute together, each with its part of the weight (Megatron, arXiv 1909.08053).

A column layer cuts its outputs, a row layer takes cut inputs and adds the workers' products up: between the two nothing
is exchanged. What is whole is equal on all workers to the last bit, and so are its gradients. All exchanges are torch's
functional collectives, which torch.compile takes into its graph; a second derivative is refused.

Workers along the axis tensor share one stream of random numbers, so that what they all compute stays equal. Between a
column and a row each draws from a stream of its own, so that dropout leaves out other units on every worker. That
stream follows from the shared one, whose state a checkpoint holds: nothing more has to be saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.dropout import _DropoutNd

from stormo.data.order import derive_seed

_exchange = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """How a parameter of this worker relates to the whole one: where it begins along one dimension."""

    dim: int
    start: int
    whole_size: int


class TensorParallelLayer:
    """What a cut layer knows of its line; plain values, so that a model can be copied."""

    group: str  # torch's name of the process group
    place: int  # this worker's among the parts
    num_parts: int
    draws: TensorParallelRng | None = None  # for what lies between a column and a row, where it draws random numbers


class ColumnParallelLinear(nn.Linear, TensorParallelLayer):
    """Some rows of the weight: whole inputs, some of the outputs."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs] -> […, outputs / parts]."""
        part = _column_product(input, self)
        if self.draws is not None and self.training:
            self.draws.enter(part.device)
        return part


class GatheredColumnLinear(nn.Linear, TensorParallelLayer):
    """Some rows of the weight, and all outputs: the parts are put together."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs] -> […, outputs]."""
        whole: Tensor = _Gather.apply(_column_product(input, self), self.group, self.place, self.num_parts)  # type: ignore[no-untyped-call]
        return whole


class RowParallelLinear(nn.Linear, TensorParallelLayer):
    """Some columns of the weight: some of the inputs, whole outputs, to which the bias is added once."""

    input_is_parallel = True  # whether inputs come cut; whole ones are cut here

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs / parts], or […, inputs] -> […, outputs]."""
        if not self.input_is_parallel:
            (input,) = _autocast(input)
            input = _Slice.apply(input, self.group, self.place, self.num_parts)  # type: ignore[no-untyped-call]
        if self.draws is not None:
            self.draws.leave(input.device)
        whole: Tensor = _Sum.apply(F.linear(input, self.weight), self.group)  # type: ignore[no-untyped-call]
        return whole if self.bias is None else whole + self.bias.to(whole.dtype)


class VocabParallelEmbedding(nn.Embedding, TensorParallelLayer):
    """Some rows of the table: each worker looks up what it has, and zeros stand for the rest."""

    def forward(self, input: Tensor) -> Tensor:
        """Numbers […] -> vectors […, width]."""
        start = self.place * self.num_embeddings
        stop, end = start + self.num_embeddings, self.num_parts * self.num_embeddings
        # A number beyond the whole table is left as it is: the lookup refuses it, as that of one process does.
        is_elsewhere = ((input >= 0) & (input < start)) | ((input >= stop) & (input < end))
        rows = F.embedding((input - start).masked_fill(is_elsewhere, 0), self.weight, self.padding_idx)
        whole: Tensor = _Sum.apply(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), self.group)  # type: ignore[no-untyped-call]
        return whole


def _column_product(input: Tensor, layer: ColumnParallelLinear | GatheredColumnLinear) -> Tensor:
    # In autocast's format before the product, so that the gradient of the input travels in it too.
    input, weight = _autocast(input, layer.weight)
    bias = None if layer.bias is None else layer.bias.to(weight.dtype)
    part: Tensor = _ColumnProduct.apply(input, weight, bias, layer.group)  # type: ignore[no-untyped-call]
    return part


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the format in which autocast, where it is on, would multiply them."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


class _ColumnProduct(torch.autograd.Function):
    """A product whose input is whole: every worker has a part of the input's gradient, and they are added up."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.group = group
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            # On its way while the weight's gradient is computed.
            grad_input = _exchange.all_reduce(grad @ weight, "sum", ctx.group)
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            grad_weight = rows.T @ input.reshape(-1, input.shape[-1])
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        if grad_input is not None:
            grad_input = _exchange.wait_tensor(grad_input)
        return grad_input, grad_weight, grad_bias, None


class _Sum(torch.autograd.Function):
    """The sum over the workers; its gradient is whole on all of them already."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: str) -> Tensor:
        if torch.compiler.is_compiling():  # the compiler finds out by itself what may be overwritten
            return _exchange.wait_tensor(_exchange.all_reduce(part, "sum", group))  # type: ignore[no-any-return]
        ctx.mark_dirty(part)  # fresh from the product, and nobody else's
        _exchange.wait_tensor(_exchange.all_reduce_(part, "sum", group))
        return part

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _Gather(torch.autograd.Function):
    """The workers' parts of the last dimension, side by side."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: str, place: int, num_parts: int) -> Tensor:
        ctx.place, ctx.num_parts = place, num_parts
        return _gathered(part, group, num_parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _part(grad, ctx.place, ctx.num_parts), None, None, None


class _Slice(torch.autograd.Function):
    """This worker's part of the last dimension."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: str, place: int, num_parts: int) -> Tensor:
        ctx.group, ctx.num_parts = group, num_parts
        return _part(whole, place, num_parts)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(grad, ctx.group, ctx.num_parts), None, None, None


def _gathered(part: Tensor, group: str, num_parts: int) -> Tensor:
    stacked = _exchange.wait_tensor(_exchange.all_gather_into_tensor(part.contiguous(), num_parts, group))
    return torch.cat(stacked.chunk(num_parts), dim=-1)


def _part(whole: Tensor, place: int, num_parts: int) -> Tensor:
    size = whole.shape[-1] // num_parts
    # A copy: what a function of autograd returns must not be a view of what it was given.
    return whole.narrow(-1, place * size, size).clone(memory_format=torch.contiguous_format)


_KNOWN = ("torch.nn.", "stormo.")  # modules whose layers say in their attributes whether they draw
_DRAWING = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def draws_random(module: nn.Module) -> bool:
    """Whether a training pass may draw random numbers.

    A layer of torch or stormo tells by its kind, or by a rate of dropout above 0. What the code of any other draws,
    by F.dropout for one, cannot be seen from outside: it may.
    """
    return any(_may_draw(layer) for layer in module.modules())


def _may_draw(layer: nn.Module) -> bool:
    is_changed = "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks
    if is_changed or not type(layer).__module__.startswith(_KNOWN):
        return True
    if isinstance(layer, _DropoutNd):
        return layer.p > 0
    rates = (value for name, value in vars(layer).items() if "drop" in name.lower() and isinstance(value, float))
    return isinstance(layer, _DRAWING) or any(rate > 0 for rate in rates)


class TensorParallelRng:
    """Switches the device's generator between the stream of all workers of a line and one of this worker.

    Which one is under way is read off the generator itself: a pass that is computed anew, and may end anywhere, puts
    the generator back and thereby the switch. Under torch.compile a switch divides the graph.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._own: int | None = None  # seed of this worker's stream, while or after it was used
        self._shared_seed = 0
        self._shared_state: Tensor | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def enter(self, device: torch.device) -> None:
        """From here on this worker's own numbers."""
        generator = _generator(device)
        if generator.initial_seed() == self._own:
            return
        if device.type == "cuda":
            # The same place under another seed: no number is drawn on the device, for which the host would wait.
            self._shared_seed, offset = generator.initial_seed(), generator.get_offset()
            self._own = derive_seed(self._shared_seed, "cut", self._rank)
            generator.manual_seed(self._own).set_offset(offset)
            return
        drawn = int(torch.randint(2**62, ()))
        self._shared_state = generator.get_state()
        self._own = derive_seed(drawn, "cut", self._rank)
        generator.manual_seed(self._own)

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def leave(self, device: torch.device) -> None:
        """Back to the numbers of all."""
        generator = _generator(device)
        if generator.initial_seed() != self._own:
            return
        if device.type == "cuda":
            offset = generator.get_offset()
            generator.manual_seed(self._shared_seed).set_offset(offset)
        else:
            assert self._shared_state is not None
            generator.set_state(self._shared_state)


@contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Meanwhile the device's generator draws from a stream of this seed."""
    generator = _generator(device)
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
