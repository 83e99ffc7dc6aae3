"""Gradients that travel in fewer bytes: the words for it, and what it is refused with."""

from __future__ import annotations

from typing import Any

import pytest

from stormo.config import options
from stormo.config.layout import resolve_layout
from stormo.config.plan import Facts, Plan, resolve
from stormo.errors import SettingError
from stormo.system.hardware import Gpu


def _plan(*gpus: Gpu, **flags: Any) -> Plan:
    config = options.make_config({"device": "cuda" if gpus else "cpu", "num_gpus": 4, **flags}, None)
    return resolve(config, resolve_layout(config, gpus), Facts(num_train=1000, num_validation=100))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"compress": "bf16"}, "gradients travel as bf16, half the bytes of fp32, and are summed in fp32"),
        ({"compress": "powersgd", "compress_rank": 2}, "two matrices of rank 2 of each large weight travel; "),
        ({"compress": "powersgd", "num_gpus": 1}, "powersgd, but one worker has nothing to send"),
    ],
)
def test_the_plan_says_how_gradients_travel(flags: dict[str, Any], said: str) -> None:
    plan = _plan(**flags)
    assert dict(plan.explanation)["compression"].startswith(said)
    assert plan.noise_scale is (flags["compress"] == "bf16")
    assert "compression" not in dict(_plan().explanation)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"compress": "bf16", "strategy": "fsdp"}, "--compress bf16 was set with strategy fsdp, but it is for copies"),
        ({"compress": "fp16", "strategy": "server"}, "--compress fp16 was set with strategy server, but"),
        ({"compress": "fp16", "strategy": "local"}, "--compress fp16 was set with strategy local, but"),
        ({"compress": "bf16", "mesh": "replicate=2,shard=2"}, "--compress bf16 was set with strategy mesh, but"),
        ({"compress_rank": 2}, "--compress-rank 2 was set with --compress none, but it is the rank of the matrices"),
        ({"compress": "powersgd", "compress_rank": 0}, "--compress-rank 0 was set, but it must be at least 1"),
        ({"compress": "powersgd", "precision": "fp16"}, "; set --precision bf16 or fp32, or --compress fp16."),
        ({"compress": "powersgd", "noise_scale": True}, "--noise-scale was set with --compress powersgd, but"),
    ],
)
def test_what_it_does_not_go_with_is_told_in_one_sentence(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingError) as refused:
        _plan(**flags)
    assert sentence in str(refused.value)
    assert str(refused.value).count(". ") == 0


def test_where_losses_would_be_scaled_low_rank_trains_in_fp32() -> None:
    old = (Gpu(name="Tesla V100-SXM2-16GB", memory_bytes=16 * 2**30, capability=(7, 0)),) * 4
    assert _plan(*old, compress="powersgd").precision == "fp32"
    assert _plan(*old, compress="fp16").precision == "fp16"
