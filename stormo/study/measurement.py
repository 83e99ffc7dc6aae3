"""What one run, or one row of a table, says about one number of workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The figures of one run after its warm-up; what was not measured is None."""

    mode: str  # "strong", "weak", or "both" where the two are the same run
    workers: int
    repeat: int  # from 1; runs of one repeat followed each other and are compared with each other
    samples_per_s: float
    units_per_s: float
    unit: str  # what the speed is counted in: images, tokens, ...
    batch: float | None = None  # samples of one optimizer step over all workers
    j_per_sample: float | None = None
    energy_reason: str = ""  # why there is no energy
    # Seconds of a worker for each sample of all workers: parts of 1 / samples_per_s.
    input_s: float | None = None  # waited for data, mean over workers
    exposed_min_s: float | None = None  # stood still for the gradients of others, the worker that did so least
    exposed_mean_s: float | None = None  # the same, mean over workers
    basis: str = ""  # what was measured: "epochs 2 to 3", "40 steps"
    time_to_target_s: float | None = None
    energy_to_target_j: float | None = None
    note: str = ""  # how it was trained, where that is not as the others

    @property
    def sample_s(self) -> float:
        """Seconds for a sample of all workers."""
        return 1.0 / self.samples_per_s
