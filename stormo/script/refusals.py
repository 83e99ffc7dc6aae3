"""Mistakes in what a script hands to its world, each with its mend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stormo.errors import SettingError, counted

if TYPE_CHECKING:
    from stormo.script.stepping import Group


def late_group(parts: tuple[Any, ...], groups: list[Group]) -> Group | None:
    """Where schedulers and loss scalers belong that come without a model; None where that cannot be told."""
    if not parts or any(isinstance(part, Optimizer) for part in parts):
        return None
    moved = [part.optimizer for part in parts if hasattr(part, "optimizer")]
    owners = [group for group in groups if all(any(each is own for own in group.optimizers) for each in moved)]
    return owners[0] if len(owners) == 1 else None


def check_parts(parts: tuple[Any, ...], models: list[nn.Module], group: Group | None) -> None:
    """Refuse what cannot be wrapped."""
    if not models and group is None:
        raise SettingError(
            "world.wrap() was called without a model",
            f"it was given {', '.join(type(part).__name__ for part in parts) or 'nothing'}",
            "pass the model first: world.wrap(model, optimizer)",
        )
    for part in parts:
        if not isinstance(part, nn.Module | Optimizer) and not (hasattr(part, "step") and hasattr(part, "state_dict")):
            raise SettingError(
                f"world.wrap() was given a {type(part).__name__}",
                "it is no model, optimizer, scheduler or loss scaler",
                "pass data to world.loader() and leave other objects out",
            )


def check_new(model: nn.Module, parts: tuple[Any, ...], groups: list[Group]) -> None:
    """Refuse what was wrapped before: its gradients would be summed twice."""
    known = {id(parameter) for group in groups for parameter in group.model.parameters()}
    num_shared = sum(id(parameter) in known for parameter in model.parameters())
    wrapped = [each for group in groups for each in (*group.optimizers, *group.others)]
    again = next((part for part in parts if any(part is each for each in wrapped)), None)
    if num_shared or again is not None:
        what = counted(num_shared, "parameter") if num_shared else f"a {type(again).__name__}"
        raise SettingError(
            f"world.wrap() was given {what} for the second time",
            "gradients are summed over the workers once",
            "pass models that share parameters, and all that goes with them, in one call",
        )


def check_optimizers(parts: tuple[Any, ...], model: nn.Module) -> None:
    """Refuse an optimizer that moves what was not wrapped with it."""
    known = {id(parameter) for parameter in model.parameters()}
    for optimizer in (part for part in parts if isinstance(part, Optimizer)):
        strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        if strangers:
            raise SettingError(
                f"world.wrap() was given an optimizer with {counted(len(strangers), 'tensor')} not of the model",
                "their gradients would stay different on every worker",
                "make the optimizer from model.parameters(), and pass all models it moves in one call",
            )


def check_loss(loss: Any) -> None:
    """Refuse what is no loss."""
    if not isinstance(loss, Tensor):
        raise SettingError(
            f"world.backward() was given a {type(loss).__name__}", "it needs the loss itself", "pass the loss tensor"
        )
    if loss.numel() != 1:
        raise SettingError(
            f"world.backward() was given a loss of shape {list(loss.shape)}",
            "it must be one number, the mean over this worker's samples",
            "pass loss.mean()",
        )
    if not loss.requires_grad:
        raise SettingError(
            "world.backward() was given a loss without a gradient",
            "it was detached, made under no_grad, or depends on no parameter",
            "compute it from the wrapped model",
        )
