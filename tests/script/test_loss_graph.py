"""Losses that are sums, or means over other items than samples: exact where declared, found where not."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stormo.distributed.world import World as Workers
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.script.loss_graph import item_counts_differ, read_terms
from tests.script.loops import Ranks, Weights, data, make, weights, world_of

N = 6  # samples; the network has as many outputs, so that no dimension tells by its size alone that it is the batch
_Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def _net() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, N)), torch.randn(N, 4), torch.rand(N, N)


def _vae(m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    out = m(x)
    mean, log_variance = out[:, :3], out[:, 3:]
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return F.binary_cross_entropy(out.sigmoid(), t, reduction="sum") + divergence


def _tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    logits = nn.Linear(4, 5)(x.unsqueeze(1).expand(N, 7, 4))
    return logits, torch.arange(N * 7).reshape(N, 7) % 5


def _correlation(m: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = m(x).T @ m(x + 1) / N
    return found


def _row_losses(m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return (m(x) - t).square().sum(dim=1)


def _stack(m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    out = m(x)
    return torch.stack([F.mse_loss(out[i], t[i]) for i in range(len(x))])


SUMS: dict[str, _Loss] = {
    "variational autoencoder": _vae,
    "half of squares": lambda m, x, t: 0.5 * (m(x) - t).square().sum(),
    "cross entropy": lambda m, x, t: F.cross_entropy(m(x), t.argmax(1), reduction="sum"),
    "one loss for each, summed": lambda m, x, t: F.mse_loss(m(x), t, reduction="none").sum(),
    "by rows, then all": lambda m, x, t: _row_losses(m, x, t).sum(),
    "mean of the outputs, sum of the rows": lambda m, x, t: (m(x) - t).square().mean(-1).sum(),
    "norms of rows": lambda m, x, t: (m(x) - t).norm(dim=1).sum(),
    "a mean and a sum": lambda m, x, t: F.mse_loss(m(x), t) + 1e-3 * m(x).abs().sum(),
    "tokens": lambda m, x, t: F.cross_entropy(_tokens(x)[0].view(-1, 5), _tokens(x)[1].view(-1), reduction="sum"),
    "tokens, classes second": lambda m, x, t: F.cross_entropy(
        _tokens(x)[0].transpose(1, 2), _tokens(x)[1], reduction="sum"
    ),
    "convolution": lambda m, x, t: nn.Conv1d(1, 2, 3)(x.unsqueeze(1)).square().sum(),
    "divided by the batch of all workers": lambda m, x, t: (m(x) - t).square().sum() / (2 * N),
    "scaled": lambda m, x, t: F.mse_loss(m(x), t, reduction="sum") * torch.tensor(65536.0),
    "scaled by a number": lambda m, x, t: torch.ops.aten.mul.Scalar(F.mse_loss(m(x), t, reduction="sum"), 3),
    "a stack": lambda m, x, t: _stack(m, x, t).sum(),
    "a stack of rows in turn": lambda m, x, t: torch.stack([a.square().mean() for a in m(x)]).sum(),
}
MEANS: dict[str, _Loss] = {
    "mean": lambda m, x, t: F.mse_loss(m(x), t),
    "divided by the samples": lambda m, x, t: (m(x) - t).square().sum() / len(x),
    "multiplied by one over the samples": lambda m, x, t: (m(x) - t).square().sum() * (1 / len(x)),
    "divided by all numbers": lambda m, x, t: (m(x) - t).square().sum() / t.numel(),
    "weighted": lambda m, x, t: 0.1 * (m(x) - t).square().sum() / len(x),
    "sum over features, mean over samples": lambda m, x, t: _row_losses(m, x, t).mean(),
    "accumulated by hand": lambda m, x, t: F.mse_loss(m(x), t) / 4,
    "batchmean": lambda m, x, t: F.kl_div(m(x).log_softmax(1), t, reduction="batchmean"),
    "tokens by samples": lambda m, x, t: (
        F.cross_entropy(_tokens(x)[0].view(-1, 5), _tokens(x)[1].view(-1), reduction="sum") / len(x)
    ),
    "a penalty on the weights": lambda m, x, t: (
        F.mse_loss(m(x), t) + 1e-4 * sum((p.square().sum() for p in m.parameters()), torch.zeros(()))
    ),
    "a penalty on a square matrix of weights": lambda m, x, t: nn.Parameter(torch.ones(N, N)).square().sum(),
    "mean over samples, sum over features": lambda m, x, t: m(x).mean(0).sum(),
    "the same from behind": lambda m, x, t: m(x).mean(-2).sum(),
    "deviations of features": lambda m, x, t: m(x).std(0).sum(),
    "correlation of features": lambda m, x, t: torch.diagonal(_correlation(m, x)).add(-1).square().sum(),
    "correlation, off the diagonal": lambda m, x, t: _correlation(m, x).flatten()[:-1].view(N - 1, N + 1).sum(),
    "similarities within the batch": lambda m, x, t: F.cross_entropy(m(x) @ m(x).T, torch.arange(N)),
    "a fraction of sums": lambda m, x, t: 1 - 2 * (m(x).sigmoid() * t).sum() / (m(x).sigmoid().sum() + t.sum()),
    "root of a mean": lambda m, x, t: F.mse_loss(m(x), t).sqrt(),
    "divided by a number": lambda m, x, t: torch.ops.aten.div.Scalar((m(x) - t).square().sum(), N),
    "mean of a stack": lambda m, x, t: _stack(m, x, t).mean(),
    "a stack divided by the samples": lambda m, x, t: _stack(m, x, t).sum() / N,
    "a stack of means": lambda m, x, t: torch.stack([m(x)[:, i].mean() for i in range(N)]).sum(),
    "a stack of means over samples": lambda m, x, t: torch.stack([m(x).mean(0)[i] for i in range(N)]).sum(),
    "a stack of penalties": lambda m, x, t: torch.stack([p.sum() for p in [*m.parameters()] + [m[0].weight] * 2]).sum(),
    "masked mean": lambda m, x, t: (_row_losses(m, x, t) * (t[:, 0] > 0.5)).sum() / (t[:, 0] > 0.5).sum(),
    "masked mean of one row": lambda m, x, t: (_row_losses(m, x, t) * (torch.arange(N) == 2)).sum() / torch.tensor(1),
    "mean of some rows": lambda m, x, t: _row_losses(m, x, t)[t[:, 0] > 0.5].mean(),
    "a list of means": lambda m, x, t: (
        sum((F.mse_loss(a, b) for a, b in zip(m(x), t, strict=True)), torch.zeros(())) / N
    ),
}


def test_a_sum_over_the_batch_is_known() -> None:
    for name, loss in SUMS.items():
        assert read_terms(loss(*_net()), N, 2 * N).has_sum, name


def test_a_mean_is_not_taken_for_a_sum() -> None:
    for name, loss in MEANS.items():
        assert not read_terms(loss(*_net()), N, 2 * N).has_sum, name


def test_a_batch_of_one_sample_divided_by_one_is_a_mean() -> None:
    model, x, t = _net()
    assert not read_terms((model(x[:1]) - t[:1]).square().sum() / 1, 1, 3).has_sum
    assert read_terms((model(x[:1]) - t[:1]).square().sum(), 1, 3).has_sum


@pytest.mark.parametrize(
    ("num_samples", "divisors", "expected"),
    [
        ([4, 4], [[9.0], [7.0]], True),
        ([4, 4], [[9.0], [9.0]], False),
        ([4, 5], [[8.0], [10.0]], False),
        ([4, 5], [[8.0, 9.0], [10.0, 9.0]], False),  # the second does not depend on the batch
        ([1, 1], [[9.0], [7.0]], False),  # each is the mean of one sample
        ([0, 5], [[], [10.0]], False),  # padding
        ([4, 4], [[8.0], []], False),
    ],
)
def test_item_counts_differ_if_a_sample_has_more_on_one_rank(
    num_samples: list[int], divisors: list[list[float]], expected: bool
) -> None:
    assert item_counts_differ(num_samples, divisors) is expected


def _masked(workers: Workers) -> str:
    world, said = world_of(workers), io.StringIO()
    model, optimizer = world.wrap(*make())
    with contextlib.redirect_stderr(said):
        for x, y in world.loader(DataLoader(data(), batch_size=12)):
            optimizer.zero_grad()
            mask = (y[:, 0] > 0).to(x.dtype)
            world.backward(((model(x) - y).square().sum(dim=1) * mask).sum() / mask.sum())
            optimizer.step()
    return said.getvalue()


def test_a_masked_mean_without_a_count_is_reported_once(run_ranks: Ranks) -> None:
    first, second = run_ranks(_masked, 2)
    assert first.count("is a mean over items other than samples") == 1
    assert second == ""


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return 0.02 * F.mse_loss(model(x), y, reduction="sum")


def _train(workers: Workers, accumulate: int, options: dict[str, Any]) -> Weights:
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=accumulate == 1))
    for x, y in world.loader(DataLoader(data(), batch_size=12), accumulate=accumulate):
        optimizer.zero_grad()
        world.backward(_loss(model, x, y), **options)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize(("size", "accumulate"), [(1, 2), (3, 1), (2, 2)])
def test_a_sum_that_is_declared_trains_as_on_one_process(run_ranks: Ranks, size: int, accumulate: int) -> None:
    model, optimizer = make(has_norm=accumulate == 1)
    for x, y in DataLoader(data(), batch_size=12):  # of which the last has two samples
        optimizer.zero_grad()
        _loss(model, x, y).backward()
        optimizer.step()
    expected = weights(model)
    for found in run_ranks(_train, size, accumulate, {"reduction": "sum"}):
        assert all(torch.allclose(found[name], value, rtol=1e-10) for name, value in expected.items())


def _refused(workers: Workers, accumulate: int) -> str:
    with pytest.raises(SettingError) as caught:
        _train(workers, accumulate, {})
    return str(caught.value)


@pytest.mark.parametrize(("size", "accumulate"), [(2, 1), (1, 2)])
def test_a_sum_that_is_not_declared_is_refused_on_all_workers(run_ranks: Ranks, size: int, accumulate: int) -> None:
    for said in run_ranks(_refused, size, accumulate):
        assert "a sum over the batch" in said
        assert 'reduction="sum"' in said


def test_one_worker_without_micro_batches_takes_a_sum_as_it_is() -> None:
    _train(Workers(alone(), torch.device("cpu")), 1, {})


@pytest.mark.parametrize(
    ("options", "said"),
    [({"reduction": "sum", "count": 3}, "a sum has no count="), ({"reduction": "none"}, "leave it out for a mean")],
)
def test_a_reduction_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        _train(Workers(alone(), torch.device("cpu")), 1, options)
