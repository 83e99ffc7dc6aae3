"""The cells of docs/python.md run as a script does, and print what the page shows."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path

from tests import forked
from tests.api.notebook import run_cells
from tests.docs.pages import DOCS, ROOT, read

TEXT = read(DOCS / "python.md")
CELLS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SHOWN = [line for block in re.findall(r"\n\n```\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]


def _check(printed: str) -> None:
    assert len(SHOWN) == 6
    pattern = r"[\s\S]*^".join(re.escape(line).replace("…", ".*") + "$" for line in SHOWN)
    assert re.search(f"^{pattern}", printed, re.MULTILINE), printed


def test_the_cells_run_as_a_script(tmp_path: Path) -> None:
    definitions = [cell for cell in CELLS if re.search(r"^(class|def) ", cell, re.MULTILINE)]
    calls = textwrap.indent("\n".join(cell for cell in CELLS if cell not in definitions), "    ")
    code = "\n".join([*definitions, 'if __name__ == "__main__":', calls])
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = forked.run([sys.executable, "page.py"], cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    _check(done.stdout)


def test_the_cells_run_in_a_notebook(tmp_path: Path) -> None:
    _check("".join(run_cells(CELLS, tmp_path)))
