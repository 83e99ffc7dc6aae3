"""The tiny task with its points in a folder, which says where it reads them."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import Dataset

from stormo.config import option
from stormo.data import TensorData
from stormo.data.staging import copying
from tests.tiny_task import Tiny, TinyOptions, points


@dataclass(frozen=True, kw_only=True)
class FolderOptions(TinyOptions):
    """Those of the tiny task, and a folder."""

    data_folder: str | None = option(None, "folder with points.pt")


class InFolder(Tiny):
    """The tiny task from files."""

    name = "in-folder"
    Options: ClassVar[type[Any]] = FolderOptions

    def train_data(self) -> Dataset[Any]:
        folder = Path(self.options.data_folder)
        print(f"reads {folder}", flush=True)
        return TensorData(*torch.load(folder / "points.pt"))


if os.environ.get("STAGING_FAULT") == "term":  # while the first piece of the data is copied

    def copy(self: Any, number: int, check: Any, real: Any = copying._File.copy) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        real(self, number, check)

    copying.PIECE_BYTES = 100
    copying._File.copy = copy  # type: ignore[method-assign]


def write_points(folder: Path) -> None:
    """The data set."""
    folder.mkdir()
    torch.save(points(1001, seed=0).tensors, folder / "points.pt")
