"""The class of each strategy; its row is in `stormo.config.strategies`."""

from __future__ import annotations

from stormo.config.layout import Layout
from stormo.parallel.base import Strategy
from stormo.parallel.ddp import DataParallel, Ddp
from stormo.parallel.local import Local
from stormo.parallel.server import Server

STRATEGIES: dict[str, type[Strategy]] = {
    "single": Strategy,
    "dp": DataParallel,
    "ddp": Ddp,
    "local": Local,
    "server": Server,
}


def strategy_class(layout: Layout) -> type[Strategy]:
    """What spreads the model over these workers."""
    if not layout.is_sharded:
        return STRATEGIES[layout.strategy]
    # Here, because torch's sharding takes long to import.
    if layout.mesh.pipeline > 1:
        from stormo.parallel.pipelined import Pipelined

        return Pipelined
    from stormo.parallel.fsdp import Sharded

    return Sharded
