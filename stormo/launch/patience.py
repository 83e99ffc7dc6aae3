"""How long the agent of a node waits for what."""

from __future__ import annotations

from dataclasses import dataclass, field

from stormo.launch.control import Timing
from stormo.launch.verdict import Settling


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long the agent waits for what."""

    silent_warning_s: float = 15.0  # without a sign of life from a worker, until a warning
    stop_s: float = 30.0  # for workers to end after SIGTERM
    interrupted_s: float | None = None  # for workers to end after Ctrl-C; None for those that first save their work
    hold_s: float = 0.2  # lines on stderr, so that the cause of a failure comes before its consequences
    leftover_s: float = 1.0  # for pipes to end after their worker has
    # For a worker to speak, or the timeout if that is longer: importing torch from a busy file system is no failure.
    # None for a script, which does other things before.
    first_sign_s: float | None = 60.0
    settling: Settling = field(default_factory=Settling)
    timing: Timing = field(default_factory=Timing)

    @property
    def is_of_script(self) -> bool:
        """Whether the workers are a user's own script, whose work is its own."""
        return self.first_sign_s is None
