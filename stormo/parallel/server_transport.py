"""Parameter servers: what one stores, how it replies to gradients, and the messages between workers and servers.

`SyncServer` sums the gradients of a step in the order of ranks (Dean et al., NIPS 2012, without its asynchrony).
`AsyncServer` steps with each gradient, in a thread beside its worker (Li et al., OSDI 2014; Ho et al., NIPS 2013).
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stormo.distributed.world import World

_PUSH, _PULL, _SUM = 1, 2, 3  # tags of gradients, of weights and of numbers among servers
# A server may pause for as long as a validation takes; a worker that waits for it has its own timeout.
_FOREVER = timedelta(days=365)
StepFunction = Callable[[float], None]  # steps the tensors of a server at a learning rate


class ServerTransport:
    """Messages between workers and servers, in a Gloo group that no collective uses."""

    def __init__(self, world: World) -> None:
        self.rank, self.size = world.rank, world.size
        self._timeout = world.timeout
        self._group = dist.new_group(list(range(world.size)), timeout=_FOREVER, backend="gloo")

    def push(self, message: ServerMessage, server: int) -> list[dist.Work]:
        """Send gradients to a server, and receive its reply in the same message."""
        return [self._send(message.buffer, server, _PUSH), self.receive(message.buffer, server, _PULL)]

    def receive_any(self, message: ServerMessage) -> int:
        """Wait for the gradients of any worker; return its rank."""
        return int(dist.recv(message.buffer, group=self._group, tag=_PUSH))

    def begin_reply(self, message: ServerMessage, worker: int) -> dist.Work:
        """Begin to send weights to a worker."""
        return self._send(message.buffer, worker, _PULL)

    def sum_among(self, ranks: Sequence[int], value: float) -> float:
        """The sum of these ranks' values, in the order of ranks, so that it is the same on all of them."""
        # Not in a subgroup: beside NCCL, torch makes the ranks outside it wait for the others.
        given = {rank: torch.tensor([value], dtype=torch.float64) for rank in ranks}
        others = [rank for rank in ranks if rank != self.rank]
        works = [self._send(given[self.rank], rank, _SUM) for rank in others]
        self.wait([*works, *(self.receive(given[rank], rank, _SUM) for rank in others)])
        return sum(float(each) for each in given.values())

    def _send(self, tensor: Tensor, rank: int, tag: int) -> dist.Work:
        work = dist.isend(tensor, rank, group=self._group, tag=tag)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, rank: int, tag: int) -> dist.Work:
        """Begin to receive what a rank sends with this tag."""
        work = dist.irecv(tensor, rank, group=self._group, tag=tag)
        assert work is not None
        return work

    def send_end(self, message: ServerMessage, server: int) -> None:
        """Tell a server that this worker is done."""
        message.pack([None] * len(message.values), status=DONE)
        dist.send(message.buffer, server, group=self._group, tag=_PUSH)

    def wait(self, works: Sequence[dist.Work]) -> None:
        """Wait for all, up to the timeout of the run."""
        for work in works:
            work.wait(self._timeout)


class ServerState:
    """The tensors of one server, in host memory, and the optimizer that steps them."""

    def __init__(self, transport: ServerTransport, tensors: Sequence[nn.Parameter], step: StepFunction) -> None:
        self.tensors = list(tensors)
        self._transport = transport
        self._step = step
        self._others = [rank for rank in range(transport.size) if rank != transport.rank]

    def start(self) -> None:
        """Start to serve."""

    def end(self) -> None:
        """Stop, once every other worker is done."""

    def reply(self, own: ServerMessage) -> None:
        """Step with this worker's own gradients, and replace them by the weights."""
        raise NotImplementedError

    def _apply(self, gradients: Sequence[Tensor | None], learning_rate: float) -> None:
        for tensor, gradient in zip(self.tensors, gradients, strict=True):
            tensor.grad = gradient
        self._step(learning_rate)
        for tensor in self.tensors:
            tensor.grad = None


class SyncServer(ServerState):
    """Waits for the gradients of all workers, steps once, and replies to all."""

    def __init__(self, transport: ServerTransport, tensors: Sequence[nn.Parameter], step: StepFunction) -> None:
        super().__init__(transport, tensors, step)
        self._total = ServerMessage(tensors)
        self._buffers = ServerMessage(tensors), ServerMessage(tensors)

    def reply(self, own: ServerMessage) -> None:
        """Return when all workers have their weights."""
        learning_rate = own.learning_rate
        for rank, message in enumerate(self._arrivals(own)):
            if rank:
                self._total.add(message)
            else:
                self._total.take(message)
        torch._foreach_div_(self._total.values, self._transport.size)
        self._apply(self._total.present(), learning_rate)
        own.pack(self.tensors)
        self._transport.wait([self._transport.begin_reply(own, rank) for rank in self._others])

    def _arrivals(self, own: ServerMessage) -> Iterator[ServerMessage]:
        """The gradients of all workers in the order of ranks; the next is received while one is used."""
        buffers = itertools.cycle(self._buffers)

        def begin(rank: int) -> tuple[ServerMessage, list[dist.Work]]:
            if rank == self._transport.rank:
                return own, []
            buffer = next(buffers)
            return buffer, [self._transport.receive(buffer.buffer, rank, _PUSH)]

        following = begin(0)
        for rank in range(self._transport.size):
            (message, works), following = following, begin(rank + 1) if rank + 1 < self._transport.size else following
            self._transport.wait(works)
            yield message


class AsyncServer(ServerState):
    """Steps with the gradient of one worker at a time, at the learning rate divided by the number of workers."""

    def __init__(self, transport: ServerTransport, tensors: Sequence[nn.Parameter], step: StepFunction) -> None:
        super().__init__(transport, tensors, step)
        self.failure: Exception | None = None
        self.ages: Counter[int] = Counter()  # of gradients: steps since their worker received its weights
        self._lock = threading.Lock()  # of all below, and of the tensors
        self._num_steps = 0
        self._pulled_at = [0] * transport.size
        self._resumed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Reply to the other workers in a thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="parameter server", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Wait for the thread, which ends when every other worker has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def reply(self, own: ServerMessage) -> None:
        """Step without the other workers."""
        with self._lock:
            if self.failure is not None:
                raise self.failure
            self._step_with(self._transport.rank, own)
            own.pack(self.tensors)

    def pause(self) -> None:
        """Do not step until `resume`: all workers have these weights, and some continue before others."""
        with self._lock:
            self._resumed.clear()
            self._pulled_at = [self._num_steps] * self._transport.size

    def resume(self) -> None:
        """Step with gradients that arrive."""
        self._resumed.set()

    def reset_ages(self) -> None:
        """Count gradients from zero."""
        with self._lock:
            self.ages.clear()

    @torch.no_grad()
    def _serve(self) -> None:
        message, serving = ServerMessage(self.tensors), set(self._others)
        try:
            while serving:
                rank = self._transport.receive_any(message)
                if message.status == DONE:
                    serving.remove(rank)
                    continue
                self._resumed.wait()
                with self._lock:
                    self._try_step_with(rank, message)
                    # A worker that reads FAILED ends, and with it everything that this process waits for.
                    message.pack(self.tensors, status=RUNNING if self.failure is None else FAILED)
                self._transport.wait([self._transport.begin_reply(message, rank)])
        except Exception as error:
            self.failure = self.failure or error

    def _try_step_with(self, rank: int, message: ServerMessage) -> None:
        try:
            if self.failure is None:
                self._step_with(rank, message)
        except Exception as error:
            self.failure = error

    def _step_with(self, rank: int, message: ServerMessage) -> None:
        self.ages[self._num_steps - self._pulled_at[rank]] += 1
        # The learning rate, not the gradient: many optimizers use only its direction.
        self._apply(message.present(), message.learning_rate / self._transport.size)
        self._num_steps += 1
        self._pulled_at[rank] = self._num_steps


RUNNING, DONE, FAILED = range(3)  # status of the sender

_ALIGNMENT_BYTES = 64  # of every tensor, for the vector loads of optimizers
_HEAD_BYTES = 16


def assign(sizes_bytes: Sequence[int], num_servers: int) -> list[list[int]]:
    """The tensors of each server: the largest first, each to the server with the fewest bytes."""
    assigned: list[list[int]] = [[] for _ in range(num_servers)]
    loads = [0] * num_servers
    for number in sorted(range(len(sizes_bytes)), key=lambda number: -sizes_bytes[number]):
        # Then the one with the fewest tensors, so that every server has one.
        least = min(range(num_servers), key=lambda server: (loads[server], len(assigned[server])))
        assigned[least].append(number)
        loads[least] += sizes_bytes[number]
    return [sorted(numbers) for numbers in assigned]


class ServerMessage:
    """A buffer for tensors like the given ones, with the sender's learning rate and status, and a flag per tensor."""

    def __init__(self, tensors: Sequence[Tensor], *, is_pinned: bool = False) -> None:
        offsets, at = list[int](), _aligned(_HEAD_BYTES + len(tensors))
        for tensor in tensors:
            offsets.append(at)
            at = _aligned(at + tensor.nbytes)
        self.buffer = torch.zeros(at, dtype=torch.uint8, pin_memory=is_pinned)
        self._head = self.buffer[:_HEAD_BYTES].view(torch.float64).numpy()
        self._flags = self.buffer[_HEAD_BYTES : _HEAD_BYTES + len(tensors)].numpy()
        self.values = [
            self.buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for offset, tensor in zip(offsets, tensors, strict=True)
        ]

    @property
    def learning_rate(self) -> float:
        """The sender's learning rate."""
        return float(self._head[0])

    @property
    def status(self) -> int:
        """RUNNING, DONE or FAILED."""
        return int(self._head[1])

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor | None], learning_rate: float = 0.0, status: int = RUNNING) -> None:
        """Copy tensors into it, zeros for None."""
        self._head[:] = learning_rate, status
        self._flags[:] = [tensor is not None for tensor in tensors]
        for target, tensor in zip(self.values, tensors, strict=True):
            if tensor is None:
                target.zero_()
        pairs = [(target, tensor) for target, tensor in zip(self.values, tensors, strict=True) if tensor is not None]
        _copy(pairs)

    @torch.no_grad()
    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values to tensors."""
        _copy(list(zip(tensors, self.values, strict=True)))

    @torch.no_grad()
    def add(self, other: ServerMessage) -> None:
        """Add another's values; a tensor is present if either has it."""
        torch._foreach_add_(self.values, other.values)
        self._flags |= other._flags

    @torch.no_grad()
    def take(self, other: ServerMessage) -> None:
        """Become a copy of another."""
        self.buffer.copy_(other.buffer)

    def present(self) -> list[Tensor | None]:
        """The values, None where the sender had none."""
        return [value if flag else None for value, flag in zip(self.values, self._flags, strict=True)]


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair to the first, and wait until host memory can be used again."""
    for target, value in pairs:
        target.copy_(value, non_blocking=True)
    for device in {tensor.device for pair in pairs for tensor in pair if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
