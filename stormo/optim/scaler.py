"""Loss scaling for fp16 where workers hold different parts of the model: a step is left out by all of them or by none.

Torch's own scaler looks for infinities in the gradients that it is given, which here are a part of the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class AgreedGradScaler(torch.amp.GradScaler):
    """Torch's scaler, which asks the other workers once a step; every worker unscales or steps alike.

    Args:
        device: of the gradients, and so of the scale and of what the others are asked.
        agree: takes the largest value over the workers, in place.
        options: torch's own, such as `enabled`.
    """

    def __init__(self, device: torch.device, agree: Callable[[Tensor], Tensor], **options: Any) -> None:
        super().__init__(device.type, **options)
        self._agree = agree
        if self.is_enabled():
            # Now, as not every worker has a loss to scale.
            self._lazy_init_scale_growth_tracker(device)

    # Both `unscale_` and the step of a fused optimizer look for infinities here.
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        device = found_inf.device
        # With no gradients nothing was looked at, and `found_inf` still says no.
        seen = torch.stack([found_inf, *(flag.to(device) for flag in found.values())])
        return {device: self._agree(seen.amax(dim=0, keepdim=True))[0]}
