"""What a node tells of itself, read from a made-up /sys and made-up counters."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from stormo.energy.node_metrics import NodeMetrics
from tests.energy.fakes import FakeDevice

KEYS = {
    *("time_unix_s", "host", "cpu_fraction", "num_cpus", "load_1", "memory_used_bytes", "memory_total_bytes"),
    *("disk_read_bytes_per_s", "disk_write_bytes_per_s", "network_in_bytes_per_s", "network_out_bytes_per_s"),
    *("cpu_temperature_c", "cpu_clock_mhz", "cpu_power_w", "gpus"),
}
GPU_KEYS = {
    *("uuid", "name", "index", "utilisation", "memory_used_bytes", "memory_total_bytes", "power_w", "power_limit_w"),
    *("temperature_c", "sm_clock_mhz", "memory_clock_mhz", "throttled"),
}


def write(path: Path, text: str | int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


class Counters:
    """What psutil answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpu = SimpleNamespace(
            user=0.0, nice=0.0, system=0.0, irq=0.0, softirq=0.0, steal=0.0, idle=0.0, iowait=0.0, guest=0.0
        )
        self.disks: dict[str, Any] = {}
        self.cards: dict[str, Any] = {}
        monkeypatch.setattr(psutil, "cpu_times", lambda: self.cpu)
        monkeypatch.setattr(psutil, "disk_io_counters", lambda perdisk: self.disks)
        monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: self.cards)

    def disk(self, name: str, read: int, written: int) -> None:
        self.disks[name] = SimpleNamespace(read_bytes=read, write_bytes=written)

    def card(self, name: str, received: int, sent: int) -> None:
        self.cards[name] = SimpleNamespace(bytes_recv=received, bytes_sent=sent)


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    return Counters(monkeypatch)


@pytest.fixture
def clock() -> list[float]:
    """The time, to be set."""
    return [0.0]


Make = Callable[[], NodeMetrics]


@pytest.fixture
def make(tmp_path: Path, clock: list[float]) -> Make:
    return lambda: NodeMetrics((), system=tmp_path, clock=lambda: clock[0])


def test_this_very_node_tells_every_key_and_rates_from_the_second_sample_on() -> None:
    vitals = NodeMetrics([FakeDevice(0, throttled=("heat",))])  # type: ignore[list-item]
    first = vitals.sample()
    assert first.keys() == KEYS
    assert first["gpus"][0].keys() == GPU_KEYS
    assert {key for key, value in first.items() if value is not None and ("per_s" in key or "fraction" in key)} == set()
    assert 0 < first["memory_used_bytes"] < first["memory_total_bytes"]
    assert first["num_cpus"] == os.cpu_count()
    second = vitals.sample()
    assert second["cpu_fraction"] is None or 0 <= second["cpu_fraction"] <= 1  # None: no tick in between
    assert second["gpus"][0]["throttled"] == ["heat"]


def test_a_gpu_that_does_not_tell_gives_none() -> None:
    device = FakeDevice(0, throttled=None)
    device.use = None
    (gpu,) = NodeMetrics([device]).sample()["gpus"]  # type: ignore[list-item]
    assert gpu["utilisation"] is None
    assert gpu["throttled"] is None


def test_busy_is_what_is_neither_idle_nor_waiting_for_a_disk(
    make: Make, counters: Counters, clock: list[float]
) -> None:
    vitals = make()
    assert vitals.sample()["cpu_fraction"] is None
    clock[0] = 10.0
    counters.cpu.user, counters.cpu.system, counters.cpu.idle, counters.cpu.iowait = 2.0, 1.0, 5.0, 4.0
    counters.cpu.guest = 2.0  # a part of user
    assert vitals.sample()["cpu_fraction"] == pytest.approx(3 / 12)


def test_disks_count_once_however_they_are_joined(
    make: Make, counters: Counters, clock: list[float], tmp_path: Path
) -> None:
    for name in ("sda", "dm-0", "md0"):
        (tmp_path / "block" / name).mkdir(parents=True)
    for name in ("dm-0", "md0"):
        (tmp_path / "devices" / "virtual" / "block" / name).mkdir(parents=True)
    for name in ("sda", "sda1", "dm-0", "md0"):
        counters.disk(name, 1000, 2000)
    vitals = make()
    assert vitals.sample()["disk_read_bytes_per_s"] is None
    clock[0] = 2.0
    for name in counters.disks:
        counters.disk(name, 1400, 2100)
    sample = vitals.sample()
    assert (sample["disk_read_bytes_per_s"], sample["disk_write_bytes_per_s"]) == (200.0, 50.0)


def test_a_node_without_disks_or_with_hidden_ones_has_no_rate(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(perdisk: bool) -> None:
        raise NotImplementedError

    vitals = make()
    assert vitals.sample()["disk_read_bytes_per_s"] is None
    monkeypatch.setattr(psutil, "disk_io_counters", refuse)
    assert vitals.sample()["disk_read_bytes_per_s"] is None


def test_the_network_is_its_cards_and_rdma_but_neither_loopback_nor_bridges(
    make: Make, counters: Counters, clock: list[float], tmp_path: Path
) -> None:
    for name in ("lo", "docker0"):
        (tmp_path / "devices" / "virtual" / "net" / name).mkdir(parents=True)
    write(tmp_path / "class" / "net" / "ib0" / "type", 32)  # its bytes are in the port's counters too
    write(tmp_path / "class" / "net" / "eth0" / "type", 1)
    port = tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / "1" / "counters"
    for scale in (1, 2):
        for name in ("lo", "docker0", "ib0", "eth0"):
            counters.card(name, 100 * scale, 200 * scale)
        write(port / "port_rcv_data", 1000 * scale)
        write(port / "port_xmit_data", 3000 * scale)
        if scale == 1:
            vitals = make()
            vitals.sample()
            clock[0] = 1.0
    sample = vitals.sample()
    assert sample["network_in_bytes_per_s"] == 100 + 4 * 1000
    assert sample["network_out_bytes_per_s"] == 200 + 4 * 3000


def test_in_a_container_the_virtual_card_is_the_network(
    make: Make, counters: Counters, clock: list[float], tmp_path: Path
) -> None:
    for name in ("lo", "eth0"):
        (tmp_path / "devices" / "virtual" / "net" / name).mkdir(parents=True)
        counters.card(name, 0, 0)
    vitals = make()
    vitals.sample()
    clock[0] = 1.0
    counters.card("eth0", 7, 8)
    sample = vitals.sample()
    assert (sample["network_in_bytes_per_s"], sample["network_out_bytes_per_s"]) == (7, 8)


def test_a_counter_that_was_set_back_has_no_rate_once(make: Make, counters: Counters, clock: list[float]) -> None:
    counters.card("eth0", 1000, 0)
    vitals = make()
    vitals.sample()
    found = []
    for received in (10, 30):
        clock[0] += 1.0
        counters.card("eth0", received, 0)
        found.append(vitals.sample()["network_in_bytes_per_s"])
    assert found == [None, 20]


@pytest.mark.parametrize(
    ("driver", "labels", "expected"),
    [
        ("coretemp", {"Package id 0": 55000, "Package id 1": 61000, "Core 0": 99000}, 61.0),
        ("k10temp", {"Tctl": 48500, "Tccd1": 90000}, 48.5),
        ("nvme", {"Composite": 40000}, None),
    ],
)
def test_the_temperature_is_that_of_the_hottest_processor(
    make: Make, tmp_path: Path, driver: str, labels: dict[str, int], expected: float | None
) -> None:
    monitor = tmp_path / "class" / "hwmon" / "hwmon3"
    write(monitor / "name", driver)
    for number, (label, value) in enumerate(labels.items(), 1):
        write(monitor / f"temp{number}_label", label)
        write(monitor / f"temp{number}_input", value)
    vitals = make()
    assert vitals.sample()["cpu_temperature_c"] == expected
    assert ("cpu_temperature_c" in vitals.reasons()) == (expected is None)


def test_the_clock_is_the_mean_of_a_few_cores_however_many_there_are(make: Make, tmp_path: Path) -> None:
    for core in range(64):
        write(
            tmp_path / f"devices/system/cpu/cpufreq/policy{core}/scaling_cur_freq", 2_000_000 + 1_000_000 * (core % 2)
        )
    vitals = make()
    assert 2000 <= vitals.sample()["cpu_clock_mhz"] <= 3000
    assert len(vitals._clocks) == 16


def rapl(root: Path, zone: str, name: str, energy_uj: int) -> Path:
    folder = root / "class" / "powercap" / zone
    write(folder / "name", name)
    write(folder / "energy_uj", energy_uj)
    write(folder / "max_energy_range_uj", 100_000_000)
    return folder / "energy_uj"


def test_processor_power_is_that_of_all_packages_over_a_wrap_around(
    make: Make, clock: list[float], tmp_path: Path
) -> None:
    first = rapl(tmp_path, "intel-rapl:0", "package-0", 90_000_000)
    second = rapl(tmp_path, "intel-rapl:1", "package-1", 10_000_000)
    memory = rapl(tmp_path, "intel-rapl:0:0", "dram", 0)
    vitals = make()
    assert vitals.sample()["cpu_power_w"] is None
    clock[0] = 2.0
    write(first, 10_000_000)  # 20 J, over the end of the counter
    write(second, 50_000_000)
    write(memory, 70_000_000)
    assert vitals.sample()["cpu_power_w"] == pytest.approx((20 + 40) / 2)
    second.unlink()
    clock[0] = 4.0
    assert vitals.sample()["cpu_power_w"] is None  # a part would pass for the whole


def test_what_cannot_be_read_is_named_with_its_reason(make: Make) -> None:
    assert make().reasons().keys() == {"cpu_temperature_c", "cpu_clock_mhz", "cpu_power_w"}
