"""What the checks look at: files, variables, programs and libraries of a machine, or of one that a test describes."""

from __future__ import annotations

import importlib
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stormo.system.hardware import Gpu, num_cores, visible_gpus

_NVIDIA, _AMD = "0x10de", "0x1002"
_DISPLAY = "0x03"  # the PCI class of everything that draws, computing cards with it


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """How a program ended: its exit code, None where it took too long or could not be started, and its words."""

    code: int | None
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine that is examined; every way to look at it can be replaced."""

    root: Path = Path("/")  # of /proc, /sys, /dev and /etc
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    runs_folder: Path = Path("runs")
    data_folder: Path = Path("~/.cache/stormo")
    temp_folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    load: Callable[[str], Any] = importlib.import_module  # of NVML
    gpus: Callable[[], list[Gpu]] = visible_gpus  # by the CUDA driver
    torch: Callable[[], Mapping[str, Any]] = dict  # what a process that has imported torch says
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    cores: Callable[[], int] = num_cores
    tell: Callable[[str], None] = lambda _: None  # what is looked at now, which may never answer

    def text(self, path: str) -> str | None:
        """What a small file holds; None where it is absent or for others alone."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """The one number that a file holds; None also where it holds something else."""
        try:
            return int(self.text(path) or "")
        except ValueError:
            return None

    def program(self, name: str) -> str | None:
        """Where a program is found, as a shell would."""
        return shutil.which(name, path=self.environ.get("PATH", os.defpath))

    def call(self, words: Sequence[str], limit_s: float) -> Answer:
        """Run a program to its end, for so long at most; both its outputs are its words."""
        path = self.program(words[0])
        if path is None:
            return Answer(code=None, text=f"{words[0]} is not found")
        try:
            done = subprocess.run(
                [path, *words[1:]],
                env=dict(self.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Answer(code=None, text=f"{words[0]} did not answer within {limit_s:g} s")
        except OSError as error:
            return Answer(code=None, text=f"{words[0]} cannot be started ({error.strerror})")
        return Answer(code=done.returncode, text=done.stdout.decode(errors="replace").strip())

    def num_cards(self, vendor: str = _NVIDIA) -> int:
        """The GPUs of a vendor on the PCI bus, whether a driver has them or not."""
        found = 0
        for card in self.root.glob("sys/bus/pci/devices/*"):
            kind, maker = ((card / name) for name in ("class", "vendor"))
            try:
                found += kind.read_text().startswith(_DISPLAY) and maker.read_text().strip() == vendor
            except OSError:
                continue
        return found

    def num_amd_cards(self) -> int:
        """The GPUs of AMD on the PCI bus."""
        return self.num_cards(_AMD)


def first_line(text: str) -> str:
    """The first line that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def last_line(text: str) -> str:
    """The last line that says something."""
    return first_line("\n".join(reversed(text.splitlines())))
