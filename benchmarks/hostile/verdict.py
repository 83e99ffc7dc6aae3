"""What one hostile file or peer has brought about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Everything is False where stormo held."""

    name: str
    code_run: bool = False
    deleted: bool = False
    job_ended: bool = False
    traceback: bool = False
    hang: bool = False
    memory_exceeded: bool = False
    wrongly_accepted: bool = False
    detail: str = ""
