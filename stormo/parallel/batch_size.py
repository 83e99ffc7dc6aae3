"""`--batch-size auto`: finds the largest micro-batch that fits in memory, by doubling and then bisecting.

After every try all workers agree on whether it fitted. A try itself uses no collective, as one worker may run out of
memory in its middle, and it leaves no trace: the run that follows is the run that had the size set by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stormo.config.plan import Plan, with_passes
from stormo.config.schema import TrainConfig
from stormo.data.batches import repeat_rows
from stormo.data.generators import host_states, set_host_states
from stormo.data.loaders import Loader
from stormo.errors import SettingError, StormoError, counted
from stormo.parallel.base import Strategy
from stormo.parallel.memory import Memory, memory_of
from stormo.system.hardware import GPU_SHARE

_FIRST = 32  # samples of the first try, and of the real batch whose rows make up every try
_GAP = 1 / 8  # between what fits and what does not: closer is not worth another try
_GIB = 2**30
# What torch, CUDA and its libraries say when they get no memory, where it is no OutOfMemoryError.
_OUT_OF_MEMORY = ("out of memory", "STATUS_ALLOC_FAILED", "DefaultCPUAllocator: can't allocate memory")
# What cuDNN says when no algorithm's workspace can be had, but also when it has no algorithm at all.
_PERHAPS_OUT_OF_MEMORY = ("unable to find an engine to execute this computation", "CUDNN_STATUS_NOT_SUPPORTED")

# How a try ended; of several workers' verdicts the largest holds.
_FITS, _NOT_TRIED, _NO_MARGIN, _NO_MEMORY, _NO_STATISTICS = range(5)
_VERDICTS = {
    _NOT_TRIED: "{size} is not tried: it would take about {used:.1f} GiB, more than half of the {room:.1f} GiB "
    "that are free for each worker",
    _NO_MARGIN: f"{{size}} takes {{used:.1f}} and leaves less than {1 - GPU_SHARE:.0%} free",
    _NO_MEMORY: "{size} does not",
    _NO_STATISTICS: "batch norm can make no statistics of a single sample",
}


@dataclass(frozen=True, slots=True)
class Try:
    """A pass of so many samples, as all workers have agreed that it went; bytes are of the worker that needs most."""

    size: int
    verdict: int
    used_bytes: int
    room_bytes: int

    @property
    def fits(self) -> bool:
        """Whether every worker can take it, and keeps its margin."""
        return self.verdict == _FITS

    def __str__(self) -> str:
        return _VERDICTS[self.verdict].format(size=self.size, used=self.used_bytes / _GIB, room=self.room_bytes / _GIB)


def find_micro_batch_size(config: TrainConfig, plan: Plan, strategy: Strategy, loader: Loader) -> Plan:
    """The plan, and with it the strategy and the loader, cut into passes that fit. All workers call it."""
    before = StateSnapshot(strategy)
    # cuDNN would time its algorithms for every size, with as much memory as there is.
    autotune, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        batch = _first_batch(plan, loader)
        strategy.make_kernels()
        memory = memory_of(strategy.world, strategy.devices())
        rest_bytes = memory.peak_bytes()
        tries: list[Try] = []

        def fits(size: int) -> bool:
            last = next((one for one in reversed(tries) if one.fits), None)
            tries.append(_attempt(strategy, before, memory, batch, size, last))
            return tries[-1].fits

        found = search(plan.share, fits)
    finally:
        torch.backends.cudnn.benchmark = autotune
    before.put_back()
    if not found:
        raise _nothing_fits(plan, strategy, tries[-1])
    plan = _with_passes(config, plan, tries, memory, rest_bytes)
    loader.share = replace(loader.share, accumulate=plan.accumulate)
    strategy.set_accumulation(plan)
    return plan


def _with_passes(config: TrainConfig, plan: Plan, tries: list[Try], memory: Memory, rest_bytes: int) -> Plan:
    best = max((one for one in tries if one.fits), key=lambda one: one.size)
    above = min((one for one in tries if one.size > best.size), key=lambda one: one.size, default=None)
    used = f"{best.used_bytes / _GIB:.1f}" if best.used_bytes > 0.1 * _GIB else f"{best.used_bytes / 2**20:.0f} MiB"
    reason = f"{best.size} fits with {used} of {best.room_bytes / _GIB:.1f} GiB"
    # A captured pass keeps its memory to itself, and the short last batch and the validation need theirs beside it.
    both_bytes = 2 * best.used_bytes - rest_bytes
    no_graph = f"a captured pass beside others would take {both_bytes / _GIB:.1f} of {best.room_bytes / _GIB:.1f} GiB"
    return with_passes(
        config,
        plan,
        math.ceil(plan.share / best.size),
        reason + (f", {above}" if above else ""),
        None if memory.is_enough(both_bytes) else no_graph,
    )


def search(most: int, fits: Callable[[int], bool]) -> int:
    """The largest size up to `most` that was found to fit, 0 where 1 does not."""
    size, too_large = min(_FIRST, most), most + 1
    while not fits(size):
        if size == 1:
            return 0
        size, too_large = size // 2, size
    while size < most and too_large > most:
        larger = min(2 * size, most)
        if fits(larger):
            size = larger
        else:
            too_large = larger
    # Also done when nothing in between would make fewer passes.
    while too_large - size > max(1.0, _GAP * size) and math.ceil(most / size) > math.ceil(most / (too_large - 1)):
        middle = (size + too_large) // 2
        if fits(middle):
            size = middle
        else:
            too_large = middle
    return size


def _first_batch(plan: Plan, loader: Loader) -> Any:
    """A few samples from the beginning of the training set, as a step would get them."""
    share = loader.share
    few = min(plan.global_batch_size, _FIRST * share.num_workers)
    loader.share = replace(share, global_batch_size=few, accumulate=1)
    try:
        batches = list(loader.first_and_last())  # to the end, as a loader wants to be read
        return batches[0].data
    finally:
        loader.share, loader.wait_s = share, 0.0


def _attempt(strategy: Strategy, before: StateSnapshot, memory: Memory, batch: Any, size: int, last: Try | None) -> Try:
    """Try a size on this worker, then agree with the others."""
    used_bytes = memory.expect(size, last.size, last.used_bytes) if last and size > last.size else None
    verdict = _NOT_TRIED
    if used_bytes is None:
        verdict = _try(strategy, batch, size)
        used_bytes = memory.peak_bytes()
        if verdict == _FITS and not memory.is_enough(used_bytes):
            verdict = _NO_MARGIN
        before.put_back()
        memory.clear()  # for the next try, and before others go on that may share the device
    agreed = strategy.world.max(torch.tensor([verdict, used_bytes, -memory.room_bytes], dtype=torch.int64))
    verdict, used_bytes, room_bytes = agreed.tolist()
    return Try(size, verdict, used_bytes, -room_bytes)


def _try(strategy: Strategy, batch: Any, size: int) -> int:
    try:
        # Two batches, as the next one is there before the last one has gone.
        held = [repeat_rows(batch, size) for _ in range(2)]
        strategy.try_step(held[0])
        if strategy.world.device.type == "cuda":
            torch.cuda.synchronize(strategy.world.device)
    except (RuntimeError, MemoryError, ValueError) as error:
        # A single sample that cuDNN refuses is more likely to be wrong than too large: that shows as it is.
        if is_out_of_memory(error, in_doubt=size > 1):
            return _NO_MEMORY
        if size == 1 and isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
            return _NO_STATISTICS
        raise
    return _FITS


def is_out_of_memory(error: BaseException, in_doubt: bool = False) -> bool:
    """Whether an error says that memory was refused; `in_doubt` is the answer where it may also say something else."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = (*_OUT_OF_MEMORY, *_PERHAPS_OUT_OF_MEMORY) if in_doubt else _OUT_OF_MEMORY
    return isinstance(error, RuntimeError) and any(words in str(error) for words in signs)


def _nothing_fits(plan: Plan, strategy: Strategy, last: Try) -> StormoError:
    if plan.share == 1 and last.verdict == _NO_STATISTICS:
        return SettingError(
            f"a global batch of {plan.global_batch_size} was set for {counted(plan.layout.world_size, 'worker')}",
            f"that is one sample for each and {last}",
            "set a larger --global-batch-size, or --sync-batch-norm",
        )
    parameters = list(strategy.module.parameters())
    count, size = sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters) / _GIB
    room = f"does not fit into {last.room_bytes / _GIB:.1f} GiB"
    why = f"a pass of two samples {room} and {last}" if last.verdict == _NO_STATISTICS else f"one sample {room}"
    return StormoError(
        f"--batch-size auto was set, but {why} beside the model of {count:,} parameters ({size:.2f} GiB, and several "
        "times that with gradients and the optimizer's state); set --checkpoint-activations, --strategy fsdp (with "
        "--offload on one device), or take a smaller model, shorter samples, a 16-bit --precision, or a device with "
        "more memory."
    )


class StateSnapshot:
    """The weights, the optimizer and the random generators as they were, to be put back to the last bit.

    Copies are kept on the host, so that they take nothing from what is measured on a GPU.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        module, optimizer = strategy.module, strategy.optimizer
        self._modes = [(layer, layer.training) for layer in module.modules()]
        self._gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        self._weights = [(parameter, _copy(parameter)) for parameter in module.parameters()]
        self._buffers = [
            (layer, name, buffer, _copy(buffer))
            for layer in module.modules()
            for name, buffer in layer._buffers.items()
            if buffer is not None
        ]
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._rates = strategy.rates
        self._states = {
            owner: {key: (value, _copy(value) if isinstance(value, Tensor) else None) for key, value in state.items()}
            for owner, state in optimizer.state.items()
        }
        self._gpus = [device for device in strategy.devices() if device.type == "cuda"]
        self._random = host_states()
        self._gpu_random = [torch.cuda.get_rng_state(device) for device in self._gpus]
        optimizer.zero_grad(set_to_none=True)  # none may be added to

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo whatever was done since."""
        optimizer = self._strategy.optimizer
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for parameter, before in self._weights:
            parameter.copy_(before)
        for layer, name, buffer, before in self._buffers:
            layer._buffers[name] = buffer.copy_(before)
        optimizer.state.clear()
        for owner, state in self._states.items():
            optimizer.state[owner] = {key: _put_back(*saved) for key, saved in state.items()}
        for group, values in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(values)
        self._strategy.rates = self._rates
        for layer, mode in self._modes:
            layer.training = mode
        set_host_states(self._random)
        for device, gpu_random in zip(self._gpus, self._gpu_random, strict=True):
            torch.cuda.set_rng_state(gpu_random, device)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _put_back(value: Any, before: Tensor | None) -> Any:
    return value if before is None else value.copy_(before)
