"""A data set of any number of tensors gets through to a loading process."""

from __future__ import annotations

import io
import multiprocessing
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stormo.data.loaders import Share, StreamedLoader
from stormo.data.sending import Travels

multiprocessing.set_forkserver_preload(["torch", "stormo.data.loaders"])

CPU = torch.device("cpu")
SHARE = Share(global_batch_size=100, accumulate=1, worker=0, num_workers=1)


@pytest.mark.parametrize("num_samples", [3, 2000])
def test_a_list_of_tensors_is_read_by_another_process(num_samples: int) -> None:
    data: Any = [(torch.full((2,), float(i)), i) for i in range(num_samples)]
    loader = StreamedLoader(data, SHARE, 0, 0, lambda batch, draws: batch, CPU, 1)
    try:
        seen = {int(i): float(x[0]) for batch in loader.epoch(1) for x, i in zip(*batch.data, strict=True)}
    finally:
        loader.close()
    assert seen == {i: float(i) for i in range(num_samples)}


class Holder(Travels):
    def __init__(self, parts: Any) -> None:
        self.parts = parts


def _sent(parts: Any) -> tuple[Any, int]:
    content = io.BytesIO()
    ForkingPickler(content).dump(Holder(parts))
    return ForkingPickler.loads(content.getvalue()).parts, len(content.getvalue())


def test_few_tensors_are_shared_and_many_are_sent_by_value_with_all_that_belongs_to_them() -> None:
    big = torch.zeros(1_000_000)
    shared, num_bytes = _sent([big])
    assert num_bytes < 10_000
    shared[0][0] = 7.0
    assert float(big[0]) == 7.0  # the same memory
    rows = [*torch.arange(400.0).view(200, 2), torch.tensor(3), torch.ones(2, dtype=torch.bfloat16)]
    parameter = nn.Parameter(torch.ones(3))
    copied, num_bytes = _sent({"rows": rows, "parameter": parameter, "kind": Tensor})
    assert num_bytes < 50_000  # a row does not bring along the tensor that it is part of
    assert [row.dtype for row in copied["rows"]] == [row.dtype for row in rows]
    assert all(torch.equal(a, b) for a, b in zip(copied["rows"], rows, strict=True))
    assert isinstance(copied["parameter"], nn.Parameter)
    copied["rows"][0][0] = 9.0
    assert float(rows[0][0]) == 0.0
