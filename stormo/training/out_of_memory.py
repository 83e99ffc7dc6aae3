"""A run that asks for more memory than its device has, in a sentence that says what would need less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stormo.config.plan import Plan
from stormo.config.schema import TrainConfig
from stormo.errors import SettingError, counted
from stormo.parallel.batch_size import is_out_of_memory

_GIB = 2**30


@contextmanager
def memory_explained(config: TrainConfig, plan: Plan, device: torch.device, *, has_model: bool) -> Iterator[None]:
    """Explain it before the first step; `has_model` says whether the model is on the device by then."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        samples = counted(plan.batch_per_pass, "sample")
        text = next(iter(str(error).splitlines()), "").split(". ")[0].rstrip(".") or type(error).__name__
        raise SettingError(
            f"passes of {samples} were set" if has_model else f"the model of {config.task} was to be made",
            f"{'one' if has_model else 'it'} does not fit into {_room(device)} ({text})",
            f"set {_ways(config, plan, has_model)}; stormo predict {config.task} says before a start what fits",
        ) from error


def note_memory(config: TrainConfig, plan: Plan, error: BaseException) -> None:
    """In a run that goes on already, say the same below the error."""
    if is_out_of_memory(error):
        error.add_note(f"Out of memory: go on by --resume with {_ways(config, plan, has_model=True)}.")


def _room(device: torch.device) -> str:
    if device.type != "cuda":
        return "the memory of this host"
    properties = torch.cuda.get_device_properties(device)
    return f"the {properties.total_memory / _GIB:.1f} GiB of {properties.name}"


def _ways(config: TrainConfig, plan: Plan, has_model: bool) -> str:
    """What would need less memory, the cheapest first."""
    ways, layout, sharding = [], plan.layout, config.sharding
    if has_model and plan.batch_per_pass > 1:
        ways.append("a smaller --batch-size (with --accumulate the global batch stays)")
    if has_model and not sharding.checkpoint_activations:
        ways.append("--checkpoint-activations")
    if not layout.is_spread:
        ways.append("--strategy fsdp" + " --offload" * (layout.world_size == 1))
    elif layout.zero and not sharding.offload:
        ways.append("--offload")
    if layout.is_spread or not ways:
        ways.append("more GPUs")
    return " or ".join(ways)
