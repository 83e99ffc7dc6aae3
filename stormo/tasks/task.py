"""The contract of a task: what a user brings to be trained. It knows nothing of distribution.

This file imports no torch, so that the options of a built-in task are read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stormo.errors import SettingError, suggestion

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

    from stormo.config.plan import Facts


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of a task that has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What a hook of a task gets, on every worker."""

    epoch: int  # counted from 1
    step: int  # optimizer steps since the start of the run
    metrics: Mapping[str, float]  # of the validation; nothing before one
    model: nn.Module  # as a validation calls it
    log: Callable[[str, Any], None]  # a name and a number, an image or a figure; that of rank 0 counts


class Task:
    """Subclass it and write `model`, `train_data`, `validation_data` and `loss`; the rest is optional."""

    name: ClassVar[str] = "task"
    Options: ClassVar[type[Any]] = NoOptions
    num_draws: ClassVar[int] = 0  # random numbers that `augment` wants for each sample
    find_unused: ClassVar[bool] = False  # a batch may leave parameters without a gradient; finding them takes time
    # What loss() is: the mean over the samples of a batch (or over the count that it returns), the sum over them, or
    # "local": a loss of the batch as a whole, such as a contrastive one, whose result depends on the number of workers.
    loss_reduction: ClassVar[Literal["mean", "sum", "local"]] = "mean"
    # Settings by field name that suit the task, {"optimizer": "adamw"}; whatever a user sets wins over them.
    defaults: ClassVar[Mapping[str, Any]] = {}
    # Factors of the learning rate by patterns of parameter names, {"head.*": 10.0}; the first that fits a name counts.
    lr_factors: Mapping[str, float] = {}
    scheduler_interval: ClassVar[Literal["step", "epoch"]] = "step"  # how often the scheduler of the task is stepped
    _initialise: Callable[[nn.Module], None] | None = None  # gives a new model the weights of --init-from, on rank 0

    def __init__(self, options: Any = None, **given: Any) -> None:
        own = type(self).Options
        options = own() if options is None else options
        if not isinstance(options, own):
            what, why = f"{type(self).__name__}({options!r}) was made", "the options of a task have names"
            raise SettingError(what, why, f"write {type(self).__name__}(NAME={options!r}), or leave it out")
        known = [field.name for field in fields(options)] if given else []
        for name in given:
            if name not in known:
                choices = f"choose one of: {', '.join(known)}" if known else "declare it in its Options"
                what, why = f"{type(self).__name__}({name}=…) was made", "the task has no such option"
                raise SettingError(what, why, f"{suggestion(name, known)}{choices}")
        self.options = replace(options, **given) if given else options
        self._datasets: tuple[Dataset[Any], Dataset[Any]] | None = None

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """The training and the validation set, loaded once."""
        if self._datasets is None:
            from stormo.data.tensors import in_tensors
            from stormo.tasks.returned import check_data

            train = check_data(self, "train_data", self.train_data())
            validation = check_data(self, "validation_data", self.validation_data())
            if type(self).collate is Task.collate:
                train, validation = in_tensors(train), in_tensors(validation)
            self._datasets = train, validation
        return self._datasets

    def __getstate__(self) -> dict[str, Any]:
        """Without the data sets: a loading process that calls `collate` has the one it reads."""
        return {**self.__dict__, "_datasets": None, "_initialise": None}

    @classmethod
    def needs_data_for_facts(cls) -> bool:
        """Whether `facts` must load the data."""
        return cls.facts is Task.facts

    def facts(self) -> Facts:
        """Sizes that the plan needs; override it if they are known without the data."""
        from stormo.config.plan import Facts
        from stormo.data.reading import is_stream, known_length

        train, validation = self.datasets()
        return Facts(
            num_train=known_length(train) or 0,
            num_validation=known_length(validation),
            is_stream=is_stream(train),
            has_accuracy=False if type(self).metrics is Task.metrics else None,
            # A task with its own collate makes batches of samples, not on the device.
            train_bytes=getattr(train, "num_bytes", None) if type(self).collate is Task.collate else None,
        )

    def fetch(self) -> Path | None:
        """Bring the data to this node; runs in one process of each node, before `train_data` anywhere."""
        return None

    def model(self) -> nn.Module:
        """The model, freshly initialised from torch's global generator."""
        raise NotImplementedError(f"{type(self).__name__}.model() is missing: return the nn.Module to train")

    def train_data(self) -> Dataset[Any]:
        """The training set: `stormo.data.TensorData`, any map-style data set, or a stream (see docs/data.md)."""
        raise NotImplementedError(f"{type(self).__name__}.train_data() is missing: return the training data set")

    def validation_data(self) -> Dataset[Any]:
        """The validation set, in the same form."""
        raise NotImplementedError(f"{type(self).__name__}.validation_data() is missing: return the validation data set")

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor | float]:
        """The mean loss over the samples of a batch, a scalar; or (loss, count), a mean over `count` other items.

        The count (of tokens, of unmasked pixels) is a number or a scalar tensor on the device. A step then has the
        gradient of the mean over all items of all workers and micro-batches. See also `loss_reduction`.
        """
        raise NotImplementedError(f"{type(self).__name__}.loss() is missing: return the mean loss of a batch")

    def collate(self, samples: list[Any]) -> Any:
        """A batch of samples as the data set gives them; by default as torch's default_collate makes it."""
        from stormo.data.batches import collate

        return collate(samples)

    def optimizer(self, model: nn.Module) -> Optimizer | None:
        """An optimizer of the task's own, over parameters of the model; None for that of --optimizer.

        Its learning rates are those for one worker's batch, as --base-lr is: --lr-rule, warm-up and decay multiply the
        learning rate of every group by the same factor. Parameters it does not hold are frozen.
        """
        return None

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """A scheduler of torch for this optimizer, in place of the warm-up and decay of the settings.

        It is stepped once a step, or with `scheduler_interval = "epoch"` after every validation. Its learning rates are
        those for one worker's batch: --lr-rule multiplies them.
        """
        return None

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer] | None:
        """Several optimizers by name, each over parameters of its own; they step in this order, in every step.

        Then `loss(self, model, batch, optimizer)` gets the name of the one whose turn it is, and returns its loss. Only
        that one's parameters have gradients meanwhile. The loss of the first is the one that is reported. Such a task
        has `metrics`, and runs on one device or with `ddp`.
        """
        return None

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """What is measured in a batch, by name; runs without gradients.

        A scalar tensor or a number is a sum over the samples of the batch; stormo reports the sum over all batches
        divided by the number of all samples. (value, count) is a mean over `count` items; stormo reports the mean over
        all items. A metric with a state (torchmetrics) is made once, in `__init__`: call its `update` here and return
        the object itself.
        """
        from stormo.data.batches import batch_length

        loss = self.loss(model, batch)
        if isinstance(loss, tuple) or self.loss_reduction == "sum":
            return {"loss": loss}
        return {"loss": loss * batch_length(batch)}

    def augment(self, batch: Any, draws: Tensor) -> Any:
        """Change a training batch at random, on its device.

        Args:
            batch: as the data set gives it, already on the device.
            draws: numbers in [0, 1), `num_draws` for each sample; they depend on seed, epoch and the sample's
                place in the global order alone, so the result does not depend on the number of workers.
        """
        return batch

    # Hooks: called on every worker, in the same order, also after a resume.

    def on_train_start(self, context: Context) -> None:
        """Before the first step of every attempt."""

    def on_step_end(self, context: Context) -> None:
        """After an optimizer step."""

    def on_validation_end(self, context: Context) -> None:
        """After a validation, while the model still has the weights that were validated (see --ema)."""

    def on_epoch_end(self, context: Context) -> None:
        """After an epoch was counted, before its checkpoint."""

    def on_train_end(self, context: Context) -> None:
        """After the last step of an attempt, unless it failed."""

    def tensor_plan(self, model: nn.Module) -> Mapping[str, str] | None:
        """How the layers of the model are cut over the workers along the axis tensor; None where stormo knows it.

        It maps layers to what becomes of them: {"blocks.*.up": "column", "blocks.*.down": "row"}. A star stands for any
        number of any characters. What is not named stays whole on every worker.

        - "column" (nn.Linear): each worker has some of the outputs, which stay cut until a "row" takes them. What lies
          between the two must treat every output, or every head, separately and have no weights.
        - "row" (nn.Linear): each worker has some of the inputs; the outputs are whole.
        - "column-gathered", "row-from-whole" (nn.Linear): the same cuts with whole inputs and outputs.
        - "vocabulary" (nn.Embedding): each worker has some rows of the table.

        Every worker gets one contiguous part of the outputs. Where the module around a layer has `num_heads`, or where
        the plan says "column:12", it is made of whole heads; the outputs must be ordered by head then (not all queries
        first, then all keys), and the code between must take the number of heads from the shape, as
        `view(n, t, -1, width)`.
        """
        return None

    def classifier(self, model: nn.Module) -> nn.Module | str | None:
        """The module, or its path, that --strategy hybrid cuts over the workers; None for the Linear layers at the end.

        It takes one tensor and gives one, whose rows are samples. All before it is copied to every worker.
        """
        return None

    def pieces(self, model: nn.Module) -> Sequence[Any] | None:
        """The model as pieces for a pipeline, each of which takes what the one before returns; None where it is traced.

        A piece is a module of the model, or a function bound to the modules that it calls, as
        `functools.partial(score, model.norm, model.head)`; every parameter is in exactly one. A list of lists says
        which pieces make which stage; a flat list is split by the times of the pieces.
        """
        return None
