"""The site that `make docs` builds: README.md and docs/, ordered by the README's last list, and the public names."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx

from stormo.version import __version__

project, author, release = "stormo", "The stormo authors", __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = [".*", "build", "runs"]
default_role = "code"  # docstrings write `code` as Markdown does
smartquotes = False  # --flags
myst_heading_anchors = 3  # as on GitHub
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
html_theme = "furo"
html_title = f"stormo {release}"
html_show_sourcelink = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]


def _contents(text: str) -> str:
    """The side bar: a part for each line of the README's last list, in its order."""
    parts = re.findall(r"^- \*\*(.*?)\*\*:(.*?)(?=\n- |\n\n)", text, re.MULTILINE | re.DOTALL)
    return "".join(_toctree(re.findall(r"\]\(([^)]*\.md)\)", links), f":caption: {name}\n") for name, links in parts)


def _toctree(pages: list[str], options: str = "") -> str:
    return f"\n```{{toctree}}\n:hidden:\n{options}\n" + "".join(f"{page}\n" for page in pages) + "```\n"


def _names(text: str) -> str:
    """The docstrings of the names in the page's table."""
    rows = re.findall(r"^\| `(stormo\S*)` \|(.*?)\|", text, re.MULTILINE)
    return "".join(f"\n## {module}\n{_docstrings(module, re.findall(r'`(.*?)`', names))}" for module, names in rows)


def _docstrings(module: str, names: list[str]) -> str:
    text = f"\n```{{eval-rst}}\n.. currentmodule:: {module}\n"
    for name in names:
        is_class = inspect.isclass(getattr(importlib.import_module(module), name))
        text += f"\n.. autoclass:: {name}\n   :members:\n" if is_class else f"\n.. autofunction:: {name}\n"
    return f"{text}```\n"


def _add(app: Sphinx, page: str, source: list[str]) -> None:
    """What GitHub does not need to show."""
    if page == root_doc:
        source[0] += _contents(source[0])
    if page == "docs/api":
        source[0] += _names(source[0])
    below = re.findall(rf"\(({Path(page).name}/[\w-]+\.md)", source[0])  # docs/clusters/ below docs/clusters.md
    if below:
        source[0] += _toctree(list(dict.fromkeys(below)))


def _escape(app: Sphinx, kind: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Norms such as |w| are no substitutions."""
    lines[:] = [re.sub(r"\|(?=\w)", r"\|", line) for line in lines]


def _add_start(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        shutil.copy(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    """Connect to the build."""
    app.connect("source-read", _add)
    app.connect("autodoc-process-docstring", _escape)
    app.connect("build-finished", _add_start)
