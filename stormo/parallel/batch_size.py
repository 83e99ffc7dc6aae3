"""`--batch-size auto`: finds the largest micro-batch that fits in memory, by doubling and then bisecting.

After every try all workers agree on whether it fitted. A try uses no collective, as one worker may run out of memory
in it, and has no side effects: the run is that with this size set by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stormo.config.plan import Plan, with_micro_batches
from stormo.config.schema import TrainConfig
from stormo.data.batches import repeat_rows
from stormo.data.generators import host_states, set_host_states
from stormo.data.loaders import Loader
from stormo.errors import SettingError, StormoError, pluralize
from stormo.launch.torch_errors import is_out_of_memory, is_single_value_per_channel
from stormo.parallel.base import Strategy, no_cudnn_benchmark
from stormo.parallel.memory import Memory, memory_of
from stormo.system.hardware import GPU_SHARE

_FIRST = 32  # samples of the first try, and of the batch whose rows are repeated in every try
_GAP = 1 / 8  # between what fits and what does not, at which the search ends
_GIB = 2**30

# How a try ended; the largest of all workers' outcomes holds.
_FITS, _NOT_TRIED, _NO_MARGIN, _NO_MEMORY, _NO_STATISTICS = range(5)
_OUTCOMES = {
    _NOT_TRIED: "{size} is not tried: it would take about {used:.1f} GiB, more than half of the {room:.1f} GiB "
    "that are free for each worker",
    _NO_MARGIN: f"{{size}} takes {{used:.1f}} and leaves less than {1 - GPU_SHARE:.0%} free",
    _NO_MEMORY: "{size} does not",
    _NO_STATISTICS: "batch norm can make no statistics of a single sample",
}


@dataclass(frozen=True, slots=True)
class Try:
    """A micro-batch size and its outcome over all workers; bytes are of the worker that needs most."""

    size: int
    outcome: int
    used_bytes: int
    room_bytes: int

    @property
    def fits(self) -> bool:
        """Whether it fits on every worker with a margin."""
        return self.outcome == _FITS

    def __str__(self) -> str:
        return _OUTCOMES[self.outcome].format(size=self.size, used=self.used_bytes / _GIB, room=self.room_bytes / _GIB)


def find_micro_batch_size(config: TrainConfig, plan: Plan, strategy: Strategy, loader: Loader) -> Plan:
    """The plan with micro-batches that fit, also set in strategy and loader. All workers call it."""
    before = StateSnapshot(strategy)
    # cuDNN would time its algorithms for every size, with all free memory.
    with no_cudnn_benchmark(), _separate_cudnn_cache(plan.precision):
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
    before.restore()
    if not found:
        raise _nothing_fits(plan, strategy, tries[-1])
    plan = _with_micro_batches(config, plan, tries, memory, rest_bytes)
    loader.share = replace(loader.share, accumulate=plan.accumulate)
    strategy.set_accumulation(plan)
    return plan


@contextmanager
def _separate_cudnn_cache(precision: str) -> Iterator[None]:
    """Keep cuDNN's choices apart from the training's, which would find them and time nothing (--autotune).

    torch keeps one for each shape and setting of TF32, which 16-bit convolutions ignore.
    """
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = conv.fp32_precision
    if precision in ("bf16", "fp16"):
        conv.fp32_precision = "ieee"  # the training sets tf32
    try:
        yield
    finally:
        conv.fp32_precision = before


def _with_micro_batches(config: TrainConfig, plan: Plan, tries: list[Try], memory: Memory, rest_bytes: int) -> Plan:
    best = max((one for one in tries if one.fits), key=lambda one: one.size)
    above = min((one for one in tries if one.size > best.size), key=lambda one: one.size, default=None)
    used = f"{best.used_bytes / _GIB:.1f}" if best.used_bytes > 0.1 * _GIB else f"{best.used_bytes / 2**20:.0f} MiB"
    reason = f"{best.size} fits with {used} of {best.room_bytes / _GIB:.1f} GiB"
    # A captured graph shares no memory with the short last batch and the validation.
    both_bytes = 2 * best.used_bytes - rest_bytes
    no_graph = (
        f"a captured micro-batch beside others would take {both_bytes / _GIB:.1f} of {best.room_bytes / _GIB:.1f} GiB"
    )
    return with_micro_batches(
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
    # It also ends if nothing in between would make fewer micro-batches.
    while too_large - size > max(1.0, _GAP * size) and math.ceil(most / size) > math.ceil(most / (too_large - 1)):
        middle = (size + too_large) // 2
        if fits(middle):
            size = middle
        else:
            too_large = middle
    return size


def _first_batch(plan: Plan, loader: Loader) -> Any:
    """A few samples from the start of the training set, as in a step."""
    share = loader.share
    few = min(plan.global_batch_size, _FIRST * share.num_workers)
    loader.share = replace(share, global_batch_size=few, accumulate=1)
    try:
        batches = list(loader.first_and_last())  # loaders are iterated to the end
        return batches[0].data
    finally:
        loader.share, loader.wait_s = share, 0.0


def _attempt(strategy: Strategy, before: StateSnapshot, memory: Memory, batch: Any, size: int, last: Try | None) -> Try:
    """Try a size on this worker, then agree with the others on the outcome."""
    used_bytes = memory.expect(size, last.size, last.used_bytes) if last and size > last.size else None
    outcome = _NOT_TRIED
    if used_bytes is None:
        outcome = _try(strategy, batch, size)
        used_bytes = memory.peak_bytes()
        if outcome == _FITS and not memory.is_enough(used_bytes):
            outcome = _NO_MARGIN
        before.restore()
        memory.clear()  # before others that may share the device continue
    agreed = strategy.world.max(torch.tensor([outcome, used_bytes, -memory.room_bytes], dtype=torch.int64))
    outcome, used_bytes, room_bytes = agreed.tolist()
    return Try(size, outcome, used_bytes, -room_bytes)


def _try(strategy: Strategy, batch: Any, size: int) -> int:
    try:
        # Two batches: the next one is loaded before the last one is freed.
        batches = [repeat_rows(batch, size) for _ in range(2)]
        strategy.try_step(batches[0])
        if strategy.world.device.type == "cuda":
            torch.cuda.synchronize(strategy.world.device)
    except (RuntimeError, MemoryError, ValueError) as error:
        # A single sample that cuDNN refuses is more likely wrong than too large.
        if is_out_of_memory(error, in_doubt=size > 1):
            return _NO_MEMORY
        if size == 1 and is_single_value_per_channel(error):
            return _NO_STATISTICS
        raise
    return _FITS


def _nothing_fits(plan: Plan, strategy: Strategy, last: Try) -> StormoError:
    if plan.share == 1 and last.outcome == _NO_STATISTICS:
        return SettingError(
            f"a global batch of {plan.global_batch_size} was set for {pluralize(plan.layout.world_size, 'worker')}",
            f"that is one sample for each and {last}",
            "set a larger --global-batch-size, or --sync-batch-norm",
        )
    parameters = list(strategy.module.parameters())
    count, size = sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters) / _GIB
    room = f"does not fit into {last.room_bytes / _GIB:.1f} GiB"
    why = f"a micro-batch of two samples {room} and {last}" if last.outcome == _NO_STATISTICS else f"one sample {room}"
    return StormoError(
        f"--batch-size auto was set, but {why} beside the model of {count:,} parameters ({size:.2f} GiB, and several "
        "times that with gradients and the optimizer's state); set --checkpoint-activations, --strategy fsdp (with "
        "--offload on one device), or take a smaller model, shorter samples, a 16-bit --precision, or a device with "
        "more memory."
    )


class StateSnapshot:
    """A copy of weights, optimizer state and random state, on the host, so that it does not change what is measured."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        module, optimizer = strategy.module, strategy.optimizer
        self._modes = [(layer, layer.training) for layer in module.modules()]
        self._gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        self._weights = [(parameter, _copy(parameter)) for parameter in module.parameters()]
        self._buffers = [
            (layer, name, buffer, _copy(buffer))
            for layer in module.modules()
            for name, buffer in layer.named_buffers(recurse=False, remove_duplicate=False)
        ]
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._learning_rates = strategy.learning_rates
        self._has_average = strategy.average is not None and strategy.average.has_started
        self._states = {
            owner: {key: (value, _copy(value) if isinstance(value, Tensor) else None) for key, value in state.items()}
            for owner, state in optimizer.state.items()
        }
        self._gpus = [device for device in strategy.devices() if device.type == "cuda"]
        self._random = host_states()
        self._gpu_random = [torch.cuda.get_rng_state(device) for device in self._gpus]
        optimizer.zero_grad(set_to_none=True)  # so that nothing is added to them

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all of it, to the last bit."""
        optimizer = self._strategy.optimizer
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for parameter, before in self._weights:
            parameter.copy_(before)
        for layer, name, buffer, before in self._buffers:
            setattr(layer, name, buffer.copy_(before))
        optimizer.state.clear()
        for owner, state in self._states.items():
            optimizer.state[owner] = {
                key: value if before is None else value.copy_(before) for key, (value, before) in state.items()
            }
        for group, values in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(values)
        self._strategy.learning_rates = self._learning_rates
        if self._strategy.average is not None:
            self._strategy.average.has_started = self._has_average
        for layer, mode in self._modes:
            layer.training = mode
        set_host_states(self._random)
        for device, gpu_random in zip(self._gpus, self._gpu_random, strict=True):
            torch.cuda.set_rng_state(gpu_random, device)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
