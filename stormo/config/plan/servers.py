"""Parameter servers: what they do not go with, and what belongs to them alone."""

from __future__ import annotations

from stormo.config.layout import Layout
from stormo.config.schema import TrainConfig
from stormo.config.strategies import with_option
from stormo.errors import SettingError


def check_servers(config: TrainConfig, layout: Layout) -> None:
    """Refuse what servers cannot have, and what only they have."""
    workers = config.workers
    if workers.strategy not in with_option("servers"):
        for name in sorted({"servers", "staleness"} & config.given):
            raise SettingError(
                f"--{name} {getattr(workers, name)} was set with strategy {layout.strategy}",
                "it is for workers that send their gradients to servers",
                "set --strategy server, or leave it out",
            )
        return
    if config.speed.precision == "fp16":
        raise SettingError(
            f"--precision fp16 was set with --strategy {workers.strategy}",
            "losses would be scaled, and each server would judge by itself whether that has overflowed",
            "set --precision bf16 or fp32, or --strategy ddp",
        )
    if workers.staleness:
        _check_stale(config)


def _check_stale(config: TrainConfig) -> None:
    """Refuse what needs the gradient of the whole batch, or all workers at the same step."""
    optimizer = config.optimizer
    # Whether it was set, as the user wrote it, and why not.
    for is_set, said, why in (
        (config.run.deterministic, "--deterministic", "gradients are applied in the order in which they come"),
        (
            config.speed.sync_batch_norm,
            "--sync-batch-norm",
            "statistics over all workers make them wait for one another in every layer",
        ),
        (
            optimizer.clip_norm is not None,
            f"--clip-norm {optimizer.clip_norm}",
            "gradients are applied one by one, and nobody sees that of the whole batch",
        ),
        (
            optimizer.gradient_noise is not None,
            f"--gradient-noise {optimizer.gradient_noise}",
            "gradients are applied one by one, and the noise is for that of the whole batch",
        ),
    ):
        if is_set:
            staleness = f"--staleness {config.workers.staleness}"
            raise SettingError(f"{said} was set with {staleness}", why, "leave it out, or set --staleness 0")


def most_stale(config: TrainConfig, layout: Layout) -> int:
    """The most updates with others' gradients that can lie between a worker's weights and its gradient.

    A worker begins step t when all others have done t - 1 - K. What it sends in step t, it has computed with weights
    that it got at the end of step t - 1, when another may have done t - 2 - K only; until it sends, that one can do
    step t + K: 2 K + 2 more.
    """
    return (2 * config.workers.staleness + 2) * (layout.world_size - 1)
