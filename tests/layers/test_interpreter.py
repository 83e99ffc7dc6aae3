"""All kernels in Triton's interpreter: one process for all of them, as Triton reads its mode at import."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter's own process")
def test_kernels_are_right_in_the_interpreter() -> None:
    others = [path for path in sorted(HERE.glob("test_*.py")) if path != Path(__file__)]
    paths = [path for path in others if "def test_interpreted" in path.read_text(encoding="utf-8")]
    assert len(paths) >= 3
    options = ("-q", "-x", "-W", "error", "-p", "no:cacheprovider", "-k", "test_interpreted")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, paths)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE)
    assert "skipped" not in done.stdout
