"""The site that `make docs` builds: every link between pages leads somewhere, words and public names are found."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, read


def test_the_public_names_are_those_of_the_modules() -> None:
    rows = re.findall(r"^\| `(stormo\S*)` \|(.*?)\|", read(DOCS / "api.md"), re.MULTILINE)
    assert len(rows) > 5
    for name, cell in rows:
        module = importlib.import_module(name)
        shown = set(re.findall(r"`(.*?)`", cell))
        assert all(hasattr(module, one) for one in shown), name
        assert shown == set(getattr(module, "__all__", shown)) - {"__version__"}, name


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason="the site needs pip install 'stormo[docs]'")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", str(DOCS), str(ROOT), str(tmp_path)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "searchindex.js").read_text(encoding="utf-8")
    assert "powersgd" in index
    assert 'id="stormo.train"' in (tmp_path / "docs" / "api.html").read_text(encoding="utf-8")
    start = (tmp_path / "index.html").read_text(encoding="utf-8")
    for page in PAGES:  # each is in the side bar
        assert f'href="{page.relative_to(ROOT).with_suffix(".html")}"' in start or page.name == "README.md"
