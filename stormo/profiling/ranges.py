"""Named ranges of a step, for torch's profiler or Nsight (NVTX).

The kind is global to the process. While nothing records, a range is one shared object that does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

from stormo.errors import SettingError

_OFF: AbstractContextManager[Any] = nullcontext()


_KINDS: dict[str, Callable[[str], AbstractContextManager[Any]] | None] = {
    "off": None,
    "profiler": record_function,
    "nvtx": torch.cuda.nvtx.range,
}
_kind = "off"
_make = _KINDS[_kind]


def range_of(name: str) -> AbstractContextManager[Any]:
    """A context with this name; both ends must be in one thread."""
    return _OFF if _make is None else _make(name)


def record_ranges(kind: str) -> str:
    """Set the kind of ranges (off, profiler, nvtx); return the kind before."""
    global _kind, _make
    before, _kind, _make = _kind, kind, _KINDS[kind]
    return before


def record_for_nsight(is_asked: bool, environ: Mapping[str, str] | None = None) -> None:
    """Turn NVTX ranges on if the user asks for them or the process runs under Nsight Systems."""
    is_watched = "NSYS_PROFILING_SESSION_ID" in (os.environ if environ is None else environ)
    if is_asked and not has_nvtx():
        raise SettingError(
            "--profile nvtx was set",
            f"torch {torch.__version__} was built without CUDA, of which NVTX is a part",
            "install a torch with CUDA, or name steps to record with torch's profiler, as in --profile 10:20",
        )
    if is_asked or (is_watched and has_nvtx()):
        record_ranges("nvtx")


def has_nvtx() -> bool:
    """True where this torch has NVTX."""
    return bool(torch.version.cuda)
