"""The page as one HTML file: template, style, script, plotting library and data, with nothing to load from outside."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.util
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from stormo.errors import MissingPackageError
from stormo.telemetry.files import to_json

_SCRIPTS = ("page.look.js", "page.lanes.js", "page.figures.js", "page.js")
_SLOT = re.compile(r"@([a-z]+)@")


def check_plotly() -> Path:
    """The plotting library's script; an error with the extra to install where the package is missing."""
    # Found without importing the package, which takes a second.
    spec = importlib.util.find_spec("plotly")
    script = Path(spec.origin).parent / "package_data" / "plotly.min.js" if spec and spec.origin else None
    if script is None or not script.is_file():
        raise MissingPackageError("plotly", "the page of a run", "report")
    return script


def make_page(document: Mapping[str, Any], *, is_live: bool = False) -> str:
    """The whole file; a live page may ask its own server for newer data, and nobody else."""
    plotly, script = _plotly(), _script()
    parts = {
        "csp": content_policy(plotly, script, is_live=is_live),
        "title": html.escape(str(document["title"])),
        "live": "1" if is_live else "",
        "css": _part("page.css"),
        # `<` cannot appear in JSON outside of strings, where this is the same sign; so no tag can begin in the data.
        "data": json.dumps(to_json(document), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "plotly": plotly,
        "script": script,
    }
    return _SLOT.sub(lambda match: parts[match[1]], _part("page.html"))


def content_policy(*scripts: str, is_live: bool) -> str:
    """What a browser may run and load: these very scripts, pictures made in the page, and nothing from outside."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(f"'sha256-{digest}'" for digest in digests),
        "style-src": "'unsafe-inline'",  # the plotting library sets styles; none can load anything
        "img-src": "data: blob:",
        "connect-src": "'self'" if is_live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


@cache
def _part(name: str) -> str:
    return resources.files("stormo.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    """The page's own script: its files see each other, and the plotting library's names stay apart from theirs."""
    return '"use strict";\n(() => {\n' + "\n".join(map(_part, _SCRIPTS)) + "})();\n"


@cache
def _plotly() -> str:
    text = check_plotly().read_text(encoding="utf-8").replace("\r\n", "\n")  # as a browser reads it, for the digest
    return text.replace("</script", "<\\/script")
