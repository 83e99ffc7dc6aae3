"""Gradients that travel in fewer bytes: what that does not go with, and what it comes to."""

from __future__ import annotations

from stormo.config.layout import Layout, at_least
from stormo.config.schema import TrainConfig
from stormo.errors import SettingError

_TEXTS = {
    "bf16": "gradients travel as bf16, half the bytes of fp32, and are summed in fp32",
    "fp16": "gradients travel as fp16 with a scale for each bucket, half the bytes of fp32, and are summed in fp32",
    "powersgd": "two matrices of rank {rank} of each large weight travel; what they lack is added to the next gradient",
}


def check_compression(config: TrainConfig, layout: Layout) -> None:
    """Refuse what gradients that travel so cannot have, and what only they have."""
    method, rank = config.workers.compress, config.workers.compress_rank
    if method != "powersgd" and "compress_rank" in config.given:
        raise SettingError(
            f"--compress-rank {rank} was set with --compress {method}",
            "it is the rank of the matrices that --compress powersgd sends",
            "set --compress powersgd, or leave it out",
        )
    if method == "none":
        return
    at_least("--compress-rank", rank, 1)
    if not layout.spec.takes_compression:
        raise SettingError(
            f"--compress {method} was set with strategy {layout.strategy}",
            "it is for copies of the model, which send their whole gradients to one another",
            "set --strategy ddp, or --compress none",
        )


def compression_line(config: TrainConfig, layout: Layout, precision: str) -> dict[str, str]:
    """How gradients travel, for the explanation."""
    method = config.workers.compress
    if method == "none":
        return {}
    if method == "powersgd" and precision == "fp16":
        raise SettingError(
            "--compress powersgd was set with fp16",
            "what it keeps back of a gradient has the scale of its loss, which the next step may change",
            "set --precision bf16 or fp32, or --compress fp16",
        )
    if layout.world_size == 1:
        return {"compression": f"{method}, but one worker has nothing to send"}
    return {"compression": _TEXTS[method].format(rank=config.workers.compress_rank)}
