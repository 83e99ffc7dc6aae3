"""Sums gradients over all workers during backward, without a wrapper around the model.

In buckets, as DDP does (Li et al., arXiv 2006.15704). The order is the reverse of the parameters' and is not learnt
from a first step, so that a resumed run sums in the same order. Several models have one order too: a worker that lacks
a gradient sends its buckets later than the others, but in the same order. Gradients of gradients (`create_graph=True`)
are not exchanged.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stormo.distributed.world import World
from stormo.errors import StormoError, pluralize
from stormo.parallel.buckets import Bucket, make_buckets, put_mark, take_mark
from stormo.parallel.coalesced import copy, split_like
from stormo.parallel.compression import HALF_DTYPES, Compression, GradBucket, HalfPrecision

_PARTS_OF_A_STEP = "world.backward(loss, more=True) for all but the last backward of a step"
_groups: weakref.WeakKeyDictionary[World, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_compressions: weakref.WeakKeyDictionary[World, dict[str, Compression]] = weakref.WeakKeyDictionary()


class GradientExchange:
    """Sums the gradients of one model over all workers during backward."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        bucket_bytes: int = 25 * 2**20,
        first_bucket_bytes: int = 2**20,
        average_buffers: bool = False,
        compress: str = "none",
        before_sending: Callable[[], object] | None = None,
        may_send: Callable[[], bool] = lambda: True,
    ) -> None:
        """Hook the model's parameters.

        Args:
            model: may change between steps, in the same way on all workers.
            world: of the workers.
            bucket_bytes: size of a bucket.
            first_bucket_bytes: size of the first bucket.
            average_buffers: average floating-point buffers over the workers after every step.
            compress: bf16 or fp16 to exchange gradients in 16 bits.
            before_sending: called once in a backward before the first bucket; it may wait for the other workers.
            may_send: whether it would return at once; until then backward continues without sending.
        """
        self._model = model
        self._before_sending = before_sending
        self._may_send = may_send
        self._world = world
        self._limits_bytes = (first_bucket_bytes, bucket_bytes)
        self._averages_buffers = average_buffers
        self._compression: Compression | None = None
        self._buckets: list[Bucket] = []
        # By the id of a parameter, as hashing a tensor is slow. The hooks keep the parameters, so ids stay unique.
        self._positions: dict[int, tuple[Bucket, int]] = {}
        self._addresses: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._signature = ""
        self._hooks: dict[int, tuple[nn.Parameter, torch.utils.hooks.RemovableHandle]] = {}
        self._is_armed = self._is_closed = self._is_out_of_step = False
        self._has_earlier = False  # a gradient of an earlier micro-batch of the step
        self._num_sent = 0
        self._before: GradientExchange | None = None  # whose buckets are sent before these in this backward
        self._after: GradientExchange | None = None  # whose buckets are sent after these
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # on which gradients came last
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._held: list[tuple[Tensor, Tensor, int]] = []  # sums of a step before: parameter, gradient, its mark
        if world.size > 1:
            self._group = _own_group(world)
            if compress != "none":
                self._compression = _own_compression(world, compress)
            self._follow_model()

    @property
    def signature(self) -> str:
        """A digest of what is exchanged, which must be the same on all workers."""
        if self._world.size > 1:
            self._follow_model()
        return self._signature

    @property
    def is_touched(self) -> bool:
        """Whether this step has a gradient: since it was armed, or of an earlier micro-batch."""
        return self._has_earlier or any(bucket.num_awaited < len(bucket.parameters) for bucket in self._buckets)

    def arm(self, before: GradientExchange | None = None) -> None:
        """Send buckets in the next backward, the last of a step, after those of `before`."""
        if self._world.size == 1:
            return
        assert not self._is_armed
        assert not self._is_closed
        if self._is_out_of_step:
            raise StormoError(
                "a backward failed after some of its gradients had been sent to the other workers, so the workers are "
                "no longer in the same step; end all of them and resume from a checkpoint."
            )
        self._follow_model()
        self._has_earlier = False
        for bucket in self._buckets:
            bucket.arm()
            for parameter in bucket.parameters:
                gradient = parameter.grad
                version = take_mark(gradient)
                if gradient is None:
                    continue
                if version is None:  # no sum of a step before
                    self._has_earlier = True
                    continue
                self._held.append((parameter, gradient, version))
                if not self._world.is_main:
                    parameter.grad = None  # all have the same: only rank 0 adds it to the new sum
        self._before, self._after = before, None
        if before is not None:
            before._after = self
        self._is_armed = True

    def send_rest(self) -> None:
        """After that backward: send the remaining buckets. All of several models do it before one finishes."""
        while self._num_sent < len(self._buckets):
            self._send_next()

    def finish(self) -> None:
        """After that backward: send the remaining buckets, wait, and put the sums into `.grad`."""
        if self._world.size == 1:
            return
        assert self._is_armed
        self.send_rest()
        means = list(self._send_buffers()) if self._averages_buffers else []
        for bucket in self._buckets:
            bucket.receive()
        for buffers, flat, work in means:
            work.wait()
            copy(buffers, split_like(flat.div_(self._world.size), buffers))
        self._rest()

    def cancel(self) -> None:
        """After a backward that raised or did not reach the model: reset without telling the other workers.

        Gradients that were sent are dropped; those of the last step are restored if nothing was added.
        """
        for parameter, gradient, version in self._held:
            parameter.grad = gradient
            put_mark(gradient, version)
        for bucket in self._buckets[: self._num_sent]:
            bucket.drop()
            self._is_out_of_step = True
        for bucket in self._buckets:
            bucket.rest()
        self._rest()

    def close(self) -> None:
        """Remove the hooks."""
        for _, hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self._is_closed = True

    def _rest(self) -> None:
        self._is_armed, self._num_sent = False, 0
        self._before = self._after = None
        self._streams.clear()
        self._held = []

    def _follow_model(self) -> None:
        """Rebuild the buckets if parameters were frozen, unfrozen, replaced or converted."""
        addresses = _addresses(self._model)
        if addresses == self._addresses:
            return
        named = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        self._buckets = make_buckets(named[::-1], *self._limits_bytes, has_clean_gaps=self._compression is not None)
        self._positions = {
            id(p): (bucket, index) for bucket in self._buckets for index, p in enumerate(bucket.parameters)
        }
        self._addresses = addresses
        described = "\n".join(f"{name} {tuple(parameter.shape)} {parameter.dtype}" for name, parameter in named)
        self._signature = f"{pluralize(len(named), 'parameter')} ({zlib.crc32(described.encode()):08x})"
        arrived = _weakly(self)
        for name, parameter in named:
            self._names[id(parameter)] = name
            if id(parameter) not in self._hooks:
                self._hooks[id(parameter)] = parameter, parameter.register_post_accumulate_grad_hook(arrived)

    def _arrived(self, parameter: Tensor) -> None:
        """Called after autograd has added to a gradient."""
        if not self._is_armed:
            self._check_base(parameter)
            return
        position = self._positions.get(id(parameter))
        if position is None:  # no longer in the model
            return
        bucket, index = position
        with self._lock:
            if bucket.work is not None:
                raise StormoError(
                    f"the gradient of {self._names[id(parameter)]} grew after it had been sent to the other workers, "
                    "because of a second backward in a step or re-entrant checkpointing; call "
                    f"{_PARTS_OF_A_STEP}, and torch.utils.checkpoint with use_reentrant=False."
                )
            if parameter.is_cuda:
                self._chain_streams(parameter.device)
            self._held = []  # this backward has added to them, so they cannot be restored
            bucket.arrived(index)
        self._send_full()

    def _check_base(self, parameter: Tensor) -> None:
        """Refuse a micro-batch that adds to the last step's sum, which would count once per worker."""
        gradient = parameter.grad
        version = take_mark(gradient)
        if version is None or gradient is None:
            return
        if gradient._version == version + 1:  # only this backward has changed it, not zero_grad
            raise StormoError(
                f"a backward added to the gradient of {self._names[id(parameter)]}, which held the last step's sum "
                f"over all {self._world.size} workers; call optimizer.zero_grad() between steps, or {_PARTS_OF_A_STEP}."
            )

    def _send_full(self) -> None:
        """Send full buckets, in order."""
        with self._lock:
            if self._before is not None and not self._before._is_all_sent:
                return
            while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].num_awaited:
                if self._num_sent == 0 and not self._may_send():
                    return
                self._send_next()
        if self._after is not None and self._is_all_sent:
            self._after._send_full()

    @property
    def _is_all_sent(self) -> bool:
        return self._num_sent == len(self._buckets) and (self._before is None or self._before._is_all_sent)

    def _send_next(self) -> None:
        bucket = self._buckets[self._num_sent]
        if self._num_sent == 0 and self._before_sending is not None:
            self._before_sending()
        if bucket.device.type == "cuda":
            self._chain_streams(bucket.device)
        flat, num_values = bucket.pack()
        if self._compression is None:
            bucket.work = dist.all_reduce(flat, group=self._group, async_op=True)
        else:
            bucket.work = self._compression.begin(GradBucket(flat=flat[:num_values], counts=flat[num_values:]))
        self._num_sent += 1

    def _chain_streams(self, device: torch.device) -> None:
        """Order the streams of different parts of a model, whose gradients go into one tensor."""
        here = torch.cuda.current_stream(device)
        last = self._streams.get(device, here)
        if last != here:
            here.wait_stream(last)
        self._streams[device] = here

    def _send_buffers(self) -> Iterator[tuple[list[Tensor], Tensor, dist.Work]]:
        floats = [buffer for buffer in self._model.buffers() if buffer.is_floating_point()]
        for device in dict.fromkeys(buffer.device for buffer in floats):
            buffers = [buffer for buffer in floats if buffer.device == device]
            flat = torch.cat([buffer.detach().flatten().double() for buffer in buffers])
            yield buffers, flat, dist.all_reduce(flat, group=self._group, async_op=True)


def _addresses(model: nn.Module) -> dict[int, int]:
    """The ids of parameters that require a gradient, and their addresses, which a conversion changes."""
    # Not by named_parameters(), which takes several times as long: this runs in every step.
    found: dict[int, int] = {}
    modules: list[nn.Module | None] = [model]
    while modules:
        module = modules.pop()
        if module is None:
            continue
        modules.extend(module._modules.values())
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                found[id(parameter)] = 0 if is_lazy(parameter) else parameter.data_ptr()
    return found


def _weakly(exchange: GradientExchange) -> Callable[[Tensor], None]:
    """A hook that does not reference its exchange: the garbage collector does not see a parameter's hooks."""
    reference = weakref.ref(exchange)

    def arrived(parameter: Tensor) -> None:
        found = reference()
        if found is not None:
            found._arrived(parameter)

    return arrived


def _own_group(world: World) -> dist.ProcessGroup:
    """A process group for the buckets of all models.

    Other communication during backward, such as synchronised batch norm, must not be mixed up with buckets, which a
    worker that lacks a gradient sends later than the others.
    """
    group = _groups.get(world)
    if group is None:
        group = _groups[world] = dist.new_group(timeout=world.timeout, group_desc="gradients")
    return group


def _own_compression(world: World, name: str) -> Compression:
    """One for all models: a single thread sends in order."""
    made = _compressions.setdefault(world, {})
    if name not in made:
        made[name] = Compression(world, HalfPrecision(HALF_DTYPES[name]))
    return made[name]
