"""The benchmark on slices of a GPU, tried on CPU processes; its figures come from what the sides measured."""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import rank_pool, slice_devices, slices
from benchmarks.slice_devices import cpu_processes, find_devices
from benchmarks.slice_exactness import Outcome, checks, loss_difference
from benchmarks.slice_speed import Speed, recorded_link
from benchmarks.strategy_exactness import Trained
from benchmarks.strategy_worker import Chunk
from stormo.config.strategies import SPECS
from stormo.system.hardware import Gpu
from tests import forked

FIGURES = [
    "workers",
    "configurations",
    "max_relative_difference_fp64",
    "ddp_vs_plain_4",
    "ddp_vs_accelerate_4",
    "ddp_vs_lightning_4",
    "ddp_vs_plain_same_link_4",
    "fsdp_vs_plain_4",
    "sync_bn_cost",
]
SMALL = ["--width", "0.0625", "--samples", "64", "--global-batch-size", "16", "--rounds", "1"]


@pytest.mark.usefixtures("forked_programs")
def test_two_cpu_processes_go_through_both_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_pool, "_PRELOAD", forked.PRELOAD)  # one server for all tests
    assert slices.main(["--device", "cpu", "--workers", "2", "--quick", *SMALL]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    figures = dict(word.split("=") for word in last.removeprefix("RESULT ").split())
    assert list(figures) == FIGURES
    assert (figures["workers"], figures["configurations"]) == ("2", "2")
    assert float(figures["max_relative_difference_fp64"]) <= 1e-10
    assert float(figures["ddp_vs_plain_4"]) > 0
    assert figures["ddp_vs_lightning_4"] == "nan"


def _cut(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    gpu = Gpu(name="NVIDIA H200 MIG 1g.18gb", memory_bytes=16 * 2**30, capability=(9, 0), slice_of="GPU-0")
    made = [replace(gpu, uuid=f"MIG-{index}") for index in range(count)]
    monkeypatch.setattr(slice_devices, "visible_gpus", lambda: made)


def test_ranks_get_a_slice_and_a_host_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _cut(monkeypatch, 7)
    found = find_devices()
    assert not found.are_shared
    assert found.names == tuple(f"MIG-{index}" for index in range(7))
    assert found.machine.startswith("7 × NVIDIA H200 MIG 1g.18gb, ")
    assert found.take(4, 2).of_rank(1) == {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "MIG-5",
        "NCCL_HOSTID": "rank-1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }
    assert found.take(4, 2).of_command() == {"CUDA_VISIBLE_DEVICES": "MIG-4,MIG-5"}


def test_ranks_share_gpus_that_are_not_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = Gpu(name="NVIDIA H200", memory_bytes=139 * 2**30, capability=(9, 0))
    monkeypatch.setattr(slice_devices, "visible_gpus", lambda: [gpu, gpu])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    found = find_devices(3)
    assert found.are_shared
    assert found.names == ("GPU-a", "GPU-b", "GPU-a")
    assert found.machine.startswith("3 ranks on 2 × NVIDIA H200, ")
    assert found.of_command() == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    assert not find_devices(2).are_shared
    assert slices.main([]) == 2  # times of ranks that take turns mean nothing
    assert "7 ranks on 2 × NVIDIA H200, " in _error(capsys)


def test_without_slices_or_data_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _cut(monkeypatch, 4)
    assert slices.main([]) == 2
    assert re.search(
        "needs 7 slices of a GPU and found 4 × NVIDIA H200 MIG 1g.18gb, .*: cut one with `stormo", _error(capsys)
    )
    _cut(monkeypatch, 7)
    with pytest.raises(SystemExit) as ended:
        slices.main(["--data-folder", str(tmp_path)])
    assert ended.value.code == 2
    assert "carry its four files here and name their folder by --data-folder" in _error(capsys)


def _error(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def test_every_strategy_is_compared_on_slices() -> None:
    every = checks([7, 4, 2])
    strategies = {one.case.setup.flags.get("strategy", "mesh") for one in every}
    assert strategies == SPECS.keys() - {"single", "dp"}
    assert {one.case.setup.num_workers for one in every} == {2, 4, 7}
    formats = {"fp64", "fp32", "tf32", "bf16", "fp16"}
    assert {one.kind for one in every} == {"control", *formats, "16-bit gradients", "low-rank gradients"}
    assert len({(one.name, one.case.optimizer) for one in every}) == len(every)


def _trained(weight: float, losses: float) -> Trained:
    values = np.array([weight])
    chunk = Chunk(name="w", whole_shape=(1,), offset=(0,), values=values, is_saved=True)
    return Trained(chunks=[chunk], others={"losses": np.full(6, losses)})


def test_compressed_workers_are_equal_to_the_bit_and_close_in_loss() -> None:
    reference = _trained(1.0, 2.0)
    assert loss_difference([_trained(1.5, 2.2), _trained(1.5, 2.2)], reference) == pytest.approx(0.1)
    assert loss_difference([_trained(1.5, 2.0), _trained(math.nextafter(1.5, 2), 2.0)], reference) == math.inf


def test_limits_are_those_of_the_number_format() -> None:
    limits = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 2.0}
    for kind, limit in limits.items():
        assert Outcome(name="", kind=kind, difference=limit).is_good
        assert not Outcome(name="", kind=kind, difference=1.1 * limit).is_good
        assert not Outcome(name="", kind=kind, difference=math.nan).is_good
    assert not Outcome(name="", kind="control", difference=1e-10).is_good


def test_ratios_are_medians_of_rounds() -> None:
    rounds = {"stormo": [10.0, 30.0, 12.0], "plain": [10.0, 10.0, math.nan], "stormo sync norm": [5.0, 10.0]}
    speed = Speed(images_per_s={(side, 4): values for side, values in rounds.items()})
    assert speed.ratio("ddp_vs_plain_4", 4) == 2
    assert speed.ratio("sync_bn_cost", 4) == 2.5
    assert math.isnan(speed.ratio("ddp_vs_accelerate_4", 4))
    assert speed.lines()[2].split() == ["plain", "4", "10", "/", "10", "/", "nan", "10"]


def test_the_link_is_the_one_that_the_run_has_recorded(tmp_path: Path) -> None:
    for stored, found in (({}, None), ({"link": None}, None), ({"link": {"variables": {}}}, {})):
        (tmp_path / "summary.json").write_text(json.dumps(stored))
        assert recorded_link(tmp_path) == found
    assert slices.link("NCCL_MAX_NCHANNELS=4 NCCL_BUFFSIZE=8") == {"NCCL_MAX_NCHANNELS": "4", "NCCL_BUFFSIZE": "8"}
    with pytest.raises(argparse.ArgumentTypeError, match="is not a list such as"):
        slices.link("CHANNELS=4")


def test_a_stage_that_was_not_run_keeps_its_stored_figures(tmp_path: Path) -> None:
    path, devices = tmp_path / "slices.json", cpu_processes(7)
    figures = {**dict.fromkeys(FIGURES, math.nan), "workers": 7, "configurations": 3}
    slices.store(path, devices, figures, {"exactness": {"differences": {"fp64": {"ddp": math.nan}}}}, "abc")
    measured = {**dict.fromkeys(FIGURES, 1.5), "workers": 7, "ddp_vs_lightning_4": math.nan}
    slices.store(path, devices, measured, {"speed": {"images_per_s": {"stormo, 4": [1.0]}}}, "def")
    stored = json.loads(path.read_text())
    assert {"figure", "command", "machine", "torch", "commit", "date"} < stored.keys()
    assert list(stored["result"]) == FIGURES
    assert stored["result"]["configurations"] == 3
    assert stored["result"]["ddp_vs_plain_4"] == 1.5
    assert stored["result"]["ddp_vs_lightning_4"] is None
    assert (stored["exactness"]["commit"], stored["speed"]["commit"]) == ("abc", "def")
    assert stored["exactness"]["differences"] == {"fp64": {"ddp": None}}
