"""Parameter servers: workers send their gradients to some of them, which keep and step a part of the weights each.

With `--staleness 0` a step waits for all workers and equals that of `ddp`. With staleness K a server steps as gradients
come (stale synchronous parallel, Ho et al., NIPS 2013), and the loop's vote, read K - 1 steps late, keeps the workers
within K steps. Servers keep weights and optimizer state in host memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stormo.config import schema
from stormo.config.plan import Plan
from stormo.data.loaders import Batch
from stormo.distributed.store import PeerFailedError, is_secondary
from stormo.distributed.world import World
from stormo.errors import SettingError, counted
from stormo.layers.sync_batch_norm import local_statistics
from stormo.optim.local import check_elementwise, to_local_params
from stormo.optim.table import start_momentum
from stormo.parallel.base import Strategy
from stormo.parallel.coalesced import share
from stormo.parallel.gradient_noise import total_norm
from stormo.parallel.parameter_shards import ParameterShard, whole_shard
from stormo.parallel.server_transport import (
    FAILED,
    AsyncServer,
    ServerMessage,
    ServerState,
    ServerTransport,
    SyncServer,
    deal,
)
from stormo.tasks.task import Task


class Server(Strategy):
    """A worker, which may be a server too."""

    exposed_reason = "it is watched under ddp alone"

    def __init__(self, world: World, plan: Plan, task: Task, settings: schema.TrainConfig) -> None:
        super().__init__(world, plan, task, settings)
        workers = settings.workers
        self.staleness = workers.staleness
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        if len(trained) < workers.servers:
            raise SettingError(
                f"--servers {workers.servers} was set",
                f"the model has {counted(len(trained), 'tensor')} to train, and each is kept whole by one server",
                f"set --servers {max(len(trained), 1)} or fewer",
            )
        self._check_optimizer()
        share(world, [*self.module.parameters(), *self.module.buffers()])
        dealt = deal([parameter.nbytes for _, parameter in trained], workers.servers)
        self._dealt = [[trained[number] for number in numbers] for numbers in dealt]
        self._messages = [
            ServerMessage([parameter for _, parameter in named], is_pinned=world.device.type == "cuda")
            for named in self._dealt
        ]
        self._post = ServerTransport(world)
        self._server = self._make_server()
        self._ages_before: Counter[int] = Counter()  # of attempts of the run before this one
        self._ages: Counter[int] = Counter()  # of all servers since, on the main worker, as far as they are told

    def _check_optimizer(self) -> None:
        if self._settings.workers.servers == 1:
            return
        check_elementwise(self.optimizer, "each server would step some of the tensors", "tensor", "set --servers 1")

    def _make_server(self) -> ServerState | None:
        """This worker as a server, where it is one, and its optimizer over what it keeps."""
        kept: dict[Tensor, nn.Parameter] = {}
        if self.world.rank < len(self._dealt):
            for _, parameter in self._dealt[self.world.rank]:
                on_host = torch.empty(parameter.shape, dtype=parameter.dtype).copy_(parameter.detach())
                kept[parameter] = nn.Parameter(on_host)
        to_local_params(self.optimizer, {parameter: kept.get(parameter) for parameter in self.module.parameters()})
        if not kept:
            return None
        kind = AsyncServer if self.staleness else SyncServer
        return kind(self._post, list(kept.values()), self._step_kept)

    @torch.no_grad()
    def _step_kept(self, rate: float) -> None:
        self._set_rate(rate)
        self._finish_gradients()
        start_momentum(self.optimizer)
        self.optimizer.step()

    # A step

    def micro_step(self, batch: Batch) -> Tensor:
        """As on one device."""
        if isinstance(self._server, AsyncServer):
            self._server.wake()
        return super().micro_step(batch)

    def step(self, learning_rate: float) -> None:
        """Send the gradients to the servers, and take the weights that they answer with."""
        works: list[dist.Work] = []
        self._divide_by_items([p.grad for p in self.module.parameters() if p.grad is not None])
        for server, (named, message) in enumerate(zip(self._dealt, self._messages, strict=True)):
            message.pack([parameter.grad for _, parameter in named], learning_rate)
            if server != self.world.rank:
                works += self._post.push(message, server)
        self.clear_gradients()
        if self._server is not None:
            self._server.answer(self._messages[self.world.rank])
        self._post.wait(works)
        for server, message in enumerate(self._messages):
            if message.mark == FAILED:
                raise PeerFailedError(f"rank {server} failed as a server while rank {self.world.rank} waited for it.")
        self._take_weights()

    def try_step(self, data: Any) -> None:
        """Take up the memory of two passes that add up: that of a step is the servers', and host memory."""
        self.module.train()
        with local_statistics(self.module):
            for _ in range(2):
                self._pass(self._alone(), data, 1.0)

    def _take_weights(self) -> None:
        for named, message in zip(self._dealt, self._messages, strict=True):
            message.unpack([parameter.detach() for _, parameter in named])

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def optimizer_params(self) -> list[nn.Parameter]:
        """What this worker keeps as a server."""
        return [] if self._server is None else self._server.tensors

    def weights(self) -> list[Tensor]:
        """What is trained, on every worker."""
        return [parameter for named in self._dealt for _, parameter in named]

    def _gradient_norm(self) -> Tensor:
        gradients = self._gradients()
        norm = float(total_norm(gradients)) if gradients else 0.0
        square = self._post.sum_among(range(len(self._dealt)), norm * norm)
        return torch.tensor(math.sqrt(square), dtype=torch.float64)

    def _add_noise(self) -> None:
        numbers = {name: number for number, (name, _) in enumerate(self.module.named_parameters())}
        boxes = []
        for (name, _), kept in zip(self._dealt[self.world.rank], self.optimizer_params(), strict=True):
            if kept.grad is not None:
                boxes.append((kept.grad, numbers[name], tuple(kept.shape), (0,) * kept.ndim))
        self._noise.add_to_boxes(boxes, self.clock.step)

    def _look_for_sparse(self) -> None:
        if self._any_has_sparse():
            raise SettingError(
                "the model has sparse gradients with --strategy server",
                "what travels to a server is whole tensors",
                "make its layers with sparse=False, or set --strategy ddp",
            )

    def _look_for_counts(self) -> None:
        super()._look_for_counts()
        if self.loss_weights.has_counts and self.staleness:
            raise SettingError(
                f"--staleness {self.staleness} was set",
                f"{type(self.task).__name__}.loss() returns counts, and workers that do not wait for each other cannot "
                "know the items of all",
                "leave out --staleness, or return the mean loss over samples",
            )

    # Going on and coming together

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serve while it holds; what goes wrong in a server is raised here, and not what other workers say of it."""
        if self._server is not None:
            self._server.start()
        try:
            yield
        except Exception as error:
            failure = self._server.failure if isinstance(self._server, AsyncServer) else None
            if failure is not None and is_secondary(error):
                raise failure from None
            raise
        if self.staleness:
            for server, message in enumerate(self._messages):
                if server != self.world.rank:
                    self._post.end(message, server)
        if self._server is not None:
            self._server.end()

    def synchronize(self) -> None:
        """Have the same weights on all workers, once all gradients have been stepped with, until training goes on."""
        if not self.staleness:
            return
        self.world.barrier()  # a worker comes here when its last gradients were answered
        ages: Mapping[int, int] = {}
        if isinstance(self._server, AsyncServer):
            self._server.rest()
            ages = self._server.ages
        self.shards_changed()
        self._ages = _added(self.world.gather_objects(ages) or [])  # nobody goes on before all have come here

    def shards_changed(self) -> None:
        """The tensors of `parts` have been given other values."""
        for server, message in enumerate(self._messages):
            if server == self.world.rank:
                message.pack(self.optimizer_params())
            dist.broadcast(message.buffer, src=server)
        self._take_weights()

    def parts(self) -> list[ParameterShard]:
        """What this worker keeps as a server, and what nobody steps."""
        own = (
            zip(self._dealt[self.world.rank], self.optimizer_params(), strict=True) if self._server is not None else ()
        )
        kept = [(name, tensor, True) for (name, _), tensor in own]
        frozen = [(name, p, self.world.is_main) for name, p in self.module.named_parameters() if not p.requires_grad]
        return [
            whole_shard(name, tensor, is_counted=speaks, is_saved=speaks) for name, tensor, speaks in (*kept, *frozen)
        ]

    # How old gradients were

    @property
    def stale_gradients(self) -> dict[int, int] | None:
        """Of the whole run, how many gradients were stepped with at which age; on the main worker, once settled."""
        return dict(sorted((self._ages_before + self._ages).items())) if self.staleness else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume, and go on counting ages from those that were seen before."""
        super().load_state_dict(state)
        self._ages_before, self._ages = _added([state.get("stale_gradients", {})]), Counter()
        if isinstance(self._server, AsyncServer):
            self._server.forget()


def _added(counts: list[Mapping[Any, int]]) -> Counter[int]:
    """The sum of counts whose keys may have become text on their way."""
    total: Counter[int] = Counter()
    for each in counts:
        total.update({int(age): number for age, number in each.items()})
    return total
