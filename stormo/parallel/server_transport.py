"""Parameter servers: what one keeps, how it answers the gradients of the workers, and what travels between them.

`SyncServer` sums the gradients of a step, in the order of ranks (Dean et al., NIPS 2012, without its asynchrony).
`AsyncServer` steps with each by itself, in a thread beside its own worker (Li et al., OSDI 2014; Ho et al., NIPS 2013).
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
# A server may rest for as long as a validation takes; who waits for it gives its own limit.
_FOREVER = timedelta(days=365)


class ServerTransport:
    """Messages between workers and servers: a process group of its own on the host, which no collective uses."""

    def __init__(self, world: World) -> None:
        self.rank, self.size = world.rank, world.size
        self._timeout = world.timeout
        self._group = dist.new_group(list(range(world.size)), timeout=_FOREVER, backend="gloo")

    def push(self, message: ServerMessage, server: int) -> list[dist.Work]:
        """Send gradients to a server, into whose message its answer comes."""
        return [self._send(message.buffer, server, _PUSH), self._receive(message.buffer, server, _PULL)]

    def ask(self, message: ServerMessage, worker: int) -> dist.Work:
        """Begin to receive the gradients of one worker."""
        return self._receive(message.buffer, worker, _PUSH)

    def receive(self, message: ServerMessage) -> int:
        """Wait for the gradients of any worker; return which one."""
        return int(dist.recv(message.buffer, group=self._group, tag=_PUSH))

    def answer(self, message: ServerMessage, worker: int) -> dist.Work:
        """Begin to send weights to a worker."""
        return self._send(message.buffer, worker, _PULL)

    def sum_among(self, ranks: Sequence[int], value: float) -> float:
        """The sum of what each of some workers gives, in their order, so that it is the same on all of them."""
        # A group of these alone would not do: beside NCCL, torch makes who is left out of one wait for the others.
        given = {rank: torch.tensor([value], dtype=torch.float64) for rank in ranks}
        others = [rank for rank in ranks if rank != self.rank]
        works = [self._send(given[self.rank], rank, _SUM) for rank in others]
        self.wait([*works, *(self._receive(given[rank], rank, _SUM) for rank in others)])
        return sum(float(each) for each in given.values())

    def _send(self, tensor: Tensor, rank: int, tag: int) -> dist.Work:
        work = dist.isend(tensor, rank, group=self._group, tag=tag)
        assert work is not None
        return work

    def _receive(self, tensor: Tensor, rank: int, tag: int) -> dist.Work:
        work = dist.irecv(tensor, rank, group=self._group, tag=tag)
        assert work is not None
        return work

    def end(self, message: ServerMessage, server: int) -> None:
        """Tell a server that this worker sends no more."""
        message.pack([None] * len(message.values), mark=ENDS)
        dist.send(message.buffer, server, group=self._group, tag=_PUSH)

    def wait(self, works: Sequence[dist.Work]) -> None:
        """Until all have come and gone, as long as workers wait for one another."""
        for work in works:
            work.wait(self._timeout)


class ServerState:
    """The tensors of one server, in host memory, and the optimizer that steps them."""

    def __init__(self, post: ServerTransport, tensors: Sequence[nn.Parameter], step: Callable[[float], None]) -> None:
        self.tensors = list(tensors)
        self._post = post
        self._step = step  # with the gradients of `tensors`, at this rate
        self._others = [rank for rank in range(post.size) if rank != post.rank]

    def start(self) -> None:
        """Begin to serve."""

    def end(self) -> None:
        """Serve no more, once every worker has said that it sends no more."""

    def answer(self, own: ServerMessage) -> None:
        """Step with the gradients of this very worker too, and put the weights in their place."""
        raise NotImplementedError

    def _apply(self, gradients: Sequence[Tensor | None], rate: float) -> None:
        for tensor, gradient in zip(self.tensors, gradients, strict=True):
            tensor.grad = gradient
        self._step(rate)
        for tensor in self.tensors:
            tensor.grad = None


class SyncServer(ServerState):
    """Waits for the gradients of all workers, steps once, and answers all."""

    def __init__(self, post: ServerTransport, tensors: Sequence[nn.Parameter], step: Callable[[float], None]) -> None:
        super().__init__(post, tensors, step)
        self._total = ServerMessage(tensors)
        self._rooms = ServerMessage(tensors), ServerMessage(tensors)

    def answer(self, own: ServerMessage) -> None:
        """Return when all have their weights."""
        rate = own.number
        for rank, message in enumerate(self._arrivals(own)):
            if rank:
                self._total.add(message)
            else:
                self._total.take(message)
        torch._foreach_div_(self._total.values, self._post.size)
        self._apply(self._total.present(), rate)
        own.pack(self.tensors)
        self._post.wait([self._post.answer(own, rank) for rank in self._others])

    def _arrivals(self, own: ServerMessage) -> Iterator[ServerMessage]:
        """The gradients of all workers in the order of ranks; while one is read the next one travels."""
        rooms = itertools.cycle(self._rooms)

        def ask(rank: int) -> tuple[ServerMessage, list[dist.Work]]:
            if rank == self._post.rank:
                return own, []
            room = next(rooms)
            return room, [self._post.ask(room, rank)]

        coming = ask(0)
        for rank in range(self._post.size):
            (message, works), coming = coming, ask(rank + 1) if rank + 1 < self._post.size else coming
            self._post.wait(works)
            yield message


class AsyncServer(ServerState):
    """Steps with the gradient of one worker at a time, each as one of so many parts of a step."""

    def __init__(self, post: ServerTransport, tensors: Sequence[nn.Parameter], step: Callable[[float], None]) -> None:
        super().__init__(post, tensors, step)
        self.failure: Exception | None = None
        self.ages: Counter[int] = Counter()  # of gradients: steps with others' since their worker had its weights
        self._lock = threading.Lock()  # of all below, and of the tensors
        self._num_steps = 0
        self._pulled_at = [0] * post.size
        self._awake = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Let a thread answer the other workers."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="parameter server", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Wait for the thread, which ends when every other worker has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def answer(self, own: ServerMessage) -> None:
        """Without a word to other workers."""
        with self._lock:
            if self.failure is not None:
                raise self.failure
            self._step_with(self._post.rank, own)
            own.pack(self.tensors)

    def rest(self) -> None:
        """Leave the tensors alone until `wake`, as all workers have them now and some will go on before others."""
        with self._lock:
            self._awake.clear()
            self._pulled_at = [self._num_steps] * self._post.size

    def wake(self) -> None:
        """Step with what comes."""
        self._awake.set()

    def forget(self) -> None:
        """Count gradients anew."""
        with self._lock:
            self.ages.clear()

    @torch.no_grad()
    def _serve(self) -> None:
        room, serving = ServerMessage(self.tensors), set(self._others)
        try:
            while serving:
                rank = self._post.receive(room)
                if room.mark == ENDS:
                    serving.remove(rank)
                    continue
                self._awake.wait()
                with self._lock:
                    self._try_step_with(rank, room)
                    # Who is told so ends, and with it everything that this process still waits for.
                    room.pack(self.tensors, mark=GOES_ON if self.failure is None else FAILED)
                self._post.wait([self._post.answer(room, rank)])
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
        # The rate, not the gradient, as many optimizers go by its direction alone.
        self._apply(message.present(), message.number / self._post.size)
        self._num_steps += 1
        self._pulled_at[rank] = self._num_steps


GOES_ON, ENDS, FAILED = range(3)  # what the sender says of itself

_ALIGNMENT_BYTES = 64  # of every tensor, for the vector loads of optimizers
_HEAD_BYTES = 16


def deal(sizes_bytes: Sequence[int], num_servers: int) -> list[list[int]]:
    """For each server the numbers of the tensors that it keeps: the largest first, each to who has the fewest bytes."""
    dealt: list[list[int]] = [[] for _ in range(num_servers)]
    loads = [0] * num_servers
    for number in sorted(range(len(sizes_bytes)), key=lambda number: -sizes_bytes[number]):
        # Of equal loads to who has the fewest tensors, so that none is left without one.
        least = min(range(num_servers), key=lambda server: (loads[server], len(dealt[server])))
        dealt[least].append(number)
        loads[least] += sizes_bytes[number]
    return [sorted(numbers) for numbers in dealt]


class ServerMessage:
    """Room for tensors like the given ones, for a number and a mark of the sender, and for a flag of each tensor."""

    def __init__(self, tensors: Sequence[Tensor], *, is_pinned: bool = False) -> None:
        places, at = list[int](), _aligned(_HEAD_BYTES + len(tensors))
        for tensor in tensors:
            places.append(at)
            at = _aligned(at + tensor.nbytes)
        self.buffer = torch.zeros(at, dtype=torch.uint8, pin_memory=is_pinned)
        self._head = self.buffer[:_HEAD_BYTES].view(torch.float64).numpy()
        self._flags = self.buffer[_HEAD_BYTES : _HEAD_BYTES + len(tensors)].numpy()
        self.values = [
            self.buffer[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for place, tensor in zip(places, tensors, strict=True)
        ]

    @property
    def number(self) -> float:
        """The sender's learning rate."""
        return float(self._head[0])

    @property
    def mark(self) -> int:
        """Whether the sender goes on, ends or has failed."""
        return int(self._head[1])

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor | None], number: float = 0.0, mark: int = GOES_ON) -> None:
        """Take in the values, zeros where there are none."""
        self._head[:] = number, mark
        self._flags[:] = [tensor is not None for tensor in tensors]
        for place, tensor in zip(self.values, tensors, strict=True):
            if tensor is None:
                place.zero_()
        pairs = [(place, tensor) for place, tensor in zip(self.values, tensors, strict=True) if tensor is not None]
        _copy(pairs)

    @torch.no_grad()
    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """Give the values away."""
        _copy(list(zip(tensors, self.values, strict=True)))

    @torch.no_grad()
    def add(self, other: ServerMessage) -> None:
        """Add another's values to these; a tensor is there if either has it."""
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
    """From the second of each to the first; returns when host memory may be read and written again."""
    for place, value in pairs:
        place.copy_(value, non_blocking=True)
    for device in {tensor.device for pair in pairs for tensor in pair if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
