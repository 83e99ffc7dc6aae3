"""The strategies by name."""

from __future__ import annotations

from stormo.layout import Layout
from stormo.strategies.data_parallel import DataParallel
from stormo.strategies.local import Local
from stormo.strategies.replicate import Replicate
from stormo.strategies.server import Server
from stormo.strategies.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {cls.name: cls for cls in (Strategy, DataParallel, Replicate, Local, Server)}


def strategy_class(layout: Layout) -> type[Strategy]:
    """What spreads the model over these workers."""
    if not layout.is_spread:
        return STRATEGIES[layout.strategy]
    # Here, because torch's sharding takes long to import.
    if layout.mesh.pipeline > 1:
        from stormo.strategies.pipelined import Pipelined

        return Pipelined
    from stormo.strategies.composed import Composed

    return Composed
