"""The server's side of parameter servers: what one keeps, and how it answers the gradients of the workers.

`Together` sums those of a step, in the order of ranks (Dean et al., NIPS 2012, without its asynchrony). `AsTheyCome`
steps with each by itself, in a thread beside its own worker (Li et al., OSDI 2014; Ho et al., NIPS 2013).
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
from stormo.parallel.parcels import ENDS, FAILED, GOES_ON, Parcel

_PUSH, _PULL, _SUM = 1, 2, 3  # tags of gradients, of weights and of numbers among servers
# A server may rest for as long as a validation takes; who waits for it gives its own limit.
_FOREVER = timedelta(days=365)


class Post:
    """The way between workers and servers: a process group of its own, on the host, that no collective uses."""

    def __init__(self, world: World) -> None:
        self.rank, self.size = world.rank, world.size
        self._timeout = world.timeout
        self._group = dist.new_group(list(range(world.size)), timeout=_FOREVER, backend="gloo")

    def push(self, parcel: Parcel, server: int) -> list[dist.Work]:
        """Send gradients to a server, into whose parcel its answer comes."""
        return [self._send(parcel.buffer, server, _PUSH), self._receive(parcel.buffer, server, _PULL)]

    def ask(self, parcel: Parcel, worker: int) -> dist.Work:
        """Begin to receive the gradients of one worker."""
        return self._receive(parcel.buffer, worker, _PUSH)

    def receive(self, parcel: Parcel) -> int:
        """Wait for the gradients of any worker; return which one."""
        return int(dist.recv(parcel.buffer, group=self._group, tag=_PUSH))

    def answer(self, parcel: Parcel, worker: int) -> dist.Work:
        """Begin to send weights to a worker."""
        return self._send(parcel.buffer, worker, _PULL)

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

    def end(self, parcel: Parcel, server: int) -> None:
        """Tell a server that this worker sends no more."""
        parcel.pack([None] * len(parcel.values), mark=ENDS)
        dist.send(parcel.buffer, server, group=self._group, tag=_PUSH)

    def wait(self, works: Sequence[dist.Work]) -> None:
        """Until all have come and gone, as long as workers wait for one another."""
        for work in works:
            work.wait(self._timeout)


class Kept:
    """The tensors of one server, in host memory, and the optimizer that steps them."""

    def __init__(self, post: Post, tensors: Sequence[nn.Parameter], step: Callable[[float], None]) -> None:
        self.tensors = list(tensors)
        self._post = post
        self._step = step  # with the gradients of `tensors`, at this rate
        self._others = [rank for rank in range(post.size) if rank != post.rank]

    def start(self) -> None:
        """Begin to serve."""

    def end(self) -> None:
        """Serve no more, once every worker has said that it sends no more."""

    def answer(self, own: Parcel) -> None:
        """Step with the gradients of this very worker too, and put the weights in their place."""
        raise NotImplementedError

    def _apply(self, gradients: Sequence[Tensor | None], rate: float) -> None:
        for tensor, gradient in zip(self.tensors, gradients, strict=True):
            tensor.grad = gradient
        self._step(rate)
        for tensor in self.tensors:
            tensor.grad = None


class Together(Kept):
    """Waits for the gradients of all workers, steps once, and answers all."""

    def __init__(self, post: Post, tensors: Sequence[nn.Parameter], step: Callable[[float], None]) -> None:
        super().__init__(post, tensors, step)
        self._total = Parcel(tensors)
        self._rooms = Parcel(tensors), Parcel(tensors)

    def answer(self, own: Parcel) -> None:
        """Return when all have their weights."""
        rate = own.number
        for rank, parcel in enumerate(self._arrivals(own)):
            if rank:
                self._total.add(parcel)
            else:
                self._total.take(parcel)
        torch._foreach_div_(self._total.values, self._post.size)
        self._apply(self._total.present(), rate)
        own.pack(self.tensors)
        self._post.wait([self._post.answer(own, rank) for rank in self._others])

    def _arrivals(self, own: Parcel) -> Iterator[Parcel]:
        """The gradients of all workers in the order of ranks; while one is read the next one travels."""
        rooms = itertools.cycle(self._rooms)

        def ask(rank: int) -> tuple[Parcel, list[dist.Work]]:
            if rank == self._post.rank:
                return own, []
            room = next(rooms)
            return room, [self._post.ask(room, rank)]

        coming = ask(0)
        for rank in range(self._post.size):
            (parcel, works), coming = coming, ask(rank + 1) if rank + 1 < self._post.size else coming
            self._post.wait(works)
            yield parcel


class AsTheyCome(Kept):
    """Steps with the gradient of one worker at a time, each as one of so many parts of a step."""

    def __init__(self, post: Post, tensors: Sequence[nn.Parameter], step: Callable[[float], None]) -> None:
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

    def answer(self, own: Parcel) -> None:
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
        room, serving = Parcel(self.tensors), set(self._others)
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

    def _try_step_with(self, rank: int, parcel: Parcel) -> None:
        try:
            if self.failure is None:
                self._step_with(rank, parcel)
        except Exception as error:
            self.failure = error

    def _step_with(self, rank: int, parcel: Parcel) -> None:
        self.ages[self._num_steps - self._pulled_at[rank]] += 1
        # The rate, not the gradient, as many optimizers go by its direction alone.
        self._apply(parcel.present(), parcel.number / self._post.size)
        self._num_steps += 1
        self._pulled_at[rank] = self._num_steps
