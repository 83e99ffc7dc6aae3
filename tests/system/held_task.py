"""The task of `task.py`, slowed down for as long as a file is there: what it comes to is the same."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stormo.config import option

sys.path.append(str(Path(__file__).parents[2]))  # which a task's file does not bring along

from tests.system import task

if TYPE_CHECKING:
    from torch import Tensor, nn

PASS_S = 1.5
FIRST = 3  # passes that are thrown away, and one that counts


@dataclass(frozen=True, kw_only=True)
class Options(task.Options):
    """What holds the training up."""

    hold: str = option("", "file that slows every pass down while it is there")


class LocalParameter(task.Tiny):
    """Waits in every pass."""

    name = "held"
    Options = Options

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        found = super().loss(model, batch)
        if self._num_passes > FIRST and Path(self.options.hold).exists():
            time.sleep(PASS_S)
        return found
