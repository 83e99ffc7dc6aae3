"""Muon: torch's own on matrices, AdamW on the rest, the same on convolutions; which layers it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stormo.config import schema
from stormo.errors import SettingError
from stormo.optim import Muon
from stormo.optim.muon import orthogonalise
from stormo.optim.table import make_optimizer, muon_groups
from tests.optim.layers import copies, make_layers, set_gradients, take_steps


@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_are_stepped_as_by_torch(adjust_lr: str, nesterov: bool) -> None:
    shapes = [(6, 4), (4, 6), (5, 5), (1, 3)]
    ours, theirs = make_layers(torch.float32, shapes), make_layers(torch.float32, shapes)
    options: dict[str, Any] = {"weight_decay": 0.1, "nesterov": nesterov}
    take_steps(Muon(ours, lr=0.05, adjust_lr=adjust_lr, **options), ours, range(4))
    take_steps(torch.optim.Muon(theirs, lr=0.05, adjust_lr_fn=adjust_lr, **options), theirs, range(4))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (), (3, 4)])
def test_what_is_not_adapted_is_stepped_by_adamw(shape: tuple[int, ...]) -> None:
    ours, theirs = make_layers(shapes=[shape]), make_layers(shapes=[shape])
    take_steps(Muon([{"params": ours, "adapt": False}], lr=0.05, weight_decay=0.1), ours, range(4))
    take_steps(torch.optim.AdamW(theirs, lr=0.05, weight_decay=0.1), theirs, range(4))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-12, atol=1e-14)


def test_a_convolution_is_stepped_as_the_matrix_of_its_filters() -> None:
    (kernel,) = make_layers(shapes=[(4, 3, 2, 2)])
    matrix = nn.Parameter(kernel.detach().flatten(1).clone())
    kernel = nn.Parameter(kernel.detach().to(memory_format=torch.channels_last))
    one, other = Muon([kernel], lr=0.05), Muon([matrix], lr=0.05)
    for seed in range(3):
        set_gradients([kernel], seed)
        matrix.grad = kernel.grad.flatten(1).clone()  # type: ignore[union-attr]
        one.step()
        other.step()
    torch.testing.assert_close(kernel.detach().flatten(1), matrix.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (6, 6)])
def test_the_factors_of_a_matrix_stay_and_its_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = orthogonalise(matrix, 5)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    left = u.T @ found @ v.T
    assert 0.6 < left.diagonal().min() <= left.diagonal().max() < 1.3
    torch.testing.assert_close(left, left.diagonal().diag(), rtol=0, atol=1e-12)
    assert not orthogonalise(torch.zeros(3, 2), 5).any()


def test_float64_weights_are_computed_in_float64() -> None:
    """bfloat16 would blow up the last digit of a gradient, which depends on the order of sums."""
    (layer,), (shaken,) = make_layers(shapes=[(16, 8)]), make_layers(shapes=[(16, 8)])
    set_gradients([layer], 0)
    noise = torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shaken.grad = layer.grad * (1 + 1e-15 * noise)  # type: ignore[operator]
    for one in (layer, shaken):
        Muon([one], lr=1.0).step()
    torch.testing.assert_close(layer, shaken, rtol=0, atol=1e-12)


class Net(nn.Module):
    """Embeddings of both kinds, a convolution, a stack of matrices, a norm and, tied or not, a head."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.bags = nn.EmbeddingBag(7, 4)
        self.conv = nn.Conv2d(2, 3, 3)
        self.hidden = nn.Linear(4, 4)
        self.experts = nn.Parameter(torch.ones(2, 4, 4))
        self.norm = nn.LayerNorm([4, 4])
        self.head = nn.Linear(4, 7)
        if tied:
            self.head.weight = self.tokens.weight


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_hidden_matrices_and_convolutions(tied: bool) -> None:
    model = Net(tied=tied)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    hidden, outer, plain = muon_groups(model, 0.1, lr=0.1, adamw_lr=0.003)
    assert [names[id(p)] for p in hidden["params"]] == ["conv.weight", "hidden.weight"]
    heads = set() if tied else {"head.weight"}
    assert {names[id(p)] for p in outer["params"]} == {"tokens.weight", "bags.weight", "experts", *heads}
    assert sum(len(group["params"]) for group in (hidden, outer, plain)) == len(names)
    assert [group["adapt"] for group in (hidden, outer, plain)] == [True, False, False]
    assert [group["weight_decay"] for group in (hidden, outer, plain)] == [0.1, 0.1, 0.0]
    assert [group.get("lr") for group in (hidden, outer, plain)] == [None, 0.003, 0.003]


def test_factors_of_learning_rates_hold_for_both() -> None:
    settings = schema.Optimizer(optimizer="muon", base_lr=0.02, adamw_lr=0.004)
    optimizer = make_optimizer(Net(tied=False), settings, {"hidden.*": 0.5, "head.*": 0.25})
    rates = {(group["adapt"], group["lr"], len(group["params"])) for group in optimizer.param_groups}
    # The convolution; hidden.weight; embeddings and experts; head.weight; vectors of each.
    assert rates == {(True, 0.02, 1), (True, 0.01, 1), (False, 0.004, 3), (False, 0.001, 1), (False, 0.002, 1)}


def test_it_takes_its_settings() -> None:
    settings = schema.Optimizer(
        optimizer="muon", base_lr=0.3, ns_steps=2, adjust_lr="original", beta2=0.5, momentum=0.8
    )
    optimizer = make_optimizer(Net(tied=False), settings)
    assert isinstance(optimizer, Muon)
    first, *others = optimizer.param_groups
    assert (first["lr"], first["momentum"], first["nesterov"], first["adjust_lr"]) == (0.3, 0.8, True, "original")
    assert {(group["lr"], group["betas"], group["eps"]) for group in others} == {(0.3, (0.9, 0.5), 1e-8)}
    (layer,) = make_layers(shapes=[(4, 3)])
    before = copies([layer])[0]
    set_gradients([layer], 0)
    Muon([layer], lr=1.0, ns_steps=2, nesterov=False, adjust_lr="original").step()
    assert layer.grad is not None
    torch.testing.assert_close(before - layer.detach(), orthogonalise(layer.grad, 2) * (4 / 3) ** 0.5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"adjust_lr": "other"}, "adjust_lr 'other'.*match_rms_adamw or original"),
        ({"adapt": True}, "a vector in a group"),
    ],
)
def test_what_cannot_hold_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingError, match=sentence):
        Muon([nn.Parameter(torch.ones(3))], lr=0.1, **options)
