"""Gives each worker its own slice (MIG instance) of a GPU, and lets NCCL join workers on one GPU."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence

from stormo.config.layout import share_a_gpu
from stormo.errors import SettingError, pluralize
from stormo.launch.rank_info import RankInfo, host_name
from stormo.system.hardware import NODE_SLICES, Gpu, cuda_has_started, visible_slices


def bind(environ: MutableMapping[str, str], slices: Sequence[Gpu], local_rank: int) -> None:
    """Show one worker its own slice alone; where there are fewer slices than workers (Gloo), they take turns."""
    environ["CUDA_VISIBLE_DEVICES"] = slices[local_rank % len(slices)].uuid
    environ[NODE_SLICES] = ",".join(one.uuid for one in slices)


def join_by_sockets(environ: MutableMapping[str, str], *, local_rank: int, all_on_this_host: bool) -> None:
    """Let NCCL connect workers on one GPU, which it refuses on one host: each is a host to it, reached by sockets."""
    environ.setdefault("NCCL_HOSTID", f"{host_name()}-{local_rank}")
    environ.setdefault("NCCL_IB_DISABLE", "1")
    if all_on_this_host:
        environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def take_slice(info: RankInfo | None, device: str) -> None:
    """Take this worker's slice where another launcher started it; call it before anything starts CUDA."""
    if info is None or info.launcher in ("local", "alone") or info.local_size == 1 or device == "cpu":
        return
    slices = [] if NODE_SLICES in os.environ else visible_slices()
    if not slices:
        return
    if share_a_gpu(slices, info.local_size):
        join_by_sockets(os.environ, local_rank=info.local_rank, all_on_this_host=info.all_on_this_host)
    if len(slices) == 1:  # bound by its launcher
        return
    if cuda_has_started():
        raise SettingError(
            f"CUDA was started before this worker took one of the {pluralize(len(slices), 'slice')} of its node",
            "it shows every worker the first of them from then on",
            "use torch.cuda only after stormo.World(), and in a task not while it is imported; or let stormo run or "
            "stormo train start the workers",
        )
    bind(os.environ, slices, info.local_rank)
