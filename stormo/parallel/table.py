"""The class of each strategy; its row is in `stormo.config.strategies`."""

from __future__ import annotations

from stormo.config.layout import Layout
from stormo.errors import SettingError
from stormo.parallel.alternating import STRATEGIES as ALTERNATING
from stormo.parallel.alternating import Alternating
from stormo.parallel.base import Strategy
from stormo.parallel.ddp import DataParallel, Ddp
from stormo.parallel.local import Local
from stormo.parallel.server import Server
from stormo.tasks.check import has_several_optimizers
from stormo.tasks.task import Task

STRATEGIES: dict[str, type[Strategy]] = {
    "single": Strategy,
    "dp": DataParallel,
    "ddp": Ddp,
    "local": Local,
    "server": Server,
}


def strategy_class(layout: Layout, task: Task | None = None) -> type[Strategy]:
    """What spreads the model of a task over these workers."""
    if task is not None and has_several_optimizers(type(task)):
        if layout.strategy not in ALTERNATING:
            raise SettingError(
                f"strategy {layout.strategy} was set",
                f"{type(task).__name__} has several optimizers, which step whole replicas in turn",
                f"set --strategy {ALTERNATING[-1]}",
            )
        return Alternating
    if not layout.is_sharded:
        return STRATEGIES[layout.strategy]
    # Here, because torch's sharding takes long to import.
    if layout.mesh.pipeline > 1:
        from stormo.parallel.pipelined import Pipelined

        return Pipelined
    from stormo.parallel.fsdp import Sharded

    return Sharded
