"""Triton's interpreter for the kernel tests, which run in a process of their own; see test_interpreter.py."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _interpreter_takes_new_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy 2.4 no longer makes an int of an array of one element, which Triton 3.6's interpreter asks of it."""
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
