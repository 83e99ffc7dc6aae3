"""What a GPU does otherwise than the operations of a CPU that stand for it, as far as it keeps other bytes.

Number formats under autocast, attention that keeps no matrix of scores, dropout with a mask of one byte, and stormo's
fused layers, which keep their input alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stormo.layers.max_pool import MaxPool2x2
from stormo.layers.norm_act import NormAct, add_residual

_HALVES = (torch.float16, torch.bfloat16)
# What autocast computes in float32 on a GPU, of the functions that it leaves alone on a CPU.
_IN_FP32 = frozenset(
    (
        *("acos", "asin", "cosh", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm"),
        *("layer_norm", "log", "log10", "log1p", "log2", "log_softmax", "norm", "pow", "prod", "reciprocal"),
        *("renorm", "rms_norm", "rsqrt", "sinh", "softmax", "softmin", "softplus", "sum", "tan", "__pow__"),
        *("__rpow__", "__rdiv__", "__rtruediv__", "cross_entropy_loss", "cosine_similarity", "kl_div"),
        *("nll_loss", "nll_loss_nd", "binary_cross_entropy_with_logits", "l1_loss", "mse_loss"),
        *("smooth_l1_loss", "huber_loss", "poisson_nll_loss"),
    )
)
_MOST_HEAD_VALUES = 256  # of attention without a matrix of scores


class AsOnGpu(TorchFunctionMode):
    """While it is entered: functions keep what they would keep on a GPU; `half` is autocast's format, or None."""

    def __init__(self, half: torch.dtype | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._half = half

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Call it, or what stands for it."""
        named = named or {}
        name = getattr(function, "__name__", "")
        if name == "scaled_dot_product_attention":
            return self._attention(function, arguments, named)
        if name == "dropout" and function is not F.dropout:
            return _dropout(function, arguments, named)
        if self._half is not None and name in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            arguments = tuple(_as_fp32(value) for value in arguments)
            named = {key: _as_fp32(value) for key, value in named.items()}
        return function(*arguments, **named)

    def _attention(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, arguments, strict=False)), **named}
        tensors = [given["query"], given["key"], given["value"]]
        if self._half is not None and torch.is_autocast_enabled("cpu"):
            tensors = [tensor.to(self._half) for tensor in tensors]
        is_usual = all(
            tensor.ndim == 4 and tensor.shape[-1] <= _MOST_HEAD_VALUES and tensor.dtype != torch.float64
            for tensor in tensors
        )
        same_heads = len({tensor.shape[1] for tensor in tensors}) == 1
        if not is_usual or not same_heads:
            return function(*arguments, **named)
        mask = given.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=tensors[0].dtype)
        output, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *tensors, 0.0, bool(given.get("is_causal", False)), attn_mask=mask, scale=given.get("scale")
        )
        return output


def _dropout(function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    given = {**dict(zip(("input", "p", "train"), arguments, strict=False)), **named}
    if not given["train"] or not 0 < given["p"] < 1:
        return function(*arguments, **named)
    return torch.native_dropout(given["input"], given["p"], True)[0]


def _as_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value


def fuse(model: nn.Module) -> None:
    """Let stormo's own layers keep what their kernels keep on a GPU, in place."""
    for layer in model.modules():
        if isinstance(layer, NormAct):
            layer.forward = _Fused(layer)  # type: ignore[method-assign]
        elif isinstance(layer, MaxPool2x2):
            layer.forward = _FusedPool.apply  # type: ignore[method-assign, unused-ignore]


class _Fused:
    def __init__(self, layer: NormAct) -> None:
        self._layer = layer

    def __call__(self, x: Tensor, residual: Tensor | None = None, residual_bias: Tensor | None = None) -> Tensor:
        """The layer's own."""
        layer = self._layer
        alike = residual is None or (residual.dtype == x.dtype and residual.shape == x.shape)
        fused: Any = _FusedNorm.apply
        y: Tensor = fused(x, residual if alike else None, residual_bias if alike else None, layer.weight, layer.bias)
        return y if alike else add_residual(y, residual, residual_bias)


class _FusedNorm(torch.autograd.Function):
    """Keeps its input and statistics; the residual's gradient is the incoming one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, residual_bias: Tensor | None, weight: Tensor, bias: Tensor
    ) -> Tensor:
        """An output like the input."""
        ctx.save_for_backward(x, weight, bias, torch.empty_like(weight), torch.empty_like(bias))
        return torch.empty_like(x, memory_format=_layout(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the right sizes."""
        (gradient,) = gradients
        _, weight, bias, *_ = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dense = gradient.contiguous(memory_format=_layout(gradient))  # a copy, of what the mean over all pixels gives
        return (
            torch.empty_like(dense) if needs[0] else None,
            gradient if needs[1] else None,
            torch.empty_like(bias) if needs[2] else None,
            torch.empty_like(weight),
            torch.empty_like(bias),
        )


def _layout(x: Tensor) -> torch.memory_format:
    """Rows of channels, which is what the kernels work on."""
    return torch.channels_last if x.ndim == 4 else torch.contiguous_format


class _FusedPool(torch.autograd.Function):
    """Keeps one byte for each output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """A quarter of the input."""
        shape = (*x.shape[:2], x.shape[2] // 2, x.shape[3] // 2)
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        ctx.save_for_backward(torch.empty_like(y, dtype=torch.uint8))
        ctx.like = x.shape, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """A gradient of the input's size."""
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype, device=gradients[0].device, memory_format=torch.channels_last)
