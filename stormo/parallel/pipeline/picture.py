"""A pass of a pipeline as a picture: one row a worker, time to the right; as text and as SVG.

`F0` is the forward of micro-batch 0, `B0` its backward, `I0` and `W0` the gradients of its inputs and of its weights; a
letter behind tells the stages of one worker apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from stormo.parallel.pipeline.bubble import Span

_COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#54a24b"}
_NAMES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
_IDLE, _GOES_ON = ".", "-"


def as_text(spans: Sequence[Span], num_columns: int | None = None) -> str:
    """The picture in a monospace font; without a number of columns one column is the shortest action."""
    first, length = _extent(spans)
    num_workers, num_chunks = _sizes(spans)
    shortest = min((span.stop - span.start for span in spans if span.stop > span.start), default=1.0)
    slot = shortest if num_columns is None else length / num_columns
    columns = max(1, round(length / slot))
    labels = {span: _label(span, num_workers, num_chunks) for span in spans}
    width = max(map(len, labels.values()))
    rows = []
    for worker in range(num_workers):
        own = [span for span in spans if span.worker == worker]
        cells, before = [], None
        for column in range(columns):
            shown = _longest(own, first + column * slot, first + (column + 1) * slot)
            text = _IDLE if shown is None else _GOES_ON * width if shown is before else labels[shown]
            cells.append(text.ljust(width))
            before = shown
        rows.append(f"worker {worker:<{len(str(num_workers - 1))}} | {' '.join(cells)}".rstrip())
    return "\n".join(rows)


def as_svg(spans: Sequence[Span], *, width: int = 900, row_height: int = 26) -> str:
    """The picture as an SVG element; every bar tells its times when it is pointed at."""
    first, length = _extent(spans)
    num_workers, num_chunks = _sizes(spans)
    left = 76
    scale = (width - left) / length if length > 0 else 0.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{num_workers * row_height}" '
        'font-family="sans-serif" font-size="11">'
    ]
    for worker in range(num_workers):
        y = worker * row_height
        parts.append(f'<text x="0" y="{y + row_height / 2 + 4:g}" fill="currentColor">worker {worker}</text>')
    for span in spans:
        x, wide = left + (span.start - first) * scale, (span.stop - span.start) * scale
        y, tall = span.worker * row_height + 1, row_height - 2
        # Later stages of a worker are paler.
        opacity = 1.0 - 0.5 * (span.stage // num_workers) / num_chunks
        told = (
            f"{_NAMES[span.kind]} of micro-batch {span.micro_batch}, stage {span.stage}: "
            f"{span.start - first:.4g} to {span.stop - first:.4g}"
        )
        parts.append(
            f'<g><title>{escape(told)}</title><rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{tall}" '
            f'fill="{_COLOURS[span.kind]}" fill-opacity="{opacity:g}" stroke="white" stroke-width="0.5"/>'
        )
        label = _label(span, num_workers, num_chunks)
        if wide >= 7 * len(label):
            at = f'x="{x + wide / 2:.2f}" y="{y + tall / 2 + 4:g}"'
            parts.append(f'<text {at} text-anchor="middle" fill="white">{label}</text>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"])


def _label(span: Span, num_workers: int, num_chunks: int) -> str:
    chunk = chr(ord("a") + span.stage // num_workers % 26) if num_chunks > 1 else ""
    return f"{span.kind}{span.micro_batch}{chunk}"


def _extent(spans: Sequence[Span]) -> tuple[float, float]:
    first = min(span.start for span in spans)
    return first, max(span.stop for span in spans) - first


def _sizes(spans: Sequence[Span]) -> tuple[int, int]:
    """Workers, and stages of one worker."""
    num_workers = 1 + max(span.worker for span in spans)
    return num_workers, max(span.stage for span in spans) // num_workers + 1


def _longest(spans: Sequence[Span], start: float, stop: float) -> Span | None:
    """What fills most of an interval; None where that is waiting."""
    shares = [(min(span.stop, stop) - max(span.start, start), span) for span in spans]
    share, found = max(shares, key=lambda pair: pair[0])
    busy = sum(max(0.0, part) for part, _ in shares)
    return found if share > 0 and busy >= (stop - start) / 2 else None
