"""The optimizer that a task makes: its checks and its learning rates."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from stormo.config import schema
from stormo.errors import SettingError, first_names
from stormo.optim.schedule_free import begin_training, is_schedule_free
from stormo.optim.table import skip_compiler_import, skip_compiler_in_step

# Settings without effect on a task's optimizer.
IGNORED = (
    *("optimizer", "momentum", "beta2", "eps", "trust_coefficient", "grad_averaging", "nesterov", "weight_decay"),
    *("ns_steps", "adjust_lr", "adamw_lr"),
)


def make_task_optimizer(make: Callable[[nn.Module], Any], model: nn.Module) -> Optimizer | None:
    """The task's optimizer for a model already on its device; None if the settings decide."""
    skip_compiler_import()
    optimizer = make(model)
    if optimizer is None:
        return None
    said = f"optimizer() returned a {type(optimizer).__name__}"
    _check(said, optimizer, model, "return one, None for that of --optimizer, or write optimizers() for several")
    _freeze_others(optimizer, model)
    skip_compiler_in_step(optimizer)
    if is_schedule_free(optimizer):
        begin_training(optimizer)
    return optimizer  # type: ignore[no-any-return]


def _freeze_others(optimizer: Optimizer, model: nn.Module) -> None:
    """Freeze what is never stepped: its gradients would only accumulate, and count in clipping."""
    for name in parameters_not_in(optimizer, model):
        model.get_parameter(name).requires_grad_(False)


class JoinedOptimizer(Optimizer):
    """Several optimizers as one, which share its parameter groups and its state; each is stepped by itself."""

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        super().__init__([group for part in parts.values() for group in part.param_groups], {})
        self.parts = dict(parts)
        for part in parts.values():
            self.state.update(part.state)
            part.state = self.state


def make_task_optimizers(make: Callable[[nn.Module], Any], model: nn.Module) -> JoinedOptimizer:
    """The optimizers of a task that has several, checked, with what they leave out frozen."""
    skip_compiler_import()
    parts = make(model)
    if not isinstance(parts, Mapping) or not parts or not all(isinstance(name, str) for name in parts):
        kind = type(parts).__name__
        raise SettingError(
            f"optimizers() returned a {kind}", "it maps names to optimizers", 'return {"critic": …, "generator": …}'
        )
    for name, part in parts.items():
        said = f"optimizers() returned a {type(part).__name__} as {name}"
        _check(said, part, model, "return one for each name")
        skip_compiler_in_step(part)
        if is_schedule_free(part):
            raise SettingError(said, "its averages are for a single optimizer", "return another, such as AdamW")
    held = Counter(id(p) for part in parts.values() for group in part.param_groups for p in group["params"])
    shared = [name for name, parameter in model.named_parameters() if held[id(parameter)] > 1]
    if shared:
        raise SettingError(
            f"optimizers() returned {', '.join(parts)}",
            f"more than one of them has {first_names(shared)}",
            "give every parameter to one",
        )
    joined = JoinedOptimizer(parts)
    _freeze_others(joined, model)
    return joined


def optimizer_name(optimizer: Optimizer) -> str:
    """What it is called: its class, or those of its parts."""
    if not isinstance(optimizer, JoinedOptimizer):
        return type(optimizer).__name__
    return " and ".join(f"{type(part).__name__} ({name})" for name, part in optimizer.parts.items())


def _check(said: str, optimizer: Any, model: nn.Module, instead: str) -> None:
    """Refuse what cannot be stepped here; `said` begins the sentence, `instead` ends it for what is no optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise SettingError(said, "a torch.optim.Optimizer is stepped", instead)
    known = {id(parameter) for parameter in model.parameters()}
    if foreign := sum(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise SettingError(
            said,
            f"{foreign} of its parameters are not the model's",
            "make it from the parameters of the model that optimizer() is called with",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise SettingError(said, "its step() needs a closure, and it is called without one", "return another one")
    if group_learning_rates(optimizer)[0] <= 0 or min(group_learning_rates(optimizer)) < 0:
        raise SettingError(
            f"{said} with the learning rates {_listed(optimizer)}",
            "the schedule multiplies them, and the first is the one that is reported",
            "set lr above 0 in the first group, and not below 0 in the others",
        )
    if is_scheduled(optimizer):
        raise _scheduled(f"{said} with a learning-rate scheduler")


def parameters_not_in(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """The names of the parameters that the optimizer does not have."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in held]


def group_learning_rates(optimizer: Optimizer) -> list[float]:
    """The learning rate of each parameter group."""
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]


def check_learning_rates(optimizer: Optimizer, rates: Sequence[float]) -> None:
    """Refuse learning rates that differ from those that stormo has set."""
    if is_scheduled(optimizer):
        raise _scheduled(f"a learning-rate scheduler was made for the task's {type(optimizer).__name__}")
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if group.get("lr", 0.0) != rate:
            raise _scheduled(
                f"the learning rate of the task's {type(optimizer).__name__} was changed from {rate:g} to "
                f"{float(group['lr']):g} between two steps"
            )


def is_scheduled(optimizer: Optimizer) -> bool:
    """Whether a torch scheduler has been made for it, which marks its `step`."""
    # The key `initial_lr` does not tell: loading a state that was saved with a scheduler sets it too.
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def _scheduled(what: str) -> SettingError:
    return SettingError(
        what,
        "stormo sets the learning rates before every step, those of all groups by one factor",
        "return the scheduler from scheduler(self, optimizer), or leave it out and set --decay and --warmup-epochs",
    )


def optimizer_notice(
    optimizer: Optimizer, frozen: list[str], settings: schema.TrainConfig, learning_rate: float
) -> str:
    """What the user should know of a task's optimizer: its learning rates, and what it does not train.

    Args:
        optimizer: as the task has made it.
        frozen: names of the parameters that it leaves out.
        settings: of the run.
        learning_rate: of the plan.
    """
    name, several = optimizer_name(optimizer), len(optimizer.param_groups) > 1
    declared = settings.optimizer.base_batch_size
    batch = "one worker's batch" if declared is None else f"a batch of {declared}"
    text = (
        f"The run uses the task's own {name}, not --optimizer: its learning rate{'s' * several} {_listed(optimizer)} "
        f"{'are' if several else 'is'} for {batch}, × {learning_rate / settings.optimizer.base_lr:g} for "
        "the global batch; warm-up and decay are those of the plan."
    )
    if frozen:
        text += f" It leaves out {len(frozen)} of the model's parameters, which are frozen: {first_names(frozen)}."
    ignored = [f"--{name.replace('_', '-')}" for name in IGNORED if name in settings.given]
    return text + (f" {', '.join(ignored)} {'have' if len(ignored) > 1 else 'has'} no effect." if ignored else "")


def _listed(optimizer: Optimizer) -> str:
    return ", ".join(f"{rate:g}" for rate in group_learning_rates(optimizer))
