"""What became of one case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Outcome:
    """One task or script on several worker counts, compared with one process in float64.

    `equal`: the same weights to rounding on all of them. `refused`: every start whose result would have differed ended
    with exit code 2 and a sentence that names the remedy. `silent`: a different result, and no word about it.
    """

    name: str
    verdict: Literal["equal", "refused", "silent"]
    detail: str
