"""Every setting of a model that is spread: what is chosen, what is refused, and the words for it."""

from __future__ import annotations

from typing import Any

import pytest

from stormo.config import options
from stormo.config.layout import resolve_layout
from stormo.config.plan import Facts, Plan, resolve
from stormo.config.plan.sharding import STAGES_PER_WORKER, even_bubble
from stormo.errors import SettingError
from stormo.parallel.pipeline.bubble import predicted_bubble

FACTS = Facts(num_train=1000, num_validation=100)


def _plan(**flags: Any) -> Plan:
    config = options.make_config({"device": "cpu", **flags}, None)
    return resolve(config, resolve_layout(config, ()), FACTS)


def test_workers_that_share_a_model_share_their_samples() -> None:
    plan = _plan(num_gpus=8, mesh="pipeline=2,shard=2,tensor=2", batch_size=16)
    assert (plan.layout.data_size, plan.global_batch_size, plan.batch_per_pass) == (2, 32, 16)
    assert "32 = 16 per group × 2 groups × 1 accumulation" in dict(plan.explanation)["global batch"]
    assert plan.learning_rate == pytest.approx(0.02)


def test_hybrid_workers_take_samples_of_their_own() -> None:
    plan = _plan(num_gpus=4, strategy="hybrid", batch_size=16)
    assert (plan.layout.data_size, plan.global_batch_size, plan.layout.sharer) == (4, 64, "worker")


@pytest.mark.parametrize(
    ("flags", "zero"),
    [
        ({"strategy": "zero1"}, 1),
        ({"strategy": "zero2"}, 2),
        ({"strategy": "fsdp"}, 3),
        ({"mesh": "shard=4"}, 3),
        ({"mesh": "shard=4", "zero": 2}, 2),
        ({"mesh": "replicate=4"}, 0),
        ({"strategy": "tensor"}, 0),
    ],
)
def test_what_the_axis_shard_cuts(flags: dict[str, Any], zero: int) -> None:
    assert _plan(num_gpus=4, **flags).layout.zero == zero


def test_a_mesh_of_copies_is_ddp() -> None:
    layout = _plan(num_gpus=4, mesh="replicate=4").layout
    assert (layout.strategy, layout.is_sharded) == ("ddp", False)


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ({"batch_size": 32}, 8),
        ({"batch_size": 6}, 6),
        ({"batch_size": 7}, 7),
        ({"batch_size": 13}, 1),
        ({"batch_size": 32, "micro_batches": 16}, 16),
        ({"batch_size": 32, "schedule": "interleaved"}, 8),
        ({"batch_size": 6, "schedule": "zero-bubble"}, 6),
        ({"batch_size": 32, "strategy": "naive"}, 1),
    ],
)
def test_micro_batches_are_equal_parts_of_a_pass(flags: dict[str, Any], chosen: int) -> None:
    assert _plan(num_gpus=2, **{"strategy": "pipeline", **flags}).micro_batches == chosen


def test_the_bubble_is_explained() -> None:
    line = dict(_plan(num_gpus=4, strategy="pipeline", batch_size=32).explanation)["pipeline"]
    assert line == "4 stages on 4 workers, 1f1b, 16 × 2 samples a pass; bubble 16% = (4 - 1) / (16 + 4 - 1)"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_the_formula_is_what_the_schedule_comes_to(schedule: str) -> None:
    played = predicted_bubble(schedule, 4, 4 * STAGES_PER_WORKER[schedule], 8)
    assert even_bubble(schedule, 4, 8) == pytest.approx(played)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"strategy": "fsdp", "mesh": "shard=2"}, "the axes of the mesh are the strategy"),
        ({"zero": 2}, "--zero 2 was set without --mesh"),
        (
            {"mesh": "tensor=2", "zero": 2},
            "the mesh has no axis shard, of which it says what that cuts; leave --zero out.",
        ),
        ({"mesh": "shard=2", "zero": 4}, "it is 1, 2 or 3"),
        ({"strategy": "fsdp", "schedule": "gpipe"}, "it is for a pipeline"),
        ({"micro_batches": 2}, "it is for a pipeline"),
        ({"strategy": "ddp", "offload": True}, "strategy ddp has none"),
        ({"strategy": "zero1", "shard_modules": "blocks.*"}, "none of these is on"),
        ({"strategy": "fsdp", "batch_size": "auto"}, "they compute together"),
        ({"strategy": "fsdp", "channels_last": True}, "in their plain layout"),
        ({"strategy": "fsdp", "noise_scale": True}, "no gradient of one worker's samples"),
        ({"strategy": "pipeline", "gradient_noise_batch": 4}, "which a pipeline computes in micro-batches"),
        ({"strategy": "naive", "micro_batches": 2}, "naive sends a whole pass"),
        ({"strategy": "naive", "schedule": "gpipe"}, "one order"),
        ({"strategy": "pipeline", "schedule": "zero-bubble", "compile": True}, "the two halves of backward"),
        ({"mesh": "pipeline=2,shard=2", "zero": 1, "schedule": "zero-bubble", "num_gpus": 4}, "torch's sharding sums"),
        (
            {"strategy": "pipeline", "batch_size": 32, "micro_batches": 5},
            "a pass of 32 samples cannot be cut into 5 equal parts; set one of 1, 2, 4, 8, 16, 32",
        ),
        ({"strategy": "pipeline", "schedule": "interleaved", "micro_batches": 1}, "takes rounds of 2 workers"),
        ({"strategy": "pipeline", "schedule": "interleaved", "batch_size": 7}, "a pass of 7 cannot be cut so"),
        ({"num_gpus": 1, "strategy": "pipeline"}, "there is one worker"),
        ({"num_gpus": 1, "strategy": "tensor"}, "there is one worker"),
    ],
)
def test_what_cannot_be_is_refused(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingError) as raised:
        _plan(**{"num_gpus": 2, **flags})
    assert sentence in str(raised.value)


def test_one_worker_can_be_sharded() -> None:
    layout = _plan(num_gpus=1, strategy="fsdp", offload=True).layout
    assert (layout.is_sharded, layout.zero, layout.world_size) == (True, 3, 1)
