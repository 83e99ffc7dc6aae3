"""The arithmetic of several workers against the real strategies, as one rank of a simulated job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import held_bytes
from benchmarks.fake_workers import stepped
from benchmarks.strategy_tasks import Words
from stormo.config import options
from stormo.data.loaders import Batch
from stormo.data.order import MicroBatch
from stormo.distributed.world import World
from stormo.predict.candidates import list_candidates
from stormo.predict.fake_tensors import FakeModel
from stormo.predict.forecast import GIB, ParallelSpec, forecast
from stormo.predict.forecaster import Forecaster
from stormo.predict.model import count_model, tensor_sharded
from stormo.predict.tracing import PassKind, Tracer, few_samples
from stormo.system.hardware import KNOWN_GPUS
from stormo.tasks.language_model import Size
from tests.tiny_run import build
from tests.tiny_task import Tiny, TinyOptions

SIZE, RANKS, SAMPLES = Size(4, 256, 8, 64), 8, 4


def simulated(flags: dict[str, Any]) -> int:
    """The most that a rank holds in a step, on tensors without memory."""
    before = held_bytes.living()
    with stepped(flags, SIZE, 0, RANKS) as (strategy, _):
        strategy.clear_gradients()
        span = MicroBatch(0, SAMPLES, 0, strategy._plan.global_batch_size, is_first=True, is_last=True)
        batch = Batch((torch.zeros((SAMPLES, SIZE.block + 1), dtype=torch.uint8),), span, is_padding=False)
        with held_bytes.Peak(before) as peak:
            strategy.micro_step(batch)
        return int(peak.num_bytes)


@pytest.mark.parametrize(
    ("flags", "spec"),
    [
        ({"strategy": "fsdp"}, ParallelSpec(num_workers=RANKS, shard=RANKS, zero=3, batch=SAMPLES)),
        ({"strategy": "tensor"}, ParallelSpec(num_workers=RANKS, tensor=RANKS, batch=SAMPLES)),
    ],
    ids=["fsdp", "tensor"],
)
def test_a_rank_holds_what_is_forecast_and_not_much_less(flags: dict[str, Any], spec: ParallelSpec) -> None:
    task = Words(SIZE, 2 * SAMPLES)
    fake_model = FakeModel(task, "fp32")
    model = count_model(task, fake_model, options.make_config({"optimizer": "adamw"}, None))
    tracer = Tracer(task, fake_model, few_samples(task), "fp32", on_gpu=False)
    if spec.tensor > 1:
        spec = replace(spec, tensor_sharded=tensor_sharded(task, fake_model.model(), spec.tensor))
    curve = tracer.curve(SAMPLES, PassKind(num_parts=spec.tensor))
    found = forecast(model, spec, curve, GIB)
    predicted = found.allocated_bytes - found.terms["workspace"]
    seen = simulated(flags)
    assert 0.97 * seen <= predicted <= 1.25 * seen


POINTS: dict[str, Any] = {"num_train": 64, "num_validation": 8, "width": 2**15, "dropout": 0.0}


def after_a_step(world: World, flags: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of this worker: of the model's tensors, of all after a step, and at most during the next one."""
    before = held_bytes.living()
    parts = build(world, POINTS, **flags)
    strategy, model = parts.strategy, parts.strategy.module
    before |= held_bytes.storages_of(parts.loader._tensors)  # type: ignore[attr-defined]
    with strategy.running():
        strategy.micro_step(next(parts.loader.epoch(1)))
        strategy.step(0.01)
        own = held_bytes.storages_of(tensor.detach() for tensor in (*model.parameters(), *model.buffers()))
        rest = held_bytes.num_bytes(held_bytes.living(), before)
        with held_bytes.Peak(before) as peak:
            strategy.micro_step(next(parts.loader.epoch(1)))
            strategy.step(0.01)
            strategy.exchange_weights()
    return held_bytes.num_bytes(own), rest, peak.num_bytes


@pytest.mark.parametrize(
    "flags",
    [
        {"strategy": "local", "average_every": "1"},
        {"strategy": "local", "average_every": "1", "outer_lr": 0.7, "outer_momentum": 0.9},
        {"strategy": "server", "servers": 1},
        {"strategy": "server", "servers": 1, "staleness": 2},
    ],
    ids=["local", "outer step", "server", "stale server"],
)
def test_local_workers_and_a_server_hold_what_is_forecast(
    flags: dict[str, Any], run_ranks: Callable[..., list[Any]]
) -> None:
    flags = {"global_batch_size": 16, "optimizer": "adamw", "precision": "fp32", "noise_scale": False, **flags}
    config = options.make_config({**flags, "num_gpus": 2}, None)
    gpus = [KNOWN_GPUS["h100-80gb"].described()] * 2
    study = Forecaster(Tiny(TinyOptions(**POINTS)), config, gpus)
    (candidate,) = [candidate for candidate in list_candidates(config, gpus, study.facts) if candidate.is_as_set]
    _, found = study.forecast(candidate)
    assert found is not None
    terms = found.terms
    (own, rest, peak), (_, other_rest, _) = run_ranks(after_a_step, 2, flags)
    assert own == terms["weights"] + terms["buffers"]
    if flags["strategy"] == "local":
        assert found.host_bytes == 0
        assert rest == pytest.approx(own + terms["state"], rel=0.01)
        predicted = sum(terms[name] for name in ("weights", "buffers", "gradients", "state", "activations"))
        assert peak == pytest.approx(predicted, rel=0.01)
    else:
        assert terms["state"] == 0
        assert rest + other_rest == pytest.approx(2 * own + found.host_bytes, rel=0.01)
