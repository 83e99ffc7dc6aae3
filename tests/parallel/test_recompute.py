"""Modules that are computed again in backward: nothing but memory may differ."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils.parametrizations import spectral_norm

from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.layers.ghost_batch_norm import convert_ghost_batch_norm
from stormo.layers.norm_act import NormAct
from stormo.layers.sync_batch_norm import convert_sync_batch_norm, set_absent
from stormo.parallel.recompute import recompute
from stormo.tasks.wide_resnet import WideResNet

RunRanks = Callable[..., list[Any]]


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = norm
        self.plain = nn.Dropout(0.3)  # a name that a class of ours might have taken

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return x + self.plain(self.norm(self.conv(x)) * scale)


class Net(nn.Module):
    """Blocks that are called with a keyword, around layers whose passes change buffers."""

    def __init__(self, make_norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 1)
        self.blocks = nn.ModuleList(Block(make_norm()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(x, scale=torch.tensor(1.0 + number))
        return F.gelu(x).mean((2, 3))


class Codebook(nn.Module):
    """Reads a buffer and then moves it behind torch's back."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("untouched", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(x * self.table.view(1, -1, 1, 1).clone())
        if self.training:
            self.table.data.mul_(0.9).add_(x.detach().mean((0, 2, 3)), alpha=0.1)
        return y


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "norm_act": lambda: NormAct(4, dropout=0.2),
    "ghosts": lambda: convert_ghost_batch_norm(nn.Sequential(nn.BatchNorm2d(4), NormAct(4)), 3),
    "spectral norm": lambda: spectral_norm(nn.Conv2d(4, 4, 1)),
    "codebook": Codebook,
}
PATHS = ["blocks.0", "blocks.1", "blocks.2"]


def trained(model: nn.Module, steps: int = 3) -> dict[str, Tensor]:
    """Weights, buffers and gradients after a few steps; the second one accumulates two passes."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        losses = [model(torch.randn(6, 1, 5, 5)).square().mean() for _ in range(1 + step % 2)]
        for loss in losses:  # both passes come before both backwards
            loss.backward()
        optimizer.step()
        gradients = {f"grad {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state | gradients | {"generator": torch.get_rng_state()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("norm", NORMS)
def test_nothing_changes_but_memory(norm: str) -> None:
    torch.manual_seed(0)
    plain = Net(NORMS[norm])
    again = copy.deepcopy(plain)
    recompute(again, PATHS)
    assert [name for name, _ in again.named_modules()] == [name for name, _ in plain.named_modules()]
    assert_same(trained(again), trained(plain))


@pytest.mark.parametrize("norm", ["batch norm", "norm_act"])
def test_a_first_pass_without_samples_moves_no_statistics_and_the_next_one_moves_them_once(norm: str) -> None:
    torch.manual_seed(0)
    plain = Net(NORMS[norm])
    again = copy.deepcopy(plain)
    recompute(again, PATHS)
    for model in (plain, again):
        set_absent(model, True)
        trained(model, steps=1)
        set_absent(model, False)
    assert_same(trained(again), trained(plain))


def test_the_whole_model() -> None:
    torch.manual_seed(0)
    plain = WideResNet(width=0.25)
    again = copy.deepcopy(plain)
    recompute(again, [""])
    images = torch.randn(4, 1, 28, 28)
    for model in (plain, again):
        torch.manual_seed(1)
        model(images).logsumexp(1).sum().backward()
    assert_same(again.state_dict(), plain.state_dict())
    for name, parameter in plain.named_parameters():
        assert torch.equal(again.get_parameter(name).grad, parameter.grad), name


def saved_bytes(model: nn.Module) -> int:
    seen: dict[int, int] = {}
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(64, 1, 16, 16))
    return sum(seen.values())


def test_activations_are_not_kept() -> None:
    model = Net(NORMS["batch norm"])
    before = saved_bytes(model)
    recompute(model, PATHS)
    activation = 64 * 4 * 16 * 16 * 4
    assert saved_bytes(model) < 5 * activation < before / 2


def test_only_where_a_backward_pass_can_come() -> None:
    model = Net(NORMS["batch norm"])
    recompute(model, PATHS)
    calls = []
    model.blocks[0].conv.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(4, 1, 5, 5)
    with torch.no_grad():
        model(x)
    model.eval()(x).sum().backward()
    assert len(calls) == 2
    model.train()(x).sum().backward()
    assert len(calls) == 4


def test_copies_and_pickles_compute_with_their_own_weights() -> None:
    model = Net(NORMS["batch norm"])
    recompute(model, PATHS)
    trained(model)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    assert_same(*map(trained, twins))
    assert saved_bytes(twins[0]) == saved_bytes(twins[1]) == saved_bytes(model)  # they forget as it does


def test_a_replaced_forward_is_refused() -> None:
    model = Net(NORMS["batch norm"])
    model.blocks[1].forward = model.blocks[1].forward  # type: ignore[method-assign]
    with pytest.raises(SettingError, match=r"blocks\.1 \(Block\) was replaced"):
        recompute(model, PATHS)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's compiler asks for it
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_compiled_blocks(norm: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), norm(6), nn.Tanh()) for _ in range(2)))
    again = copy.deepcopy(plain)
    recompute(again, ["0", "1"])
    for block in again:
        block.compile(backend="aot_eager", dynamic=False)
    for model in (plain, again):
        for seed in range(3):
            torch.manual_seed(seed)
            model(torch.randn(5, 6)).square().sum().backward()
    torch._dynamo.reset()
    for (name, parameter), twin in zip(plain.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(twin.grad, parameter.grad, msg=name)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(again.get_buffer(name), buffer, msg=name)


def _sharded_pass(world: World) -> list[dict[str, Tensor]]:
    results = []
    for is_again in (False, True):
        torch.manual_seed(0)
        model = Net(NORMS["norm_act"])
        model = convert_sync_batch_norm(model, world.sum)
        if is_again:
            recompute(model, PATHS)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        assert isinstance(model.blocks[0], FSDPModule)
        torch.manual_seed(world.rank)
        for number in range(2):
            set_absent(model, number == 0 and world.rank == 0)  # in a first pass one worker has no samples
            model(torch.randn(4, 1, 5, 5)).square().mean().backward()
        gradients = {n: p.grad._local_tensor for n, p in model.named_parameters()}
        results.append(gradients | {n: b.clone() for n, b in model.named_buffers()})
    return results


def test_sharded_with_synchronised_statistics(run_ranks: RunRanks) -> None:
    for plain, again in run_ranks(_sharded_pass, 2):
        assert_same(again, plain)
