"""Loops that keep batches, pass some over, or step in their own way: a save is behind what was trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stormo.distributed.world import World as Workers
from tests.script.loops import Ranks, Weights, data, make, weights, world_of


class _Sharpness(torch.optim.Optimizer):
    """Two backwards a batch: the second, at weights moved uphill, is what another optimizer inside of it steps with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def climb(self) -> None:
        self._moves = [0.05 * p.grad for p in self.param_groups[0]["params"]]
        for p, move in zip(self.param_groups[0]["params"], self._moves, strict=True):
            p.add_(move)
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for p, move in zip(self.param_groups[0]["params"], self._moves, strict=True):
            p.sub_(move)
        self.inner.step()
        self.zero_grad()


def _rows(batch: list[Tensor], loader: Any) -> list[float]:
    return [float(row[0]) for row in batch[0][: loader.num_samples]]


def _sharpness(workers: Workers, folder: str, wraps: str, save_at: int = 0) -> tuple[list[float], Weights]:
    world = world_of(workers)
    model, _ = make(has_norm=False)
    optimizer = _Sharpness(model)
    world.wrap(model, optimizer if wraps == "the outer" else optimizer.inner)
    loader = world.loader(DataLoader(data(), batch_size=8, shuffle=True))
    world.load(folder)
    seen: list[float] = []
    for number, batch in enumerate(loader, 1):
        seen += _rows(batch, loader)
        for move in (optimizer.climb, optimizer.descend):
            world.backward(F.mse_loss(model(batch[0]), batch[1]))
            move()
        if number == save_at:
            world.save(folder)
            break
    return seen, weights(model)


@pytest.mark.parametrize(("wraps", "size"), [("the outer", 3), ("the inner", 1), ("the inner", 3)])
def test_a_batch_with_two_backwards_is_behind_a_save_whichever_optimizer_has_stepped(
    run_ranks: Ranks, tmp_path: Path, wraps: str, size: int
) -> None:
    whole = run_ranks(_sharpness, size, str(tmp_path / "whole"), wraps)
    first = run_ranks(_sharpness, size, str(tmp_path / "cut"), wraps, 2)
    rest = run_ranks(_sharpness, size, str(tmp_path / "cut"), wraps)
    assert sorted(value for seen, _ in first + rest for value in seen) == sorted(data().tensors[0][:, 0].tolist())
    if wraps == "the inner":  # whose momentum is saved then
        for (_, uncut), (_, found) in zip(whole, rest, strict=True):
            assert all(torch.equal(found[name], value) for name, value in uncut.items())


def _every_other(loader: Any) -> Iterator[Any]:
    """Passes batches over."""
    for number, batch in enumerate(loader):
        if number % 2:
            yield batch


def _hold(workers: Workers, folder: str, how: str, save_at: int = 0) -> list[list[float]]:
    """Trains with batches that come in another way than one by one; the first values of those that were, by step."""
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=False))
    loader = world.loader(DataLoader(data(), batch_size=8, shuffle=True))
    world.load(folder)
    seen: list[list[float]] = []
    kept, pending = [], []
    for number, (x, y) in enumerate(_every_other(loader) if how == "passed over" else loader, 1):
        if how == "kept":
            kept.append(x)
        pending.append(F.mse_loss(model(x), y))
        if how == "added up" and number % 2:
            continue
        seen.append(x[:, 0].tolist())
        optimizer.zero_grad()
        world.backward(torch.stack(pending).sum())
        pending.clear()
        optimizer.step()
        if len(seen) == save_at:
            world.save(folder)
            break
    return seen


@pytest.mark.parametrize("how", ["passed over", "added up", "kept"])
def test_batches_that_are_passed_over_added_up_or_kept_are_behind_a_save(
    run_ranks: Ranks, tmp_path: Path, how: str
) -> None:
    whole = run_ranks(_hold, 2, str(tmp_path / "whole"), how)
    first = run_ranks(_hold, 2, str(tmp_path / "cut"), how, 1)
    rest = run_ranks(_hold, 2, str(tmp_path / "cut"), how)
    for seen, before, after in zip(whole, first, rest, strict=True):
        assert len(seen) > 1
        assert before + after == seen
