"""Counting GPUs through the driver, here a stand-in for its library, and the table of peaks."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

from stormo.system.hardware import PEAK_TFLOPS, Gpu, num_cores, peak_tflops, visible_gpus

_CARDS = [
    ("NVIDIA H200", 150_000_000_000, (9, 0)),
    ("Tesla V100-SXM2-16GB", 16_945_512_448, (7, 0)),
]


class Driver:
    """Answers as libcuda does: results go through pointers, 0 means success."""

    def __init__(self, cards: list[tuple[str, int, tuple[int, int]]], *, init: int = 0, count: int = 0) -> None:
        self._cards = cards
        self._init, self._count = init, count
        self.is_initialised = False

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the driver's name
        assert flags == 0
        self.is_initialised = self._init == 0
        return self._init

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        if not self.is_initialised:
            return 3  # CUDA_ERROR_NOT_INITIALIZED
        count._obj.value = len(self._cards)
        return self._count

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = 100 + ordinal  # a handle is not an ordinal
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: Any) -> int:  # noqa: N802
        text = self._cards[device.value - 100][0].encode()
        assert len(text) < length
        name.value = text
        return 0

    def cuDeviceTotalMem_v2(self, memory_bytes: Any, device: Any) -> int:  # noqa: N802
        assert isinstance(memory_bytes._obj, ctypes.c_size_t)  # 32 bits would overflow
        memory_bytes._obj.value = self._cards[device.value - 100][1]
        return 0

    def cuDeviceGetPCIBusId(self, bus_id: Any, length: int, device: Any) -> int:  # noqa: N802
        bus_id.value = f"0000:{device.value:02x}:00.0".encode()
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:  # noqa: N802
        value._obj.value = self._cards[device.value - 100][2][{75: 0, 76: 1}[attribute]]
        return 0


def install_driver(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> None:
    def load(name: str) -> Driver:
        assert name == "libcuda.so.1"
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr("stormo.system.hardware.ctypes.CDLL", load)


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(monkeypatch, None)
    assert visible_gpus() == []


@pytest.mark.parametrize(("init", "count"), [(100, 0), (0, 3)])
def test_a_driver_that_refuses_shows_no_gpu(monkeypatch: pytest.MonkeyPatch, init: int, count: int) -> None:
    install_driver(monkeypatch, Driver(_CARDS, init=init, count=count))
    assert visible_gpus() == []


def test_a_driver_without_devices_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(monkeypatch, Driver([]))
    assert visible_gpus() == []


def test_every_gpu_of_the_driver_is_described_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(monkeypatch, Driver(_CARDS))
    buses = ("0000:64:00.0", "0000:65:00.0")
    assert visible_gpus() == [
        Gpu(name=name, memory_bytes=size, capability=level, bus_id=bus)
        for (name, size, level), bus in zip(_CARDS, buses, strict=True)
    ]


def test_number_formats_follow_the_compute_capability() -> None:
    levels = {(6, 0): (False, False), (7, 0): (False, True), (7, 5): (False, True), (8, 0): (True, True)}
    for capability, formats in levels.items():
        gpu = Gpu(name="x", memory_bytes=1, capability=capability)
        assert (gpu.has_bf16, gpu.has_fp16_matrix_units) == formats


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-PCIE-32GB", "V100 PCIE"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", None),  # not the L4, nor the L40S
        ("NVIDIA T400", None),
        ("NVIDIA A1000", None),
        ("", None),
    ],
)
def test_peaks_are_known_for_known_names_alone(name: str, row: str | None) -> None:
    assert peak_tflops(name) == (PEAK_TFLOPS[row] if row else None)


def test_peaks_fall_with_the_width_of_the_numbers() -> None:
    for sixteen, tf32, fp32 in PEAK_TFLOPS.values():
        assert sixteen > (tf32 or fp32) >= fp32 * (1 if tf32 else 0)
        assert sixteen > fp32


def test_cores_are_those_this_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert num_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert num_cores() == len(before)
