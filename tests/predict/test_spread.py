"""The arithmetic of several workers against the real strategies, as one rank of a job that nobody has started."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import held_bytes
from benchmarks.fake_workers import stepped
from benchmarks.spread_tasks import Words
from stormo import options
from stormo.data.loaders import Batch
from stormo.data.order import Pass
from stormo.predict.blank import Blank
from stormo.predict.forecast import GIB, Spread, forecast
from stormo.predict.model import count_model, cut_by_tensor
from stormo.predict.passes import Passes, few_samples
from stormo.tasks.gpt_sizes import Size

SIZE, RANKS, SAMPLES = Size(4, 256, 8, 64), 8, 4


def simulated(flags: dict[str, Any]) -> int:
    """The most that a rank holds in a step, on tensors without memory."""
    before = held_bytes.living()
    with stepped(flags, SIZE, 0, RANKS) as (strategy, _):
        strategy.clear_gradients()
        span = Pass(0, SAMPLES, 0, strategy._plan.global_batch_size, is_first=True, is_last=True)
        batch = Batch((torch.zeros((SAMPLES, SIZE.block + 1), dtype=torch.uint8),), span, is_ghost=False)
        with held_bytes.Peak(before) as peak:
            strategy.forward_backward(batch)
        return int(peak.num_bytes)


@pytest.mark.parametrize(
    ("flags", "spread"),
    [
        ({"strategy": "fsdp"}, Spread(num_workers=RANKS, shard=RANKS, zero=3, batch=SAMPLES)),
        ({"strategy": "tensor"}, Spread(num_workers=RANKS, tensor=RANKS, batch=SAMPLES)),
    ],
    ids=["fsdp", "tensor"],
)
def test_a_rank_holds_what_is_forecast_and_not_much_less(flags: dict[str, Any], spread: Spread) -> None:
    task = Words(SIZE, 2 * SAMPLES)
    blank = Blank(task, "fp32")
    model = count_model(task, blank, options.make_config({"optimizer": "adamw"}, None))
    passes = Passes(task, blank, few_samples(task), "fp32", on_gpu=False)
    if spread.tensor > 1:
        cut = cut_by_tensor(task, blank.model(), spread.tensor)
        spread = Spread(num_workers=RANKS, tensor=RANKS, batch=SAMPLES, cut=cut)
    curve = passes.curve(SAMPLES, recomputes=False, is_sharded=False, channels_last=False, num_parts=spread.tensor)
    found = forecast(model, spread, curve, GIB)
    predicted = found.allocated_bytes - found.terms["workspace"]
    seen = simulated(flags)
    assert 0.97 * seen <= predicted <= 1.25 * seen
