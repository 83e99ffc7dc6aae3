"""A script of a user: trains, saves, resumes, and misbehaves as its flags say. Prints the digest of its weights."""

import argparse
import hashlib
import os
import signal
import sys
import time
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stormo
from stormo.config.schema import Optimizer
from stormo.optim.table import make_optimizer

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--folder", default="")
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--fail-rank", type=int, default=-1)
parser.add_argument("--how", default="raise")
parser.add_argument("--looks", action="store_true", help="at stop_requested")
parser.add_argument("--slow", type=float, default=0.0)
parser.add_argument("--alone", type=float, default=0.0, help="seconds that the last worker runs longer than the others")
flags = parser.parse_args()

torch.manual_seed(0)
world = stormo.World()
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
# torch's own would import its compiler in every process, which takes as long as all of torch; those of examples/ do.
optimizer = make_optimizer(model, Optimizer(base_lr=0.1, momentum=0.9))
x = torch.randn(48, 4, dtype=torch.float64)
model, optimizer = world.wrap(model, optimizer)
loader = world.loader(DataLoader(TensorDataset(x, x[:, :2]), 12, shuffle=True, num_workers=flags.num_workers))
extra = world.load(flags.folder) if flags.folder else {}
step = extra.get("step", 0)

for epoch in range(extra.get("epoch", 0), flags.epochs):
    for batch, target in loader:
        optimizer.zero_grad()
        world.backward(F.mse_loss(model(batch), target))
        optimizer.step()
        step += 1
        time.sleep(flags.slow)
        if step == 2:
            print(f"rank {world.rank} has pid {os.getpid()}", flush=True)
        if step == 3 and world.rank == flags.fail_rank:
            if flags.how == "raise":
                raise ValueError("boom")
            if flags.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if flags.how == "exit":
                sys.exit(3)
            if flags.how == "break":
                break
            if flags.how == "fork":
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
                    child = os.fork()
                if not child:
                    sys.exit(0)
                os.waitpid(child, 0)
        if flags.how == "setting" and step == 3:
            world.sum("text")
        if flags.looks and world.stop_requested:
            break
    if flags.looks and world.stop_requested:
        world.save(flags.folder, epoch=epoch, step=step)
        world.print(f"saved at step {step}")
        sys.exit(world.exit_code)

content = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
world.print(f"steps {step} of {world.size} workers: {hashlib.sha256(content).hexdigest()[:16]}")
if world.rank == world.size - 1:
    time.sleep(flags.alone)
