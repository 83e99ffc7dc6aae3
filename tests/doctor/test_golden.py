"""The whole output of the doctor on a machine that is made up: golden/doctor.txt."""

from __future__ import annotations

import io
import os
import platform
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from stormo.doctor import gpus, machine
from stormo.doctor.finding import Finding, show
from stormo.doctor.machine import Machine, Speed
from stormo.system.hardware import Gpu
from tests.doctor.machines import write
from tests.doctor.test_gpus import GOOD, PACKAGES, Driver, cards
from tests.doctor.test_machine import card, port
from tests.golden import check_golden

GB = 10**9
FILES: dict[str, object] = {
    **card("lo", -1, 65536, "0x9", "unknown"),
    **card("eth0", 10_000, 1500),
    **port("mlx5_0"),
    **port("mlx5_1", "1: DOWN"),
    "dev/infiniband/uverbs0": "",
    "proc/net/route": "Iface Destination\neth0 00000000 0100000A 0003 0 0 0 00000000 0 0 0",
    "proc/self/mounts": "disk / ext4 rw 0 0",
}


def _findings(root: Path) -> list[Finding]:
    """What each check finds: a GPU that is hot, an InfiniBand port without a cable, a runs folder that is slow."""
    write(root, FILES)
    driver = Driver(cards(2, throttle_bits=0x60, celsius=90))
    shown = Gpu(name="NVIDIA H200", memory_bytes=1, capability=(9, 0))
    made_up = Machine(
        root=root,
        environ={"PATH": "/nowhere", "CC": "gcc", "OMP_NUM_THREADS": "8"},
        runs_folder=Path("/tmp"),
        data_folder=Path("/tmp"),
        temp_folder=Path("/tmp"),
        load=lambda _: driver,
        gpus=lambda: [shown] * 2,
        torch=lambda: GOOD,
        statvfs=lambda _: SimpleNamespace(  # type: ignore[arg-type, return-value]
            f_blocks=64 * GB, f_bavail=60 * GB, f_frsize=1, f_files=10**6, f_favail=10**6, f_flag=0
        ),
        limit=lambda _: (-1, -1),
        cores=lambda: 64,
        memory=lambda: SimpleNamespace(total=512 * GB, available=480 * GB),
    )
    groups = {
        "devices": gpus.check_gpus(made_up),
        "libraries": gpus.check_libraries(made_up, lambda name: PACKAGES.get(name, {})),
        "backends": gpus.check_backends(made_up, lambda _: None),
        "network": machine.check_network(made_up, lambda _: ["10.0.0.7"], lambda: "node7"),
        "limits": machine.check_limits(made_up),
        "storage": machine.check_storage(made_up),
    }
    return [replace(finding, group=group) for group, found in groups.items() for finding in found]


def test_the_whole_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(platform, "python_version", lambda: "3.12.0")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    slow = Speed(write_bytes_per_s=40e6, read_bytes_per_s=3e9, small_s=0.0003)
    monkeypatch.setattr(machine, "_measure_speed", lambda _: slow)
    stream = io.StringIO()
    show(_findings(tmp_path), stream)
    check_golden(Path(__file__).parent / "golden" / "doctor.txt", stream.getvalue())
