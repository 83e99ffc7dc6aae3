"""What the plan says of kinds of layers, where the model has them."""

from __future__ import annotations

from dataclasses import replace

from stormo.config.plan.one_worker import one_worker_line
from stormo.config.plan.plan import Plan
from stormo.config.schema import TrainConfig

# A line of the explanation: the settings that it is about, and the layers.
_LINES = {
    "channels last": (("channels_last",), "convolution of images"),
    "batch norm": (("sync_batch_norm", "ghost_batch_size"), "batch norm"),
}


def with_layers(
    config: TrainConfig,
    plan: Plan,
    *,
    has_convolutions: bool | None,
    has_batch_norms: bool | None,
    loss_reduction: str = "mean",
) -> Plan:
    """The plan without lines on layers that the model has not; None where it is not known what the model has."""
    said = dict(plan.explanation)
    said |= one_worker_line(config, plan.layout, plan.global_batch_size, has_batch_norms, loss_reduction)
    for (label, (settings, layer)), has_some in zip(_LINES.items(), (has_convolutions, has_batch_norms), strict=True):
        if has_some is None:
            said[label] += f", where the model has a {layer}"
        elif not has_some and config.given.isdisjoint(settings):
            del said[label]
        elif not has_some:
            said[label] = f"as set, without effect: the model has no {layer}"
    return replace(plan, explanation=tuple(said.items()))
