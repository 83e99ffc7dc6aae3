"""Which modules are units: by themselves, and as asked for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from stormo.errors import SettingError
from stormo.parallel.blocks import blocks_of
from stormo.tasks.gpt import Gpt
from stormo.tasks.gpt_sizes import Size
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
    assert blocks_of(gpt()) == numbered("blocks.", 3)
    assert blocks_of(WideResNet(width=0.25)) == [f"blocks.{number}" for number in (0, 1, 3, 4, 6, 7)]


def test_without_memory_they_are_the_same() -> None:
    with torch.device("meta"):
        assert blocks_of(gpt()) == numbered("blocks.", 3)


def test_blocks_of_torch_s_transformer() -> None:
    model = nn.Transformer(16, 2, 2, 3, 32, batch_first=True)
    assert blocks_of(model) == [*numbered("encoder.layers.", 2), *numbered("decoder.layers.", 3)]


def test_layers_are_units_where_there_are_no_blocks() -> None:
    assert blocks_of(mlp()) == ["0", "3", "5"]
    # Beside blocks they belong to the root, and within them to their block.
    assert blocks_of(with_parts(trunk=nn.Sequential(Block(4), Block(4)), head=mlp())) == ["trunk.0", "trunk.1"]


def test_a_model_without_blocks_has_none() -> None:
    assert blocks_of(with_parts(one=nn.Linear(2, 2), two=nn.Linear(2, 2))) == []
    assert blocks_of(Gpt(Size(1, 16, 2, 8), block=8, vocabulary=32)) == []
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


def test_unequal_stages_are_taken_apart() -> None:
    stages = nn.ModuleList(Stage(width, depth) for width, depth in ((4, 2), (8, 3)))
    assert blocks_of(with_parts(stages=stages)) == [*numbered("stages.0.blocks.", 2), *numbered("stages.1.blocks.", 3)]
    in_lists = nn.Sequential(*(nn.Sequential(Block(4), Block(4)) for _ in range(2)))
    assert blocks_of(in_lists) == ["0.0", "0.1", "1.0", "1.1"]


def test_experts_stay_in_their_block() -> None:
    # They are not all called on every worker, which would wait for the others.
    assert blocks_of(with_parts(layers=nn.ModuleList(Experts() for _ in range(2)))) == ["layers.0", "layers.1"]


def test_tied_units_belong_to_the_root() -> None:
    model = gpt()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    assert blocks_of(model) == ["blocks.2"]
    model.blocks[2].norm1.weight = model.norm.weight
    assert blocks_of(model, "blocks.*") == []
    model = gpt()
    model.head.weight = model.tokens.weight  # both of the root
    assert blocks_of(model) == numbered("blocks.", 3)


def test_one_module_at_two_places_is_not_repeated() -> None:
    shared = Block(4)
    assert blocks_of(nn.ModuleList([shared, shared])) == []


@pytest.mark.parametrize(
    ("asked", "units"),
    [
        ("blocks.*", numbered("blocks.", 3)),
        ("blocks", numbered("blocks.", 3)),
        ("Block", numbered("blocks.", 3)),
        ("blocks.[12], head", ["blocks.1", "blocks.2", "head"]),
        (
            ["head", "blocks.1.attention", "*.up"],
            ["blocks.0.up", "blocks.1.attention", "blocks.1.up", "blocks.2.up", "head"],
        ),
        ("Att*", [f"blocks.{number}.attention" for number in range(3)]),
        ("blocks.1.attention.qkv, blocks.1", ["blocks.1"]),
    ],
)
def test_as_asked(asked: str | list[str], units: list[str]) -> None:
    model = gpt()
    assert blocks_of(model, asked) == units
    assert blocks_of(copy.deepcopy(model), asked) == units


@pytest.mark.parametrize(
    ("asked", "near"), [("block.*", "blocks"), ("Blok", "Block"), ("layers.*", "tokens"), ("dropout", "")]
)
def test_a_name_that_nothing_has(asked: str, near: str) -> None:
    with pytest.raises(SettingError, match=f"'{asked}' was set.*for example .*{near}".replace("*'", r"\*'", 1)):
        blocks_of(gpt(), f"head, {asked}")
