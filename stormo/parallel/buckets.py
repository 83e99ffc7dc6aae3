"""Buckets: gradients that are exchanged together, as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stormo.errors import SettingError, StormoError

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
_ALIGNMENT_BYTES = 64  # of every gradient in a bucket, for the vector loads of optimizers
_MOVED_BYTES = 2**20  # about what a core's cache holds
# An attribute of a gradient that is the sum over all workers: its version at that time. On the tensor itself, because
# another tensor in `.grad` is not that sum, and because no reference may keep its memory.
_SUMMED = "_stormo_summed_at_version"


class Bucket:
    """Gradients of one dtype and device, followed by a flag for each: 1 if this worker has that gradient."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, has_clean_gaps: bool = False) -> None:
        self.device = device
        self._has_clean_gaps = has_clean_gaps
        self.parameters: list[nn.Parameter] = []
        self.num_awaited = 0  # gradients that are missing in this backward
        self.work: dist.Work | torch.futures.Future[Tensor] | None = None  # once it is sent
        self._dtype = dtype
        self._names: list[str] = []
        self._layouts: list[tuple[torch.Size, tuple[int, ...], int]] = []  # shape, strides, offset
        self._sizes_bytes: list[int] = []
        self._num_values = 0
        self.rest()

    @property
    def num_bytes(self) -> int:
        """The bytes of the values, without the flags."""
        return self._num_values * self._dtype.itemsize

    def add(self, name: str, parameter: nn.Parameter) -> None:
        """Add a parameter."""
        # The strides that autograd gives a gradient: the parameter's own if it is dense.
        strides = torch.empty_like(parameter, device="meta").stride()
        self._names.append(name)
        self.parameters.append(parameter)
        self._layouts.append((parameter.shape, strides, self._num_values))
        self._sizes_bytes.append(parameter.numel() * self._dtype.itemsize)
        unit = _ALIGNMENT_BYTES // self._dtype.itemsize
        self._num_values += -(-parameter.numel() // unit) * unit

    def rest(self) -> None:
        """Free everything that belongs to one backward."""
        self.work = None
        self._flat: Tensor | None = None
        self._parts: list[Tensor] = []
        self._has_arrived = [False] * len(self.parameters)
        self._to_move: list[int] = []
        self._to_move_bytes = 0
        self._missing: list[int] = []
        self._versions: list[int] = []

    def arm(self) -> None:
        """Prepare for a backward."""
        self.rest()
        self.num_awaited = len(self.parameters)

    def arrived(self, index: int) -> None:
        """A parameter has got its gradient, perhaps not for the first time."""
        if self._has_arrived[index]:
            return
        self._has_arrived[index] = True
        self.num_awaited -= 1
        self._to_move.append(index)
        self._to_move_bytes += self._sizes_bytes[index]
        # Soon, while it is in the cache and to free its memory, but not one small tensor at a time.
        if self._to_move_bytes >= _MOVED_BYTES:
            self._move()

    def _move(self) -> None:
        """Move the gradients that have arrived into the bucket."""
        if self._flat is None:
            # New in every step: gradients that the user keeps from the last one do not change, and forward, which fills
            # the memory with activations, has no bucket. The gaps are summed too and never read.
            length = self._num_values + len(self.parameters)
            make = torch.zeros if self._has_clean_gaps else torch.empty
            self._flat = make(length, dtype=self._dtype, device=self.device)
            # .data: each has its own version
            self._parts = [self._flat.as_strided(*layout).data for layout in self._layouts]
        gradients = [_checked(self._names[index], self.parameters[index].grad) for index in self._to_move]
        if gradients:
            torch._foreach_copy_([self._parts[index] for index in self._to_move], gradients)
        for index in self._to_move:
            self.parameters[index].grad = self._parts[index]
        self._to_move, self._to_move_bytes = [], 0

    def pack(self) -> tuple[Tensor, int]:
        """The tensor to sum over the workers, and its number of values before the flags.

        Its gradients must not change until `receive`.
        """
        for index, (parameter, has_arrived) in enumerate(zip(self.parameters, self._has_arrived, strict=True)):
            if not has_arrived:  # but perhaps in an earlier micro-batch
                (self._missing if parameter.grad is None else self._to_move).append(index)
        self._move()
        assert self._flat is not None
        flags = self._flat[self._num_values :].fill_(1)
        for index in self._missing:
            self._parts[index].zero_()
            flags[index].zero_()
        self._versions = [part._version for part in self._parts]
        return self._flat, self._num_values

    def receive(self) -> None:
        """Wait for the sums; a parameter gets a gradient if any worker has one."""
        assert self.work is not None
        assert self._flat is not None
        self.work.wait()  # on a GPU the stream waits, not the host
        if self._flat.is_cuda:
            self._flat.record_stream(torch.cuda.current_stream(self.device))
        left_out: set[int] = set()
        if self._missing:  # only then the host reads the flags
            flags = self._flat[self._num_values :].tolist()
            left_out = {index for index in self._missing if flags[index] == 0}
            for index in set(self._missing) - left_out:
                self.parameters[index].grad = self._parts[index]
        for index, (parameter, part, version) in enumerate(
            zip(self.parameters, self._parts, self._versions, strict=True)
        ):
            if index in left_out:
                continue
            if parameter.grad is not part or part._version != version:
                raise _taken(self._names[index])
            put_mark(part, version)
        self.rest()

    def drop(self) -> None:
        """Set gradients that were sent to None."""
        for parameter in self.parameters:
            parameter.grad = None


def is_summed(gradient: Tensor) -> bool:
    """Whether this is, or was, a sum over all workers."""
    return hasattr(gradient, _SUMMED)


def put_mark(gradient: Tensor, version: int) -> None:
    """Mark a gradient as a sum over all workers, with its version."""
    setattr(gradient, _SUMMED, version)


def take_mark(gradient: Tensor | None) -> int | None:
    """Remove the mark of a gradient, and return its version; None without a mark."""
    version: int | None = getattr(gradient, _SUMMED, None)
    if version is not None:
        delattr(gradient, _SUMMED)
    return version


def make_buckets(
    named: Sequence[tuple[str, nn.Parameter]], first_bytes: int, other_bytes: int, *, has_clean_gaps: bool = False
) -> list[Bucket]:
    """Buckets of one dtype and device each, in the order in which they fill; the first of a kind is small.

    `has_clean_gaps`: the values between two gradients are zero.
    """
    full: list[Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    limits_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for name, parameter in named:
        _check_parameter(name, parameter)
        kind = parameter.dtype, parameter.device
        bucket = filling.pop(kind, None) or Bucket(*kind, has_clean_gaps=has_clean_gaps)
        bucket.add(name, parameter)
        if bucket.num_bytes >= limits_bytes.get(kind, first_bytes):
            full.append(bucket)
            limits_bytes[kind] = other_bytes
        else:
            filling[kind] = bucket  # last in the dict: the bucket added to last fills last
    return full + list(filling.values())


def require_shape(name: str, tensor: Tensor) -> None:
    """Refuse a lazy layer's parameter or buffer before its first call."""
    if is_lazy(tensor):
        raise SettingError(
            f"{name} has no shape yet",
            "the workers must agree on it",
            "call the model on a batch once before stormo gets it",
        )


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    require_shape(f"the parameter {name}", parameter)
    if parameter.dtype not in _DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise SettingError(
            f"the parameter {name} has the dtype {str(parameter.dtype).removeprefix('torch.')}",
            f"gradients are summed over workers in {names}",
            "convert it to one of these, or set its requires_grad to False",
        )


def _checked(name: str, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise _taken(name)
    if gradient.layout != torch.strided:
        raise SettingError(
            f"the gradient of {name} is sparse",
            "only dense gradients are summed over workers",
            "leave out sparse=True where its layer is made",
        )
    return gradient.detach() if gradient.requires_grad else gradient


def _taken(name: str) -> StormoError:
    return StormoError(
        f"the gradient of {name} was changed or removed while it was summed over the workers, because of a hook on the "
        "parameter that steps the optimizer or replaces the gradient; do that after world.backward(loss)."
    )
