"""Which device a worker takes, and how many cores."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from stormo.distributed.store import Store
from stormo.errors import SettingError, pluralize
from stormo.launch import RankInfo
from stormo.system.hardware import NODE_SLICES, num_cores

# Launchers that start all workers of a node from one process, in its environment.
_SHOW_ALL_THE_SAME = ("alone", "local", "torchrun")


def device_of(
    device_type: str, rank_info: RankInfo, store: Store | None = None, *, may_share: bool = False
) -> torch.device:
    """The device of a worker: its own GPU, or the CPU.

    Args:
        store: in which the workers of a node share which GPUs each of them sees.
        may_share: whether several workers may take one GPU.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    if rank_info.launcher in _SHOW_ALL_THE_SAME and NODE_SLICES in os.environ:
        return torch.device("cuda", 0)  # its slice, bound before CUDA was started
    num_visible = torch.cuda.device_count()
    if rank_info.launcher == "env" and rank_info.local_size == 1 and store is not None and not may_share:
        _require_own_gpu(rank_info, store)
    all_see_enough = rank_info.launcher in _SHOW_ALL_THE_SAME and num_visible >= rank_info.local_size
    if all_see_enough or rank_info.local_size == 1 or store is None or may_share:
        return torch.device("cuda", rank_info.local_rank % num_visible)
    # All workers of a node reach this or none: under srun, each may see other GPUs.
    signed = store.signed(f"devices/{rank_info.node_id}")
    signed.put(str(rank_info.local_rank), [device_uuid(index) for index in range(num_visible)])
    visible = signed.get_all([str(local_rank) for local_rank in range(rank_info.local_size)], store.timeout)
    return torch.device("cuda", choose_gpus(visible, rank_info.host)[rank_info.local_rank])


def _require_own_gpu(rank_info: RankInfo, store: Store) -> None:
    """Refuse two ranks on one GPU that do not know that they share a host."""
    signed = store.signed("devices")
    signed.put(str(rank_info.rank), [rank_info.host, device_uuid(0)])
    gpus = signed.get_all([str(rank) for rank in range(rank_info.world_size)], store.timeout)
    others = [rank for rank, gpu in enumerate(gpus) if rank != rank_info.rank and gpu == gpus[rank_info.rank]]
    if others:
        first, second = sorted((rank_info.rank, others[0]))
        raise SettingError(
            f"RANK={first} and RANK={second} were started on host {rank_info.host} without LOCAL_RANK",
            "both would take its first GPU",
            "set LOCAL_RANK and LOCAL_WORLD_SIZE too, or start them by torchrun",
        )


def choose_gpus(seen: Sequence[Sequence[str]], host: str) -> list[int]:
    """For every worker of a node, the index of its GPU among those it sees; no two take the same.

    srun's --gpu-bind shows each task any of the GPUs of its node.
    """
    owner: dict[str, int] = {}

    def assign(worker: int, tried: set[str]) -> bool:
        for gpu in sorted(seen[worker], key=lambda gpu: gpu in owner):  # a free one first
            if gpu in tried:
                continue
            tried.add(gpu)
            if gpu not in owner or assign(owner[gpu], tried):  # its worker may have another choice
                owner[gpu] = worker
                return True
        return False

    for worker in range(len(seen)):
        if not assign(worker, set()):
            num_gpus = len({gpu for gpus in seen for gpu in gpus})
            raise SettingError(
                f"{pluralize(len(seen), 'worker')} were started on host {host}",
                f"they see {pluralize(num_gpus, 'GPU')}, and each worker needs one",
                "ask Slurm for --gpus-per-task=1, or drop --gpu-bind, or set --backend gloo to let workers share a GPU",
            )
    chosen = {worker: gpu for gpu, worker in owner.items()}
    return [list(seen[worker]).index(chosen[worker]) for worker in range(len(seen))]


def device_uuid(index: int | None) -> str:
    """The id of a visible GPU, the same for every process of a node; each slice has its own, as NVML writes it."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.startswith("MIG-")]
    index = torch.cuda.current_device() if index is None else index
    return named[index] if index < len(named) else str(torch.cuda.get_device_properties(index).uuid)


def share_cores(rank_info: RankInfo) -> None:
    """Limit torch's threads to this worker's share of the cores, unless the user or the launcher sets them."""
    if rank_info.local_size > 1 and "OMP_NUM_THREADS" not in os.environ and num_cores() == os.cpu_count():
        torch.set_num_threads(max(1, num_cores() // rank_info.local_size))
