# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, attr-defined"
# ruff: noqa: D103, N803
"""A Triton kernel that reads the device's clock at the start and at the end of a wait, and adds the difference."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def interval_kernel(began_and_total_ptr: tl.tensor, IS_END: tl.constexpr) -> None:
    now = globaltimer()
    if IS_END:
        total = tl.load(began_and_total_ptr + 1)
        tl.store(began_and_total_ptr + 1, total + now - tl.load(began_and_total_ptr))
    else:
        tl.store(began_and_total_ptr, now)
