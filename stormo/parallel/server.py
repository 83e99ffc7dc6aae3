"""Parameter servers: some workers are also servers, which store and step a part of the weights each.

With `--staleness 0` a step waits for all workers and equals that of `ddp`. With staleness K a server steps as gradients
arrive (stale synchronous parallel, Ho et al., NIPS 2013), and the loop's vote, read K - 1 steps late, keeps the workers
within K steps. Servers store weights and optimizer state in host memory.
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
from stormo.errors import SettingError, pluralize
from stormo.layers.sync_batch_norm import local_statistics
from stormo.optim.sharded import check_elementwise, to_local_params
from stormo.optim.table import start_momentum
from stormo.parallel.base import Strategy
from stormo.parallel.gradient_noise import total_norm
from stormo.parallel.parameter_shards import ParameterShard, whole_shard
from stormo.parallel.server_transport import (
    FAILED,
    AsyncServer,
    ServerMessage,
    ServerState,
    ServerTransport,
    SyncServer,
    assign,
)
from stormo.tasks.task import Task


class Server(Strategy):
    """A worker, which may be a server too."""

    def __init__(self, world: World, plan: Plan, task: Task, settings: schema.TrainConfig) -> None:
        super().__init__(world, plan, task, settings)
        workers = settings.workers
        self.staleness = workers.staleness
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        if len(trained) < workers.servers:
            raise SettingError(
                f"--servers {workers.servers} was set",
                f"the model has {pluralize(len(trained), 'tensor')} to train, and each is stored whole by one server",
                f"set --servers {max(len(trained), 1)} or fewer",
            )
        if workers.servers > 1:
            check_elementwise(self.optimizer, "each server would step some of the tensors", "tensor", "set --servers 1")
        numbers_of = assign([parameter.nbytes for _, parameter in trained], workers.servers)
        self._assigned = [[trained[number] for number in numbers] for numbers in numbers_of]
        self._messages = [
            ServerMessage([parameter for _, parameter in named], is_pinned=world.device.type == "cuda")
            for named in self._assigned
        ]
        self._transport = ServerTransport(world)
        self._server = self._make_server()
        self._ages_before: Counter[int] = Counter()  # of earlier attempts of the run
        self._ages: Counter[int] = Counter()  # of all servers since, on rank 0

    def _make_server(self) -> ServerState | None:
        """This worker as a server, if it is one; its optimizer then steps the stored tensors."""
        kept: dict[Tensor, nn.Parameter] = {}
        if self.world.rank < len(self._assigned):
            for _, parameter in self._assigned[self.world.rank]:
                on_host = torch.empty(parameter.shape, dtype=parameter.dtype).copy_(parameter.detach())
                kept[parameter] = nn.Parameter(on_host)
        to_local_params(self.optimizer, {parameter: kept.get(parameter) for parameter in self.module.parameters()})
        if not kept:
            return None
        kind = AsyncServer if self.staleness else SyncServer
        return kind(self._transport, list(kept.values()), self._step_stored)

    @torch.no_grad()
    def _step_stored(self, learning_rate: float) -> None:
        self._set_learning_rate(learning_rate)
        self._finish_gradients(self.optimizer)
        start_momentum(self.optimizer)
        self.optimizer.step()

    # A step

    def micro_step(self, batch: Batch) -> Tensor:
        """As on one device."""
        if isinstance(self._server, AsyncServer):
            self._server.resume()
        return super().micro_step(batch)

    def step(self, learning_rate: float) -> None:
        """Send the gradients to the servers, and receive the new weights."""
        works: list[dist.Work] = []
        if self.loss_weights.has_counts:
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            self.loss_weights.divide(gradients, self._total_items())
        for server, (named, message) in enumerate(zip(self._assigned, self._messages, strict=True)):
            message.pack([parameter.grad for _, parameter in named], learning_rate)
            if server != self.world.rank:
                works += self._transport.push(message, server)
        self.clear_gradients()
        if self._server is not None:
            self._server.reply(self._messages[self.world.rank])
        with self.exposed.waiting():
            self._transport.wait(works)
        for server, message in enumerate(self._messages):
            if message.status == FAILED:
                raise PeerFailedError(f"rank {server} failed as a server while rank {self.world.rank} waited for it.")
        self._take_weights()
        self.update_average()

    def try_step(self, data: Any) -> None:
        """Use the memory of two accumulated micro-batches: a step needs only host memory, on the servers."""
        self.module.train()
        with local_statistics(self.module):
            for _ in range(2):
                self._forward_backward(self._local_model(), data, 1.0)

    def _take_weights(self) -> None:
        for named, message in zip(self._assigned, self._messages, strict=True):
            message.unpack([parameter.detach() for _, parameter in named])

    def clear_gradients(self) -> None:
        """Set all gradients to None."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def optimizer_params(self) -> list[nn.Parameter]:
        """What this worker stores as a server."""
        return [] if self._server is None else self._server.tensors

    def weights(self) -> list[Tensor]:
        """All trained parameters."""
        return [parameter for named in self._assigned for _, parameter in named]

    def _gradient_norm(self) -> Tensor:
        gradients = self._gradients()
        norm = float(total_norm(gradients)) if gradients else 0.0
        square = self._transport.sum_among(range(len(self._assigned)), norm * norm)
        return torch.tensor(math.sqrt(square), dtype=torch.float64)

    def _detect_sparse(self) -> None:
        if self._any_has_sparse():
            raise SettingError(
                "the model has sparse gradients with --strategy server",
                "servers receive dense tensors",
                "make its layers with sparse=False, or set --strategy ddp",
            )

    def _detect_counts(self) -> None:
        super()._detect_counts()
        if self.loss_weights.has_counts and self.staleness:
            raise SettingError(
                f"--staleness {self.staleness} was set",
                f"{type(self.task).__name__}.loss() returns counts, and asynchronous workers do not know each other's",
                "leave out --staleness, or return the mean loss over samples",
            )

    # Starting and synchronizing

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serve inside it. A failure of the server is raised here, not what other workers report of it."""
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
                    self._transport.send_end(message, server)
        if self._server is not None:
            self._server.end()

    def synchronize(self) -> None:
        """Apply all gradients, then give all workers the same weights, which stay until training continues."""
        if not self.staleness:
            return
        self.world.barrier()  # a worker is here after the reply to its last gradients
        ages: Mapping[int, int] = {}
        if isinstance(self._server, AsyncServer):
            self._server.pause()
            ages = self._server.ages
        self.shards_changed()
        self._ages = _added(self.world.gather_objects(ages) or [])  # nobody continues before all are here

    def shards_changed(self) -> None:
        """Broadcast the weights of the servers."""
        for server, message in enumerate(self._messages):
            if server == self.world.rank:
                message.pack(self.optimizer_params())
            dist.broadcast(message.buffer, src=server)
        self._take_weights()

    def shards(self) -> list[ParameterShard]:
        """What this worker stores as a server, and frozen parameters."""
        found = [(name, p, self.world.is_main) for name, p in self.module.named_parameters() if not p.requires_grad]
        if self._server is not None:
            own = zip(self._assigned[self.world.rank], self.optimizer_params(), strict=True)
            found = [*((name, tensor, True) for (name, _), tensor in own), *found]
        return [whole_shard(name, tensor, is_counted=is_mine, is_saved=is_mine) for name, tensor, is_mine in found]

    @property
    def stale_gradients(self) -> dict[int, int] | None:
        """How many gradients of the run were applied at which age; on rank 0, after `synchronize`."""
        return dict(sorted((self._ages_before + self._ages).items())) if self.staleness else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume, and continue to count ages."""
        super().load_state_dict(state)
        self._ages_before, self._ages = _added([state.get("stale_gradients", {})]), Counter()
        if isinstance(self._server, AsyncServer):
            self._server.reset_ages()


def _added(counts: list[Mapping[Any, int]]) -> Counter[int]:
    """The sum of counts, whose keys JSON may have turned into text."""
    total: Counter[int] = Counter()
    for each in counts:
        total.update({int(age): number for age, number in each.items()})
    return total
