"""A training of one step as a script, by hand with torch.distributed or with stormo.World: what `launch` starts.

    launch_script.py FILE [--world]

Rank 0 writes into FILE when its first optimizer step has ended, by the clock that all processes of a machine share.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH_SIZE = 64
NUM_INPUTS, NUM_CLASSES, WIDTH = 32, 10, 64


def make_model() -> nn.Module:
    """A small network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(NUM_INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, NUM_CLASSES))


def make_tensors() -> tuple[Tensor, Tensor]:
    """Inputs and classes, enough for one step of two workers."""
    random = torch.Generator().manual_seed(0)
    num_samples = 2 * BATCH_SIZE
    inputs = torch.randn(num_samples, NUM_INPUTS, generator=random)
    return inputs, torch.randint(NUM_CLASSES, (num_samples,), generator=random)


def write_now(path: Path) -> None:
    """Leave the time in a file; a later step overwrites it."""
    path.write_text(repr(time.monotonic()), encoding="utf-8")


def by_hand(path: Path) -> None:
    """One step as the tutorials of torch teach it."""
    dist.init_process_group("gloo")
    data = TensorDataset(*make_tensors())
    loader = DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data))
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, classes in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), classes).backward()
        optimizer.step()
    if os.environ["RANK"] == "0":
        write_now(path)
    dist.destroy_process_group()


def with_world(path: Path) -> None:
    """The same step with stormo.World."""
    import stormo

    world = stormo.World("cpu")
    model = make_model()
    model, optimizer = world.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = world.loader(DataLoader(TensorDataset(*make_tensors()), BATCH_SIZE * world.size, shuffle=True))
    for inputs, classes in loader:
        optimizer.zero_grad()
        world.backward(cross_entropy(model(inputs), classes))
        optimizer.step()
    if world.is_main:
        write_now(path)


def main() -> None:
    """Train one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--world", action="store_true")
    options = parser.parse_args()
    (with_world if options.world else by_hand)(options.file)


if __name__ == "__main__":
    main()
