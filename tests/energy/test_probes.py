"""The GPUs' and the CPUs' counters, on a stand-in for the driver and a powercap folder of our own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stormo.energy.probes import open_nvidia, open_rapl
from stormo.system.nvml import NvmlUnavailableError, open_nvml
from tests.fake_nvml import Card, FakeNvml, NVMLError


def _open(cards: list[Card], uuids: list[str] | None) -> tuple[object, list[str], FakeNvml]:
    library = FakeNvml(cards)
    probe, missing = open_nvidia(uuids, lambda: open_nvml(lambda _: library))
    return probe, [one.reason for one in missing], library


def test_a_gpu_is_read_by_its_counter() -> None:
    cards = [Card("GPU-a", tells={"energy_mj": 7001}), Card("GPU-b", tells={"energy_mj": 1})]
    library = FakeNvml(cards)
    probe, missing = open_nvidia(["GPU-a"], lambda: open_nvml(lambda _: library))
    assert probe is not None
    assert missing == []
    assert probe.read() == {"GPU-a": 7.001}
    (source,) = probe.sources
    assert (source.kind, source.method, source.resolution_j, source.interval_s) == ("gpu", "counter", 0.001, 0.1)
    cards[0].tells["energy_mj"] = NVMLError("GPU is lost")
    assert probe.read() == {}
    probe.close()
    assert library.num_open == 0


def test_a_gpu_without_a_counter_gives_its_power_and_says_so() -> None:
    library = FakeNvml([Card("GPU-p", name="Tesla P100", tells={"power_mw": 123_000})])
    probe, missing = open_nvidia(None, lambda: open_nvml(lambda _: library))
    assert probe is not None
    assert missing == []
    assert probe.sources[0].method == "power"
    assert probe.read() == {"GPU-p": 123.0}
    assert probe.notes == (
        "GPU-p has no energy counter (Tesla P100 does not support it (Not Supported)): its power is integrated",
    )


def test_a_gpu_that_tells_nothing_is_missing_and_nothing_is_invented() -> None:
    probe, reasons, library = _open([Card("GPU-a", name="GeForce")], None)
    assert probe is None
    why = "GeForce does not support it (Not Supported)"
    assert reasons == [f"GPU-a: energy: {why}; power: {why}"]
    assert library.num_open == 0


@pytest.mark.parametrize(
    ("uuids", "note"),
    [
        (["MIG-1", "2", "GPU-a", "MIG-1"], "this run uses all of them: the energy of the whole GPU is the run's"),
        (
            ["MIG-2"],
            "this run uses 1 of them: the GPU has one counter, so the figure includes what the other slices drew",
        ),
        (
            ["GPU-a"],  # where CUDA names the whole GPU
            "this run uses only some: the GPU has one counter, so the figure includes what the other slices drew",
        ),
    ],
)
def test_slices_of_one_gpu_are_one_source_and_its_sharing_is_named(uuids: list[str], note: str) -> None:
    slices: list[Card | None] = [Card("MIG-1", "NVIDIA H200 MIG 3g.71gb"), Card("MIG-2", "NVIDIA H200 MIG 3g.71gb")]
    library = FakeNvml([Card("GPU-a", tells={"energy_mj": 4000}, instances=slices)])
    probe, missing = open_nvidia(uuids, lambda: open_nvml(lambda _: library))
    assert probe is not None
    assert missing == []
    assert probe.read() == {"GPU-a": 4.0}
    assert [(source.id, source.name) for source in probe.sources] == [("GPU-a", "NVIDIA H200")]
    assert probe.notes == (f"GPU-a is cut into 2 slices, and {note}",)


def test_without_uuids_the_visible_gpus_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [Card("GPU-a", tells={"energy_mj": 1}), Card("GPU-b", tells={"energy_mj": 2})]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    probe, _ = open_nvidia(None, lambda: open_nvml(lambda _: FakeNvml(cards)))
    assert probe is not None
    assert probe.read() == {"GPU-b": 0.002}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert _open(cards, None)[:2] == (None, ["CUDA shows no GPU to this process"])


def test_a_job_without_gpus_asks_for_no_driver() -> None:
    def refuse() -> None:
        raise AssertionError("asked")

    assert open_nvidia([], refuse) == (None, [])  # type: ignore[arg-type]


def test_without_a_driver_the_reason_is_given() -> None:
    def refuse() -> None:
        raise NvmlUnavailableError("no driver")

    _, missing = open_nvidia(["GPU-a"], refuse)  # type: ignore[arg-type]
    assert [(one.kind, one.reason) for one in missing] == [("gpu", "no driver")]


def _zone(root: Path, folder: str, name: str, energy_uj: int | str = 1_000_000) -> None:
    path = root / folder
    path.mkdir(parents=True)
    (path / "name").write_text(name + "\n")
    (path / "energy_uj").write_text(f"{energy_uj}\n")
    (path / "max_energy_range_uj").write_text("262143328850\n")


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    root = tmp_path / "powercap"
    (root / "intel-rapl").mkdir(parents=True)  # the control type, which is no zone
    _zone(root, "intel-rapl:0", "package-0", 5_000_001)
    _zone(root, "intel-rapl:0:0", "core")
    _zone(root, "intel-rapl:0:1", "dram", 700_000)
    _zone(root, "intel-rapl:1", "package-1", 6_000_000)
    _zone(root, "intel-rapl:1:0", "uncore")
    _zone(root, "intel-rapl:1:1", "dram", 800_000)
    _zone(root, "intel-rapl:2", "psys", 99_000_000)
    _zone(root, "intel-rapl-mmio:0", "package-0", 5_000_001)
    return root


def test_packages_and_memory_are_read_and_nothing_twice(powercap: Path) -> None:
    probe, missing = open_rapl(powercap)
    assert probe is not None
    assert missing == []
    assert probe.read() == {
        "intel-rapl:0": 5.000001,
        "intel-rapl:0:1": 0.7,
        "intel-rapl:1": 6.0,
        "intel-rapl:1:1": 0.8,
    }
    assert [(one.kind, one.name) for one in probe.sources] == [
        ("cpu", "package-0"),
        ("dram", "package-0 dram"),
        ("cpu", "package-1"),
        ("dram", "package-1 dram"),
    ]
    assert {one.wraps_at_j for one in probe.sources} == {262143.32885}
    (powercap / "intel-rapl:1" / "energy_uj").unlink()
    assert "intel-rapl:1" not in probe.read()


def test_a_cpu_that_does_not_count_its_memory_says_so(tmp_path: Path) -> None:
    _zone(tmp_path, "intel-rapl:0", "package-0")
    _zone(tmp_path, "intel-rapl:0:0", "core")
    probe, missing = open_rapl(tmp_path)
    assert probe is not None
    assert [one.kind for one in missing] == ["dram"]
    assert missing[0].reason.endswith("has no dram zone: this CPU does not count its memory")


def test_counters_for_root_alone_come_with_their_mend(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text

    def refuse(path: Path, *arguments: str) -> str:
        if path.name == "energy_uj" and "intel-rapl:1" not in str(path):
            raise PermissionError(13, "Permission denied")
        return read_text(path, *arguments)

    monkeypatch.setattr(Path, "read_text", refuse)
    probe, missing = open_rapl(powercap)
    assert probe is not None
    assert [one.id for one in probe.sources] == ["intel-rapl:1", "intel-rapl:1:1"]
    assert [one.kind for one in missing] == ["cpu", "dram"]
    assert missing[0].reason == (
        "package-0: only root may read the counter (CVE-2020-8694); an administrator allows it until the next boot "
        f"with: sudo chmod a+r {powercap}/intel-rapl:0/energy_uj"
    )


def test_a_machine_without_counters_says_why(tmp_path: Path) -> None:
    probe, missing = open_rapl(tmp_path / "none")
    assert probe is None
    assert [one.kind for one in missing] == ["cpu"]
    assert "shows no CPU package: a virtual machine, a container without it" in missing[0].reason


def test_a_counter_that_holds_nonsense_is_named(powercap: Path) -> None:
    (powercap / "intel-rapl:0" / "energy_uj").write_text("what\n")
    _, missing = open_rapl(powercap)
    assert [one.kind for one in missing] == ["cpu"]
    assert missing[0].reason.startswith("package-0: ")


def test_a_share_of_the_cpus_is_said_to_be_one(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    probe, _ = open_rapl(powercap)
    assert probe is not None
    assert probe.notes == ("this job may use 2 of 64 CPUs: the energy of the packages is that of all of them",)
