"""Devices, workers, backend and strategy of a run, from the settings and the GPUs of this node.

Pure functions, whose checks fail before any process starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stormo.config.mesh import SHARDED, Mesh, mesh_of, parse_mesh, preset_mesh
from stormo.config.schema import TrainConfig, Workers
from stormo.config.strategies import DDP, MESH, SINGLE, SPECS, StrategySpec, names
from stormo.errors import SettingError, pluralize
from stormo.system.hardware import Gpu, why_no_gpu

_PORTS = (1024, 49151)
_MAX_TIMEOUT_S = 30 * 24 * 3600
_MAX_STALENESS = 1000

DEFAULT_PORT = 29500


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """The workers that another program (torchrun, srun, mpirun) has already started."""

    launcher: str
    world_size: int
    local_size: int
    num_nodes: int
    gpus_on_node: int | None = None  # where the launcher counts them


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What is known before any process starts and before the task is loaded."""

    device_type: str  # "cpu" or "cuda"
    gpus: tuple[Gpu, ...]  # that are visible on this node, or slices of them; empty on CPUs
    backend: str
    strategy: str
    num_nodes: int
    workers_per_node: int
    devices_per_worker: int
    world_size: int
    mesh: Mesh
    zero: int  # what is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too
    shares_a_gpu: bool  # whether workers of this node are on one GPU, or slices of one, which NCCL joins by sockets
    explanation: tuple[tuple[str, str], ...]

    @property
    def gpu(self) -> Gpu | None:
        """The first one; the others are alike."""
        return self.gpus[0] if self.gpus else None

    @property
    def slices(self) -> tuple[Gpu, ...]:
        """The slices (MIG instances) of which each worker takes one; empty on whole GPUs."""
        return _slices(self.gpus)

    @property
    def shares_whole_gpus(self) -> bool:
        """Whether there are more workers than GPUs, and these are not cut into slices."""
        return self.shares_a_gpu and not self.slices

    @property
    def may_share(self) -> bool:
        """Whether workers may take one device: Gloo lets them, and NCCL where it is set up for it."""
        return self.backend == "gloo" or self.shares_whole_gpus

    @property
    def spec(self) -> StrategySpec:
        """The row of the strategy."""
        return SPECS[self.strategy]

    @property
    def is_sharded(self) -> bool:
        """Whether a worker may hold less than the whole model."""
        return self.spec.is_sharded

    @property
    def data_size(self) -> int:
        """The data-parallel size: parts into which a batch is split."""
        return math.prod(getattr(self.mesh, axis) for axis in self.spec.data_axes)

    @property
    def sharer(self) -> str:
        """Who takes one part of a batch: a worker, or a group that takes the same samples."""
        return "worker" if self.data_size == self.world_size else "group"


def resolve_layout(config: TrainConfig, gpus: Sequence[Gpu], launched: Launched | None = None) -> Layout:
    """Devices, workers, backend and strategy."""
    workers = config.workers
    _check_workers(config)
    device_type, device_reason = _device(config, gpus)
    is_one_process = _is_one_process(config)
    if launched:
        per_node, num_nodes, world_size = launched.local_size, launched.num_nodes, launched.world_size
        origin = f"started by {launched.launcher}"
        if device_type == "cuda" and per_node < len(gpus):
            origin += f", which leaves GPUs idle: {per_node} of {len(gpus)} visible ones are used on this node"
    else:
        per_node = workers.num_gpus or (len(gpus) if device_type == "cuda" else 1)
        num_nodes = workers.num_nodes
        world_size = per_node * num_nodes
        origin = "as set" if workers.num_gpus else "all that are visible" if device_type == "cuda" else "the default"
    if device_type == "cuda":
        _check_gpus(config, per_node, gpus, launched)
    devices_per_worker = 1
    if is_one_process:
        _check_data_parallel(config, device_type, num_nodes, launched)
        devices_per_worker, per_node, world_size = per_node, 1, 1
    count = per_node * devices_per_worker
    gpus = tuple(gpus) if device_type == "cuda" else ()
    slices = _slices(gpus)
    if is_one_process and slices and count > 1:
        raise SettingError(
            f"--strategy {workers.strategy} was set on {pluralize(count, 'slice')} of GPUs",
            "DataParallel is one process, and CUDA shows a process one slice",
            "set --strategy ddp, or --num-gpus 1",
        )
    is_whole_shared = not slices and _is_own(launched) and 0 < len(gpus) < count  # `_check_gpus` lets this pass
    shares_a_gpu = is_whole_shared or share_a_gpu(slices, per_node)
    backend, backend_reason = _backend(config, device_type, world_size, shares_a_gpu, num_nodes)
    if is_whole_shared:
        backend_reason = f"they share {pluralize(len(gpus), 'GPU')}, for tests, not for speed; {backend_reason}"
    strategy, mesh, zero, strategy_reason = _strategy(config, world_size, per_node, devices_per_worker, origin)
    devices = pluralize(count, "worker") if is_whole_shared else _devices(device_type, count, slices[:count])
    total = f"{world_size} = {pluralize(num_nodes, 'node')} × {devices}"
    if is_one_process:
        total = f"1 process with {pluralize(count, 'GPU')}"
    elif world_size != per_node * num_nodes:
        total = f"{world_size} on {pluralize(num_nodes, 'node')}, {per_node} of them on this one"
    return Layout(
        device_type=device_type,
        gpus=gpus,
        backend=backend,
        strategy=strategy,
        num_nodes=num_nodes,
        workers_per_node=per_node,
        devices_per_worker=devices_per_worker,
        world_size=world_size,
        mesh=mesh,
        zero=zero,
        shares_a_gpu=shares_a_gpu,
        explanation=(
            ("workers", f"{total} ({origin}; {device_reason}); {backend_reason}"),
            ("strategy", f"{strategy}: {strategy_reason}"),
        ),
    )


def share_a_gpu(slices: Sequence[Gpu], num_workers: int) -> bool:
    """Whether two workers have slices of one GPU, or may have: where a launcher binds them, each sees its own alone."""
    return bool(slices) and len({one.slice_of for one in slices[:num_workers]}) < num_workers


def _slices(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    return gpus if gpus and gpus[0].slice_of else ()


def _devices(device_type: str, count: int, slices: Sequence[Gpu]) -> str:
    if not slices:
        return pluralize(count, "GPU" if device_type == "cuda" else "CPU process")
    profiles = ", ".join(sorted({one.profile for one in slices}))
    num_gpus = len({one.slice_of for one in slices})
    of = f" of {pluralize(num_gpus, 'GPU')}" if len(slices) == count else ""  # else each worker sees its own alone
    return f"{pluralize(count, 'slice')} ({profiles}){of}"


def _check_workers(config: TrainConfig) -> None:
    workers = config.workers
    at_least("--num-gpus", workers.num_gpus, 1)
    at_least("--num-nodes", workers.num_nodes, 1)
    at_least("--max-restarts", workers.max_restarts, 0)
    if not 0 <= workers.node_id < workers.num_nodes:
        raise SettingError(
            f"--node-id {workers.node_id} was set with --num-nodes {workers.num_nodes}",
            f"the nodes are counted from 0 to {workers.num_nodes - 1}",
            f"set --node-id to a number from 0 to {workers.num_nodes - 1}"
            if workers.num_nodes > 1
            else f"set --num-nodes {workers.node_id + 1} or more, or leave --node-id out",
        )
    port = workers.master_port
    if port is not None and not _PORTS[0] <= port <= _PORTS[1]:
        raise SettingError(
            f"--master-port {port} was set", f"it lies outside {_PORTS[0]} to {_PORTS[1]}", "set a port in that range"
        )
    check_timeout("--timeout", workers.timeout)


def check_timeout(flag: str, seconds: float) -> None:
    """Refuse a time limit that no timer takes, or in which no worker can start."""
    if not 1 <= seconds <= _MAX_TIMEOUT_S:
        raise SettingError(
            f"{flag} {seconds:.15g} was set",
            f"it must lie between 1 and {_MAX_TIMEOUT_S} seconds (30 days)",
            f"set {flag} 600",
        )


def at_least(flag: str, value: float | None, least: float) -> None:
    """Refuse a setting below its minimum."""
    if value is not None and value < least:
        raise SettingError(
            f"{flag} {value:g} was set", f"it must be at least {least:g}", f"set {flag} {least:g} or more"
        )


def _device(config: TrainConfig, gpus: Sequence[Gpu]) -> tuple[str, str]:
    asked = config.workers.device
    if asked == "cuda" and not gpus:
        raise SettingError(
            "--device cuda was set",
            f"no GPU is visible to this process{why_no_gpu()}",
            "set --device cpu, or check nvidia-smi",
        )
    if asked == "cpu":
        return "cpu", "--device cpu"
    if gpus:
        names = sorted({gpu.name for gpu in gpus})
        return "cuda", f"{len(gpus)} × {names[0]} visible" if len(names) == 1 else f"{len(gpus)} GPUs visible"
    return "cpu", f"no GPU is visible{why_no_gpu()}"


def _check_gpus(config: TrainConfig, per_node: int, gpus: Sequence[Gpu], launched: Launched | None) -> None:
    num_visible, kind = len(gpus), "slice" if gpus[0].slice_of else "GPU"
    if launched is not None and launched.gpus_on_node is not None:
        num_visible = max(num_visible, launched.gpus_on_node)  # srun --gpu-bind shows each rank its own GPU only
    bound_one_each = launched is not None and launched.gpus_on_node is None and num_visible == 1
    if per_node > num_visible and not bound_one_each and not _may_share(config, launched):
        raise SettingError(
            f"{pluralize(per_node, 'worker')} {'was' if per_node == 1 else 'were'} asked for on this node",
            f"it has {pluralize(num_visible, kind)} and each worker needs its own",
            (
                f"start srun with --ntasks-per-node {num_visible}, or ask for more --gpus-per-node"
                if launched is not None and launched.launcher == "slurm"
                else f"set --num-gpus {num_visible}"
            )
            + _or_share(config, launched, kind),
        )


def _may_share(config: TrainConfig, launched: Launched | None) -> bool:
    """Whether workers may share GPUs: only if asked, and over NCCL only where stormo starts them."""
    return not _is_one_process(config) and config.workers.backend in ("gloo", _sharing_backend(launched))


def _or_share(config: TrainConfig, launched: Launched | None, kind: str) -> str:
    if _is_one_process(config):
        return f", or --strategy {DDP}"
    return f", or --device cpu, or --backend {_sharing_backend(launched)} to let workers share a {kind}"


def _is_one_process(config: TrainConfig) -> bool:
    return config.workers.strategy in names(lambda row: row.is_one_process)


def _sharing_backend(launched: Launched | None) -> str:
    return "nccl" if _is_own(launched) else "gloo"


def _is_own(launched: Launched | None) -> bool:
    """Whether stormo itself starts the workers, and so sets the variables of each."""
    return launched is None or launched.launcher == "local"


def _check_data_parallel(config: TrainConfig, device_type: str, num_nodes: int, launched: Launched | None) -> None:
    asked = f"--strategy {config.workers.strategy}"
    if config.speed.sync_batch_norm:
        raise SettingError(
            f"{asked} was set with --sync-batch-norm",
            "DataParallel's threads cannot exchange statistics",
            "set --strategy ddp",
        )
    if device_type == "cpu":
        raise SettingError(
            f"{asked} was set", "DataParallel needs GPUs and the workers run on CPUs", "set --strategy ddp"
        )
    if num_nodes > 1 or (launched is not None and launched.world_size > 1):
        raise SettingError(
            f"{asked} was set for several processes",
            "DataParallel is one process with the GPUs of one node",
            "set --strategy ddp, or start one process",
        )


def _backend(
    config: TrainConfig, device_type: str, world_size: int, shares_a_gpu: bool, num_nodes: int
) -> tuple[str, str]:
    asked = config.workers.backend
    if asked == "nccl" and device_type == "cpu":
        raise SettingError(
            "--backend nccl was set", "NCCL moves GPU memory and the workers run on CPUs", "set --backend gloo"
        )
    backend = asked if asked != "auto" else "nccl" if device_type == "cuda" else "gloo"
    if world_size == 1:
        return backend, "no communication needed"
    if backend == "nccl" and shares_a_gpu:
        sockets = "loopback sockets" if num_nodes == 1 else "sockets"
        reason = "workers on one GPU have no direct path, so their links are those of a slow network, 1 to 4 GB/s"
        return backend, f"nccl over {sockets}: {reason}"
    return backend, f"{backend} {'as set' if asked != 'auto' else 'for GPUs' if backend == 'nccl' else 'for CPUs'}"


def _strategy(
    config: TrainConfig, world_size: int, per_node: int, devices_per_worker: int, origin: str
) -> tuple[str, Mesh, int, str]:
    """The strategy, its mesh, its ZeRO stage, and why."""
    workers = config.workers
    if workers.mesh is not None:
        return _by_mesh(config, workers.mesh, world_size, origin)
    if workers.zero is not None:
        raise SettingError(
            f"--zero {workers.zero} was set without --mesh",
            "it is the ZeRO stage of a mesh",
            "set --strategy zero1, zero2 or fsdp, or --mesh shard=…",
        )
    spec = SPECS.get(workers.strategy, SPECS[SINGLE if world_size == 1 else DDP])  # auto has no row
    if spec.axis is not None:
        if world_size < spec.least_workers and not spec.replicates_nodes:  # preset_mesh checks those
            raise SettingError(
                f"--strategy {workers.strategy} was set",
                f"it needs several workers and there is one ({origin})",
                "set --num-gpus 2 or more, or --strategy single",
            )
        mesh = preset_mesh(spec, world_size, per_node)
        return spec.name, mesh, spec.zero, f"{spec.meaning}: {_lengths(mesh)}"
    if "servers" in spec.options:
        _check_servers(workers)
        if world_size == 1 and config.resumed is not None and not workers.staleness:
            return SINGLE, Mesh(), 0, "resumed on one worker, which needs no server"
        return spec.name, Mesh(replicate=world_size), 0, _server_reason(config, world_size, origin)
    reason = _plain_reason(config, spec, world_size, devices_per_worker)
    return spec.name, Mesh(replicate=world_size), 0, reason


def _lengths(mesh: Mesh) -> str:
    return str(mesh).replace(",", " × ")


def _by_mesh(config: TrainConfig, text: str, world_size: int, origin: str) -> tuple[str, Mesh, int, str]:
    workers = config.workers
    if workers.strategy != "auto":
        raise SettingError(
            f"--strategy {workers.strategy} was set with --mesh {text}",
            "the axes of the mesh are the strategy",
            "leave one of them out; --zero 1, 2 or 3 sets the ZeRO stage",
        )
    axes = parse_mesh(text)
    mesh = mesh_of(axes, text, world_size, origin)
    if workers.zero is not None and (workers.zero not in (1, 2, 3) or "shard" not in axes):
        why = "the mesh has no axis shard" if workers.zero in (1, 2, 3) else "the ZeRO stages are 1, 2 and 3"
        instead = "set --zero 1, 2 or 3 and an axis shard, or leave it out"
        raise SettingError(f"--zero {workers.zero} was set with --mesh {text}", why, instead)
    if set(axes) == {"replicate"}:
        return SINGLE if world_size == 1 else DDP, mesh, 0, f"replicas of the model: {_lengths(mesh)}"
    zero = (workers.zero or 3) if "shard" in axes else 0
    reason = f"{_lengths(mesh)}, as set"
    return MESH, mesh, zero, reason + (f"; sharded: {SHARDED[zero]}" if zero else "")


def _check_servers(workers: Workers) -> None:
    at_least("--servers", workers.servers, 1)
    at_least("--staleness", workers.staleness, 0)
    if workers.staleness > _MAX_STALENESS:
        raise SettingError(
            f"--staleness {workers.staleness} was set",
            "a stop signal would take effect that many steps late",
            f"set --staleness {_MAX_STALENESS} or less",
        )


def _server_reason(config: TrainConfig, world_size: int, origin: str) -> str:
    servers, staleness = config.workers.servers, config.workers.staleness
    if world_size == 1:
        raise SettingError(
            f"--strategy {config.workers.strategy} was set",
            f"it needs several workers and there is one ({origin})",
            f"set --num-gpus 2 or more, or --{'strategy single' if config.resumed is None else 'staleness 0'}",
        )
    if servers > world_size:
        raise SettingError(
            f"--servers {servers} was set",
            f"servers are workers too and there are {world_size} ({origin})",
            f"set --servers {world_size} or fewer, or start more workers",
        )
    which = "one of them, which steps" if servers == 1 else f"{servers} of them, which step a shard of the weights each"
    pace = f"at most {pluralize(staleness, 'step')} ahead of the slowest" if staleness else "synchronous"
    return f"{world_size} workers send their gradients to {which}; {pace}"


def _plain_reason(config: TrainConfig, spec: StrategySpec, world_size: int, devices_per_worker: int) -> str:
    is_asked = config.workers.strategy == spec.name
    if spec.name == SINGLE:
        if world_size > 1:
            raise SettingError(
                f"--strategy {spec.name} was set with {world_size} workers",
                f"{spec.name} trains on one device",
                f"set --strategy {DDP}, or --num-gpus 1 --num-nodes 1",
            )
        return "one worker, nothing to average"
    if spec.is_one_process:
        return f"{spec.meaning} over {pluralize(devices_per_worker, 'GPU')}, as set; {DDP} is faster"
    if spec.name != DDP:
        return spec.meaning
    if is_asked:
        return "as set" if world_size > 1 else "as set; with one worker there is nothing to average"
    return f"the model is copied to {world_size} workers, their gradients are averaged during backward"
