"""What a pass holds as a function of its samples, and what ways to spread a model make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Rows = Sequence[tuple[int, int, int]]  # bytes of (other, casts, gradients) after each operation


@dataclass(frozen=True, slots=True)
class Curve:
    """What is alive after each operation of a pass, at two sizes of a batch: bytes of (other, casts, gradients).

    Operations are the same at every size, and so the bytes of each are a straight line.
    """

    sizes: tuple[int, int]
    rows: tuple[Rows, Rows]
    kept: tuple[int, int]  # alive when backward begins

    def kept_at(self, size: float) -> float:
        """Activations that are kept for backward."""
        return _line(self.sizes, self.kept, size)

    @property
    def kept_per_sample(self) -> float:
        """The slope of `kept_at`."""
        return (self.kept[1] - self.kept[0]) / (self.sizes[1] - self.sizes[0])

    def peak(self, size: float, load: Load) -> float:
        """The most that a pass holds beyond what is there all the time."""
        return max(fixed + slope * size for fixed, slope in self._lines(load))

    def largest(self, room: float, load: Load) -> int:
        """The largest size whose peak is within the room; 0 where none is."""
        most = float("inf")
        for fixed, slope in self._lines(load):
            if slope > 0:
                most = min(most, (room - fixed) / slope)
            elif fixed > room:
                return 0
        return max(0, int(min(most, 2**40)))

    def _lines(self, load: Load) -> list[tuple[float, float]]:
        first, second = (self._loaded(rows, load) for rows in self.rows)
        if len(first) != len(second):  # another number of operations: the peaks alone are comparable
            first, second = [max(first)], [max(second)]
        low, high = self.sizes
        lines = []
        for one, two in zip(first, second, strict=True):
            slope = (two - one) / (high - low)
            lines.append((one - slope * low, slope))
        return lines

    def _loaded(self, rows: Rows, load: Load) -> list[float]:
        whole = max((gradients for _, _, gradients in rows), default=0) or 1
        found = []
        for other, casts, gradients in rows:
            done = gradients / whole
            held = load.gradient_bytes if load.keeps_gradients else done * load.gradient_bytes
            found.append(load.share * (other + load.cast_share * casts) + held + (1 - done) * load.falling_bytes)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a way to spread the model makes of a counted pass."""

    gradient_bytes: float = 0.0  # of this worker, when all are there
    keeps_gradients: bool = False  # they are there all the time, as under ddp
    falling_bytes: float = 0.0  # gathered weights that go as backward goes on
    cast_share: float = 1.0  # of the copies of weights in another format
    share: float = 1.0  # of the activations


def _line(sizes: tuple[int, int], values: tuple[float, float], size: float) -> float:
    slope = (values[1] - values[0]) / (sizes[1] - sizes[0])
    return values[0] + slope * (size - sizes[0])
