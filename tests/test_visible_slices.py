"""Slices (MIG instances) of GPUs as this process may use them; driver and NVML are stand-ins."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stormo.config.layout import Launched, resolve_layout
from stormo.config.options import make_config
from stormo.config.plan.choices import peak_flops
from stormo.errors import SettingError
from stormo.launch import alone
from stormo.launch.slices import take_slice
from stormo.system import hardware
from stormo.system.hardware import (
    NODE_SLICES,
    Gpu,
    cuda_has_started,
    peaks_of,
    visible_gpus,
    visible_slices,
    why_no_gpu,
)
from tests.fake_nvml import Card, FakeNvml, cut_h200
from tests.test_hardware import Driver, install_driver

SEVEN = [f"MIG-0{index}" for index in range(7)]
SHOWN = ("NVIDIA H200 MIG 1g.18gb", 17_000_000_000, (9, 0))  # CUDA shows one slice alone
WHOLE = ("NVIDIA H200", 150_000_000_000, (9, 0))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", NODE_SLICES):
        monkeypatch.delenv(name, raising=False)
    driver = tmp_path / "nvidiactl"
    driver.touch()
    monkeypatch.setattr(hardware, "_DRIVER", driver)


def _install(monkeypatch: pytest.MonkeyPatch, cards: list[Card], shown: list[Any] | None = None) -> FakeNvml:
    nvml = FakeNvml(cards)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    install_driver(monkeypatch, Driver([SHOWN] if shown is None else shown))
    return nvml


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, [*SEVEN, "MIG-10", "MIG-11"]),
        ("0", SEVEN),
        ("1,0", ["MIG-10", "MIG-11", *SEVEN]),
        ("GPU-1", ["MIG-10", "MIG-11"]),
        ("MIG-03,MIG-01,MIG-10", ["MIG-03", "MIG-01", "MIG-10"]),
        ("MIG-06", ["MIG-06"]),
    ],
)
def test_every_slice_that_this_process_may_use_is_found(
    monkeypatch: pytest.MonkeyPatch, names: str | None, expected: list[str]
) -> None:
    nvml = _install(monkeypatch, [cut_h200(0), cut_h200(1, 2), Card("GPU-2")])
    if names is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    assert [gpu.uuid for gpu in visible_gpus()] == expected
    assert nvml.num_open == 0


def test_a_worker_that_is_shown_its_own_slice_knows_those_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, [cut_h200()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-02")
    monkeypatch.setenv(NODE_SLICES, "MIG-01,MIG-02")
    assert [gpu.uuid for gpu in visible_gpus()] == ["MIG-01", "MIG-02"]


def test_a_task_of_slurm_takes_one_of_the_slices_of_its_job_and_knows_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _install(monkeypatch, [cut_h200()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-03,MIG-01")
    for name in (NODE_SLICES, "NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    assert not cuda_has_started()
    take_slice(replace(alone(), launcher="slurm", rank=1, world_size=2, local_rank=1, local_size=2), "auto")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-01"
    assert [gpu.uuid for gpu in visible_gpus()] == ["MIG-03", "MIG-01"]
    assert not cuda_has_started()


def test_cuda_that_has_started_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(monkeypatch, Driver([WHOLE]))
    visible_gpus()
    assert cuda_has_started()
    install_driver(monkeypatch, None)
    assert not cuda_has_started()


def test_a_slice_knows_its_gpu_and_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, [cut_h200(num_slices=1)])
    (found,) = visible_gpus()
    assert found == Gpu(
        name="NVIDIA H200 MIG 1g.18gb",
        memory_bytes=16 * 2**30,
        capability=(9, 0),
        bus_id="00000000:00:00.0",
        uuid="MIG-00",
        slice_of="GPU-0",
        share=16 / 132,
    )
    assert found.profile == "1g.18gb"
    assert peaks_of(found) == pytest.approx(tuple(peak * 16 / 132 for peak in (989.0, 494.0, 67.0)))


def test_without_a_share_there_is_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    card = cut_h200(num_slices=1)
    card.tells["profiles"] = {}
    _install(monkeypatch, [card])
    assert visible_gpus()[0].share is None
    assert peaks_of(visible_gpus()[0]) is None


def test_whole_gpus_do_not_open_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(monkeypatch, Driver([WHOLE, WHOLE]))
    monkeypatch.setattr(hardware, "open_nvml", lambda: pytest.fail("NVML was opened"))
    assert [gpu.name for gpu in visible_gpus()] == ["NVIDIA H200"] * 2


def test_without_nvml_the_one_slice_that_cuda_shows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    install_driver(monkeypatch, Driver([SHOWN]))
    for names in ("0", "MIG-00"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        assert [gpu.name for gpu in visible_gpus()] == [SHOWN[0]]
    assert visible_slices() == []


def test_a_gpu_in_mig_mode_without_a_slice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, [cut_h200(num_slices=0)], shown=[])
    assert visible_gpus() == []
    layout = resolve_layout(make_config({}, None), [])
    assert "GPU 0 (NVIDIA H200) is in MIG mode and has no slice; stormo doctor --slices" in layout.explanation[0][1]
    with pytest.raises(SettingError, match="doctor --slices"):
        resolve_layout(make_config({"device": "cuda"}, None), [])


def test_without_a_driver_nothing_explains_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _install(monkeypatch, [cut_h200(num_slices=0)])
    monkeypatch.setattr(hardware, "_DRIVER", tmp_path / "nothing")
    assert why_no_gpu() == ""


def test_the_peak_of_a_job_on_slices_is_that_of_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, [cut_h200()])
    layout = resolve_layout(make_config({}, None), visible_gpus())
    assert peak_flops(layout, "bf16") == pytest.approx(989e12 * 7 * 16 / 132)


def test_the_plan_names_the_slices_and_the_slow_links(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, [cut_h200(0), cut_h200(1)])
    gpus = visible_gpus()
    workers = {
        count: dict(resolve_layout(make_config({"num_gpus": count}, None), gpus).explanation)["workers"]
        for count in (7, 8)
    }
    links = "workers on one GPU have no direct path, so their links are those of a slow network, 1 to 4 GB/s"
    visible = "(as set; 14 × NVIDIA H200 MIG 1g.18gb visible)"
    assert workers == {
        7: f"7 = 1 node × 7 slices (1g.18gb) of 1 GPU {visible}; nccl over loopback sockets: {links}",
        8: f"8 = 1 node × 8 slices (1g.18gb) of 2 GPUs {visible}; nccl over loopback sockets: {links}",
    }


def test_workers_that_see_one_slice_each_are_joined_over_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, [cut_h200(0, 1)])
    launched = Launched(launcher="slurm", world_size=4, local_size=4, num_nodes=1, gpus_on_node=4)
    layout = resolve_layout(make_config({}, None), visible_gpus(), launched)
    assert layout.shares_a_gpu
    assert not layout.may_share  # a slice that two tasks see is refused when they have met
    text = dict(layout.explanation)["workers"]
    assert text.startswith("4 = 1 node × 4 slices (1g.18gb) (started by slurm; ")
    assert "nccl over loopback sockets: workers on one GPU have no direct path" in text


def test_slices_of_different_gpus_need_no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, [cut_h200(0, 1), cut_h200(1, 1)])
    text = dict(resolve_layout(make_config({}, None), visible_gpus()).explanation)["workers"]
    assert text.endswith("nccl for GPUs")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_more_workers_than_slices_must_be_asked_for(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    _install(monkeypatch, [cut_h200(num_slices=2)])
    with pytest.raises(SettingError, match=r"3 workers .* it has 2 slices .* --backend nccl to let workers share"):
        resolve_layout(make_config({"num_gpus": 3}, None), visible_gpus())
    assert resolve_layout(make_config({"num_gpus": 3, "backend": backend}, None), visible_gpus()).shares_a_gpu


H200 = Gpu(name="NVIDIA H200", memory_bytes=139 * 2**30, capability=(9, 0))


def test_workers_share_a_whole_gpu_only_if_asked() -> None:
    config = make_config({"num_gpus": 4, "backend": "nccl"}, None)
    layout = resolve_layout(config, [H200])
    assert layout.shares_a_gpu
    assert not layout.slices
    assert peak_flops(layout, "bf16") == 989e12
    text = dict(layout.explanation)["workers"]
    assert text.startswith(
        "4 = 1 node × 4 workers (as set; 1 × NVIDIA H200 visible); they share 1 GPU, for tests, not for speed; "
    )
    assert "nccl over loopback sockets: workers on one GPU have no direct path" in text
    assert not resolve_layout(config, [H200] * 4).shares_a_gpu
    launched = Launched(launcher="torchrun", world_size=4, local_size=4, num_nodes=1, gpus_on_node=1)
    with pytest.raises(SettingError, match="--backend gloo to let workers share"):  # which sets no NCCL_HOSTID
        resolve_layout(config, [H200], launched)
    for backend in ("gloo", "nccl"):
        with pytest.raises(SettingError, match=r"needs its own; set --num-gpus 1, or --strategy ddp\.$"):
            resolve_layout(make_config({"num_gpus": 4, "backend": backend, "strategy": "dp"}, None), [H200])


def test_data_parallel_sees_one_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, [cut_h200()])
    with pytest.raises(SettingError, match="one slice"):
        resolve_layout(make_config({"strategy": "dp"}, None), visible_gpus())
