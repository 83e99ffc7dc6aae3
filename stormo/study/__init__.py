"""`stormo scale`: trains at several numbers of workers and says whether more of them pay, for time and for energy."""

from __future__ import annotations

from stormo.study.command import main

__all__ = ["main"]
