"""The optimizer in words: its name, and every value that it takes besides the learning rate."""

from __future__ import annotations

from stormo.config.schema import TrainConfig


def optimizer_text(config: TrainConfig) -> str:
    """The optimizer that the settings name."""
    return f"{config.optimizer.optimizer}: {_values(config)}{_clipping(config)}"


def own_optimizer_text(config: TrainConfig, name: str | None) -> str:
    """An optimizer of the task's own by its name; without one it is not known yet whether the task makes any."""
    none = f", or {config.optimizer.optimizer} where its optimizer() returns None ({_values(config)})"
    return f"the task's own{none if name is None else f' {name}'}{_clipping(config)}"


def _values(config: TrainConfig) -> str:
    """Numbers always, switches where they are on."""
    settings = config.optimizer
    values = {"momentum": settings.momentum, "Nesterov": settings.nesterov}
    values |= settings.of_its_own() | {"weight decay": settings.weight_decay}
    return ", ".join(
        name.replace("_", " ") + ("" if value is True else f" {value:g}")
        for name, value in values.items()
        if value is not False
    )


def _clipping(config: TrainConfig) -> str:
    norm = config.optimizer.clip_norm
    return "" if norm is None else f"; gradient clipped to a norm of {norm:g}"
