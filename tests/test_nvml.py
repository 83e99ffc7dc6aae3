"""GPUs by UUID as CUDA shows them, and what they tell of themselves, through a stand-in for the driver's library."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from stormo.system.nvml import Nvml, NvmlUnavailableError, open_nvml
from tests.fake_nvml import Card, FakeNvml, NVMLError

A, B, C = "GPU-aa11-1", "GPU-ab22-2", "GPU-cc33-3"


def _open(cards: list[Card]) -> Nvml:
    return open_nvml(lambda name: FakeNvml(cards) if name == "pynvml" else None)


def _split() -> list[Card]:
    """Two GPUs, the first in three MIG instances with an empty place between them."""
    names = ("MIG-1a", None, "MIG-1b", "MIG-2c")
    return [Card(A, instances=[None if name is None else Card(name) for name in names]), Card(B)]


def _shown(cards: list[Card], text: str | None) -> list[str]:
    environment = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    return [device.uuid for device in _open(cards).visible(environment)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, [A, B, C]),
        ("", []),
        ("-1", []),
        ("2,0", [C, A]),
        (" 1 , 2 ", [B, C]),
        ("0,7,1", [A]),  # up to the first that names nothing
        ("0,-1,1", [A]),
        ("NoDevFiles", []),
        ("1,1", []),
        (f"1,{B}", []),  # the same twice
        (f"{C},{A}", [C, A]),
        ("GPU-c", [C]),
        ("GPU-a", []),  # two begin so
        ("GPU-ab,GPU-aa", [B, A]),
        ("GPU-", []),
    ],
)
def test_visible_devices_are_those_cuda_shows(text: str | None, expected: list[str]) -> None:
    assert _shown([Card(A), Card(B), Card(C)], text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ["MIG-1a"]),  # CUDA shows one instance alone
        ("0", ["MIG-1a"]),
        ("1", [B]),
        (A, ["MIG-1a"]),
        ("MIG-2", ["MIG-2c"]),
        ("MIG-1", []),
        ("MIG-1b,MIG-2c", ["MIG-1b"]),
        (f"{B},MIG-1b", ["MIG-1b"]),
    ],
)
def test_split_gpus_show_one_instance(text: str | None, expected: list[str]) -> None:
    assert _shown(_split(), text) == expected


def test_instances_of_old_drivers_are_named_by_their_gpu() -> None:
    cards = [Card(A, instances=[Card(f"MIG-{A}/7/0"), Card(f"MIG-{A}/8/0")])]
    assert _shown(cards, f"MIG-{A}/8/0") == [f"MIG-{A}/8/0"]


def test_gpus_of_other_jobs_are_left_out_and_numbers_count_without_them() -> None:
    cards = [Card(A, is_hidden=True), Card(B), Card(C)]
    assert [device.uuid for device in _open(cards).devices()] == [B, C]
    assert _shown(cards, "1") == [C]
    assert _open(cards).devices()[1].index == 2  # as nvidia-smi numbers it


def test_the_environment_of_the_process_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [device.uuid for device in _open([Card(A), Card(B)]).visible()] == [B]


@pytest.mark.parametrize("uuid", [B, "ab22-2", "AB22-2", "GPU-AB22-2"])
def test_find_takes_a_uuid_as_torch_prints_it(uuid: str) -> None:
    found = _open([Card(A), Card(B)]).find(uuid)
    assert found is not None
    assert found.uuid == B


def test_find_knows_instances_and_says_none_otherwise() -> None:
    nvml = _open(_split())
    found = nvml.find("2c")
    assert found is not None
    assert (found.uuid, found.parent_uuid, found.physical_uuid) == ("MIG-2c", A, A)
    assert nvml.find("zz") is None


TELLS: dict[str, Any] = {
    "energy_mj": 1_234_567,
    "power_mw": 512_250,
    "power_limit_mw": 700_000,
    "percent": 87,
    "used": 3 * 2**30,
    "total": 140 * 2**30,
    "celsius": 61,
    "sm_mhz": 1980,
    "memory_mhz": 3201,
    "throttle_bits": 0x1 | 0x4 | 0x20,  # idle is no throttling
}
TOLD = {
    "energy_j": 1234.567,
    "power_w": 512.25,
    "power_limit_w": 700.0,
    "utilisation": 0.87,
    "memory_used_bytes": 3 * 2**30,
    "memory_total_bytes": 140 * 2**30,
    "temperature_c": 61.0,
    "sm_clock_mhz": 1980.0,
    "memory_clock_mhz": 3201.0,
    "throttled": ("power limit", "heat"),
}


@pytest.mark.parametrize("method", TOLD)
def test_a_device_tells_in_plain_units_or_says_why_not(method: str) -> None:
    telling, silent = _open([Card(A, tells=TELLS), Card(B, name="Tesla V100")]).devices()
    assert getattr(telling, method)() == TOLD[method]
    assert telling.why_not(method) == ""
    assert getattr(silent, method)() is None
    assert silent.why_not(method).startswith("Tesla V100 does not support it (")


def test_an_instance_has_its_own_memory_and_the_power_of_the_whole_gpu() -> None:
    card = Card(A, tells=TELLS, instances=[Card("MIG-1a", tells={"used": 1, "total": 2})])
    instance = _open([card]).visible({})[0]
    assert (instance.memory_used_bytes(), instance.memory_total_bytes()) == (1, 2)
    assert (instance.energy_j(), instance.power_w(), instance.throttled()) == (
        1234.567,
        512.25,
        ("power limit", "heat"),
    )
    assert instance.utilisation() is None
    assert instance.why_not("utilisation") == "a MIG instance does not support it (Not Supported)"


def test_a_value_that_comes_back_clears_the_reason() -> None:
    card = Card(A)
    device = _open([card]).devices()[0]
    assert device.power_w() is None
    card.tells["power_mw"] = 1000
    assert device.power_w() == 1.0
    assert device.why_not("power_w") == ""


def test_without_the_package_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlUnavailableError, match="nvidia-ml-py is not installed"):
        open_nvml()


def test_without_a_driver_there_is_a_reason() -> None:
    library = FakeNvml([], init=NVMLError("Shared Library Not Found"))
    with pytest.raises(NvmlUnavailableError) as caught:
        open_nvml(lambda _: library)
    assert caught.value.reason == "NVML cannot be opened (Shared Library Not Found): no NVIDIA driver answers"


def test_close_lets_go_of_the_library() -> None:
    library = FakeNvml([Card(A)])
    nvml = open_nvml(lambda _: library)
    assert library.num_open == 1
    nvml.close()
    assert library.num_open == 0
    nvml.close()  # a driver that is gone must not fail a run at its end


def test_the_real_module_has_every_function_that_is_asked_for() -> None:
    pynvml = pytest.importorskip("pynvml")
    names = [name for name in dir(FakeNvml) if name.lower().startswith("nvml")]
    assert len(names) > 15
    assert [name for name in names if not hasattr(pynvml, name)] == []
    assert hasattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons")
