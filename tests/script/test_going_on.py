"""A load in the middle of a loop goes on as the uninterrupted run does, also where the loop is no plain one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from stormo.distributed.world import World as Workers
from tests.script.loops import Ranks, Weights, data, make, weights, world_of


def _train(workers: Workers, folder: str, how: str, save_at: int = 0) -> tuple[Weights, list[int]]:
    world = world_of(workers)
    model, optimizer = world.wrap(*make(has_norm=False))
    draws = torch.Generator().manual_seed(7)
    first = world.loader(DataLoader(data(), batch_size=8, shuffle=True, generator=draws))
    second = world.loader(DataLoader(data(), batch_size=8, shuffle=True))
    state = world.load(folder)
    num_steps = state.get("num_steps", 0)
    for epoch in range(state.get("epoch", 0), 3):
        for batches in zip(first, second, strict=False) if how == "zip" else ([batch] for batch in first):
            optimizer.zero_grad()
            world.backward(sum((F.mse_loss(model(x), y) for x, y in batches), torch.zeros(())))
            optimizer.step()
            num_steps += 1
            if num_steps == save_at:
                world.save(folder, epoch=epoch, num_steps=num_steps)
                return weights(model), []
            if how == "break" and first.num_behind == 3:
                break
        if how == "dropped" and epoch == 0:
            iter(first)  # draws, and is gone
            world.save(folder, epoch=1, num_steps=num_steps)
            if save_at:
                return weights(model), []
    return weights(model), draws.get_state().tolist()


@pytest.mark.parametrize(
    ("how", "save_at"),
    [("break", 1), ("break", 2), ("break", 4), ("zip", 2), ("zip", 5), ("dropped", -1)],
)
def test_a_load_goes_on_where_a_loop_is_broken_off_zipped_or_dropped(
    run_ranks: Ranks, tmp_path: Path, how: str, save_at: int
) -> None:
    whole = run_ranks(_train, 2, str(tmp_path / "whole"), how)
    run_ranks(_train, 2, str(tmp_path / "cut"), how, save_at)
    rest = run_ranks(_train, 2, str(tmp_path / "cut"), how)
    for (uncut, _), (found, _) in zip(whole, rest, strict=True):
        assert all(torch.equal(found[name], value) for name, value in uncut.items())
    assert rest[0][1] == whole[0][1], "the main worker draws"
