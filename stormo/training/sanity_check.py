"""Runs the first batches and undoes them, so that mistakes of a task show before training, in one sentence.

All ranks do it together, before the run has a folder. Weights, buffers, gradients and random generators are restored.
"""

from __future__ import annotations

import math
import pickle
import traceback
import warnings
from collections.abc import Generator, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from stormo.checkpoint import collect_random_state, restore_random_state
from stormo.checkpoint.tensors import DTYPE_NAMES
from stormo.config.plan import Plan
from stormo.config.plan.steps import remaining_step_sizes
from stormo.config.schema import TrainConfig
from stormo.data.batches import batch_length, cut, tensors_in
from stormo.data.loaders import Batch, IterableLoader, Loader, Share
from stormo.data.sample_check import require_same_start
from stormo.distributed.world import World
from stormo.errors import SettingError, pluralize
from stormo.launch.torch_errors import is_out_of_memory, task_mistake
from stormo.parallel.base import Strategy, no_cudnn_benchmark
from stormo.parallel.batch_size import StateSnapshot
from stormo.tasks.metrics import COUNT_OF, read_metrics
from stormo.tasks.returned import unused_parameters
from stormo.tasks.task import Task
from stormo.training.divergence import has_bad_inputs
from stormo.training.loss_check import check_loss_parts
from stormo.training.state import Progress
from stormo.training.validation import Sums, Validation

Steps = Set[tuple[int, int]]  # samples and micro-batches of each
_GIB = 2**30
_NUM_COMPARED = 4  # samples at the start of a stream
_PICKLE_ERRORS = (pickle.PicklingError, AttributeError, TypeError)
_PICKLING = str(Path("multiprocessing", "reduction.py"))
_LIBRARY_CODE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
# What the task does, why it cannot be, what to write instead.
_TASK_MISTAKES = {
    "dtype": (
        "mixes tensors",
        "the numbers of the batch and the weights must be of one type",
        "let the data set give {numbers}, and class numbers as torch.int64 (.long())",
    ),
    "sparse": (
        "has a sparse gradient that is not of a layer nn.Embedding or nn.EmbeddingBag",
        "DDP makes room for dense gradients wherever it does not know such a layer",
        "call a layer of these with sparse=True, or leave sparse=True out",
    ),
    "wrapper": (
        "does more with the model than to call it",
        "on several workers or GPUs it is wrapped in DDP or DataParallel, which exchanges gradients only when called",
        "do that in the model's forward()",
    ),
}


def sanity_check(
    strategy: Strategy,
    loader: Loader,
    validation: Validation,
    *,
    may_diverge: bool = False,
    largest: Share | None = None,
    is_resumed: bool = False,
) -> Steps:
    """Run the micro-batches of the first step and of a short last one, and a validation batch, and undo them.

    Returns the steps that were run whole.

    Args:
        may_diverge: only warn where the first loss is not finite.
        largest: the share of a batch that grows, where its micro-batches become larger: it must fit now.
        is_resumed: the run may be past its first batches, so steps with a single sample are left to
            `check_single_samples`.
    """
    task, first_check = strategy.task, _FirstBatchCheck(strategy, may_diverge=may_diverge)
    _check_types(strategy)
    warnings.filterwarnings("ignore", "Got pickle error when attempting to start")  # explained below
    share, random_state = loader.share, collect_random_state()
    if is_resumed:
        loader.share = _share_without_single_samples(strategy._plan, share)
    try:
        with explain_errors(task, "train_data", "loss"):
            batches = _checked(strategy, loader, first_check, is_resumed=is_resumed)
            strategy.warm_up(loader, batches, first_check)
            stages = [loader.share.accumulate, *(stage.accumulate for stage in strategy._plan.stages)]
            check_loss_parts(strategy, first_check.first, max(stages))
            if largest is not None:
                _try_largest(strategy, loader, largest)
        with explain_errors(task, "validation_data", "metrics"):
            rounds = validation.run(strategy.validated, strategy.autocast, partial(_find_means, strategy))
            next(rounds)
            cast("Generator[object]", rounds).close()
    finally:
        loader.share = share
        restore_random_state(*random_state)
    return first_check.steps


def _check_types(strategy: Strategy) -> None:
    """Refuse a model that could be trained but not saved."""
    for name, tensor in (*((part.name, part.local) for part in strategy.shards()), *strategy.named_buffers()):
        if tensor.dtype not in DTYPE_NAMES:
            raise SettingError(
                f"{type(strategy.task).__name__}.model() has {name} of type {str(tensor.dtype).removeprefix('torch.')}",
                "a checkpoint cannot hold that type",
                "make it complex64, or keep real and imaginary parts in one tensor (torch.view_as_real)"
                if tensor.is_complex()
                else "make it of another type",
            )


def _try_largest(strategy: Strategy, loader: Loader, largest: Share) -> None:
    """Take a step with the largest micro-batch, with the optimizer's state in memory, and undo it."""
    share, before = loader.share, StateSnapshot(strategy)
    loader.share = largest
    batch = next(loader.first_and_last())
    try:
        strategy.try_step(batch.data)
    except torch.OutOfMemoryError as error:
        size = batch.span.num_samples
        raise SettingError(
            "--grow-batch was set with --max-batch-size",
            f"a micro-batch of {pluralize(size, 'sample')}, once the batch has grown, does not fit in memory "
            f"({next(iter(str(error).splitlines()), '').rstrip('.')})",
            f"set --max-batch-size below {size}, or leave it out to grow by accumulation",
        ) from error
    finally:
        loader.share, loader.wait_s = share, 0.0
    before.restore()


def check_single_samples(
    strategy: Strategy, loader: Loader, plan: Plan, progress: Progress, checked: Steps = frozenset()
) -> None:
    """Run and undo a step in which a rank has a single sample, if one is to come. All ranks call it.

    Batch norm may refuse a single sample, and would do so only at the end of an epoch. Steps in `checked` are not run
    again.
    """
    steps = remaining_step_sizes(plan.stages, plan.epochs, progress.epoch, progress.position)
    found = next((step for step in steps if step not in checked and _has_single_sample(plan, *step)), None)
    if found is None:
        return
    share, random_state = loader.share, collect_random_state()
    loader.share = replace(share, global_batch_size=found[0], accumulate=found[1])
    try:
        with explain_errors(strategy.task, "train_data", "loss"):
            strategy.warm_up(loader, (batch for batch in loader.first_and_last() if not batch.span.step_start))
    finally:
        loader.share = share
        restore_random_state(*random_state)


def check_streams(task: Task, world: World, loader: Loader, validation: Validation) -> None:
    """Refuse a stream that differs between ranks. All ranks call it."""
    if world.size == 1:
        return

    def refusal(method: str, rank: int) -> SettingError:
        return SettingError(
            f"{type(task).__name__}.{method}() gave a stream that starts with different samples on "
            f"rank 0 and rank {rank}",
            "each worker reads the whole stream and takes its share of every batch, so that samples would be left out",
            "let the stream give all samples to every worker, whatever its rank: do not shard it",
        )

    if isinstance(loader, IterableLoader):
        read = partial(loader.start, _NUM_COMPARED)
        with explain_errors(task, "train_data", "loss"):
            require_same_start(world, read(), read, partial(refusal, "train_data"))
    if validation.is_stream:
        with explain_errors(task, "validation_data", "metrics"):
            require_same_start(world, validation.start(), validation.start, partial(refusal, "validation_data"))


def _share_without_single_samples(plan: Plan, share: Share) -> Share:
    """The share of the first batch size in which no rank has a single sample, if there is one."""
    cuts = [(share.global_batch_size, share.accumulate), *((s.global_batch_size, s.accumulate) for s in plan.stages)]
    fitting = (cut for cut in cuts if not _has_single_sample(plan, min(cut[0], plan.facts.num_train), cut[1]))
    size, accumulate = next(fitting, cuts[0])
    return replace(share, global_batch_size=size, accumulate=accumulate)


def _has_single_sample(plan: Plan, num_samples: int, accumulate: int) -> bool:
    """Whether a device has a single sample in a micro-batch of such a step."""
    shares = {num_samples // plan.layout.data_size, math.ceil(num_samples / plan.layout.data_size)}
    sizes = {share // accumulate for share in shares} | {math.ceil(share / accumulate) for share in shares}
    # DataParallel splits a micro-batch into equal pieces, and a smaller last one.
    pieces = {size: math.ceil(size / plan.layout.devices_per_worker) for size in sizes if size}
    return any(piece <= plan.micro_batches or size % piece == 1 for size, piece in pieces.items())


class _FirstBatchCheck:
    """Checks the first micro-batch: parameters without a gradient, a model in eval mode, a loss that is not finite."""

    def __init__(self, strategy: Strategy, *, may_diverge: bool) -> None:
        self._strategy = strategy
        self._may_diverge = may_diverge
        self._is_done = False
        self.data: Any = None  # of the current micro-batch
        self.first: Batch | None = None
        self.steps: set[tuple[int, int]] = set()  # those run whole, including the current one

    def __call__(self, loss: Tensor) -> None:
        if self._is_done:
            return
        self._is_done = True
        strategy = self._strategy
        names = strategy.without_gradient()
        if names and not strategy.task.find_unused:
            raise unused_parameters(strategy.task, names)
        strategy.check_first_gradients()
        if not strategy.module.training:
            raise SettingError(
                f"{type(strategy.task).__name__}.loss() leaves the model in evaluation mode",
                "dropout and batch norm would not train from then on",
                "leave model.eval() out of it: every micro-batch begins in the mode that it needs",
            )
        # A collective: all ranks take part, whatever their own loss is, and decide alike.
        seen = torch.tensor([float(not torch.isfinite(loss)), float(has_bad_inputs(self.data))])
        is_bad, is_bad_input = (bool(flag) for flag in strategy.world.max(seen).tolist())
        if not is_bad:
            return
        name = type(strategy.task).__name__
        what = f"{name}.loss() returned a number that is not finite in the very first batch"
        fix = "look for a division by zero, a log of zero, inputs that are not scaled or overflow in fp16"
        if is_bad_input:
            what = f"{name}.train_data() gave inputs that are not finite numbers in the very first batch"
            fix = "clean the data (torch.isfinite finds such values)"
        if not self._may_diverge:
            instead = f"{fix}, or set --on-divergence ignore to train all the same"
            raise SettingError(what, "no step can be learned from it", instead)
        strategy.warnings.append(f"{what}: {fix}.")


def _find_means(strategy: Strategy, batch: Any, whole: Sums) -> None:
    """Warn of metrics that are means: the sum of a batch is that of its two halves, a mean is not."""
    task = strategy.task
    if type(task).metrics is Task.metrics:
        return
    length = 0
    with suppress(SettingError):  # the batch cannot be split
        length = batch_length(batch)
    is_short = length < 2
    if strategy.is_sharded:  # ranks that share a model must call it equally often
        is_short = strategy.world.any(is_short)
    if is_short:
        return
    middle = length // 2
    try:
        with no_cudnn_benchmark():
            first, second = (
                read_metrics(task, task.metrics(strategy.validated, cut(batch, *half)), strategy.world.device)[0]
                for half in ((0, middle), (middle, length))
            )
    except Exception:
        return  # the batch cannot be split, or the task takes whole batches only
    with_count = {name for name in whole if COUNT_OF + name in whole or name.startswith(COUNT_OF)}
    for name in sorted((whole.keys() & first.keys() & second.keys()) - with_count):
        total, a, b = (float(sums[name]) for sums in (whole, first, second))
        largest = max(abs(total), abs(a), abs(b))
        mean = (middle * a + (length - middle) * b) / length
        # Wide bounds: 16-bit numbers round coarsely.
        if abs(total - mean) <= 0.01 * largest and abs(total - (a + b)) > 0.1 * largest:
            strategy.warnings.append(
                f"{type(task).__name__}.metrics() returned {name!r} as {total:.4g} for the first batch, and as {a:.4g} "
                f"and {b:.4g} for its halves, as if it were a mean: return the sum over the samples (a mean times "
                "their number), which is divided by the number of all samples."
            )


def _checked(strategy: Strategy, loader: Loader, first_check: _FirstBatchCheck, *, is_resumed: bool) -> Iterator[Batch]:
    name, accumulate = type(strategy.task).__name__, loader.share.accumulate
    for batch in loader.first_and_last():
        span = batch.span
        if is_resumed and span.step_start and _has_single_sample(strategy._plan, span.step_samples, accumulate):
            continue
        first_check.data = batch.data
        first_check.first = first_check.first or batch
        if span.is_last:
            first_check.steps.add((span.step_samples, accumulate))
        if next(tensors_in(batch.data), None) is None:
            raise SettingError(
                f"{name}.train_data() gives batches of type {type(batch.data).__name__}",
                "there is no tensor in them",
                "return tensors or numbers from the data set",
            )
        yield batch


@contextmanager
def explain_errors(task: Task, data_method: str, method: str) -> Iterator[None]:
    """Explain well-known errors of torch and Python in a sentence; raise all others unchanged."""
    name = type(task).__name__
    try:
        yield
    except SettingError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        text = next(iter(str(error).splitlines()), "").rstrip(".")
        if isinstance(error, _PICKLE_ERRORS) and any(frame.filename.endswith(_PICKLING) for frame in frames):
            raise SettingError(
                f"{name}.{data_method}() returned a data set that cannot be sent to a loading process ({text})",
                "loading processes get it by pickle",
                "set --loader-workers 0, or keep that out of it (functions and classes go to the top level of a file)",
            ) from error
        mistake = task_mistake(error)
        if mistake is None:
            raise
        what, why, instead = _TASK_MISTAKES[mistake]
        shown = f"{name}.{method}() {what} ({_location(frames)}{text})"
        is_fp64 = torch.get_default_dtype() == torch.float64
        numbers = "torch.float64 (.double()) for --precision fp64" if is_fp64 else "torch.float32 (.float())"
        raise SettingError(shown, why, instead.format(numbers=numbers)) from error


def _location(frames: traceback.StackSummary) -> str:
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARY_CODE)]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}: " if own else ""


@contextmanager
def explain_out_of_memory(config: TrainConfig, plan: Plan, device: torch.device, *, has_model: bool) -> Iterator[None]:
    """Explain an out-of-memory error before the first step; `has_model`: the model is on the device."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        samples = pluralize(plan.micro_batch_size, "sample")
        text = next(iter(str(error).splitlines()), "").split(". ")[0].rstrip(".") or type(error).__name__
        raise SettingError(
            f"micro-batches of {samples} were set" if has_model else f"the model of {config.task} was to be made",
            f"{'one' if has_model else 'it'} does not fit into {_memory_of(device)} ({text})",
            f"set {_advice(config, plan, has_model)}; stormo predict {config.task} says before a start what fits",
        ) from error


def add_memory_note(config: TrainConfig, plan: Plan, error: BaseException) -> None:
    """Add to an out-of-memory error during training what would need less memory."""
    if is_out_of_memory(error):
        error.add_note(f"Out of memory: resume with --resume and {_advice(config, plan, has_model=True)}.")


def _memory_of(device: torch.device) -> str:
    if device.type != "cuda":
        return "the memory of this host"
    properties = torch.cuda.get_device_properties(device)
    return f"the {properties.total_memory / _GIB:.1f} GiB of {properties.name}"


def _advice(config: TrainConfig, plan: Plan, has_model: bool) -> str:
    """What would need less memory, the cheapest first."""
    advice, layout, sharding = [], plan.layout, config.sharding
    if has_model and plan.micro_batch_size > 1:
        advice.append("a smaller --batch-size (with --accumulate the global batch stays)")
    if has_model and plan.graph:
        advice.append("--no-graph")
    if has_model and not sharding.checkpoint_activations:
        advice.append("--checkpoint-activations")
    if not layout.is_sharded:
        advice.append("--strategy fsdp" + " --offload" * (layout.world_size == 1))
    elif layout.zero and not sharding.offload:
        advice.append("--offload")
    if layout.is_sharded or not advice:
        advice.append("more GPUs")
    return " or ".join(advice)
