"""The command line of a small training, and what its run folder says afterwards."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PYTHON = sys.executable
STORMO = str(Path(PYTHON).with_name("stormo"))
RUN_NAME = "run"
STEPS_PER_EPOCH = 16  # of two workers
ENDS_WITHIN_S = 120.0  # on a busy machine; what is promised after any rank has failed is seconds

# So slow that there is time to look at a run and to end it; the epoch of two workers takes more than a second.
SLOW = ("--task.pass-s", "0.1", "--epochs", "1000")


@dataclass(frozen=True, kw_only=True, slots=True)
class Digests:
    """What two runs that are the same have in common."""

    weights: str
    sample_order: str
    num_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Gives the words of `stormo train`; the later of two equal options wins."""

    folder: Path

    def __call__(self, *options: str) -> list[str]:
        """The whole command."""
        return [STORMO, "train", *self.arguments(*options)]

    def arguments(self, *options: str) -> list[str]:
        """What follows the verb."""
        run = ["--runs-folder", str(self.folder), "--run-name", RUN_NAME, "--timeout", "60"]
        # --deterministic changes no bit on a CPU, and torch imports its compiler for it in every worker.
        fixed = ["--epochs", "3", "--target-accuracy", "1", "--patience", "100"]
        return [str(HERE / "task.py"), *run, *fixed, *options]

    def slowly(self, pass_s: str = "0.1") -> tuple[Path, list[str]]:
        """A file, and the options of a training that takes its time for as long as that is there."""
        hold = self.folder.with_name("hold")
        hold.touch()
        return hold, ["--task.pass-s", pass_s, "--task.while-there", str(hold)]

    def first_epoch_is_saved(self) -> bool:
        """Whether the checkpoint at the end of the first epoch of two workers is there."""
        return (self.folder / RUN_NAME / "checkpoints" / f"step-{STEPS_PER_EPOCH:08d}").is_dir()

    def resume(self, *options: str) -> list[str]:
        """The whole command that goes on with the run."""
        return [STORMO, "train", "--resume", RUN_NAME, "--runs-folder", str(self.folder), *options]


def summary_of(folder: Path) -> dict[str, Any]:
    """The summary of the one run in a folder."""
    content: dict[str, Any] = json.loads((folder / RUN_NAME / "summary.json").read_text())
    return content


def digests_of(folder: Path) -> Digests:
    """What the one run in a folder came to."""
    summary = summary_of(folder)
    return Digests(
        weights=summary["weights_sha256"], sample_order=summary["sample_order_sha256"], num_steps=summary["steps"]
    )
