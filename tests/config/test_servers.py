"""Parameter servers: the words for them, and what they are refused with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stormo.config import options
from stormo.config.layout import resolve_layout
from stormo.config.plan import Facts, Plan, resolve
from stormo.config.schema import Effective
from stormo.errors import SettingError
from stormo.system.hardware import Gpu

BEGAN = Effective(global_batch_size=8, learning_rate=1.0, warmup_start=1.0)
STALE = {"strategy": "server", "staleness": 2}


def _plan(*gpus: Gpu, **flags: Any) -> Plan:
    config = options.make_config({"device": "cuda" if gpus else "cpu", "num_gpus": 4, **flags}, None)
    return resolve(config, resolve_layout(config, gpus), Facts(num_train=1000, num_validation=100))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, "server: 4 workers send their gradients to one of them, which steps; synchronous"),
        (
            {"servers": 2, "staleness": 1},
            "server: 4 workers send their gradients to 2 of them, which step a part of the weights each; "
            "at most 1 step ahead of the slowest",
        ),
    ],
)
def test_the_plan_says_who_steps_and_how_far_workers_may_be_apart(flags: dict[str, Any], said: str) -> None:
    plan = _plan(strategy="server", **flags)
    assert dict(plan.explanation)["strategy"] == said
    assert (plan.noise_scale, plan.graph, plan.layout.data_size) == (False, False, 4)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"strategy": "server", "num_gpus": 1}, "there is one worker (as set) and it would send its gradients to"),
        ({"strategy": "server", "servers": 5}, "--servers 5 was set, but servers are workers too and there are 4"),
        ({"strategy": "server", "servers": 0}, "--servers 0 was set, but it must be at least 1"),
        ({"strategy": "server", "staleness": -1}, "--staleness -1 was set, but it must be at least 0"),
        ({"strategy": "server", "staleness": 10**20}, " heard as many steps late; set --staleness 1000 or fewer."),
        ({"servers": 2}, "--servers 2 was set with strategy ddp"),
        ({"strategy": "ddp", "staleness": 2}, "--staleness 2 was set with strategy ddp"),
        ({"strategy": "server", "mesh": "replicate=4"}, "the axes of the mesh are the strategy"),
        ({"strategy": "server", "precision": "fp16"}, "--precision fp16 was set with --strategy server"),
        ({"strategy": "server", "noise_scale": True}, "--noise-scale was set with --strategy server"),
        ({"strategy": "server", "graph": True}, "--graph was set"),
        (STALE | {"deterministic": True}, "--deterministic was set with --staleness 2, but gradients are applied in"),
        (STALE | {"sync_batch_norm": True}, "make them wait for one another in every layer"),
        (STALE | {"clip_norm": 1.0}, "--clip-norm 1.0 was set with --staleness 2"),
        (STALE | {"gradient_noise": 0.1}, "--gradient-noise 0.1 was set with --staleness 2"),
    ],
)
def test_what_servers_do_not_go_with_is_refused(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingError) as raised:
        _plan(**flags)
    assert sentence in str(raised.value)


def test_what_only_the_gradient_of_a_whole_batch_can_have_goes_with_synchronous_servers() -> None:
    _plan(strategy="server", deterministic=True, sync_batch_norm=True, clip_norm=1.0, gradient_noise=0.1)


def test_gpus_without_bf16_compute_in_32_bits_as_no_loss_is_scaled() -> None:
    old = Gpu(name="Tesla V100-SXM2-16GB", memory_bytes=16 * 2**30, capability=(7, 0))
    assert _plan(*[old] * 4).precision == "fp16"
    assert _plan(*[old] * 4, strategy="server").precision == "fp32"


def test_one_worker_goes_on_alone_with_a_run_of_synchronous_servers() -> None:
    facts, old = Facts(num_train=1000, num_validation=100), Gpu(name="V100", memory_bytes=2**34, capability=(7, 0))
    flags = {"num_gpus": 1, "strategy": "server", "servers": 2}
    goes_on = replace(options.make_config(flags, None), resumed=BEGAN)
    plan = resolve(goes_on, resolve_layout(goes_on, [old]), facts)
    assert plan.layout.strategy == "single"
    assert "single: one worker for now, which keeps" in dict(plan.explanation)["strategy"]
    assert plan.precision == "fp32"  # as its servers had it
    stale = replace(goes_on, workers=replace(goes_on.workers, staleness=2))
    with pytest.raises(SettingError, match="whose gradients cannot be as old as --staleness 2 allows; set"):
        resolve_layout(stale, [old])
