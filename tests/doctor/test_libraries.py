"""What the doctor says of versions and backends, from facts that a test describes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from stormo.doctor import libraries
from stormo.doctor.finding import Finding
from stormo.doctor.machine import Machine
from tests.doctor.machines import bad
from tests.doctor.test_gpus import Driver, cards

GOOD: dict[str, Any] = {
    "torch": "2.11.0+cu128",
    "path": "/env/torch",
    "homes": ["/env"],
    "import_s": 2.0,
    "cuda_of_torch": "12.8",
    "num_gpus": 1,
    "architectures": ["sm_80", "sm_90"],
    "capabilities": ["9.0"],
    "cudnn": 91900,
    "nccl": "2.28.9",
    "backends": {"gloo": True, "nccl": True},
    "numpy_error": None,
    "cuda_error": None,
    "gloo_error": None,
    "nccl_error": None,
    "has_tried_nccl": True,
    "warnings": [],
    "libraries": {"libnccl": "/env/nvidia/nccl/lib/libnccl.so.2"},
}
PINS = ["triton==3.6.0; platform_system == 'Linux'", "nvidia-nccl-cu12==2.28.9", "numpy", "ruff==1 ; extra == 'dev'"]
FITTING = {
    "torch": [("2.11.0", "/env")],
    "triton": [("3.6.0", "/env")],
    "nvidia-nccl-cu12": [("2.28.9", "/env")],
    "ruff": [("0.1", "/env")],
    "stormo": [("0.1.0", "/env")],
}


def look(
    facts: dict[str, Any], packages: libraries.Packages = FITTING, cuda: int = 12080, **environ: str
) -> list[Finding]:
    library = Driver(cards(1))
    library.nvmlSystemGetCudaDriverVersion_v2 = lambda: cuda  # type: ignore[method-assign]
    machine = Machine(
        root=Path("/nowhere"),
        environ={"PATH": "/usr/bin:/bin", "CC": "cc"} | environ,
        load=lambda _: library,
        torch=lambda: facts,
    )
    return list(libraries.check(machine, lambda: packages, lambda: PINS))


def test_what_fits_together() -> None:
    found = look(GOOD)
    assert not bad(found)
    assert [one.text for one in found[1:]] == [
        "2 packages that torch wants in one version fit",
        "torch 2.11.0+cu128 for CUDA 12.8, NCCL 2.28.9, cuDNN 9.19.0",
    ]


@pytest.mark.parametrize(
    ("changes", "cuda", "expected", "words"),
    [
        ({"cuda_of_torch": "13.0"}, 12080, ("torch-cuda", "error"), "goes up to CUDA 12.8"),
        ({}, 12040, ("torch-cuda", "note"), "the driver for 12.4"),
        ({"cuda_of_torch": None, "capabilities": []}, 12080, ("torch-cuda", "error"), "NVIDIA driver 570.86.15"),
        ({"capabilities": ["12.0"]}, 12080, ("torch-cuda", "error"), "no kernels for a GPU of compute capability 12.0"),
        ({"cuda_error": "RuntimeError: no"}, 12080, ("torch-cuda", "error"), "cannot compute on the GPU"),
        ({"numpy_error": "RuntimeError: Numpy is not available"}, 12080, ("numpy", "error"), "cannot use numpy"),
        ({"import_s": 45.0}, 12080, ("torch-import", "warning"), "took 45 s"),
        ({"libraries": {"libnccl": "/opt/nccl/libnccl.so.2"}}, 12080, ("library-path", "warning"), "/opt/nccl/"),
        ({"warnings": ["old"]}, 12080, ("torch", "note"), "it warns: old"),
    ],
)
def test_what_does_not_fit(changes: dict[str, Any], cuda: int, expected: tuple[str, str], words: str) -> None:
    found = look(GOOD | changes, cuda=cuda)
    assert bad(found) == [expected]
    assert any(words in one.text for one in found if one.level != "ok")


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ("9.0", ["sm_80", "sm_90a"], True),
        ("8.6", ["sm_80"], True),
        ("8.0", ["sm_86"], False),
        ("10.0", ["sm_90", "compute_90"], True),
        ("7.0", ["sm_75", "compute_75"], False),
    ],
)
def test_machine_code_and_ptx(capability: str, architectures: list[str], runs: bool) -> None:
    found = look(GOOD | {"capabilities": [capability], "architectures": architectures})
    assert bad(found) == ([] if runs else [("torch-cuda", "error")])


def test_packages_in_another_version_or_twice() -> None:
    found = look(GOOD, FITTING | {"triton": [("3.4.0", "/env")]})
    assert bad(found) == [("torch-pins", "warning")]
    assert found[1].fix == "install the one that torch was tested with: pip install 'triton==3.6.0'"
    found = look(GOOD, FITTING | {"torch": [("2.11.0", "/env"), ("2.4.0", "/home/me/.local")]})
    assert bad(found) == [("two-torch", "warning")]
    assert any("2.11.0 in /env and 2.4.0 in /home/me/.local" in one.text for one in found)


def test_libraries_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "libnccl.so.2").touch()
    found = look(GOOD, LD_LIBRARY_PATH=f"/nowhere:{tmp_path}", LD_PRELOAD="/opt/spy.so")
    assert bad(found) == [("library-path", "warning"), ("library-path", "note")]
    assert any(f"LD_LIBRARY_PATH has libnccl in {tmp_path}" in one.text for one in found)


def test_a_machine_without_a_compiler(tmp_path: Path) -> None:
    assert bad(look(GOOD, PATH=str(tmp_path), CC="")) == [("compiler", "note")]


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    facts = libraries.gather()
    found = look(facts)
    assert bad(found) == [("torch", "error")]
    assert "torch cannot be imported: ModuleNotFoundError" in found[-1].text
    assert [one.level for one in libraries.check_backends(Machine(torch=lambda: facts))] == ["note"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"gloo_error": "RuntimeError: lo is down"}, [("gloo", "error")]),
        ({"nccl_error": "DistBackendError: bad"}, [("nccl", "error")]),
        ({"has_tried_nccl": False, "num_gpus": 0}, [("nccl", "note")]),
        ({"backends": {"gloo": True, "nccl": False}, "has_tried_nccl": False}, [("nccl", "error")]),
    ],
)
def test_backends(changes: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert bad(list(libraries.check_backends(Machine(torch=lambda: GOOD | changes)))) == expected
