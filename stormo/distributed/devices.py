"""Which device a worker takes, and how many cores."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from stormo.distributed.store import Store
from stormo.errors import SettingError, counted
from stormo.launch import RankInfo
from stormo.system.hardware import num_cores

# Launchers that start the workers of a node from one process, in its own environment.
_SHOW_ALL_THE_SAME = ("alone", "local", "torchrun")


def device_of(
    device_type: str, place: RankInfo, store: Store | None = None, *, may_share: bool = False
) -> torch.device:
    """The device of a worker: its own GPU, or the CPU.

    Args:
        store: where the workers of a node tell one another which GPUs each of them sees.
        may_share: whether several workers may take one GPU.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    num_visible = torch.cuda.device_count()
    if place.launcher == "env" and place.local_size == 1 and store is not None and not may_share:
        _require_own_gpu(place, store)
    all_see_enough = place.launcher in _SHOW_ALL_THE_SAME and num_visible >= place.local_size
    if all_see_enough or place.local_size == 1 or store is None or may_share:
        return torch.device("cuda", place.local_rank % num_visible)
    # All workers of a node come here or none of them, since under srun what one sees does not tell what the others do.
    signed = store.signed(f"devices/{place.node_id}")
    signed.put(str(place.local_rank), _identities(num_visible))
    told = signed.get_all([str(local_rank) for local_rank in range(place.local_size)], store.timeout)
    return torch.device("cuda", choose_gpus(told, place.host)[place.local_rank])


def _require_own_gpu(place: RankInfo, store: Store) -> None:
    """Refuse two ranks that share a GPU because nobody told them that they are on one host."""
    signed = store.signed("devices")
    signed.put(str(place.rank), [place.host, *_identities(1)])
    told = signed.get_all([str(rank) for rank in range(place.world_size)], store.timeout)
    others = [rank for rank, gpu in enumerate(told) if rank != place.rank and gpu == told[place.rank]]
    if others:
        first, second = sorted((place.rank, others[0]))
        raise SettingError(
            f"RANK={first} and RANK={second} were started on host {place.host} without LOCAL_RANK",
            "both would take its first GPU",
            "set LOCAL_RANK and LOCAL_WORLD_SIZE too, or start them by torchrun",
        )


def choose_gpus(seen: Sequence[Sequence[str]], host: str) -> list[int]:
    """For every worker of a node, the index of its GPU among those it sees, so that no two take the same.

    srun's --gpu-bind shows each task some of the GPUs of its node: one of its own, those of its socket, or any others.
    """
    owner: dict[str, int] = {}

    def settle(worker: int, tried: set[str]) -> bool:
        for gpu in sorted(seen[worker], key=lambda gpu: gpu in owner):  # a free one first
            if gpu in tried:
                continue
            tried.add(gpu)
            if gpu not in owner or settle(owner[gpu], tried):  # who had it may have another choice
                owner[gpu] = worker
                return True
        return False

    for worker in range(len(seen)):
        if not settle(worker, set()):
            num_gpus = len({gpu for gpus in seen for gpu in gpus})
            raise SettingError(
                f"{counted(len(seen), 'worker')} were started on host {host}",
                f"they see {counted(num_gpus, 'GPU')}, and not each of them can have one of its own",
                "ask Slurm for --gpus-per-task=1, or drop --gpu-bind, or set --backend gloo to let workers share a GPU",
            )
    chosen = {worker: gpu for gpu, worker in owner.items()}
    return [list(seen[worker]).index(chosen[worker]) for worker in range(len(seen))]


def _identities(num_visible: int) -> list[str]:
    """The ids of the visible GPUs, the same for every process of a node; MIG parts of one GPU have ids of their own."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.startswith("MIG-")]
    if len(named) == num_visible:
        return named
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(num_visible)]


def share_cores(place: RankInfo) -> None:
    """Limit torch's threads to this worker's share of the cores, unless the user or the launcher has given it some."""
    if place.local_size > 1 and "OMP_NUM_THREADS" not in os.environ and num_cores() == os.cpu_count():
        torch.set_num_threads(max(1, num_cores() // place.local_size))
