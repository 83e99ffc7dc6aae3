"""A user's own loop on shards of its model: the weights of one process, saved and loaded on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.command import relative_difference
from stormo.distributed.world import World as Workers
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.script.sharding import whole_tensors
from stormo.script.world import World
from stormo.script.wrapping import warn_of_unwrapped_optimizers
from tests.script.loops import Ranks, Weights, data, plain_loop, weights, world_loop, world_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.inner(x)
        return found


def _make(kind: str = "adamw", *, has_norm: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    norm = nn.BatchNorm1d(8) if has_norm else nn.Tanh()
    model = nn.Sequential(nn.Linear(4, 8, bias=False), norm, nn.Sequential(Block(), Block()), nn.Linear(8, 2))
    if kind == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


class Rooted(nn.Module):
    """A parameter and layers outside of the blocks, so that the root has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.first, self.last, self.norm = nn.Linear(4, 8), nn.Linear(8, 2), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x * self.scale))
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.last(x)
        return found


def _loader() -> DataLoader[Any]:
    return DataLoader(data(34), batch_size=8)  # the last batch has fewer samples than there are workers


def _train(workers: Workers, kind: str, accumulate: int, max_norm: float | None) -> Weights:
    world = world_of(workers)
    model, optimizer = world.wrap(*_make(kind, has_norm=accumulate == 1), strategy="fsdp")
    loader = world.loader(data(34), global_batch_size=8, accumulate=accumulate)
    if accumulate > 1:  # an optimizer of the shards, and a mean whose count is known after the last micro-batch
        optimizer = world.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for x, y in (batch for _ in range(2) for batch in loader):
            optimizer.zero_grad()
            world.backward(F.mse_loss(model(x), y), count=len(x))
            optimizer.step()
    else:
        world_loop(world, model, optimizer, loader, max_norm=max_norm)
    model.eval()
    with torch.no_grad():
        total = sum(F.mse_loss(model(x), y, reduction="sum").item() for x, y in world.loader(data(31), 3))
    whole = {name: tensor.cpu() for name, tensor in whole_tensors(model.state_dict(), workers).items()}
    parts = [tensor.to_local().numel() if hasattr(tensor, "to_local") else 0 for tensor in model.parameters()]
    assert workers.size == 1 or sum(parts) < sum(p.numel() for p in model.parameters())
    return whole | {"error": torch.tensor(world.sum(total))}


@pytest.mark.parametrize(
    ("kind", "size", "accumulate", "max_norm"),
    [("adamw", 2, 1, None), ("sgd", 3, 1, 0.05), ("sgd", 2, 2, None), ("adamw", 1, 1, None)],
)
def test_shards_come_to_the_weights_of_one_process(
    run_ranks: Ranks, kind: str, size: int, accumulate: int, max_norm: float | None
) -> None:
    model, optimizer = _make(kind, has_norm=accumulate == 1)  # a norm is one of micro-batches
    expected = plain_loop(model, optimizer, _loader(), max_norm=max_norm)
    model.eval()
    with torch.no_grad():
        expected["error"] = sum((F.mse_loss(model(x), y, reduction="sum") for x, y in [data(31)[:]]), torch.zeros(()))
    found, *_ = run_ranks(_train, size, kind, accumulate, max_norm)
    assert relative_difference(found, expected) < 1e-12


@pytest.mark.gpu
def test_the_same_over_nccl() -> None:
    from benchmarks.rank_pool import RankPool
    from benchmarks.slice_devices import find_devices

    expected = plain_loop(*_make("sgd"), _loader(), max_norm=0.05)
    devices = find_devices()
    with RankPool(60.0, [devices.of_rank(rank) for rank in range(2)]) as pool:
        found, *_ = pool.run(_train, 2, "sgd", 1, 0.05)
    del found["error"]
    assert relative_difference(found, expected) < 1e-10


def _changed_after_evaluations(workers: Workers, strategy: Any, precision: Any, has_graph: bool) -> Weights:
    """An optimizer that is made, and parameters that are frozen and changed, each after an evaluation."""
    world = world_of(workers)
    torch.set_default_dtype(torch.float64 if precision == "fp32" else torch.float32)
    torch.manual_seed(5)
    model = world.wrap(Rooted(), strategy=strategy, precision=precision)
    loader, checks = (world.loader(DataLoader(_inputs(count), batch_size=8)) for count in (32, 16))

    def evaluate() -> None:
        with torch.set_grad_enabled(has_graph):
            for x, _ in checks:
                model(x)

    evaluate()
    optimizer = world.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for epoch in range(3):
        evaluate()
        model.scale.requires_grad_(epoch != 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        world_loop(world, model, optimizer, loader, 1, max_norm=0.5)
    return whole_tensors(model.state_dict(), workers)


def _inputs(count: int) -> TensorDataset:
    return TensorDataset(*(tensor.to(torch.get_default_dtype()) for tensor in data(count).tensors))


@pytest.mark.parametrize("has_graph", [False, True])
@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-12), ("bf16", 0.05)])
def test_after_an_evaluation_the_parameters_are_the_shards_again(
    run_ranks: Ranks, precision: str, limit: float, has_graph: bool
) -> None:
    expected, *_ = run_ranks(_changed_after_evaluations, 1, "ddp", precision, has_graph)
    found, *_ = run_ranks(_changed_after_evaluations, 2, "fsdp", precision, has_graph)
    assert relative_difference(found, expected) < limit


def _part(workers: Workers, folder: str, strategy: Any, num_epochs: int) -> Weights:
    world = world_of(workers)
    model, optimizer = world.wrap(*_make(), strategy=strategy)
    loader = world.loader(_loader())
    done = world.load(folder).get("epochs", 0)
    world_loop(world, model, optimizer, loader, num_epochs - done)
    world.save(folder, epochs=num_epochs)
    return whole_tensors(model.state_dict(), workers)


def test_any_number_of_workers_loads_shards(run_ranks: Ranks, tmp_path: Path) -> None:
    expected = plain_loop(*_make(), _loader(), 4)
    run_ranks(_part, 2, str(tmp_path), "fsdp", 1)
    run_ranks(_part, 1, str(tmp_path), "ddp", 2)
    run_ranks(_part, 3, str(tmp_path), "fsdp", 3)
    found, *_ = run_ranks(_part, 2, str(tmp_path), "ddp", 4)
    assert relative_difference(found, expected) < 1e-12


def _bf16(workers: Workers, strategy: Any) -> tuple[str, str, Weights]:
    world = world_of(workers)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 2))
    model, optimizer = world.wrap(
        model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy, precision="bf16"
    )
    seen = []
    model[1].register_forward_hook(lambda _, __, output: seen.append(str(output.dtype)))
    x = torch.ones(4, 4)
    output = model(x)
    world.backward(output.square().mean(), count=4)
    optimizer.step()
    gradient = next(iter(model.parameters())).grad
    assert gradient is not None
    assert gradient.dtype == torch.float32
    return seen[0], str(output.dtype), whole_tensors(model.state_dict(), workers)


def test_bf16_inside_and_float32_outside(run_ranks: Ranks) -> None:
    results = [run_ranks(_bf16, size, strategy)[0] for size, strategy in ((1, "ddp"), (2, "ddp"), (2, "fsdp"))]
    for inside, outside, found in results:
        assert (inside, outside) == ("torch.bfloat16", "torch.float32")
        assert relative_difference(found, results[0][2]) < 1e-2
        assert {tensor.dtype for tensor in found.values()} == {torch.float32}


def _wrong(workers: Workers, kind: str) -> None:
    world = world_of(workers)
    model, optimizer = _make("sgd")
    if kind == "stepped":
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    more = [nn.Sequential(model[0], nn.Linear(8, 1))] if kind == "shared" else []
    if kind == "small batch, root":
        model = Rooted()
    if kind == "transposed":
        model[0].weight = nn.Parameter(torch.randn(4, 8).t())
    if kind in ("small batch, root", "transposed"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "LBFGS":
        optimizer = torch.optim.LBFGS(model.parameters())
    if kind == "LBFGS later":
        world.wrap(torch.optim.LBFGS(world.wrap(model, strategy="fsdp").parameters()))
    if kind in ("forgotten", "loss.backward()"):
        _mistaken(world, model, optimizer, kind)
    world.wrap(model, *more, optimizer, **OPTIONS.get(kind, {"strategy": "fsdp"}))
    model.eval()
    for x, _ in world.loader(data(5), global_batch_size=4):
        model(x)


def _mistaken(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> None:
    """What is refused for replicas, in a loop over shards."""
    world.wrap(*([model] if kind == "forgotten" else [model, optimizer]), strategy="fsdp")
    warn_of_unwrapped_optimizers(world._loop)  # as `stormo.World()` does
    for x, y in world.loader(data(16), global_batch_size=8):
        optimizer.zero_grad()
        if kind == "loss.backward()":
            F.mse_loss(model(x), y).backward()
        world.backward(F.mse_loss(model(x), y))
        optimizer.step()


def _refused(workers: Workers, kind: str) -> str:
    with pytest.raises(SettingError) as refused:
        _wrong(workers, kind)
    return f"{refused.value.what}: {refused.value.why}"


OPTIONS: dict[str, dict[str, Any]] = {
    "strategy": {"strategy": "zero"},
    "precision": {"precision": "fp16"},
    "compress": {"strategy": "fsdp", "compress": "bf16"},
}


@pytest.mark.parametrize(
    ("kind", "words", "size"),
    [
        ("stepped", "an optimizer that has stepped", 2),
        ("small batch", "a batch of 1 sample was given to a sharded model", 2),
        ("small batch, root", "a batch of 1 sample was given to a sharded model", 2),
        ("forgotten", "was made before world.wrap(): strategy", 2),
        ("loss.backward()", "on top of gradients that did not come from it", 2),
        ("LBFGS", "it is not known to step every element independently", 2),
        ("LBFGS later", "it is not known to step every element independently", 2),
        ("transposed", "the parameter 0.weight is not contiguous in memory", 2),
        ("shared", "models that share the parameter 0.weight", 2),
        ("shared", "models that share the parameter 0.weight", 1),
        ("strategy", "replicas or shards", 1),
        ("precision", "fp16 needs a scaled loss", 1),
        ("compress", "torch sums the gradients", 1),
    ],
)
def test_what_cannot_hold_is_refused(run_ranks: Ranks, kind: str, words: str, size: int) -> None:
    assert words in run_ranks(_refused, size, kind)[0]


def test_a_copy_of_a_model_in_bf16_is_the_script_s_own() -> None:
    import copy

    world = world_of(Workers(alone(), torch.device("cpu")))
    model = world.wrap(nn.Linear(4, 2), precision="bf16")
    assert "forward" not in vars(copy.deepcopy(model))
    assert weights(copy.deepcopy(model)).keys() == weights(model).keys()
