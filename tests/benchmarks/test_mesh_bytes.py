"""Bytes of a rank of a job that is never started."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from benchmarks.mesh_bytes import Row, every_row, measure
from stormo.tasks.language_model import SIZES

NUM_PARAMETERS = SIZES["tiny"].num_parameters(block=SIZES["tiny"].block, vocabulary=256)


@pytest.mark.parametrize(("strategy", "share"), [("ddp", 1.0), ("fsdp", 1 / 64)])
def test_a_rank_holds_its_share(strategy: str, share: float) -> None:
    held = measure(Row(name=strategy, num_ranks=64, flags={"strategy": strategy}), "tiny", rank=0)
    assert held.total == pytest.approx(16 * NUM_PARAMETERS * share, rel=0.01)
    assert (held.weights, held.gradients) == pytest.approx([4 * NUM_PARAMETERS * share] * 2, rel=0.01)
    assert not dist.is_initialized()


def test_stages_hold_all_of_the_model_together() -> None:
    row = Row(name="pipeline", num_ranks=16, flags={"mesh": "pipeline=2,shard=8"}, stages=2)
    assert row.ranks == [0, 8]
    held = [measure(row, "tiny", rank) for rank in row.ranks]
    assert sum(one.total for one in held) == pytest.approx(16 * NUM_PARAMETERS / 8, rel=0.01)


def test_rows_have_all_presets_and_fill_their_ranks() -> None:
    rows = list(every_row(256))
    assert {row.num_ranks for row in rows} == {16, 256}
    assert {"ddp", "zero1", "zero2", "fsdp", "hsdp", "hybrid"} <= {row.name for row in rows}
    assert all(row.num_ranks % row.stages == 0 for row in rows)
