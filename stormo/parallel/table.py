"""The strategies by name."""

from __future__ import annotations

from stormo.config.layout import Layout
from stormo.parallel.data_parallel import DataParallel
from stormo.parallel.local import Local
from stormo.parallel.replicate import Replicate
from stormo.parallel.server import Server
from stormo.parallel.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {cls.name: cls for cls in (Strategy, DataParallel, Replicate, Local, Server)}


def strategy_class(layout: Layout) -> type[Strategy]:
    """What spreads the model over these workers."""
    if not layout.is_spread:
        return STRATEGIES[layout.strategy]
    # Here, because torch's sharding takes long to import.
    if layout.mesh.pipeline > 1:
        from stormo.parallel.pipelined import Pipelined

        return Pipelined
    from stormo.parallel.composed import Composed

    return Composed
