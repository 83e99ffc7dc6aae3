"""torch's DataParallel: one process, a thread for each GPU; kept for comparison, DDP is faster."""

from __future__ import annotations

from torch import nn

from stormo.parallel.strategy import Strategy


class DataParallel(Strategy):
    """Splits every batch over the GPUs of one process and gathers the outputs on the first."""

    name = "dp"
    exposed_reason = "DataParallel copies between its GPUs throughout every pass"

    def _wrap(self, model: nn.Module) -> nn.Module:
        return nn.DataParallel(model, device_ids=list(range(self._plan.layout.devices_per_worker)))
