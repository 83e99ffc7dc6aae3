"""A sharded model without a strategy that trains: known values, sharded by hand, and an optimizer of the shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stormo.checkpoint.reader import Reader, ReadItem
from stormo.config.mesh import Mesh
from stormo.distributed.world import World
from stormo.optim.novograd import NovoGrad
from stormo.parallel.base import Strategy
from stormo.parallel.parameter_shards import ParameterShard, chunk_range

MESHES: dict[str, Mesh] = {
    "one": Mesh(),
    "rows 2": Mesh(shard=2),
    "rows 3": Mesh(shard=3),
    "rows 4": Mesh(shard=4),
    "copies of rows": Mesh(replicate=2, shard=2),
    "columns": Mesh(tensor=2),
    "grid": Mesh(shard=2, tensor=2),
    "stages": Mesh(pipeline=2),
    "stages of rows": Mesh(pipeline=2, shard=2),
}
FROZEN = "frozen"
State = dict[str, Tensor]  # `name` or `name|key`


class Model(nn.Module):
    """Weights of all shapes: cut unevenly, too few rows for all, a number, none at all, tied, frozen; and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.second = nn.Linear(6, 8, bias=False)
        self.tied = nn.Linear(6, 8, bias=False)
        self.tied.weight = self.second.weight
        self.norm = nn.BatchNorm1d(2)
        self.number = nn.Parameter(torch.zeros(()))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.register_buffer("table", torch.zeros(3), persistent=False)


class FakeSharded:
    """What the checkpoint room and `RunState` ask of a strategy."""

    is_sharded = sharded_checkpoint = True
    local_updates = False
    powersgd = None

    average = None
    persistent_buffers = Strategy.persistent_buffers

    def load_state_dict(self, state: object) -> None:
        """There is none."""

    def __init__(self, world: World, mesh: str, optimizer: str = "adamw", module: nn.Module | None = None) -> None:
        world.arrange(MESHES[mesh])
        self.world = world
        self.module = module or Model()
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.clock: Any = None
        self.num_changes = 0
        self._optimizer_name = optimizer
        numbered = enumerate(self.module.named_parameters())
        self._parts = [
            self._cut(name, whole)
            for number, (name, whole) in numbered
            if number % world.mesh.pipeline == world.parallel_dims.at["pipeline"]
        ]
        stepped = [part.local for part in self._parts if part.name != FROZEN]
        self.optimizer: torch.optim.Optimizer
        if optimizer == "novograd":
            self.optimizer = NovoGrad(stepped, lr=0.1)
        elif optimizer == "sgd":
            self.optimizer = torch.optim.SGD(stepped, lr=0.1, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(stepped, lr=0.1)

    def _cut(self, name: str, whole: Tensor) -> ParameterShard:
        """By columns, then by rows of what is left."""
        at, mesh = self.world.parallel_dims.at, self.world.mesh
        offset, shape, is_first = [0] * whole.ndim, list(whole.shape), at["tensor"] == 0
        if whole.ndim == 2:
            offset[1], shape[1] = chunk_range(shape[1], at["tensor"], mesh.tensor)
            is_first = True
        if whole.ndim:
            offset[0], shape[0] = chunk_range(shape[0], at["shard"], mesh.shard)
        else:
            is_first = is_first and at["shard"] == 0
        return ParameterShard(
            name=name,
            whole_shape=tuple(whole.shape),
            offset=tuple(offset),
            local=nn.Parameter(torch.zeros(shape), requires_grad=whole.requires_grad),
            is_counted=is_first,
            is_saved=is_first and at["replicate"] == 0,
        )

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """Give everything the values of a run."""
        values = whole_values(self._optimizer_name, seed)
        for part in self._parts:
            part.local.copy_(part.of(values[part.name]))
            if part.name != FROZEN:
                self.optimizer.state[part.local] = {
                    key: self._of(part, tensor).clone() for key, tensor in _keys(values, part.name)
                }
        for _, buffer in self.named_buffers():
            buffer.fill_(seed + 2 * self.world.rank if buffer.is_floating_point() else seed)

    def require(self, seed: int) -> None:
        """Everything has the values of a run."""
        values = whole_values(self._optimizer_name, seed)
        for part in self._parts:
            assert torch.equal(part.local, part.of(values[part.name])), part.name
            state = self.optimizer.state.get(part.local, {})
            keys = dict(_keys(values, part.name)) if part.name != FROZEN else {}
            assert state.keys() == keys.keys()
            for key, tensor in keys.items():
                assert torch.equal(state[key], self._of(part, tensor)), f"{part.name}|{key}"

    @staticmethod
    def _of(part: ParameterShard, tensor: Tensor) -> Tensor:
        return part.of(tensor) if tuple(tensor.shape) == part.whole_shape else tensor

    def shards(self) -> list[ParameterShard]:
        return self._parts

    def shards_changed(self) -> None:
        self.num_changes += 1

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in self.module.named_buffers():
            if name == "table" or self.world.parallel_dims.at["pipeline"] == 0:
                yield name, buffer

    def state_dict(self) -> dict[str, Any]:
        return {"scaler": {}, "noise_scale": None, "stale_gradients": {}}


def _keys(values: State, name: str) -> list[tuple[str, Tensor]]:
    return [(full.partition("|")[2], tensor) for full, tensor in values.items() if full.startswith(f"{name}|")]


def whole_values(optimizer: str, seed: int) -> State:
    """The whole weights and the whole optimizer state of a run."""
    draw = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(p.shape, generator=draw) for name, p in Model().named_parameters()}
    for name, weight in list(values.items()):
        if name == FROZEN:
            continue
        if optimizer == "sgd":
            values[f"{name}|momentum_buffer"] = torch.randn(weight.shape, generator=draw)
            continue
        values[f"{name}|exp_avg"] = torch.randn(weight.shape, generator=draw)
        of_layer = () if optimizer == "novograd" else weight.shape
        values[f"{name}|exp_avg_sq"] = torch.rand(of_layer, generator=draw)
        if optimizer == "adamw":
            values[f"{name}|step"] = torch.tensor(float(seed))
    return values


def require_whole(snapshot: Any, optimizer: str, seed: int) -> None:
    """A checkpoint that was read whole has the values of a run."""
    values = whole_values(optimizer, seed)
    weights = {name: tensor for name, tensor in values.items() if "|" not in name}
    for name, tensor in {**weights, "tied.weight": weights["second.weight"]}.items():
        assert torch.equal(snapshot.model[name], tensor), name
    assert snapshot.model.keys() == Model().state_dict().keys()
    assert snapshot.optimizer.keys() == values.keys() - weights.keys()
    for name, tensor in snapshot.optimizer.items():
        assert torch.equal(tensor, values[name]), name


def read_chunk(reader: Reader, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """A chunk of a weight."""
    into = torch.empty(shape, dtype=reader.entries("model")[name].dtype)
    reader.fill([ReadItem(section="model", name=name, offset=offset, into=into)])
    return into


def read_tensor(reader: Reader, name: str) -> Tensor:
    """A whole weight."""
    shape = reader.entries("model")[name].shape
    return read_chunk(reader, name, (0,) * len(shape), shape)
