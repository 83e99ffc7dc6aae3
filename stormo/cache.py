"""Where stormo keeps data that it has fetched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def data_cache(environ: Mapping[str, str]) -> Path:
    """The folder, which may begin with ~: $STORMO_DATA, or stormo's in the user's cache."""
    if environ.get("STORMO_DATA"):
        return Path(environ["STORMO_DATA"])
    cache = environ.get("XDG_CACHE_HOME")
    return Path(cache) / "stormo" if cache else Path("~/.cache/stormo")
