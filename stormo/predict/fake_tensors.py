"""Models on tensors without memory, the bytes alive after each operation, and what GPU kernels keep of them."""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stormo.data.batches import tensors_in
from stormo.errors import SettingError
from stormo.layers.max_pool import MaxPool2x2
from stormo.layers.norm_act import NormAct, add_residual
from stormo.parallel.meta_init import materialize, to_meta
from stormo.tasks.returned import check_model
from stormo.tasks.task import Task

OTHER, CAST, GRADIENT = range(3)  # activations and temporary tensors; weights cast to another dtype; gradients


class FakeModel:
    """Builds the task's model on fake tensors, which have shapes and no memory."""

    def __init__(self, task: Task, precision: str) -> None:
        # Otherwise an operation with unknown shapes would run on real memory.
        self.fake = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self.notices: list[str] = []
        self.frozen: set[str] = set()  # parameters that the optimizer leaves out
        self._task, self._precision = task, precision
        self._on_meta: nn.Module | None = None  # where the model reads its own values while it is built

    def model(self) -> nn.Module:
        """A new model, as one process would have it."""
        model = self._built()
        if self._precision == "fp64":
            self.convert(model, lambda tensor: tensor.double())
        for name, parameter in model.named_parameters():
            if name in self.frozen:
                parameter.requires_grad_(False)
        return model

    def _built(self) -> nn.Module:
        if self._on_meta is None:
            state = torch.get_rng_state()
            try:
                with self.fake, warnings.catch_warnings(action="ignore"):
                    return check_model(self._task, self._task.model())
            except SettingError:
                raise
            except Exception:  # building it in real memory shows the error
                torch.set_rng_state(state)
                self._on_meta = check_model(self._task, self._task.model())
                to_meta(self._on_meta)
                self.notices.append("The model was built in host memory, as it reads its own values")
        model = copy.deepcopy(self._on_meta)
        with self.fake:
            materialize(model, torch.device("cpu"))
        return model

    def convert(self, model: nn.Module, change: Callable[[Tensor], Tensor], *, of_norms: bool = True) -> None:
        """Convert the floating-point tensors of a model, in place; tied ones stay tied."""
        made: dict[int, Tensor] = {}
        with self.fake, torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, nn.modules.batchnorm._NormBase) and not of_norms:
                    continue
                for name, parameter in [*layer.named_parameters(recurse=False, remove_duplicate=False)]:
                    if parameter.is_floating_point():
                        if id(parameter) not in made:
                            made[id(parameter)] = nn.Parameter(change(parameter), parameter.requires_grad)
                        setattr(layer, name, made[id(parameter)])
                for name, buffer in [*layer.named_buffers(recurse=False, remove_duplicate=False)] if of_norms else []:
                    if buffer.is_floating_point():
                        setattr(layer, name, change(buffer))


_CONVERSION = torch.ops.aten._to_copy.default
_QUESTION = torch.ops.prim.device.default  # which fake tensors call all the time


class MemoryTrace(TorchDispatchMode):
    """Records the bytes alive after every operation, without weights and buffers.

    A storage counts once, from the operation that creates it until nothing refers to it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.rows: list[tuple[int, int, int]] = []  # bytes of each kind, after each operation
        self._weights = {storage_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._alive: dict[int, tuple[int, int, Any]] = {}  # by storage: kind, bytes, weak reference
        self._sums = [0, 0, 0]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._is_gradient)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def __exit__(self, *error: Any) -> None:
        """Stop recording."""
        super().__exit__(*error)  # type: ignore[no-untyped-call, unused-ignore]
        for hook in self._hooks:
            hook.remove()

    def add(self, tensors: Iterable[Any]) -> None:
        """Count tensors that existed before."""
        for tensor in tensors:
            self._note(tensor, OTHER)
        self._record()

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave out tensors."""
        self._weights |= {storage_key(tensor) for tensor in tensors}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and record the bytes."""
        result = function(*arguments, **(named or {}))
        if function is _QUESTION:
            return result
        is_cast = function is _CONVERSION and storage_key(arguments[0]) in self._weights
        for tensor in tensors_in(result):
            self._note(tensor, CAST if is_cast else OTHER)
        self._record()
        return result

    @property
    def now(self) -> tuple[int, int, int]:
        """The bytes alive of each kind."""
        return self._sums[OTHER], self._sums[CAST], self._sums[GRADIENT]

    def _record(self) -> None:
        self.rows.append(self.now)

    def _note(self, tensor: Any, kind: int) -> None:
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key in self._weights or key in self._alive:
            return
        num_bytes = storage.nbytes()
        self._alive[key] = kind, num_bytes, weakref.ref(storage, lambda _: self._freed(key))
        self._sums[kind] += num_bytes

    def _freed(self, key: int) -> None:
        kind, num_bytes, _ = self._alive.pop(key)
        self._sums[kind] -= num_bytes

    def _is_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        key = storage_key(parameter.grad)
        if key in self._alive:
            kind, num_bytes, end = self._alive[key]
            self._alive[key] = GRADIENT, num_bytes, end
            self._sums[kind] -= num_bytes
            self._sums[GRADIENT] += num_bytes
        self._record()


def storage_key(tensor: Tensor) -> int:
    """Identifies a storage, also one without memory."""
    return int(tensor.untyped_storage()._cdata)


_HALVES = (torch.float16, torch.bfloat16)
# Functions that autocast computes in float32 on a GPU but not on a CPU.
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
_MOST_HEAD_VALUES = 256  # of attention that keeps no score matrix


class GpuKernels(TorchFunctionMode):
    """Makes functions keep what they keep on a GPU; `half` is autocast's dtype, or None."""

    def __init__(self, half: torch.dtype | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._half = half

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, or its stand-in."""
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


def fuse_layers(model: nn.Module) -> None:
    """Make stormo's own layers keep what their fused kernels keep, in place."""
    for layer in model.modules():
        if isinstance(layer, NormAct):
            layer.forward = functools.partial(_fused_forward, layer)  # type: ignore[method-assign]
        elif isinstance(layer, MaxPool2x2):
            layer.forward = _FusedPool.apply  # type: ignore[method-assign, unused-ignore]


def _fused_forward(
    layer: NormAct, x: Tensor, residual: Tensor | None = None, residual_bias: Tensor | None = None
) -> Tensor:
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
        dense = gradient.contiguous(memory_format=_layout(gradient))
        return (
            torch.empty_like(dense) if needs[0] else None,
            dense if needs[1] else None,
            torch.empty_like(bias) if needs[2] else None,
            torch.empty_like(weight),
            torch.empty_like(bias),
        )


def _layout(x: Tensor) -> torch.memory_format:
    """The memory format of the kernels."""
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
