"""Which modules are units, and that recomputing their activations changes nothing."""

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
from stormo.parallel.units import recompute, units_of
from stormo.tasks.gpt import Gpt
from stormo.tasks.language_model import Size
from stormo.tasks.wide_resnet import WideResNet


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.merge = nn.Linear(width, 2 * width)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(Block(8) for _ in range(4))


def gpt() -> Gpt:
    return Gpt(Size(3, 16, 2, 8), block=8, vocabulary=32)


def with_parts(**parts: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


def numbered(path: str, count: int) -> list[str]:
    return [f"{path}{number}" for number in range(count)]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def test_repeated_blocks_of_the_built_in_models() -> None:
    assert units_of(gpt()) == numbered("blocks.", 3)
    assert units_of(WideResNet(width=0.25)) == [f"blocks.{number}" for number in (0, 1, 3, 4, 6, 7)]


def test_units_on_meta_are_the_same() -> None:
    with torch.device("meta"):
        assert units_of(gpt()) == numbered("blocks.", 3)


def test_blocks_of_torch_s_transformer() -> None:
    model = nn.Transformer(16, 2, 2, 3, 32, batch_first=True)
    assert units_of(model) == [*numbered("encoder.layers.", 2), *numbered("decoder.layers.", 3)]


def test_layers_are_units_where_there_are_no_blocks() -> None:
    assert units_of(mlp()) == ["0", "3", "5"]
    # Beside blocks they belong to the root, and within them to their block.
    assert units_of(with_parts(trunk=nn.Sequential(Block(4), Block(4)), head=mlp())) == ["trunk.0", "trunk.1"]


def test_a_model_without_blocks_has_none() -> None:
    assert units_of(with_parts(one=nn.Linear(2, 2), two=nn.Linear(2, 2))) == []
    assert units_of(Gpt(Size(1, 16, 2, 8), block=8, vocabulary=32)) == []
    assert units_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


def test_unequal_stages_are_split_into_blocks() -> None:
    stages = nn.ModuleList(Stage(width, depth) for width, depth in ((4, 2), (8, 3)))
    assert units_of(with_parts(stages=stages)) == [*numbered("stages.0.blocks.", 2), *numbered("stages.1.blocks.", 3)]
    in_lists = nn.Sequential(*(nn.Sequential(Block(4), Block(4)) for _ in range(2)))
    assert units_of(in_lists) == ["0.0", "0.1", "1.0", "1.1"]


def test_experts_stay_in_their_block() -> None:
    # They are not all called on every worker, which would wait for the others.
    assert units_of(with_parts(layers=nn.ModuleList(Experts() for _ in range(2)))) == ["layers.0", "layers.1"]


def test_tied_units_belong_to_the_root() -> None:
    model = gpt()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    assert units_of(model) == ["blocks.2"]
    model.blocks[2].norm1.weight = model.norm.weight
    assert units_of(model, "blocks.*") == []
    model = gpt()
    model.head.weight = model.tokens.weight  # both of the root
    assert units_of(model) == numbered("blocks.", 3)


def test_one_module_at_two_places_is_not_repeated() -> None:
    shared = Block(4)
    assert units_of(nn.ModuleList([shared, shared])) == []


@pytest.mark.parametrize(
    ("asked", "units"),
    [
        ("blocks.*", numbered("blocks.", 3)),
        ("blocks", numbered("blocks.", 3)),
        ("Block", numbered("blocks.", 3)),
        ("blocks.[12], head", ["blocks.1", "blocks.2", "head"]),
        (
            "head, blocks.1.attention, *.up",
            ["blocks.0.up", "blocks.1.attention", "blocks.1.up", "blocks.2.up", "head"],
        ),
        ("Att*", [f"blocks.{number}.attention" for number in range(3)]),
        ("blocks.1.attention.qkv, blocks.1", ["blocks.1"]),
    ],
)
def test_units_by_name(asked: str, units: list[str]) -> None:
    model = gpt()
    assert units_of(model, asked) == units
    assert units_of(copy.deepcopy(model), asked) == units


@pytest.mark.parametrize(
    ("asked", "near"), [("block.*", "blocks"), ("Blok", "Block"), ("layers.*", "tokens"), ("dropout", "")]
)
def test_an_unknown_unit_is_refused(asked: str, near: str) -> None:
    with pytest.raises(SettingError, match=f"'{asked}' was set.*for example .*{near}".replace("*'", r"\*'", 1)):
        units_of(gpt(), f"head, {asked}")


RunRanks = Callable[..., list[Any]]


class NormBlock(nn.Module):
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
        self.blocks = nn.ModuleList(NormBlock(make_norm()) for _ in range(3))

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


class LateBuffer(nn.BatchNorm2d):
    """A norm with a buffer of its own, which the first micro-batch does not change."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(super().forward(x) * self.scale.clone())
        if self.training and int(self.num_batches_tracked or 0) > 1:
            self.scale.mul_(0.9)
        return y


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "norm_act": lambda: NormAct(4, dropout=0.2),
    "ghosts": lambda: convert_ghost_batch_norm(nn.Sequential(nn.BatchNorm2d(4), NormAct(4)), 3),
    "spectral norm": lambda: spectral_norm(nn.Conv2d(4, 4, 1)),
    "codebook": Codebook,
    "late buffer": LateBuffer,
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
def test_recomputing_changes_only_memory(norm: str) -> None:
    torch.manual_seed(0)
    plain = Net(NORMS[norm])
    again = copy.deepcopy(plain)
    recompute(again, PATHS)
    assert [name for name, _ in again.named_modules()] == [name for name, _ in plain.named_modules()]
    assert_same(trained(again), trained(plain))


@pytest.mark.parametrize("norm", ["batch norm", "norm_act"])
def test_a_first_micro_batch_without_samples_changes_no_statistics(norm: str) -> None:
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


def test_only_before_a_backward() -> None:
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
    with pytest.raises(SettingError, match=r"blocks\.1 \(NormBlock\) was replaced"):
        recompute(model, PATHS)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's compiler asks for it
def test_compiled_blocks() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(2)))
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
