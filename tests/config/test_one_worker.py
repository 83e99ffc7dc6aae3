"""The plan's first line: what makes a run on several workers another than the same command on one."""

from __future__ import annotations

from typing import Any

import pytest

from stormo.config import options
from stormo.config.layout import resolve_layout
from stormo.config.plan import Facts, Plan, resolve, with_layers


def _plan(has_batch_norms: bool | None = None, **flags: Any) -> Plan:
    config = options.make_config({"device": "cpu", "num_gpus": 2, "warmup_epochs": 0.0, **flags}, None)
    plan = resolve(config, resolve_layout(config, ()), Facts(num_train=1024, num_validation=100))
    return with_layers(config, plan, has_convolutions=None, has_batch_norms=has_batch_norms)


def _line(has_batch_norms: bool | None = None, **flags: Any) -> str:
    plan = _plan(has_batch_norms, **flags)
    assert plan.explanation[0][0] == "as 1 worker"
    return plan.explanation[0][1]


def with_local_loss() -> str:
    config = options.make_config({"device": "cpu", "num_gpus": 2}, None)
    plan = resolve(config, resolve_layout(config, ()), Facts(num_train=1024, num_validation=100))
    explained = with_layers(config, plan, has_convolutions=None, has_batch_norms=False, loss_reduction="local")
    return explained.explanation[0][1]


def test_the_flags_that_make_it_equal_are_named_with_what_they_change() -> None:
    assert _line(True, batch_size=64, warmup_epochs=1.0) == (
        "no; set --global-batch-size 64 (this run has 128 = 64 × 2 workers, learning rate and warm-up scaled with it) "
        "and --sync-batch-norm (batch norm takes the statistics of each worker's own samples) for the same result"
    )
    assert with_local_loss().startswith("no: the task's loss_reduction")


@pytest.mark.parametrize(
    ("has_batch_norms", "flags", "named"),
    [
        (True, {}, {"--global-batch-size 32", "--sync-batch-norm"}),
        (None, {}, {"--global-batch-size 32", "--sync-batch-norm if the model has batch norm"}),
        (False, {}, {"--global-batch-size 32"}),
        (True, {"global_batch_size": 32}, {"--sync-batch-norm"}),
        (True, {"sync_batch_norm": True}, {"--global-batch-size 32"}),
        (True, {"accumulate": 2}, {"--global-batch-size 64", "--base-lr 0.02", "--sync-batch-norm"}),
        (True, {"accumulate": 2, "base_batch_size": 32}, {"--global-batch-size 64", "--sync-batch-norm"}),
        (True, {"global_batch_size": 32, "ghost_batch_size": 8}, set()),
        (True, {"global_batch_size": 32, "ghost_batch_size": 12}, {"--ghost-batch-size that divides the 16 samples"}),
        (False, {"global_batch_size": 32, "compress": "bf16"}, {"--compress none"}),
        (True, {"global_batch_size": 32, "sync_batch_norm": True}, set()),
        (False, {"global_batch_size": 32}, set()),
        (None, {"global_batch_size": 32, "sync_batch_norm": True, "strategy": "fsdp"}, set()),
    ],
)
def test_only_what_differs_is_named(has_batch_norms: bool | None, flags: dict[str, Any], named: set[str]) -> None:
    line = _line(has_batch_norms, **({"batch_size": 32} if "global_batch_size" not in flags else {}), **flags)
    assert all(flag in line for flag in named)
    assert line.count("--") == sum(flag.count("--") for flag in named)
    assert line.startswith("yes" if not named else "no; set ")


def test_the_flags_give_the_batch_and_the_rate_of_one_worker() -> None:
    for flags in ({"accumulate": 2}, {"lr_rule": "sqrt"}, {"base_batch_size": 16}):
        alone = _plan(num_gpus=1, batch_size=32, **flags)
        words = _line(batch_size=32, **flags).partition("(")[0].split()
        named = {"global_batch_size": int(words[words.index("--global-batch-size") + 1])}
        rate = {"base_lr": float(words[words.index("--base-lr") + 1])} if "--base-lr" in words else {}
        equal = _plan(**named, **rate, **flags)
        assert (equal.global_batch_size, equal.learning_rate) == (alone.global_batch_size, alone.learning_rate)
        assert equal.warmup_start == alone.warmup_start


def test_other_algorithms_say_so_and_one_worker_says_nothing() -> None:
    assert _line(strategy="local").startswith("no: strategy local is another algorithm")
    for flags in ({"num_gpus": 1}, {"strategy": "tensor"}, {"strategy": "pipeline"}):
        assert "as 1 worker" not in dict(_plan(**flags).explanation)
