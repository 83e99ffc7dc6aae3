"""Findings on GPUs, versions and backends, from drivers and facts that a test describes."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stormo.doctor import gpus
from stormo.doctor.finding import Finding
from stormo.doctor.machine import Machine
from stormo.system.hardware import Gpu
from tests.doctor.machines import bad
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


def check_gpus(
    library: Any, num_cuda: int | None = None, root: Path = Path("/nowhere"), **environ: str
) -> list[Finding]:
    num_cuda = len(getattr(library, "cards", [])) if num_cuda is None else num_cuda
    shown = Gpu(name="NVIDIA H200", memory_bytes=1, capability=(9, 0))
    machine = Machine(root=root, environ=environ, load=lambda _: library, gpus=lambda: [shown] * num_cuda)
    return list(gpus.check_gpus(machine))


def problems(findings: list[Finding]) -> list[Finding]:
    return [one for one in findings if one.level in ("warning", "error")]


def cards(number: int = 1, **changes: Any) -> list[Card]:
    return [Card(f"GPU-{index}", tells=HEALTHY | (changes if index == 0 else {})) for index in range(number)]


def test_healthy_gpus() -> None:
    library = Driver(cards(8))
    found = check_gpus(library)
    assert [one.level for one in found] == ["ok"] * 11
    assert found[0].text == "NVIDIA driver 570.86.15, supports CUDA up to 12.8"
    assert found[1].text == "8 × NVIDIA H200, 151 GB each"
    assert found[2].text == "8 of 8 visible"
    assert (found[3].where, found[3].text) == ("GPU 0", "healthy at 31 °C")
    assert library.num_open == 0


PROCESS = SimpleNamespace(pid=4711, usedGpuMemory=9)


@pytest.mark.parametrize(
    ("changes", "check", "level", "words"),
    [
        ({"ecc": {0: 0, 1: 3}}, "gpu-ecc", "error", "3 memory errors that could not be corrected"),
        ({"RemappedRows": (0, 1, 1, 0)}, "gpu-ecc", "error", "retired only at the next reset"),
        ({"RemappedRows": (0, 1, 1, 1)}, "gpu-ecc", "error", "cannot be remapped"),
        ({"throttle_bits": 0x60, "celsius": 90}, "gpu-throttle", "warning", "heat, heat, by hardware (90 °C)"),
        ({"celsius": 84}, "gpu-throttle", "warning", "84 °C, and it slows down from 87 °C on"),
        ({"throttle_bits": 0x4}, "gpu-throttle", "note", "power limit"),
        ({"power_limit_mw": 5e5, "PowerManagementDefaultLimit": 7e5}, "gpu-power", "note", "500 W of its usual 700 W"),
        (
            {"used": 20e9, "ComputeRunningProcesses": [PROCESS]},
            *("gpu-in-use", "warning", "20 GB of 151 GB in use by 1 process (pid 4711)"),
        ),
        ({"ComputeRunningProcesses": [PROCESS]}, "gpu-in-use", "note", "pid 4711"),
        ({"CurrPcieLinkWidth": 8}, "gpu-pcie", "warning", "PCIe ×8 instead of ×16"),
        ({"links": [1] * 16 + [0, 0]}, "gpu-nvlink", "warning", "2 of 18 NVLinks are down"),
    ],
)
def test_problems_of_one_gpu(changes: dict[str, Any], check: str, level: str, words: str) -> None:
    found = [one for one in check_gpus(Driver(cards(2, **changes))) if one.check == check]
    assert [(one.level, one.where) for one in found] == [(level, "GPU 0")]
    assert words in found[0].text


def test_pynvml_has_every_function_that_is_called() -> None:
    library = importlib.import_module("pynvml")
    names = set(re.findall(r"\bnvml[A-Z]\w+", Path(inspect.getfile(gpus)).read_text(encoding="utf-8")))
    assert len(names) > 10
    assert not [name for name in names if not hasattr(library, name)]
    assert (library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC) == (1, 0)
    assert library.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN == 1
    assert library.NVML_ERROR_NO_PERMISSION == 4


def test_a_gpu_that_reports_nothing_is_not_judged() -> None:
    found = check_gpus(Driver([Card("GPU-old", name="Tesla V100")]))
    assert not problems(found)


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
def test_visible_gpus(asked: str | None, num_cuda: int, level: str, words: str) -> None:
    environ = {} if asked is None else {"CUDA_VISIBLE_DEVICES": asked}
    (found,) = [one for one in check_gpus(Driver(cards(2)), num_cuda, **environ) if one.check == "gpu-visible"]
    assert found.level == level
    assert words in found.text


def test_gpus_of_other_jobs_are_no_error_and_lost_ones_are() -> None:
    others = check_gpus(Driver([*cards(1), Card("GPU-theirs", is_hidden=True)]), 1)
    assert not problems(others)
    assert any("1 more GPU of this machine for other jobs" in one.text for one in others)

    class Lost(Driver):
        def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
            if index == 1:
                raise NVMLError("GPU is lost")
            return super().nvmlDeviceGetHandleByIndex(index)

    (found,) = problems(check_gpus(Lost(cards(2)), 1))
    assert (found.check, found.level, found.where) == ("gpu-lost", "error", "GPU 1")


def test_mixed_models() -> None:
    mixed = [*cards(1), Card("GPU-b", name="NVIDIA A100-SXM4-80GB", tells=HEALTHY)]
    (found,) = problems(check_gpus(Driver(mixed)))
    assert "1 × NVIDIA H200, 1 × NVIDIA A100-SXM4-80GB: different models" in found.text


def test_mig() -> None:
    split = Card("GPU-a", instances=[Card("MIG-1", tells=HEALTHY), Card("MIG-2", tells=HEALTHY)], tells=HEALTHY)
    found = check_gpus(Driver([split]), 1)
    assert not problems(found)
    assert any(one.check == "gpu-mig" and "cut into slices" in one.text for one in found)


def test_without_a_driver(tmp_path: Path) -> None:
    absent = Driver([], init=NVMLError("NVML Shared Library Not Found"))
    (found,) = check_gpus(absent, root=tmp_path)
    assert (found.check, found.level) == ("gpus", "note")
    card = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    card.mkdir(parents=True)
    (card / "class").write_text("0x030200\n")
    (card / "vendor").write_text("0x10de\n")
    (found,) = check_gpus(absent, root=tmp_path)
    assert (found.check, found.level) == ("gpu-driver", "error")
    assert found.text.startswith("1 NVIDIA GPU on the PCI bus, but NVML cannot be opened")
    (found,) = check_gpus(Driver([], init=NVMLError("Driver/library version mismatch")), root=tmp_path)
    assert found.level == "error"
    assert "reboot" in found.fix


GOOD: dict[str, Any] = {
    "torch": "2.11.0+cu128",
    "path": "/env/torch",
    "homes": ["/env"],
    "import_s": 2.0,
    "cuda_of_torch": "12.8",
    "num_gpus": 1,
    "cudnn": 91900,
    "nccl": "2.28.9",
    "backends": {"nccl": True},
    "numpy_error": None,
    "cuda_error": None,
    "libraries": {"libnccl": "/env/nvidia/nccl/lib/libnccl.so.2"},
}
PACKAGES = {"torch": {"/env": "2.11.0"}, "stormo": {"/env": "0.1.0"}}


def check_libraries(
    facts: dict[str, Any], packages: dict[str, dict[str, str]] = PACKAGES, **environ: str
) -> list[Finding]:
    machine = Machine(
        root=Path("/nowhere"),
        environ={"PATH": "/usr/bin:/bin", "CC": "cc"} | environ,
        gpus=lambda: [Gpu(name="NVIDIA H200", memory_bytes=1, capability=(9, 0))],
        torch=lambda: facts,
    )
    return list(gpus.check_libraries(machine, lambda name: packages.get(name, {})))


def test_versions_that_fit() -> None:
    found = check_libraries(GOOD)
    assert not bad(found)
    assert found[1].text == "torch 2.11.0+cu128 for CUDA 12.8, NCCL 2.28.9, cuDNN 9.19.0"


@pytest.mark.parametrize(
    ("changes", "expected", "text"),
    [
        ({"cuda_of_torch": None}, ("torch-cuda", "error"), "for CPUs only, but this machine has 1 NVIDIA GPU"),
        ({"cuda_error": "RuntimeError: no"}, ("torch-cuda", "error"), "cannot compute on the GPU: RuntimeError: no"),
        ({"cuda_error": "RuntimeError: no", "num_gpus": 0}, ("torch-cuda", "error"), "cannot compute on the GPU"),
        ({"numpy_error": "RuntimeError: Numpy is not available"}, ("numpy", "error"), "cannot use numpy"),
        ({"import_s": 45.0}, ("torch-import", "warning"), "took 45 s"),
        ({"libraries": {"libnccl": "/opt/nccl/libnccl.so.2"}}, ("library-path", "warning"), "/opt/nccl/"),
    ],
)
def test_versions_that_do_not_fit(changes: dict[str, Any], expected: tuple[str, str], text: str) -> None:
    found = check_libraries(GOOD | changes)
    assert bad(found) == [expected]
    assert any(text in one.text for one in found)


def test_a_package_that_is_installed_twice() -> None:
    found = check_libraries(GOOD, PACKAGES | {"torch": {"/env": "2.11.0", "/home/me/.local": "2.4.0"}})
    assert bad(found) == [("two-torch", "warning")]
    assert any("2.11.0 in /env and 2.4.0 in /home/me/.local" in one.text for one in found)


def test_libraries_before_torchs_own(tmp_path: Path) -> None:
    (tmp_path / "libnccl.so.2").touch()
    found = check_libraries(GOOD, LD_LIBRARY_PATH=f"/nowhere:{tmp_path}")
    assert bad(found) == [("library-path", "warning")]
    assert any(f"LD_LIBRARY_PATH has libnccl in {tmp_path}" in one.text for one in found)


def test_a_machine_without_a_compiler(tmp_path: Path) -> None:
    assert bad(check_libraries(GOOD, PATH=str(tmp_path), CC="")) == [("compiler", "note")]


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    facts = gpus.torch_facts()
    found = check_libraries(facts)
    assert bad(found) == [("torch", "error")]
    assert "torch cannot be imported: ModuleNotFoundError" in found[-1].text
    assert [one.level for one in gpus.check_backends(Machine(torch=lambda: facts))] == ["note"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"fails": "gloo"}, [("gloo", "error")]),
        ({"fails": "nccl"}, [("nccl", "error")]),
        ({"num_gpus": 0}, [("nccl", "note")]),
        ({"cuda_error": "RuntimeError: no driver"}, [("nccl", "note")]),
        ({"backends": {"nccl": False}}, [("nccl", "error")]),
    ],
)
def test_backends(changes: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    steps: list[str] = []

    def try_sum(backend: str) -> None:
        steps.append(backend)
        if backend == changes.get("fails"):
            raise RuntimeError("lo is down")

    machine = Machine(torch=lambda: GOOD | changes, progress=steps.append)
    assert bad(list(gpus.check_backends(machine, try_sum))) == expected
    assert steps in (["Gloo", "gloo"], ["Gloo", "gloo", "NCCL", "nccl"])  # what may hang is named before


def test_libraries_that_a_wheel_has_renamed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "7f00-7f01 r-xp 0 08:01 9 /env/torch.libs/libcudart-d0da41ae.so.11.0\n7f02 /env/lib/libnccl.so.2\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: lines)
    found = gpus._loaded_libraries()
    assert found["libcudart"] == "/env/torch.libs/libcudart-d0da41ae.so.11.0"
    assert found["libnccl"] == "/env/lib/libnccl.so.2"
