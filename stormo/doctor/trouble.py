"""How long the phases of a job's measurements may take, and the error that ends them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stormo.doctor.finding import Finding
from stormo.doctor.naming import sentence
from stormo.errors import StormoError


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long each part may take; what goes well takes a fraction of it."""

    arrival_s: float
    reach_s: float = 5.0
    joining_s: float = 60.0
    device_s: float = 30.0
    exchange_s: float = 10.0
    one_measurement_s: float = 0.15
    all_rounds_s: float = 3.0
    whole_s: float = math.inf


class TroubleError(StormoError):
    """What was found keeps the job from running well; the first error in one sentence.

    Args:
        is_hang: whether some workers are stuck, and have to be ended.
    """

    def __init__(self, findings: Sequence[Finding], *, is_hang: bool = False) -> None:
        self.findings, self.is_hang = list(findings), is_hang
        errors = [finding for finding in findings if finding.level == "error"]
        more = f" ({len(errors) - 1} more of {len(errors)} errors: stormo doctor lists them)" if len(errors) > 1 else ""
        super().__init__(f"preflight: {sentence(errors[0])}{more}.")
