"""`python -m benchmarks.hostile`: hostile files and peers against stormo; fails where one of them got anywhere."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from benchmarks.hostile import files, peers
from benchmarks.hostile.intruder import Verdict

_OUTCOMES = {
    "code_run": "code_run",
    "deleted": "deleted",
    "job_ended": "job_ended",
    "traceback": "tracebacks",
    "hang": "hangs",
    "memory_exceeded": "memory_exceeded",
    "wrongly_accepted": "wrongly_accepted",
}
assert set(_OUTCOMES) == {one.name for one in fields(Verdict)} - {"name", "detail"}


def main() -> int:
    """Run both halves, say what got anywhere, and count."""
    verdicts: list[Verdict] = []
    parts: dict[str, Callable[[Path], list[Verdict]]] = {"files": files.run, "peers": peers.run}
    # Under /tmp by name: other accounts must be able to walk there, which a private TMPDIR would not let them.
    with tempfile.TemporaryDirectory(prefix="stormo-hostile-", dir="/tmp") as scratch:
        Path(scratch).chmod(0o755)
        for name, run in parts.items():
            folder = Path(scratch) / name
            folder.mkdir(mode=0o755)
            began_s = time.monotonic()
            found = run(folder)
            held = sum(not outcomes(one) for one in found)
            print(f"{name}: {held} of {len(found)} cases held, in {time.monotonic() - began_s:.0f} s", flush=True)
            verdicts += found
    for verdict in verdicts:
        if what := outcomes(verdict):
            print(f"  {verdict.name}: {', '.join(what)}  {verdict.detail}")
    counts = {word: sum(getattr(one, name) for one in verdicts) for name, word in _OUTCOMES.items()}
    print(f"RESULT cases={len(verdicts)}", *(f"{word}={count}" for word, count in counts.items()))
    return 1 if any(counts.values()) or not verdicts else 0


def outcomes(verdict: Verdict) -> list[str]:
    """What a case brought about, in words; none where stormo held."""
    return [name for name in _OUTCOMES if getattr(verdict, name)]


if __name__ == "__main__":
    sys.exit(main())
