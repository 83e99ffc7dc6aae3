"""What the page is made of: panels with charts and tables, as plain data that knows nothing of HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stormo.report.series import Series


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure; without a line it says why."""

    id: str
    title: str
    y_title: str
    series: Sequence[Series] = ()
    all_series: Sequence[Series] = ()  # where fewer are drawn: what the CSV files hold
    from_zero: bool = False
    top: float | None = None  # where the axis ends, such as 100 %
    why_empty: str = ""
    note: str = ""

    @property
    def whole(self) -> Sequence[Series]:
        """Every line, drawn or not."""
        return self.all_series or self.series


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Bars of parts that sum to a whole, one bar a run."""

    id: str
    title: str
    x_title: str
    bars: Sequence[str]
    parts: Sequence[tuple[str, Sequence[float]]]  # name, one value a bar


class Bar(NamedTuple):
    """One stretch of time in a row."""

    row: int
    start: float
    length: float
    label: str
    words: str
    shade: int  # 0 is the full colour, above that paler


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """What went on from when to when: one row a worker, one colour a kind."""

    id: str
    title: str
    x_title: str
    rows: Sequence[str]
    kinds: Sequence[tuple[str, int, Sequence[Bar]]]  # name, colour, what is drawn of it
    records: Sequence[Sequence[str | float]]  # what the CSV files hold: a head, then everything
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text in rows; the columns from `first_figure` on are figures."""

    id: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    first_figure: int = 99
    marked: Sequence[int] = ()  # rows that differ between the runs
    is_code: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One section of the page."""

    id: str
    title: str
    about: str = ""
    charts: Sequence[Chart] = ()
    stacks: Sequence[Stack] = ()
    lanes: Sequence[Lanes] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    why_empty: str = ""
