"""A script with `stormo.World` for `benchmarks.fingerprint`; it leaves its weights, samples, losses and metrics."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import stormo
from benchmarks.fingerprint_task import FOLDER, write_line

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="loader")
parser.add_argument("--reduction", default="mean")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--compress", default="none")
parser.add_argument("--own-norm", action="store_true")
parser.add_argument("--checkpoints", default="")
parser.add_argument("--stop-after", type=int, default=0)
options = parser.parse_args()

x = torch.randn(45, 4, generator=torch.Generator().manual_seed(1))
points = TensorDataset(x, x.prod(dim=1, keepdim=True).sin() + x[:, :1], torch.arange(45))


class Stream(IterableDataset[Any]):
    def __init__(self, part: int = 0, num_parts: int = 1) -> None:
        self.indices = range(part, 45, num_parts)

    def __iter__(self) -> Iterator[Any]:
        return (points[index] for index in self.indices)


world = stormo.World(energy=False)
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
layers = (nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(options.dropout), nn.Tanh(), nn.Linear(16, 1))
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
world.wrap(model, optimizer, scheduler, sync_batch_norm=not options.own_norm, compress=options.compress)
given: dict[str, tuple[Any, dict[str, Any]]] = {
    "loader": (DataLoader(points, batch_size=14, shuffle=True), {}),
    # Two samples at least in the last micro-batches, for batch norm.
    "set": (points, {"global_batch_size": 14 if options.accumulate == 1 else 13, "shuffle": True}),
    "stream": (DataLoader(Stream(), batch_size=14), {}),
    "sharded": (Stream(world.rank, world.size), {"batch_size": 6, "sharded": True}),
}
data, settings = given[options.data]
loader = world.loader(data, accumulate=options.accumulate, **settings)

state = world.load(options.checkpoints) if options.checkpoints else {}
metrics, num_steps = state.get("metrics", []), 0
for epoch in range(state.get("epoch", 1), 4):
    loss_sum = 0.0
    for place, value, number in loader:
        out = model(place)
        loss = mse_loss(out, value)
        if options.reduction == "count":
            counted = number % 3 != 0
            loss = ((out - value).square().flatten() * counted).sum() / counted.sum().clamp(min=1)
            world.backward(loss, count=counted.sum())
        elif options.reduction == "sum":
            world.backward(0.05 * mse_loss(out, value, reduction="sum"), reduction="sum")
        elif options.reduction == "two":
            world.backward(loss, more=True, retain_graph=True)
            world.backward(0.01 * out.abs().mean())
        else:
            world.backward(loss)
        norm = world.clip_grad_norm(model.parameters(), max_norm=1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        write_line(samples=[*number.tolist(), loader.num_samples], loss=[loss.item(), norm and norm.item()])
        loss_sum += loss.item() * loader.num_samples
        num_steps += world.is_last_micro_batch
        if num_steps == options.stop_after > 0:
            world.save(options.checkpoints, epoch=epoch, metrics=metrics)
            raise SystemExit
    metrics.append([epoch, world.sum(loss_sum), scheduler.get_last_lr()])
if world.is_main:
    folder = Path(os.environ[FOLDER])
    save_file(model.state_dict(), folder / "weights")
    (folder / "metrics").write_text(json.dumps(metrics), encoding="utf-8")
