"""Tensor-parallel layers, each worker with a shard of the weight (Megatron, arXiv 1909.08053).

A column layer shards its outputs; a row layer takes sharded inputs and sums the workers' products. Between the two
nothing is exchanged. Whole activations, and their gradients, are equal on all workers to the last bit. All exchanges
are torch's functional collectives, which torch.compile can trace. A second derivative is refused.

Tensor-parallel peers share one random stream, so that what they all compute stays equal. Between a column and a row
each draws from its own stream, so that dropout differs between shards. That stream is derived from the shared one,
whose state is in the checkpoint: nothing more has to be saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stormo.data.order import derive_seed
from stormo.parallel.exposed import ExposedWait

# torch.compile traces these operators; the functions around them are private as well.
_collectives = torch.ops._c10d_functional


_EXPOSED: dict[str, ExposedWait] = {}  # by the name of the group


def count_waits(group: str, exposed: ExposedWait) -> None:
    """Count the time in which this worker waits for the exchanges of a group."""
    _EXPOSED[group] = exposed


def waiting_for(group: str) -> AbstractContextManager[object]:
    """Entered while this worker waits for an exchange of the group."""
    exposed = None if torch.compiler.is_compiling() else _EXPOSED.get(group)
    return nullcontext() if exposed is None else exposed.waiting()


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """This worker's shard of a whole parameter: where it starts along one dimension."""

    dim: int
    start: int
    whole_size: int


class TensorParallelLayer:
    """What a sharded layer knows of its peers; plain values, so that a model can be copied."""

    group: str  # torch's name of the process group
    tp_rank: int
    tp_size: int
    rng: TensorParallelRng | None = None  # for layers between a column and a row that draw random numbers


class ColumnParallelLinear(nn.Linear, TensorParallelLayer):
    """A shard of the weight's rows: whole inputs, sharded outputs."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs] -> […, outputs / tp_size]."""
        part = _column_product(input, self)
        if self.rng is not None and self.training:
            self.rng.enter(part.device)
        return part


class GatheredColumnLinear(nn.Linear, TensorParallelLayer):
    """A shard of the weight's rows, and whole outputs, which are gathered."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs] -> […, outputs]."""
        whole: Tensor = _Gather.apply(_column_product(input, self), self.group, self.tp_rank, self.tp_size)  # type: ignore[no-untyped-call]
        return whole


class RowParallelLinear(nn.Linear, TensorParallelLayer):
    """A shard of the weight's columns: sharded inputs, whole outputs, to which the bias is added once."""

    input_is_parallel = True  # whether inputs arrive sharded; whole inputs are sharded here

    def forward(self, input: Tensor) -> Tensor:
        """[…, inputs / tp_size], or […, inputs] -> […, outputs]."""
        if not self.input_is_parallel:
            (input,) = _autocast(input)
            input = _Slice.apply(input, self.group, self.tp_rank, self.tp_size)  # type: ignore[no-untyped-call]
        if self.rng is not None:
            self.rng.leave(input.device)
        whole: Tensor = _Sum.apply(F.linear(input, self.weight), self.group)  # type: ignore[no-untyped-call]
        return whole if self.bias is None else whole + self.bias.to(whole.dtype)


class VocabParallelEmbedding(nn.Embedding, TensorParallelLayer):
    """A shard of the table's rows: each worker looks up what it has, and zeros stand for the rest."""

    def forward(self, input: Tensor) -> Tensor:
        """Indices […] -> vectors […, width]."""
        start = self.tp_rank * self.num_embeddings
        stop, end = start + self.num_embeddings, self.tp_size * self.num_embeddings
        # An index beyond the whole table stays as it is: the lookup refuses it, as in a single process.
        is_elsewhere = ((input >= 0) & (input < start)) | ((input >= stop) & (input < end))
        rows = F.embedding((input - start).masked_fill(is_elsewhere, 0), self.weight, self.padding_idx)
        whole: Tensor = _Sum.apply(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), self.group)  # type: ignore[no-untyped-call]
        return whole


def _column_product(input: Tensor, layer: ColumnParallelLinear | GatheredColumnLinear) -> Tensor:
    # Cast before the product, so that the gradient of the input is exchanged in autocast's dtype too.
    input, weight = _autocast(input, layer.weight)
    bias = None if layer.bias is None else layer.bias.to(weight.dtype)
    part: Tensor = _ColumnProduct.apply(input, weight, bias, layer.group)  # type: ignore[no-untyped-call]
    return part


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype in which autocast, if it is on, would multiply them."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


class _ColumnProduct(torch.autograd.Function):
    """A product whose input is whole: the input's gradient is summed over the workers."""

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
            # Sent while the weight's gradient is computed.
            grad_input = _collectives.all_reduce(grad @ weight, "sum", ctx.group)
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            grad_weight = rows.T @ input.reshape(-1, input.shape[-1])
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        if grad_input is not None:
            with waiting_for(ctx.group):
                grad_input = _collectives.wait_tensor(grad_input)
        return grad_input, grad_weight, grad_bias, None


class _Sum(torch.autograd.Function):
    """The sum over the workers; its gradient is already whole on all of them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: str) -> Tensor:
        if torch.compiler.is_compiling():  # the compiler decides what can be overwritten
            return _collectives.wait_tensor(_collectives.all_reduce(part, "sum", group))  # type: ignore[no-any-return]
        ctx.mark_dirty(part)  # the product, which nobody else uses
        with waiting_for(group):
            _collectives.wait_tensor(_collectives.all_reduce_(part, "sum", group))
        return part

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _Gather(torch.autograd.Function):
    """Gather the last dimension."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: str, tp_rank: int, tp_size: int) -> Tensor:
        ctx.tp_rank, ctx.tp_size = tp_rank, tp_size
        return _gathered(part, group, tp_size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _part(grad, ctx.tp_rank, ctx.tp_size), None, None, None


class _Slice(torch.autograd.Function):
    """This worker's shard of the last dimension."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: str, tp_rank: int, tp_size: int) -> Tensor:
        ctx.group, ctx.tp_size = group, tp_size
        return _part(whole, tp_rank, tp_size)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(grad, ctx.group, ctx.tp_size), None, None, None


def _gathered(part: Tensor, group: str, tp_size: int) -> Tensor:
    with waiting_for(group):
        stacked = _collectives.wait_tensor(_collectives.all_gather_into_tensor(part.contiguous(), tp_size, group))
    return torch.cat(stacked.chunk(tp_size), dim=-1)


def _part(whole: Tensor, tp_rank: int, tp_size: int) -> Tensor:
    size = whole.shape[-1] // tp_size
    # A copy: an autograd function must not return a view of its input.
    return whole.narrow(-1, tp_rank * size, size).clone(memory_format=torch.contiguous_format)


_KNOWN = ("torch.nn.", "stormo.")  # packages whose layers show in their attributes whether they draw
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_RANDOM = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def draws_random(module: nn.Module) -> bool:
    """Whether a forward in training may draw random numbers.

    For a layer of torch or stormo, its type or its dropout rate decides. Any other code may draw, by F.dropout for one.
    """
    return any(_may_draw(layer) for layer in module.modules())


def _may_draw(layer: nn.Module) -> bool:
    is_changed = "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks
    if is_changed or not type(layer).__module__.startswith(_KNOWN):
        return True
    if isinstance(layer, _DROPOUTS):
        return layer.p > 0
    rates = (value for name, value in vars(layer).items() if "drop" in name.lower() and isinstance(value, float))
    return isinstance(layer, _RANDOM) or any(rate > 0 for rate in rates)


class TensorParallelRng:
    """Switches the device's generator between the stream that all peers share and one of this worker.

    The generator itself tells which stream is active: recomputing, which may end anywhere, restores the generator and
    so the switch. Under torch.compile a switch breaks the graph.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._own: int | None = None  # seed of this worker's stream, once it was used
        self._shared_seed = 0
        self._shared_state: Tensor | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def enter(self, device: torch.device) -> None:
        """Switch to this worker's stream."""
        generator = _generator(device)
        if generator.initial_seed() == self._own:
            return
        if device.type == "cuda":
            # The same offset under another seed: a draw on the device would make the host wait.
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
        """Switch back to the shared stream."""
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
    """Inside it, the device's generator draws from a stream of this seed."""
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
