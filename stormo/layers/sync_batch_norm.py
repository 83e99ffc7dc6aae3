"""Batch normalisation over the samples of all ranks, exact for unequal local batches.

One collective in the forward pass (count, sum and sum of squares) and one in the backward pass, each a single
float64 vector that a `Reduce` callable sums in place; this file knows nothing of process groups.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stormo.errors import SettingError

Reduce = Callable[[Tensor], object]  # sums a float64 vector in place over all ranks, in one collective

BatchNormBase = nn.modules.batchnorm._BatchNorm  # torch has no public base class of batch norms
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SynchronisedNorm:
    """A normalisation layer whose statistics can be summed over ranks."""

    reduce: Reduce | None = None
    absent: bool = False  # this rank's samples are padding: they count in no statistic

    def __copy__(self) -> Self:
        return self._copied(dict(vars(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.reduce)] = self.reduce  # a copy of the model has the same ranks
        twin = memo[id(self)] = self._copied({})
        twin.__setstate__(copy.deepcopy(vars(self), memo))  # type: ignore[attr-defined]
        vars(twin).pop("absent", None)  # nobody would reset it on a copy
        return twin

    def _copied(self, state: dict[str, Any]) -> Self:
        twin = type(self).__new__(type(self))
        vars(twin).update(state)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle without the ranks, which a reader does not have, and a batch norm of torch as what it was."""
        parts: Any = super().__reduce_ex__(max(protocol, 2))  # in the form that torch.load(weights_only=True) takes
        make, arguments, state, *rest = parts
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name not in ("reduce", "absent")}
        plain = getattr(self, "plain", type(self))
        return make, tuple(plain if one is type(self) else one for one in arguments), state, *rest


class LocalNorm:
    """A normalisation layer whose statistics stay those of this rank."""


def pack_moments(count: int, mean: Tensor, variance: Tensor) -> Tensor:
    """Local moments as the float64 vector [count, sums, sums of squares] that the ranks add up."""
    # Without a shift, as the ranks know no common one yet; in float64 the cancellation of the large terms costs
    # (mean / std)² · 1e-16, which float32 inputs cannot resolve anyway.
    wide_mean, wide_variance = mean.double(), variance.double()
    total = wide_mean * count
    squares = (wide_variance + wide_mean.square()) * count
    return torch.cat((wide_mean.new_full((1,), count), total, squares))


def unpack_moments(vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Global count, mean and biased variance of a summed vector, all in float64 and on its device."""
    count = vector[0].clamp(min=1.0)  # all ranks absent: finite numbers rather than 0 / 0
    mean, mean_square = (vector[1:] / count).chunk(2)
    return count, mean, (mean_square - mean.square()).clamp_(min=0.0)


def update_running(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches: Tensor | None,
    vector: Tensor,
    mean: Tensor,
    variance: Tensor,
    momentum: float | None,
) -> None:
    """Update the running statistics with those of a global batch, with the unbiased variance, as torch does.

    One to which no rank had a sample changes nothing. Without `momentum` they are the average of all batches so far.
    """
    count = vector[0]
    is_batch = count > 0  # on the device: asking the host whether every rank was absent would synchronise
    if num_batches is not None:
        num_batches.add_(is_batch)
    if momentum is None:
        assert num_batches is not None, "an average over all batches needs their number"
        weight = is_batch / num_batches.clamp(min=1).to(count.dtype)
    else:
        weight = momentum * is_batch.to(count.dtype)  # bool times float would be float32
    unbiased = variance * (count / (count - 1.0).clamp(min=1.0))
    running_mean.lerp_(mean.to(running_mean.dtype), weight.to(running_mean.dtype))
    running_var.lerp_(unbiased.to(running_var.dtype), weight.to(running_var.dtype))


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *([1] * (like.dim() - 2)))


class SyncNorm(torch.autograd.Function):
    """Batch norm with global statistics in plain torch operations, for every backend, dtype and layout.

    Arguments: x, weight, bias, running_mean, running_var, num_batches (the last five may be None), momentum (None for
    the average over all batches), eps, reduce, absent.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches: Tensor | None,
        momentum: float | None,
        eps: float,
        reduce: Reduce,
        absent: bool,
    ) -> Tensor:
        """Sum local moments over the ranks, then normalise with the global ones."""
        # Autocast would cast some of the sums below.
        with torch.autocast(x.device.type, enabled=False):
            num_channels = x.shape[1]
            compute_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
            num_rows = x.numel() // num_channels if num_channels else 0
            if absent or num_rows == 0:
                vector = torch.zeros(1 + 2 * num_channels, dtype=torch.float64, device=x.device)
            else:
                dims = [0, *range(2, x.dim())]
                variance, mean = torch.var_mean(x.to(compute_dtype), dims, correction=0)
                vector = pack_moments(num_rows, mean, variance)
            reduce(vector)
            # As on one rank, all ranks refuse a single value per channel. A rank with several need not read the count,
            # which would wait for the device.
            if num_rows <= 1 and reduce is not _keep and vector[0] == 1:
                raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
            count, mean, variance = unpack_moments(vector)
            if running_mean is not None and running_var is not None:
                update_running(running_mean, running_var, num_batches, vector, mean, variance, momentum)
            invstd = (variance + eps).rsqrt().to(compute_dtype)
            mean, variance = mean.to(compute_dtype), variance.to(compute_dtype)
            ctx.save_for_backward(x, weight, mean, invstd, count)
            ctx.reduce, ctx.absent = reduce, absent
            if weight is not None and weight.dtype != compute_dtype:
                # Parameters in half precision: the kernel below wants statistics and parameters in one dtype.
                weight = weight.to(compute_dtype)
                bias = None if bias is None else bias.to(compute_dtype)
            return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sum the two per-channel gradients over the ranks; parameter gradients stay local."""
        x, weight, mean, invstd, count = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            dims = [0, *range(2, x.dim())]
            grad_wide = grad.to(mean.dtype)
            normal = (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel(invstd, x)
            sum_grad = grad_wide.sum(dims)
            sum_grad_normal = (grad_wide * normal).sum(dims)
            vector = torch.cat((sum_grad, sum_grad_normal)).double()
            if ctx.absent:
                vector.zero_()
            ctx.reduce(vector)

            grad_x = None
            if ctx.needs_input_grad[0]:
                scale = invstd if weight is None else invstd * weight.to(mean.dtype)
                if not ctx.absent:  # padding has no part in the statistics, so none of their gradient
                    mean_grad, mean_grad_normal = (vector / count).to(mean.dtype).chunk(2)
                    grad_wide = grad_wide - _per_channel(mean_grad, x) - normal * _per_channel(mean_grad_normal, x)
                grad_x = (grad_wide * _per_channel(scale, x)).to(x.dtype)
            grad_weight = sum_grad_normal.to(weight.dtype) if ctx.needs_input_grad[1] else None
            grad_bias = sum_grad.to(weight.dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None, None, None, None, None


class SyncBatchNorm(BatchNormBase, SynchronisedNorm):
    """A batch norm with training statistics over all ranks; see `synchronised`."""

    plain: type[nn.Module]  # the layer's class, a base of this one

    def forward(self, input: Tensor) -> Tensor:
        """Normalise with global statistics in training, with the running ones in evaluation."""
        if not self.training or self.reduce is None:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        normalised: Tensor = SyncNorm.apply(  # type: ignore[no-untyped-call]
            input,
            self.weight,
            self.bias,
            *(
                (self.running_mean, self.running_var, self.num_batches_tracked)
                if self.track_running_stats
                else [None] * 3
            ),
            self.momentum,
            self.eps,
            self.reduce,
            self.absent,
        )
        return normalised


@functools.cache
def synchronised(plain: type[nn.Module]) -> type[SyncBatchNorm]:
    """The class of a converted layer, a subclass of its own."""
    # pickle compares the class it writes with the layer's `__class__`.
    return variant("Sync", SyncBatchNorm, plain, __class__=property(_shown_class, _become))


_shows_own_class: ContextVar[bool] = ContextVar("shows_own_class", default=False)


@contextmanager
def own_classes() -> Iterator[None]:
    """Within it, `__class__` of a converted layer is its own class: torch derives that of a sharded layer from it."""
    token = _shows_own_class.set(True)
    try:
        yield
    finally:
        _shows_own_class.reset(token)


def _shown_class(layer: SyncBatchNorm) -> type[nn.Module]:
    return type(layer) if _shows_own_class.get() else layer.plain


def _become(layer: Any, kind: type[Any]) -> None:
    vars(object)["__class__"].__set__(layer, kind)


def variant(prefix: str, mixin: type[Any], plain: type[nn.Module], **more: Any) -> type[Any]:
    """A subclass of both classes, with the plain one as an attribute."""
    body = {"plain": plain, "__module__": plain.__module__, "__doc__": plain.__doc__} | more
    return types.new_class(f"{prefix}{plain.__name__}", (mixin, plain), exec_body=lambda names: names.update(body))


def check_forward(layer: nn.Module, bases: Iterable[type[Any]], asked: str) -> None:
    """Refuse a layer whose own forward method a conversion would lose."""
    base = next(kind for kind in bases if isinstance(layer, kind))
    if type(layer).forward is not base.forward or "forward" in vars(layer):
        raise SettingError(
            f"{asked} was asked for a model with a {type(layer).__name__}",
            f"that layer replaces the forward pass of {base.__name__}, which a conversion would lose",
            "write the layer as a batch norm followed by the rest, or use stormo's NormAct",
        )


def convert_sync_batch_norm(module: nn.Module, reduce: Reduce) -> nn.Module:
    """Make every batch norm and `NormAct` sum its statistics over ranks, in place; return the module.

    Layers with ghost batch norm stay as they are.
    """
    # In place, so that hooks, references and `isinstance` stay valid. All are checked before any is changed.
    kinds = (SynchronisedNorm, *_BATCH_NORMS)
    norms = [layer for layer in module.modules() if isinstance(layer, kinds) and not isinstance(layer, LocalNorm)]
    plain: list[Any] = [layer for layer in norms if not isinstance(layer, SynchronisedNorm)]
    for layer in plain:
        check_forward(layer, _BATCH_NORMS, "synchronised batch norm")
    for layer in plain:
        kind: Any = type(layer)
        layer.__class__ = synchronised(kind)
    for layer in norms:
        layer.reduce = reduce  # type: ignore[assignment]
    return module


def synchronised_norms(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers whose statistics are summed over ranks, with their names."""
    norms = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, SynchronisedNorm)]
    return [(name, layer) for name, layer in norms if layer.reduce is not None]


class _Absence:
    """Replaces the `train` of a layer that gets padding: keeps it in evaluation mode until `end`."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.owner, self.before = layer, id(layer), layer.training
        self.asked: bool | None = None
        layer.training = False

    def __call__(self, mode: bool = True) -> nn.Module:
        """Remember the mode that the user sets meanwhile."""
        self.asked = mode
        if id(self.layer) != self.owner:  # a copy, made meanwhile, for which nobody would call `end`
            self.end()
        return self.layer

    def end(self) -> None:
        """Restore the mode, or set the one that was asked for; a layer frozen by the user stays frozen."""
        del self.layer.train
        if self.asked is None:
            self.layer.training = self.before
        else:
            self.layer.train(self.asked)


def set_absent(module: nn.Module, absent: bool) -> None:
    """Set whether this rank's next samples are padding, which must count in no statistic.

    Synchronised layers contribute zeros and use the global statistics; others use their running ones unchanged.
    """
    for layer in module.modules():
        if isinstance(layer, SynchronisedNorm):
            layer.absent = absent
        elif isinstance(layer, _BATCH_NORMS):
            absence = vars(layer).get("train")
            if absent and absence is None:
                layer.train = _Absence(layer)  # type: ignore[method-assign, assignment]
            elif not absent and isinstance(absence, _Absence):
                absence.end()


@contextmanager
def absent(module: nn.Module, is_padding: bool) -> Iterator[None]:
    """Keep a padding sample out of every statistic."""
    if not is_padding:
        yield
        return
    set_absent(module, True)
    try:
        yield
    finally:
        set_absent(module, False)


@contextmanager
def local_statistics(module: nn.Module) -> Iterator[None]:
    """Within it, every batch norm uses this rank's statistics, by the same arithmetic but without a collective.

    For a forward and backward that not every rank may complete. This includes torch's `SyncBatchNorm`.
    """
    reduces = {layer: layer.reduce for layer in module.modules() if isinstance(layer, SynchronisedNorm)}
    foreign = [layer for layer in module.modules() if isinstance(layer, nn.SyncBatchNorm)]
    for layer, reduce in reduces.items():
        layer.reduce = None if reduce is None else _keep
    for norm in foreign:
        norm.forward = functools.partial(  # type: ignore[method-assign]
            BatchNormBase.forward, norm
        )
    try:
        yield
    finally:
        for layer, reduce in reduces.items():
            layer.reduce = reduce
        for norm in foreign:
            del norm.forward


def _keep(vector: Tensor) -> None:
    """Do nothing: the sum over one rank."""
