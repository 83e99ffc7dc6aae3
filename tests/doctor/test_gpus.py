"""What the doctor says of GPUs, from drivers that a test describes."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stormo.doctor import gpus
from stormo.doctor.finding import Finding
from stormo.doctor.machine import Machine
from stormo.system.hardware import Gpu
from tests.fake_nvml import Card, FakeNvml, NVMLError

HEALTHY: dict[str, Any] = {
    "celsius": 31,
    "used": 600e6,
    "total": 150_754_820_096,
    "percent": 0,
    "throttle_bits": 0x1,
    "RemappedRows": (0, 0, 0, 0),
    "ecc": {0: 0, 1: 0},
    "ComputeRunningProcesses": [],
    "PersistenceMode": 1,
    "ComputeMode": 0,
    "CurrPcieLinkGeneration": 1,
    "MaxPcieLinkGeneration": 5,
    "CurrPcieLinkWidth": 16,
    "MaxPcieLinkWidth": 16,
    "links": [1] * 18,
    "slowdown": 87,
    "energy_mj": 5,
}


class Driver(FakeNvml):
    """Everything of pynvml that the doctor asks for, by the names that library gives it."""

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "570.86.15"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return 12080

    def nvmlDeviceGetTotalEccErrors(self, card: Card, kind: int, counter: int) -> Any:  # noqa: N802
        assert counter == 0
        return card["ecc"][kind]

    def nvmlDeviceGetTemperatureThreshold(self, card: Card, kind: int) -> Any:  # noqa: N802
        assert kind == 1
        return card["slowdown"]

    def nvmlDeviceGetNvLinkState(self, card: Card, link: int) -> Any:  # noqa: N802
        if link >= len(card["links"]):
            raise NVMLError("Invalid Argument")
        return card["links"][link]

    def __getattr__(self, name: str) -> Any:
        key = name.removeprefix("nvmlDeviceGet")
        if key in HEALTHY or key in ("RetiredPagesPendingStatus", "PowerManagementDefaultLimit"):
            return lambda card: card[key]
        raise AttributeError(name)


def look(library: Any, num_cuda: int | None = None, root: Path = Path("/nowhere"), **environ: str) -> list[Finding]:
    num_cuda = len(getattr(library, "cards", [])) if num_cuda is None else num_cuda
    shown = Gpu(name="NVIDIA H200", memory_bytes=1, capability=(9, 0))
    machine = Machine(root=root, environ=environ, load=lambda _: library, gpus=lambda: [shown] * num_cuda)
    return list(gpus.check(machine))


def bad(findings: list[Finding]) -> list[Finding]:
    return [one for one in findings if one.level in ("warning", "error")]


def cards(number: int = 1, **changes: Any) -> list[Card]:
    return [Card(f"GPU-{index}", tells=HEALTHY | (changes if index == 0 else {})) for index in range(number)]


def test_healthy_gpus() -> None:
    library = Driver(cards(8))
    found = look(library)
    assert [one.level for one in found] == ["ok"] * 11
    assert found[0].text == "NVIDIA driver 570.86.15, good for CUDA up to 12.8"
    assert found[1].text == "8 × NVIDIA H200, 151 GB each"
    assert found[2].text == "8 of 8 visible"
    assert (found[3].where, found[3].text) == ("GPU 0", "healthy at 31 °C")
    assert library.num_open == 0


PROCESS = SimpleNamespace(pid=4711, usedGpuMemory=9)


@pytest.mark.parametrize(
    ("changes", "check", "level", "words"),
    [
        ({"ecc": {0: 0, 1: 3}}, "gpu-ecc", "error", "3 memory errors that could not be corrected"),
        ({"RemappedRows": (0, 1, 1, 0)}, "gpu-ecc", "error", "bad memory waits to be taken out"),
        ({"RemappedRows": (0, 1, 1, 1)}, "gpu-ecc", "error", "cannot be remapped"),
        ({"RetiredPagesPendingStatus": 1}, "gpu-ecc", "error", "bad memory waits"),
        ({"ecc": {0: 7, 1: 0}}, "gpu-ecc", "note", "7 memory errors corrected"),
        ({"throttle_bits": 0x60, "celsius": 90}, "gpu-throttle", "warning", "heat, heat, by hardware (90 °C)"),
        ({"celsius": 84}, "gpu-throttle", "warning", "84 °C, and slows down from 87 °C on"),
        ({"throttle_bits": 0x4}, "gpu-throttle", "note", "power limit"),
        ({"power_limit_mw": 5e5, "PowerManagementDefaultLimit": 7e5}, "gpu-power", "note", "500 W of its usual 700 W"),
        (
            {"used": 20e9, "ComputeRunningProcesses": [PROCESS]},
            *("gpu-in-use", "warning", "20 GB of 151 GB in use by 1 process (pid 4711)"),
        ),
        ({"ComputeRunningProcesses": [PROCESS]}, "gpu-in-use", "note", "pid 4711"),
        ({"ComputeMode": 2}, "gpu-mode", "error", "computing is forbidden"),
        ({"ComputeMode": 3}, "gpu-mode", "note", "one process at a time"),
        ({"PersistenceMode": 0}, "gpu-mode", "note", "unloaded between jobs"),
        ({"CurrPcieLinkWidth": 8}, "gpu-pcie", "warning", "PCIe ×8 instead of ×16"),
        ({"percent": 99}, "gpu-pcie", "warning", "generation 1 instead of 5 although it is busy"),
        ({"links": [1] * 16 + [0, 0]}, "gpu-nvlink", "warning", "2 of 18 NVLinks are down"),
    ],
)
def test_what_is_wrong_with_one_gpu(changes: dict[str, Any], check: str, level: str, words: str) -> None:
    found = [one for one in look(Driver(cards(2, **changes))) if one.check == check]
    assert [(one.level, one.where) for one in found] == [(level, "GPU 0")]
    assert words in found[0].text


def test_nvidias_library_knows_every_name_that_it_is_asked_for() -> None:
    library = importlib.import_module("pynvml")
    names = set(re.findall(r"\bnvml[A-Z]\w+", Path(inspect.getfile(gpus)).read_text(encoding="utf-8")))
    assert len(names) > 15
    assert not [name for name in names if not hasattr(library, name)]
    assert (library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC) == (1, 0)
    assert (library.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, library.NVML_COMPUTEMODE_PROHIBITED) == (1, 2)
    assert library.NVML_ERROR_NO_PERMISSION == 4


def test_a_gpu_that_tells_nothing_is_not_judged() -> None:
    found = look(Driver([Card("GPU-old", name="Tesla V100")]))
    assert not bad(found)


@pytest.mark.parametrize(
    ("asked", "num_cuda", "level", "words"),
    [
        ("0", 1, "ok", "1 of 2 visible (CUDA_VISIBLE_DEVICES=0)"),
        ("", 0, "warning", "CUDA_VISIBLE_DEVICES='' hides all GPUs"),
        ("0,9", 1, "warning", "names 2 GPUs, but CUDA shows 1"),
        ("1,1", 0, "warning", "names 2 GPUs, but CUDA shows 0"),
        (None, 0, "error", "the driver lists 2 GPUs, but CUDA cannot start on any"),
    ],
)
def test_which_gpus_cuda_shows(asked: str | None, num_cuda: int, level: str, words: str) -> None:
    environ = {} if asked is None else {"CUDA_VISIBLE_DEVICES": asked}
    (found,) = [one for one in look(Driver(cards(2)), num_cuda, **environ) if one.check == "gpu-visible"]
    assert found.level == level
    assert words in found.text


def test_gpus_of_other_jobs_are_no_fault_and_lost_ones_are() -> None:
    others = look(Driver([*cards(1), Card("GPU-theirs", is_hidden=True)]), 1)
    assert not bad(others)
    assert any("1 more GPU of this machine for other jobs" in one.text for one in others)

    class Lost(Driver):
        def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
            if index == 1:
                raise NVMLError("GPU is lost")
            return super().nvmlDeviceGetHandleByIndex(index)

    (found,) = bad(look(Lost(cards(2)), 1))
    assert (found.check, found.level, found.where) == ("gpu-lost", "error", "GPU 1")


def test_mixed_models() -> None:
    mixed = [*cards(1), Card("GPU-b", name="NVIDIA A100-SXM4-80GB", tells=HEALTHY)]
    (found,) = bad(look(Driver(mixed)))
    assert "1 × NVIDIA H200, 1 × NVIDIA A100-SXM4-80GB: different models" in found.text


def test_split_gpus() -> None:
    split = Card("GPU-a", instances=[Card("MIG-1", tells=HEALTHY), Card("MIG-2", tells=HEALTHY)], tells=HEALTHY)
    found = look(Driver([split]), 1)
    assert not bad(found)
    assert any(one.check == "gpu-mig" and "split into instances" in one.text for one in found)


def test_without_a_driver(tmp_path: Path) -> None:
    absent = Driver([], init=NVMLError("NVML Shared Library Not Found"))
    (found,) = look(absent, root=tmp_path)
    assert (found.check, found.level) == ("gpus", "note")
    card = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    card.mkdir(parents=True)
    (card / "class").write_text("0x030200\n")
    (card / "vendor").write_text("0x10de\n")
    (found,) = look(absent, root=tmp_path)
    assert (found.check, found.level) == ("gpu-driver", "error")
    assert found.text.startswith("1 NVIDIA GPU on the PCI bus, but NVML cannot be opened")
    (card / "vendor").write_text("0x1002\n")
    assert "AMD" in look(absent, root=tmp_path)[0].text
    (found,) = look(Driver([], init=NVMLError("Driver/library version mismatch")), root=tmp_path)
    assert found.level == "error"
    assert "reboot" in found.fix
