"""The strategies by name."""

from __future__ import annotations

from stormo.strategies.data_parallel import DataParallel
from stormo.strategies.replicate import Replicate
from stormo.strategies.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {cls.name: cls for cls in (Strategy, DataParallel, Replicate)}
