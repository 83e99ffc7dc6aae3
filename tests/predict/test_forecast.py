"""The arithmetic of a forecast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stormo.predict.forecast import (
    GIB,
    MIB,
    Forecast,
    MemoryCurve,
    ModelSize,
    ParallelSpec,
    ParameterSize,
    forecast,
    gpus_needed,
)

VALUES = 10 * MIB


def parameter(name: str, block: str = "", num_values: int = VALUES) -> ParameterSize:
    return ParameterSize(
        name=name,
        num_bytes=4 * num_values,
        num_values=num_values,
        num_rows=1024,
        is_trained=True,
        state_bytes=8 * num_values,
        block=block,
    )


_OTHERS: dict[str, Any] = {"buffer_bytes": 0, "step_bytes": 0, "optimizer": "AdamW"}
MODEL = ModelSize(
    parameters=(parameter("root"), *(parameter(f"{n}.weight", str(n)) for n in range(4))),
    **_OTHERS,
)
TOTAL = 5 * VALUES
# Forward makes 100 bytes a sample and copies of weights, backward frees them as gradients come.
ROWS = tuple(
    [(100 * size, 0, 0), (100 * size, 2 * TOTAL, 0), (50 * size, TOTAL, 2 * TOTAL), (0, 0, 4 * TOTAL)]
    for size in (10, 20)
)
CURVE = MemoryCurve((10, 20), (ROWS[0], ROWS[1]), (1000, 2000))


def held(spec: ParallelSpec, curve: MemoryCurve | None = CURVE, memory_gib: float = 80.0) -> Forecast:
    return forecast(MODEL, spec, curve, int(memory_gib * GIB))


@pytest.mark.parametrize("shard", [1, 2, 8])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_weights_gradients_and_state_are_those_of_zero(zero: int, shard: int) -> None:
    terms = held(ParallelSpec(num_workers=shard, shard=shard if zero else 1, zero=zero)).terms
    parts = shard if zero else 1
    assert terms["state"] == 8 * TOTAL / parts
    assert terms["gradients"] == 4 * TOTAL / parts
    assert terms["weights"] == 4 * TOTAL / parts
    again = held(ParallelSpec(num_workers=shard, shard=parts, zero=zero, accumulate=2)).terms
    assert again["gradients"] == 4 * TOTAL / (parts if zero >= 2 else 1)
    if zero in (1, 2):
        assert again["gathered"] == 4 * TOTAL + 8 * VALUES  # all weights, and the gradients of a block


def test_a_pass_counts_at_its_worst_moment() -> None:
    few, many = held(ParallelSpec(batch=10)), held(ParallelSpec(batch=10**8))
    assert few.terms["activations"] == 0  # when all gradients are there, no activation is left
    assert many.terms["activations"] == 100 * 10**8 + 2 * TOTAL - 4 * TOTAL  # and the other candidate round
    copies = held(ParallelSpec(num_workers=2, copies=2, batch=10))
    assert copies.terms["activations"] == 1000 + 2 * TOTAL  # views of buckets, which stay
    again = held(ParallelSpec(batch=10, accumulate=2))
    assert again.terms["activations"] == 1000 + 2 * TOTAL  # the gradients of the pass before


def test_fsdp_gathers_two_blocks_and_the_rest_and_a_single_worker_all() -> None:
    spec = ParallelSpec(num_workers=2, shard=2, zero=3, half_bytes=2, batch=10)
    one = held(spec)
    assert one.terms["gathered"] == 2 * VALUES + 2 * 2 * VALUES + 6 * VALUES
    assert one.terms["activations"] == 0  # no copies of weights: they are gathered as they are used
    sent = held(replace(spec, half_gradients=True))  # two copies of 16 bits more
    assert sent.terms["gathered"] == one.terms["gathered"] + 4 * VALUES
    kept = held(replace(spec, merge_blocks=True))  # 100 MiB are not gathered again for backward
    assert kept.terms["gathered"] == 2 * TOTAL + 6 * VALUES
    large = replace(MODEL, parameters=tuple(parameter(f"{n}.weight", str(n), 4 * VALUES) for n in range(4)))
    freed = forecast(large, replace(spec, merge_blocks=True), CURVE, 80 * GIB)  # of 320
    assert freed.terms["gathered"] == 2 * 8 * VALUES + 24 * VALUES
    lone = held(ParallelSpec(zero=3, half_bytes=2, batch=10**8, merge_blocks=True))
    assert lone.terms["activations"] == 100 * 10**8 + 2 * TOTAL - 4 * TOTAL
    away = held(ParallelSpec(num_workers=2, workers_per_node=2, shard=2, zero=3, half_bytes=2, offload=True))
    assert [away.terms[name] for name in ("weights", "gradients", "state")] == [0, 0, 0]
    assert away.host_bytes == 16 * TOTAL


def test_a_captured_pass_keeps_its_memory_and_others_take_theirs_beside_it() -> None:
    def at(tail: int | None, **others: Any) -> Forecast:
        return held(ParallelSpec(graph=True, batch=10**8, tail=tail), **others)

    full, workspace = 100 * 10**8 + 2 * TOTAL, 64 * MIB  # a pass at its worst moment; what its stream needs
    assert at(0).terms["activations"] == full - 4 * TOTAL
    assert at(0).terms["captured"] == workspace  # all batches are full, and the tracer before it found no state
    assert at(10).terms["captured"] == workspace + 4 * TOTAL  # gradients of its own
    assert at(None).terms["captured"] == at(10**8).terms["captured"] == workspace + full
    judged = forecast(MODEL, ParallelSpec(graph=True, batch=10**8, tail=0), CURVE, GIB, [(9 * TOTAL, TOTAL, 0)])
    assert judged.terms["captured"] == workspace + 10 * TOTAL
    lean = ModelSize(parameters=tuple(replace(one, state_bytes=0) for one in MODEL.parameters), **_OTHERS)
    without = forecast(lean, ParallelSpec(graph=True, batch=10**8, tail=0), CURVE, GIB)
    assert without.terms["captured"] == workspace + 4 * TOTAL  # run twice before, it had the first one's gradients
    tight = at(0, memory_gib=14.0)
    assert (tight.fits, tight.largest_batch) == (True, 10**8)  # of which other sizes may have a short last batch
    assert (at(None, memory_gib=14.0).fits, (at(None, memory_gib=14.0).largest_batch or 0) < 10**8) == (False, True)


def test_local_workers_and_servers() -> None:
    many: dict[str, Any] = {"num_workers": 4, "workers_per_node": 2, "batch": 10}
    alone = held(ParallelSpec(**many, averages_weights=True))
    assert alone.terms["state"] == 8 * TOTAL
    assert alone.terms["activations"] == 0
    outer = held(ParallelSpec(**many, averages_weights=True, extra_copies=2))
    assert outer.terms["state"] == 8 * TOTAL + 2 * 4 * TOTAL
    judged = forecast(MODEL, ParallelSpec(**many, averages_weights=True), CURVE, GIB, [(9 * TOTAL, TOTAL, 0)])
    assert judged.terms["activations"] == (10 + 4 - 4) * TOTAL  # its own weights are kept while the mean is judged
    served = held(ParallelSpec(**many, servers=1, server_buffers=3))
    assert [served.terms[name] for name in ("weights", "gradients", "state")] == [4 * TOTAL, 4 * TOTAL, 0]
    # Two workers have room for all that travels; the server has the weights, three times gradients, and the state.
    assert served.host_bytes == 2 * 4 * TOTAL + 4 * TOTAL + 3 * 4 * TOTAL + 8 * TOTAL
    over = held(ParallelSpec(**many, servers=4, server_buffers=1))
    assert over.host_bytes == 2 * 4 * TOTAL + (4 * TOTAL + 4 * TOTAL + 8 * TOTAL) / 2  # of four servers, two here


def test_sharded_layers_and_the_largest_stage() -> None:
    cut = held(
        ParallelSpec(
            num_workers=2, tensor=2, tensor_sharded=frozenset({"0.weight", "1.weight", "2.weight", "3.weight"})
        )
    )
    assert cut.terms["weights"] == 4 * VALUES + 8 * VALUES
    stages = (frozenset({"root", "0.weight"}), frozenset({"1.weight", "2.weight", "3.weight"}))
    spec = ParallelSpec(num_workers=2, pipeline=2, stages=stages, batch=10**6, micro_batches=4, in_flight=2)
    piped = held(spec)
    assert piped.terms["weights"] == 4 * 3 * VALUES
    assert piped.kept_bytes == 100 * 10**6 / 4


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("num_workers", [1, 4])
def test_the_largest_batch_fits_and_the_next_one_does_not(num_workers: int, graph: bool) -> None:
    def at(batch: int, accumulate: int = 1) -> Forecast:
        spec = ParallelSpec(
            num_workers=num_workers, copies=num_workers, graph=graph, batch=batch, accumulate=accumulate
        )
        return held(spec, memory_gib=10)

    largest, in_turn = at(10**9).largest_batch, at(10**9).largest_micro_batch
    assert largest
    if graph:
        assert in_turn > largest  # several are not captured
    else:
        assert (in_turn < largest) == (num_workers == 1)  # where gradients are not there all the time anyway
    assert (at(largest).fits, at(largest + 1).fits) == (True, False)
    assert (at(in_turn, 2).fits, at(in_turn + 1, 2).fits) == (True, False)


def test_what_does_not_fit_has_no_batch_and_says_how_many_gpus_are_enough() -> None:
    tight = ParallelSpec(num_workers=2, shard=2, zero=3, batch=1)
    one = held(tight, memory_gib=2.1)
    assert (one.fits, one.largest_batch) == (False, 0)
    needed = gpus_needed(MODEL, tight, one)
    assert needed is not None
    assert needed > 2
    assert held(ParallelSpec(num_workers=needed, shard=needed, zero=3, batch=1), memory_gib=2.1).fits
    assert not held(ParallelSpec(num_workers=needed - 1, shard=needed - 1, zero=3, batch=1), memory_gib=2.1).fits
    assert gpus_needed(MODEL, tight, held(tight, memory_gib=1.0)) is None


def test_without_a_pass_the_rest_is_known() -> None:
    one = held(ParallelSpec(), None)
    assert (one.largest_batch, one.kept_bytes) == (None, None)
    assert one.total_bytes >= 16 * TOTAL


def test_what_a_step_or_a_validation_needs_counts_where_it_is_more() -> None:
    model = ModelSize(parameters=MODEL.parameters, buffer_bytes=0, step_bytes=8 * TOTAL, optimizer="LAMB")
    assert forecast(model, ParallelSpec(), CURVE, GIB).terms["activations"] == 8 * TOTAL
    gathered = held(ParallelSpec(num_workers=2, shard=2, zero=1, batch=0))
    # When backward begins: whole weights, and their copies in 16 bits; all gradients are still to come.
    assert gathered.terms["activations"] == 4 * TOTAL + 2 * TOTAL - 2 * TOTAL
    judged = forecast(MODEL, ParallelSpec(), CURVE, GIB, [(9 * TOTAL, TOTAL, 0)])
    assert judged.terms["activations"] == (9 + 1 - 4) * TOTAL
