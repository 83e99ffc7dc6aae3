"""A task small enough for tests: an MLP with batch norm and dropout on made-up points.

It fails in chosen ways. How is said by the environment, not by an option: a resumed run must be able to go on with
the same options and another fault. `TINY_FAULT="kill 1 20"` kills rank 1 in its 20th call of `loss`; see `FAULTS`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from stormo.config import option
from stormo.data import TensorData
from stormo.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class TinyOptions:
    """Options of the tiny task."""

    num_train: int = option(1001, "training samples")
    num_validation: int = option(301, "validation samples")
    width: int = option(16, "hidden units")
    dropout: float = option(0.1, "dropout")
    norm: bool = option(True, "batch norm")
    jitter: bool = option(False, "move the training points at random")
    noisy: bool = option(False, "a data set that draws random numbers itself, without tensors")
    label: str | None = option(None, "not used")


class NoisyPoints(Dataset[tuple[Tensor, Tensor]]):
    """A map-style data set whose samples hold random numbers, as augmenting data sets have them."""

    def __init__(self, data: TensorData) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        points, label = self.data[index]
        return points + 0.01 * torch.randn(points.shape), label


class Tiny(Task):
    """Three classes of points in eight dimensions; almost separable."""

    name = "tiny"
    Options: ClassVar[type[Any]] = TinyOptions
    num_draws = 2

    def __init__(self, options: TinyOptions | None = None) -> None:
        super().__init__(options or TinyOptions())
        self.num_calls = 0

    def model(self) -> nn.Module:
        width = self.options.width
        return nn.Sequential(
            nn.Linear(8, width),
            nn.BatchNorm1d(width) if self.options.norm else nn.Identity(),
            nn.ReLU(),
            nn.Dropout(self.options.dropout),
            nn.Linear(width, 3),
        )

    def train_data(self) -> Dataset[Any]:
        data = points(self.options.num_train, seed=0)
        return NoisyPoints(data) if self.options.noisy else data

    def validation_data(self) -> Dataset[Any]:
        return points(self.options.num_validation, seed=1)

    def augment(self, batch: Any, draws: Tensor) -> Any:
        if not self.options.jitter:
            return batch
        x, y = batch
        return x + 0.01 * (draws.sum(dim=1, keepdim=True) - 1.0), y

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if torch.is_grad_enabled():  # not where its parts are compared
            self.num_calls += 1
            _fail_if_due(self.num_calls)
        x, y = batch
        _fill_memory(len(x))
        return cross_entropy(model(x.to(torch.get_default_dtype())), y)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        x, y = batch
        logits = model(x.to(torch.get_default_dtype()))
        return {"loss": cross_entropy(logits, y, reduction="sum"), "accuracy": (logits.argmax(dim=1) == y).sum()}


def points(num_samples: int, seed: int) -> TensorData:
    """Random points with their classes."""
    x = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(seed))
    return TensorData(x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long())


def _job() -> int:
    """The process that the user started: the agent of this worker, or this process."""
    return os.getppid() if os.environ.get("STORMO_LAUNCHER") == "local" else os.getpid()


def _raise() -> None:
    raise ValueError("the tiny task fails on purpose")


def _sum_alone() -> float:
    """A collective that the other ranks do not make, too large to end with what they send in theirs."""
    alone = torch.ones(2**22, device="cuda")
    dist.all_reduce(alone)
    return alone.sum().item()


def _kill_job() -> None:
    os.kill(_job(), signal.SIGKILL)
    time.sleep(60)  # the kernel ends this worker when its agent is gone; until then it must not take another step


FAULTS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "memory": lambda: _fill_memory(10**6 + 1),
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),  # this worker alone
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "collective": lambda: print(_sum_alone(), file=sys.stderr),
    "kill-job": _kill_job,
    "term-job": lambda: os.kill(_job(), signal.SIGTERM),
    "usr1-job": lambda: os.kill(_job(), signal.SIGUSR1),
    "interrupt-job": lambda: os.kill(_job(), signal.SIGINT),
    "listeners": lambda: print(f"listeners {' '.join(listening_addresses())}", file=sys.stderr, flush=True),
}


def _fail_if_due(num_calls: int) -> None:
    how, rank, at = os.environ.get("TINY_FAULT", "none -1 0").split()
    if int(os.environ.get("RANK", "0")) == int(rank) and num_calls == int(at):
        FAULTS[how]()


def _fill_memory(num_samples: int) -> None:
    """`TINY_MEMORY="1 20"`: rank 1 runs out of memory in a pass of more than 20 samples; * is every rank."""
    rank, most = os.environ.get("TINY_MEMORY", "* 1000000").split()
    own = dist.get_rank() if dist.is_initialized() else 0
    if rank in ("*", str(own)) and num_samples > int(most):
        raise torch.OutOfMemoryError(f"CUDA out of memory, on purpose, with {num_samples} samples")


def listening_addresses() -> list[str]:
    """The local addresses on which this process listens for TCP, as the kernel writes them (hexadecimal)."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            own.add(str(descriptor.readlink()))
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].partition(":")[0])
    return found


def watch_writes() -> None:
    """From now on, tell on stderr of every file this process opens for writing or makes in a folder called `runs`."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        is_write = event in ("os.mkdir", "os.rename", "os.remove") or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        if is_write and "runs" in str(arguments[0]).split("/"):
            os.write(2, f"rank {os.environ.get('RANK', 'none')} wrote {arguments[0]}\n".encode())

    sys.addaudithook(hook)


if os.environ.get("TINY_WATCH_WRITES"):
    watch_writes()
