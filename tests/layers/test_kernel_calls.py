"""Calls of kernels: the short way to a compiled kernel takes the one that triton would have taken."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from stormo.layers import kernel_calls
from stormo.layers.kernel_calls import call_key, launch

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs the package triton's compiler",
)


class _Compiled:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.calls.append(("short", grid, arguments))


class _Kernel:
    """Like a triton kernel with the arguments x, count, BLOCK and KIND."""

    arg_names = ("x", "count", "BLOCK", "KIND")

    def __init__(self, is_interpreted: bool = False) -> None:
        self.calls: list[Any] = []
        self._is_interpreted = is_interpreted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*operands: Any, **settings: Any) -> Any:
            self.calls.append(("long", grid, operands, settings))
            return None if self._is_interpreted else _Compiled(self.calls)

        return run


@pytest.fixture(autouse=True)
def _nothing_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_calls, "_READY", {})


def test_a_second_call_goes_straight_to_the_compiled_kernel_with_all_arguments_in_order() -> None:
    kernel, x = _Kernel(), torch.zeros(8)
    settings = {"KIND": "sum", "num_warps": 4, "BLOCK": 64}
    for grid, count in (((7,), 5), ((3, 2), 6), ((3, 2, 1), 7)):
        launch(kernel, grid, x, count, **settings)
    assert kernel.calls == [
        ("long", (7,), (x, 5), settings),
        ("short", (3, 2, 1), (x, 6, 64, "sum")),
        ("short", (3, 2, 1), (x, 7, 64, "sum")),
    ]


def test_what_is_compiled_for_is_looked_up_anew() -> None:
    kernel, x = _Kernel(), torch.zeros(8)
    settings: dict[str, Any] = {"BLOCK": 64, "KIND": "sum", "num_warps": 4}
    launch(kernel, (1,), x, 5, **settings)
    for operands, changes in (
        ((x.double(), 5), {}),
        ((x[1:], 5), {}),  # not at a multiple of 16 bytes
        ((x, 1), {}),
        ((x, 16), {}),
        ((x, 2**31 + 1), {}),
        ((x, 5.0), {}),
        ((x, None), {}),
        ((x, 5), {"BLOCK": 32}),
        ((x, 5), {"num_warps": 8}),
    ):
        launch(kernel, (1,), *operands, **(settings | changes))
    assert [call[0] for call in kernel.calls] == ["long"] * 10
    launch(_Kernel(), (1,), x, 5, **settings)
    assert len(kernel.calls) == 10


def test_the_interpreter_is_always_asked() -> None:
    kernel = _Kernel(is_interpreted=True)
    for _ in range(2):
        launch(kernel, (1,), torch.zeros(8), 5, BLOCK=64, KIND="sum")
    assert [call[0] for call in kernel.calls] == ["long", "long"]


@pytest.fixture
def _no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import triton.compiler
    from triton.runtime import driver

    from stormo.layers.norm_kernels import apply_kernel
    from tests.layers.test_compile_ahead import _Driver

    monkeypatch.setattr(driver, "_active", _Driver())
    monkeypatch.setattr(triton.compiler, "compile", lambda source, **facts: object())
    apply_kernel.device_caches.clear()
    yield
    apply_kernel.device_caches.clear()


@needs_triton
@pytest.mark.usefixtures("_no_device")
def test_calls_with_one_key_are_one_kernel_to_triton() -> None:
    from stormo.layers.norm_kernels import apply_kernel
    from stormo.layers.norm_tiles import TILES

    vectors = torch.zeros(3, 640)
    kernels: dict[Any, set[int]] = {}
    alive = []
    for dtype, offset, num_rows, num_channels, tiles_each, momentum, dropout, bias in itertools.product(
        (torch.bfloat16, torch.float32),
        (0, 1, 8),
        (5, 16, 2**30),
        (1, 16, 33),
        (1, 3),
        (0.0, float("-inf")),
        (False, True),
        (None, 0, 1),
    ):
        x = torch.zeros(4096, dtype=dtype)[offset:]
        operands = (
            *(x, x, None if bias is None else vectors[0, bias:], x),
            *(vectors[0], vectors[1], vectors[2, offset:], vectors[2]),
            *(num_rows, num_channels, tiles_each, momentum),
            *(torch.zeros(1, dtype=torch.int64) if dropout else None, 655 if dropout else 0, 1.0),
        )
        settings = {"DROPOUT": dropout, "RESIDUAL": True, **TILES["apply"].stream}
        compiled = apply_kernel.warmup(*operands, grid=(1,), **settings)
        alive.append(compiled)  # an identity is unique among the living
        kernels.setdefault(call_key(apply_kernel, operands, settings), set()).add(id(compiled))
    assert all(len(ids) == 1 for ids in kernels.values())
    assert len(set().union(*kernels.values())) > 40
