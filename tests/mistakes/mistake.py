"""One mistake: the file of a user who makes it, the command, and the answer."""

from __future__ import annotations

from dataclasses import dataclass

GOOD_TASK = """\
import dataclasses
import torch
import stormo
from stormo.data import TensorData
from torch import nn

class Net(stormo.Task):
    def model(self):
        return nn.Linear(8, 3)

    def train_data(self):
        return TensorData(torch.randn(64, 8), torch.randint(3, (64,)))

    def validation_data(self):
        return self.train_data()

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)
"""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A row of the table. `change` is made to a good file: what it replaces, and by what."""

    name: str
    change: tuple[str, str]
    says: str  # everything on stderr, after "stormo: "
    verb: str = "train"
    good: str = GOOD_TASK
    file: str = "my_task.py"
    flags: tuple[str, ...] = ()
    num_workers: int = 1
    before_workers: bool = False  # known before any worker is started
    exit_code: int = 2

    @property
    def text(self) -> str:
        """The broken file."""
        old, new = self.change
        assert self.good.count(old) == 1, old
        return self.good.replace(old, new)

    @property
    def command(self) -> list[str]:
        """What the user types after `stormo`."""
        workers = ["--num-gpus", str(self.num_workers)] if self.num_workers > 1 else []
        return [self.verb, self.file, *workers, *self.flags]
