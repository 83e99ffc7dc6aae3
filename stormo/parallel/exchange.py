"""Sums gradients over all workers while backward still runs, for a model that stays the very object it was.

In buckets, as DDP does (Li et al., arXiv 2006.15704), without its wrapper. The order is the reverse of the parameters'
and is never learnt from a first step: a resumed run must add up in the same order as one that never stopped. Several
models have one order too: a worker that lacks a gradient sends its buckets later than the others, but never in another
turn, or a model would get the sums of another one.
Gradients of gradients (`create_graph=True`) do not travel.
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
from stormo.errors import StormoError, counted
from stormo.parallel.buckets import Bucket, make_buckets, put_mark, take_mark
from stormo.parallel.compression import HALF_DTYPES, Compression, GradBucket, HalfPrecision

_PARTS_OF_A_STEP = "world.backward(loss, more=True) for all but the last backward of a step"
_groups: weakref.WeakKeyDictionary[World, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_compressions: weakref.WeakKeyDictionary[World, dict[str, Compression]] = weakref.WeakKeyDictionary()


class GradientExchange:
    """Sums the gradients of one model over all workers while backward still runs."""

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
            model: may be changed between steps, on all workers alike.
            world: of the workers.
            bucket_bytes: how much travels together.
            first_bucket_bytes: the same for what is ready first.
            average_buffers: make floating-point buffers the mean over the workers, after every step.
            compress: bf16 or fp16 where gradients are to travel in as many bits.
            before_sending: called once in a backward before anything leaves; it may wait for the other workers.
            may_send: whether it would not; until then backward goes on, and the first bucket leaves later.
        """
        self._model = model
        self._before_sending = before_sending
        self._may_send = may_send
        self._world = world
        self._limits_bytes = (first_bucket_bytes, bucket_bytes)
        self._averages_buffers = average_buffers
        self._compression: Compression | None = None
        self._buckets: list[Bucket] = []
        # By the id of a parameter: to hash a tensor is slow. The hooks hold the parameters, so an id stays one's own.
        self._places: dict[int, tuple[Bucket, int]] = {}
        self._addresses: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._signature = ""
        self._hooks: dict[int, tuple[nn.Parameter, torch.utils.hooks.RemovableHandle]] = {}
        self._is_armed = self._is_closed = self._is_out_of_step = False
        self._has_earlier = False  # a gradient of an earlier pass of the step
        self._num_sent = 0
        self._before: GradientExchange | None = None  # of this backward: whose buckets leave before these,
        self._after: GradientExchange | None = None  # and whose leave after them
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
        """What is exchanged, in words that differ where it does: all workers must have the same."""
        if self._world.size > 1:
            self._follow_model()
        return self._signature

    @property
    def is_touched(self) -> bool:
        """Whether a gradient has come in this step: since it was armed, or in a pass before."""
        return self._has_earlier or any(bucket.num_awaited < len(bucket.parameters) for bucket in self._buckets)

    def arm(self, before: GradientExchange | None = None) -> None:
        """The next backward is the last of a step: buckets leave as they fill, after those of the one before."""
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
                    parameter.grad = None  # all have the same: the main worker alone takes it into the new sum
        self._before, self._after = before, None
        if before is not None:
            before._after = self
        self._is_armed = True

    def send_rest(self) -> None:
        """After that backward: send what has not left yet. Of several models all do it before any one finishes."""
        while self._num_sent < len(self._buckets):
            self._send_next()

    def finish(self) -> None:
        """After that backward: send what is left, wait, put the sums into `.grad`."""
        if self._world.size == 1:
            return
        assert self._is_armed
        self.send_rest()
        means = list(self._send_buffers()) if self._averages_buffers else []
        for bucket in self._buckets:
            bucket.receive()
        for buffers, flat, work in means:
            work.wait()
            parts = flat.div_(self._world.size).split([buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.detach().copy_(part.view_as(buffer))
        self._rest()

    def cancel(self) -> None:
        """A backward raised, or went elsewhere: back to rest, without a word to the other workers.

        Gradients already sent are dropped; those of a step before, to which nothing was added, are what they were.
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
        """Make the buckets anew where parameters were frozen, unfrozen, replaced or converted, on all workers alike."""
        addresses = _addresses(self._model)
        if addresses == self._addresses:
            return
        named = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        self._buckets = make_buckets(named[::-1], *self._limits_bytes, has_clean_gaps=self._compression is not None)
        self._places = {id(p): (bucket, index) for bucket in self._buckets for index, p in enumerate(bucket.parameters)}
        self._addresses = addresses
        described = "\n".join(f"{name} {tuple(parameter.shape)} {parameter.dtype}" for name, parameter in named)
        self._signature = f"{counted(len(named), 'parameter')} ({zlib.crc32(described.encode()):08x})"
        arrived = _weakly(self)
        for name, parameter in named:
            self._names[id(parameter)] = name
            if id(parameter) not in self._hooks:
                self._hooks[id(parameter)] = parameter, parameter.register_post_accumulate_grad_hook(arrived)

    def _arrived(self, parameter: Tensor) -> None:
        """Autograd has added to the gradient of a parameter."""
        if not self._is_armed:
            self._check_base(parameter)
            return
        place = self._places.get(id(parameter))
        if place is None:  # no longer in the model
            return
        bucket, index = place
        with self._lock:
            if bucket.work is not None:
                raise StormoError(
                    f"the gradient of {self._names[id(parameter)]} grew after it had been sent to the other workers, "
                    "which comes of a second backward in a step or of re-entrant checkpointing; call "
                    f"{_PARTS_OF_A_STEP}, and torch.utils.checkpoint with use_reentrant=False."
                )
            if parameter.is_cuda:
                self._chain_streams(parameter.device)
            self._held = []  # whatever comes of this backward, it has added to them: their memory is free
            bucket.arrived(index)
        self._send_full()

    def _check_base(self, parameter: Tensor) -> None:
        """Refuse a first pass of a step that adds to the sum of the step before, which would count once a worker."""
        gradient = parameter.grad
        version = take_mark(gradient)
        if version is None or gradient is None:
            return
        if gradient._version == version + 1:  # nothing but this pass has changed it: not even zero_grad
            raise StormoError(
                f"a backward added to the gradient of {self._names[id(parameter)]}, which held the last step's sum "
                f"over all {self._world.size} workers; call optimizer.zero_grad() between steps, or {_PARTS_OF_A_STEP}."
            )

    def _send_full(self) -> None:
        """Send the buckets that are full, in their turn."""
        with self._lock:
            if self._before is not None and not self._before._has_left:
                return
            while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].num_awaited:
                if self._num_sent == 0 and not self._may_send():
                    return
                self._send_next()
        if self._after is not None and self._has_left:
            self._after._send_full()

    @property
    def _has_left(self) -> bool:
        return self._num_sent == len(self._buckets) and (self._before is None or self._before._has_left)

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
        """Parts of a model may run on streams of their own, but their gradients go into one tensor."""
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
    """The ids of parameters that require a gradient, and where their values are, which a conversion changes."""
    # By hand, because named_parameters() takes several times as long and this is done in every step.
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
    """A hook that does not keep its exchange: no garbage collector sees what a parameter's hooks hold on to."""
    reference = weakref.ref(exchange)

    def arrived(parameter: Tensor) -> None:
        found = reference()
        if found is not None:
            found._arrived(parameter)

    return arrived


def _own_group(world: World) -> dist.ProcessGroup:
    """A process group for this alone, one for all models.

    Whatever else communicates during backward (synchronised batch norm, features gathered for a loss) cannot be taken
    for a bucket then, although a worker that lacks a gradient sends its buckets later than the others.
    """
    group = _groups.get(world)
    if group is None:
        group = _groups[world] = dist.new_group(timeout=world.timeout, group_desc="gradients")
    return group


def _own_compression(world: World, name: str) -> Compression:
    """One for all models as well: it keeps nothing of them, and what is sent by one thread keeps its order."""
    made = _compressions.setdefault(world, {})
    if name not in made:
        made[name] = Compression(world, HalfPrecision(HALF_DTYPES[name]))
    return made[name]
