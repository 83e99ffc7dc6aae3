"""A probe whose figures are made up: `python -m tests.distributed.fake_probe FD FOLDER RANK FAULT`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from stormo.distributed.nccl_probe import SMALL_BYTES, Exchange, serve

BUCKET_MS = {"1": 10.0, "2": 10.4, "4": 13.0, "8": 14.0}  # by the number of channels
DEFAULT_MS = 14.5


def main() -> None:
    descriptor, folder, rank, fault = sys.argv[1:]

    def measure(order: Mapping[str, Any], exchange: Exchange) -> dict[str, Any]:
        ids = exchange(lambda: [f"made by rank {rank} in process {os.getpid()}"])
        channels = os.environ.get("NCCL_MAX_NCHANNELS", "default")
        with (Path(folder) / f"rank-{rank}").open("a", encoding="utf-8") as file:
            print(order["number"], channels, *ids, file=file)
        if fault == "crash":
            os.abort()
        if fault == "hang":
            time.sleep(3600)
        if fault == "error":
            raise OSError("ncclAllReduce gave error 3")
        if fault == "gone":
            os.kill(os.getppid(), 9)
        each_s = (BUCKET_MS.get(channels, DEFAULT_MS) + int(rank) / 10) / 1e3 / (25 << 20)
        found = {"seconds": {str(size): 2e-4 if size in SMALL_BYTES else size * each_s for size in order["sizes"]}}
        if order["tree"]:
            found["tree"] = dict.fromkeys(map(str, SMALL_BYTES), 1e-4)
        return found

    serve(Connection(int(descriptor)), measure)


if __name__ == "__main__":
    main()
