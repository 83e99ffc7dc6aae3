"""The first passes of a run, whose effect is thrown away: what a task does wrong shows here, in one sentence.

Every worker rehearses alike, before the run has a folder. Afterwards the weights, buffers, gradients and random
generators are what they were.
"""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import re
import traceback
import warnings
from collections.abc import Generator, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from stormo.checkpoint import collect_random_state, restore_random_state
from stormo.checkpoint.tensors import DTYPE_NAMES
from stormo.config.plan import Plan
from stormo.config.plan.stages import steps_to_come
from stormo.data.batches import batch_length, cut, tensors_in
from stormo.data.loaders import Batch, Loader, Share
from stormo.errors import SettingError, counted
from stormo.parallel.base import Strategy
from stormo.parallel.batch_size import StateSnapshot
from stormo.tasks.measured import COUNT_OF, read_metrics
from stormo.tasks.returned import unused_parameters
from stormo.tasks.task import Task
from stormo.training.loss_parts import check_parts
from stormo.training.metrics import Sums, Validation
from stormo.training.progress import Progress

Steps = Set[tuple[int, int]]  # samples and passes of each
_PICKLE_ERRORS = (pickle.PicklingError, AttributeError, TypeError)
_PICKLING = str(Path("multiprocessing", "reduction.py"))
_NOT_A_PLACE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_EXPLAINED = (RuntimeError, AttributeError, TypeError)
# What torch or Python say of a mistake; what was done, why it cannot be, what to write instead.
_MEANINGS = (
    (
        r"backward through the graph a second time",
        "calls backward() itself",
        "its gradient is taken, and weighed, once it is returned",
        "leave backward() and step() out of it",
    ),
    (
        r"on the same device|indices should be either on|Input type \(.*weight type",
        "mixes tensors",
        "the model and the batch are on {device}, and whatever meets them must be there too",
        "make it with device= of one of the batch's tensors, or in a module by register_buffer()",
    ),
    (
        r"same dtype|scalar type|Found dtype",
        "mixes tensors",
        "the numbers of the batch and the weights must be of one type",
        "let the data set give {numbers}, and class numbers as torch.int64 (.long())",
    ),
    (
        r"storage of SparseTensorImpl",
        "has a sparse gradient that is not of a layer nn.Embedding or nn.EmbeddingBag",
        "DDP makes room for dense gradients wherever it does not know such a layer",
        "call a layer of these with sparse=True, or leave sparse=True out",
    ),
    (
        r"'\w*Parallel' object (has no attribute|is not)",
        "does more with the model than to call it",
        "on several workers a wrapper stands for it, which exchanges gradients when it is called",
        "do that in the model's forward()",
    ),
)


def rehearse(
    strategy: Strategy,
    loader: Loader,
    validation: Validation,
    *,
    every_shape: bool,
    may_diverge: bool = False,
    largest: Share | None = None,
    goes_on: bool = False,
) -> Steps:
    """Run the first training passes and the first validation batch, and leave no trace of them.

    Returns the samples and passes of the steps that were run whole.

    Args:
        strategy: holds the task and the model.
        loader: of the run.
        validation: of the run.
        every_shape: also run the short last batch, and make ready whatever the first steps would stumble over.
        may_diverge: only warn of a first loss that is not a finite number.
        largest: of the batch once it has grown, where its passes are larger than the first ones: it must fit now, and
            not after a night of training.
        goes_on: the run may be beyond its first batches: those with a single sample for a worker are left to
            `rehearse_lone_samples`.
    """
    task, look = strategy.task, _FirstLook(strategy, may_diverge=may_diverge)
    _check_types(strategy)
    # torch's own words on what is explained below
    warnings.filterwarnings("ignore", "Got pickle error when attempting to start")
    share, random_state = loader.share, collect_random_state()
    if goes_on:
        loader.share = _first_of_several(strategy._plan, share)
    try:
        with explained(task, "train_data", "loss", strategy.world.device):
            batches = _checked(strategy, loader, look, goes_on=goes_on)
            strategy.warm_up(loader, batches if every_shape else itertools.islice(batches, 1), look)
            stages = [loader.share.accumulate, *(stage.accumulate for stage in strategy._plan.stages)]
            check_parts(strategy, look.first, max(stages))
            if largest is not None:
                _try_largest(strategy, loader, largest)
        with explained(task, "validation_data", "metrics", strategy.world.device):
            rounds = validation.run(strategy.validated, strategy.autocast, functools.partial(_look_for_means, strategy))
            next(rounds)
            cast("Generator[object]", rounds).close()
    finally:
        loader.share = share
        restore_random_state(*random_state)
    return look.steps


def _check_types(strategy: Strategy) -> None:
    """Refuse a model that could be trained and not be saved."""
    for name, tensor in (*((part.name, part.local) for part in strategy.parts()), *strategy.named_buffers()):
        if tensor.dtype not in DTYPE_NAMES:
            raise SettingError(
                f"{type(strategy.task).__name__}.model() has {name} of type {str(tensor.dtype).removeprefix('torch.')}",
                "a checkpoint cannot hold that type",
                "make it complex64, or keep real and imaginary parts in one tensor (torch.view_as_real)"
                if tensor.is_complex()
                else "make it of another type",
            )


def _try_largest(strategy: Strategy, loader: Loader, largest: Share) -> None:
    """Take a step with the largest pass, with the optimizer's state beside it, and undo it."""
    share, before = loader.share, StateSnapshot(strategy)
    loader.share = largest
    batch = next(loader.first_and_last())
    try:
        strategy.try_step(batch.data)
    except torch.OutOfMemoryError as error:
        size = batch.span.num_samples
        raise SettingError(
            "--grow-batch was set with --max-batch-size",
            f"a pass of {counted(size, 'sample')} of the batch that has grown does not fit in memory "
            f"({next(iter(str(error).splitlines()), '').rstrip('.')})",
            f"set --max-batch-size below {size}, or leave it out to grow by accumulation",
        ) from error
    finally:
        loader.share, loader.wait_s = share, 0.0
    before.put_back()


def rehearse_lone_samples(
    strategy: Strategy, loader: Loader, plan: Plan, progress: Progress, rehearsed: Steps = frozenset()
) -> None:
    """Run a step that leaves a worker a single sample, where one is to come, and leave no trace of it.

    Batch norm may refuse it, and would do so at the end of an epoch, or after a night of training. What was rehearsed
    before is not run again. All workers call it.
    """
    steps = steps_to_come(plan.stages, plan.epochs, progress.epoch, progress.position)
    found = next((step for step in steps if step not in rehearsed and _leaves_one(plan, *step)), None)
    if found is None:
        return
    share, random_state = loader.share, collect_random_state()
    loader.share = replace(share, global_batch_size=found[0], accumulate=found[1])
    try:
        with explained(strategy.task, "train_data", "loss", strategy.world.device):
            strategy.warm_up(loader, (batch for batch in loader.first_and_last() if not batch.span.step_start))
    finally:
        loader.share = share
        restore_random_state(*random_state)


def _first_of_several(plan: Plan, share: Share) -> Share:
    """The share in the first batch that leaves nobody a single sample, if one of a batch that grows does."""
    cuts = [(share.global_batch_size, share.accumulate), *((s.global_batch_size, s.accumulate) for s in plan.stages)]
    fitting = (cut for cut in cuts if not _leaves_one(plan, min(cut[0], plan.facts.num_train), cut[1]))
    size, accumulate = next(fitting, cuts[0])
    return replace(share, global_batch_size=size, accumulate=accumulate)


def _leaves_one(plan: Plan, num_samples: int, accumulate: int) -> bool:
    """Whether a step of so many samples has a pass in which a device computes on one of them alone."""
    shares = {num_samples // plan.layout.data_size, math.ceil(num_samples / plan.layout.data_size)}
    passes = {share // accumulate for share in shares} | {math.ceil(share / accumulate) for share in shares}
    # DataParallel cuts a pass into pieces of one size, and what is left.
    pieces = {size: math.ceil(size / plan.layout.devices_per_worker) for size in passes if size}
    return any(piece <= plan.micro_batches or size % piece == 1 for size, piece in pieces.items())


class _FirstLook:
    """Sees, after the first pass, what no type can tell: parameters without a gradient, a loss that is no number."""

    def __init__(self, strategy: Strategy, *, may_diverge: bool) -> None:
        self._strategy = strategy
        self._may_diverge = may_diverge
        self._has_looked = False
        self.data: Any = None  # of the pass under way
        self.first: Batch | None = None  # pass of all
        self.steps: set[tuple[int, int]] = set()  # of which the last pass is under way, or was

    def __call__(self, loss: Tensor) -> None:
        if self._has_looked:
            return
        self._has_looked = True
        strategy = self._strategy
        names = strategy.without_gradient()
        if names and not strategy.task.find_unused:
            raise unused_parameters(strategy.task, names)
        strategy.check_first_pass()
        if not strategy.module.training:
            raise SettingError(
                f"{type(strategy.task).__name__}.loss() leaves the model as model.eval() makes it",
                "dropout and batch norm would not train from then on",
                "leave model.eval() out of it: every pass begins in the mode that it needs",
            )
        # All workers ask, whatever their own loss is, and answer alike.
        floats = [tensor for tensor in tensors_in(self.data) if tensor.is_floating_point()]
        has_bad_inputs = not all(bool(tensor.isfinite().all()) for tensor in floats)
        seen = torch.tensor([float(not torch.isfinite(loss)), float(has_bad_inputs)])
        is_bad, has_bad_inputs = (bool(flag) for flag in strategy.world.max(seen).tolist())
        if is_bad and self._may_diverge:
            strategy.notices.append(
                f"{type(strategy.task).__name__}.loss() is not a finite number in the very first batch: look for a "
                "division by zero, a log of zero, and inputs that are not scaled."
            )
        elif is_bad:
            raise _not_finite(strategy.task, has_bad_inputs)


def _not_finite(task: Task, has_bad_inputs: bool) -> SettingError:
    name = type(task).__name__
    if has_bad_inputs:
        return SettingError(
            f"{name}.train_data() gave inputs that are not finite numbers in the very first batch",
            f"{name}.loss() of them is not finite either, and no step can be learned from it",
            "clean the data (torch.isfinite finds such values), or set --on-divergence ignore to train all the same",
        )
    return SettingError(
        f"{name}.loss() returned a number that is not finite in the very first batch",
        "its inputs are finite, and no step can be learned from it",
        "look for a division by zero, a log of zero, inputs that are not scaled or overflow in fp16, or set "
        "--on-divergence ignore to train all the same",
    )


def _look_for_means(strategy: Strategy, batch: Any, whole: Sums) -> None:
    """Warn of values that are no sums: of a batch that is cut in two, a sum is that of both halves, a mean is not."""
    task = strategy.task
    if type(task).metrics is Task.metrics:
        return
    length = _num_rows(batch)
    is_short = length < 2
    if strategy.is_spread:  # its workers call the model equally often: with halves all of them, or none
        is_short = bool(strategy.world.max(torch.tensor([float(is_short)])).item())
    if is_short:
        return
    middle = length // 2
    try:
        first, second = (
            read_metrics(task, task.metrics(strategy.validated, cut(batch, *half)), strategy.world.device)[0]
            for half in ((0, middle), (middle, length))
        )
    except Exception:
        return  # a batch that cannot be cut, or a task that takes whole batches only
    with_count = {name for name in whole if COUNT_OF + name in whole or name.startswith(COUNT_OF)}
    for name in sorted((whole.keys() & first.keys() & second.keys()) - with_count):
        total, a, b = (float(sums[name]) for sums in (whole, first, second))
        largest = max(abs(total), abs(a), abs(b))
        mean = (middle * a + (length - middle) * b) / length
        # The bounds are wide apart, for numbers of 16 bits.
        if abs(total - mean) <= 0.01 * largest and abs(total - (a + b)) > 0.1 * largest:
            strategy.notices.append(
                f"{type(task).__name__}.metrics() returned {name!r} as {total:.4g} for the first batch, and as {a:.4g} "
                f"and {b:.4g} for its halves, as if it were a mean: return the sum over the samples (a mean times "
                "their number), which is divided by the number of all samples."
            )


def _num_rows(batch: Any) -> int:
    """How many samples a batch shows; 0 where it shows none."""
    try:
        return batch_length(batch)
    except SettingError:
        return 0


def _checked(strategy: Strategy, loader: Loader, look: _FirstLook, *, goes_on: bool) -> Iterator[Batch]:
    name, accumulate = type(strategy.task).__name__, loader.share.accumulate
    for batch in loader.first_and_last():
        span = batch.span
        if goes_on and span.step_start and _leaves_one(strategy._plan, span.step_samples, accumulate):
            continue
        look.data = batch.data
        look.first = look.first or batch
        if span.is_last:
            look.steps.add((span.step_samples, accumulate))
        if next(tensors_in(batch.data), None) is None:
            raise SettingError(
                f"{name}.train_data() gives batches of type {type(batch.data).__name__}",
                "there is no tensor in them",
                "return tensors or numbers from the data set",
            )
        yield batch


@contextmanager
def explained(task: Task, data_method: str, method: str, device: torch.device) -> Iterator[None]:
    """Put what torch and Python say of well-known mistakes into a sentence; all else goes up as it is."""
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
        for pattern, what, why, instead in _MEANINGS if isinstance(error, _EXPLAINED) else ():
            if re.search(pattern, text):
                said = f"{name}.{method}() {what} ({_place(frames)}{text})"
                raise SettingError(said, why.format(device=device), instead.format(numbers=_numbers())) from error
        raise


def _numbers() -> str:
    """The type of the weights, and how a tensor is given it."""
    if torch.get_default_dtype() == torch.float64:
        return "torch.float64 (.double()) for --precision fp64"
    return "torch.float32 (.float())"


def _place(frames: traceback.StackSummary) -> str:
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_A_PLACE)]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}: " if own else ""
