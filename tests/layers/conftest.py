"""Triton's interpreter for the kernel tests: a process of its own, as Triton reads its mode at import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
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


@pytest.fixture
def run_interpreted() -> Callable[[str], None]:
    """Runs the tests of a file whose names begin with `test_interpreted`."""

    def run(path: str) -> None:
        options = ("-q", "-x", "-W", "error", "-p", "no:cacheprovider", "-k", "interpreted")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, path],
            env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert " passed" in done.stdout
        assert "skipped" not in done.stdout

    return run
