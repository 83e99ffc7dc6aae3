"""Loading processes: their signals, their end, and how a data set gets to them."""

from __future__ import annotations

import io
import multiprocessing
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stormo.data.batches import collate
from stormo.data.loaders import Share, StreamedLoader
from stormo.data.processes import PickleByValue, open_loader
from stormo.data.reading import key_loader
from tests import forked

multiprocessing.set_forkserver_preload(["torch", "stormo.data.loaders"])

CPU = torch.device("cpu")
SHARE = Share(global_batch_size=100, accumulate=1, worker=0, num_workers=1)
NUM_BATCHES = 40  # far more than are read ahead


def read_all_and_fail() -> None:
    import os
    import signal

    signal.signal(signal.SIGTERM, lambda number, frame: None)
    batches = [[(index, 0)] for index in range(NUM_BATCHES)]
    loader = key_loader(TensorDataset(torch.arange(NUM_BATCHES)), batches, torch.device("cpu"), 1)
    read: list[int] = []
    for batch in loader:
        if not read:
            os.killpg(0, signal.SIGTERM)
        read.append(int(batch[0]))
    assert read == list(range(NUM_BATCHES))
    for _ in loader:
        raise ValueError("of the user")


def test_loading_processes_ignore_stop_signals_and_end_with_an_error_of_the_script() -> None:
    # In a group of processes of its own, all of which are signalled.
    words = [sys.executable, "-c", f"import {__name__} as test; test.read_all_and_fail()"]
    done = forked.run(words, cwd=Path(__file__).parents[2], start_new_session=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "ValueError: of the user")


@pytest.mark.parametrize("num_samples", [3, 2000])
def test_a_list_of_tensors_is_read_by_another_process(num_samples: int) -> None:
    data: Any = [(torch.full((2,), float(i)), i) for i in range(num_samples)]
    loader = StreamedLoader(data, SHARE, 0, 0, lambda batch, draws: batch, CPU, 1)
    try:
        seen = {int(i): float(x[0]) for batch in loader.epoch(1) for x, i in zip(*batch.data, strict=True)}
    finally:
        loader.close()
    assert seen == {i: float(i) for i in range(num_samples)}


class Holder(PickleByValue):
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


def test_the_fork_server_ignores_signals_before_it_imports_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    preloaded: list[str] = []
    context = type(multiprocessing.get_context("forkserver"))
    monkeypatch.setattr(context, "set_forkserver_preload", lambda _, names: preloaded.extend(names))
    open_loader(TensorDataset(torch.ones(2)), torch.device("cpu"), 1, collate)
    assert preloaded[:2] == ["stormo.data.loading_process_signals", "torch"]
