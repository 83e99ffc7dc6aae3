"""ZeRO-3: torch's fully_shard over the axis `shard`, copies over `replicate`; a unit is gathered when it computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from stormo.distributed.parallel_dims import Grid
from stormo.errors import SettingError

_LONE_GROUPS = 4  # every unit costs the host some milliseconds a step; what is summed at once needs memory


def shard(
    model: nn.Module,
    units: Sequence[str],
    grid: Grid,
    *,
    dtype: torch.dtype | None,
    offload: bool,
    on_gpu: bool,
    merges: bool,
) -> FSDPModule:
    """Shard a model in place: its units, then what is left of it.

    Args:
        model: on any device, also on meta.
        units: paths of the modules that are gathered one at a time.
        grid: of the workers.
        dtype: in which weights are gathered and used; gradients are summed in float32 then. None: as they are.
        offload: keep what belongs to this worker in host memory.
        on_gpu: whether the workers compute on GPUs.
        merges: let neighbours be one unit, where nothing is freed between them.
    """
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise SettingError(
                f"the parameter {name} is a single number",
                "the axis shard cuts parameters by their rows",
                "give it the shape [1], or set --strategy zero1 or zero2",
            )
    both = grid.mesh.replicate > 1
    mesh = grid.devices["replicate", "shard"] if both else grid.devices["shard"]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
    host = CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()
    # A lone worker has nothing to free between forward and backward.
    frees = grid.mesh.shard > 1
    # Weights of batch norm must be of the type of its running statistics, as in one process: small units of their own.
    norms = [path for path, layer in model.named_modules() if path and _has_statistics(layer)] if dtype else []
    groups = [[path] for path in units if path not in norms]
    if merges and not (frees or both or offload):
        groups = _merged([path for (path,) in groups], _LONE_GROUPS)
    for paths in (*([path] for path in norms), *groups):
        fully_shard(
            [model.get_submodule(path) for path in paths],
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy() if paths[0] in norms else policy,
            offload_policy=host,
            reshard_after_forward=frees,
        )
    # The root is needed again at once, in backward: its own weights stay gathered in between.
    return fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=host, reshard_after_forward=False)


def _merged(paths: list[str], num_groups: int) -> list[list[str]]:
    """Neighbours together, in so many groups at most."""
    size = -(-len(paths) // num_groups)
    return [paths[start : start + size] for start in range(0, len(paths), size)] if paths else []


def _has_statistics(layer: nn.Module) -> bool:
    """Whether it is a batch norm of any kind, also stormo's fused one, with weights and running statistics."""
    has_weights = any(parameter is not None for parameter in layer._parameters.values())
    return has_weights and layer._buffers.get("running_mean") is not None
