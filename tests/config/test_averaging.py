"""Workers that step by themselves: what the plan says of them, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from stormo.errors import SettingError
from tests.config.test_plan import plan_of, said

LOCAL: dict[str, Any] = {"strategy": "local", "num_gpus": 2, "device": "cpu"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "the weights of 2 workers every 16 steps, 58.6 times an epoch: 1/16 of what ddp sends"),
        ({"average_every": "0.5ep"}, "every 469 steps = 0.5 × 938, 2 times an epoch: 1/469 of what ddp sends"),
        ({"average_every": "2ep"}, "every 1876 steps = 2 × 938: 1/1876 of what ddp sends"),
        ({"average_every": "1"}, "every 1 step, 938 times an epoch: as much as ddp sends"),
        ({"outer_lr": 0.7}, "ddp sends; their mean change is stepped by 0.7"),
        ({"outer_lr": 0.7, "outer_momentum": 0.9}, "is stepped by 0.7 with Nesterov's momentum of 0.9"),
        ({"num_gpus": 1}, "the weights of 1 worker every 16 steps, 117 times an epoch; with one worker there is"),
    ],
)
def test_the_plan_says_how_often_weights_are_averaged(flags: dict[str, Any], words: str) -> None:
    plan = plan_of(**{**LOCAL, **flags})
    assert words in said(plan, "averaging")
    assert said(plan, "strategy") == "local: every worker steps by itself, with the gradient of its own samples"
    assert said(plan, "noise scale").startswith("off: workers that step by themselves")
    assert "averaging" not in dict(plan_of(num_gpus=2, device="cpu").explanation)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"average_every": "40000"},
            "--average-every 40000 was set, but the run has 40 epochs = 37520 steps, and its weights would never be "
            "averaged; set --average-every 37520 to average once, at the end, or fewer steps.",
        ),
        ({"average_every": "41ep"}, "would never be averaged"),
        ({"average_every": "0"}, "would never be averaged"),
        ({"average_every": "often"}, "it is neither a number of steps (500) nor of epochs (1ep, 0.25ep)"),
        ({"outer_lr": 0.0}, "--outer-lr 0 was set, but it must be above 0"),
        ({"outer_momentum": 1.0}, "--outer-momentum 1 was set, but it must lie in [0, 1)"),
        ({"sync_batch_norm": True}, "--sync-batch-norm was set with --strategy local, but its workers have weights of"),
        ({"noise_scale": True}, "--noise-scale was set with --strategy local, but workers that step by themselves"),
        ({"strategy": "ddp", "average_every": "8"}, "--average-every 8 was set with strategy ddp, but it is for"),
        ({"strategy": "fsdp", "outer_lr": 0.5}, "--outer-lr 0.5 was set with strategy fsdp, but it is for workers"),
        ({"mesh": "replicate=2"}, "--strategy local was set with --mesh replicate=2, but"),
    ],
)
def test_what_does_not_go_with_it_is_refused(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingError) as refused:
        plan_of(**{**LOCAL, **flags})
    assert sentence in str(refused.value)
