"""Keeps backward, step and zero_grad of a user's loop in their order, and lets a step wait for all of its passes.

The user's objects stay what they are: their `step` and `zero_grad` are replaced on the object itself, so schedulers
and loss scalers made before or after find them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from enum import Enum
from traceback import walk_stack
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from stormo.errors import SettingError
from stormo.optim.own import is_scheduled
from stormo.parallel.buckets import is_summed
from stormo.parallel.exchange import GradientExchange
from stormo.script.loop import Loop
from stormo.script.refusals import check_metric

_MOST_FRAMES = 12  # between a step and the loss scaler that calls for it: torch's wrappers and ours


class Stage(Enum):
    """Where the gradients of an optimizer are."""

    CLEAN = "no gradient"
    READY = "the gradient of a step, the same on every worker"
    DONE = "the gradient of a step that has been taken"
    STALE = "the gradient of a step that has been taken, and another one on top of it"


class Stepper:
    """One optimizer."""

    def __init__(self, group: Group, optimizer: Optimizer) -> None:
        self._group = group
        self._loop = group.loop
        self.optimizer = optimizer
        self.stage = Stage.CLEAN
        self._taken: tuple[int, int] | None = None  # a gradient as the last step left it: which one, and its version
        _replace(optimizer, "step", self._step)
        _replace(optimizer, "zero_grad", self._zero_grad)

    @property
    def parameters(self) -> list[Tensor]:
        """All that it moves."""
        return [parameter for settings in self.optimizer.param_groups for parameter in settings["params"]]

    def begin_backward(self) -> None:
        """Note whether the gradients of a step taken before are still there."""
        if self.stage is Stage.DONE:
            is_there = self._taken is not None and self._taken == self._gradient()
            self.stage = Stage.STALE if is_there else Stage.CLEAN

    def end_backward(self) -> None:
        """The gradients are complete, where there are any."""
        if self._gradient() is not None:
            self.stage = Stage.STALE if self.stage is Stage.STALE else Stage.READY

    def step_done(self) -> None:
        """A step was taken, or left out by a loss scaler."""
        self.stage, self._taken = Stage.DONE, self._gradient()
        self._group.num_steps += 1
        for loader in self._loop.iterating:
            loader.take()

    def _gradient(self) -> tuple[int, int] | None:
        # Not the tensor itself, which would keep the memory of all gradients.
        gradient = next((p.grad for p in self.parameters if p.grad is not None), None)
        return None if gradient is None else (id(gradient), gradient._version)

    def _zero_grad(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._loop.is_partial:
            return None  # it belongs to the step, which is not complete
        self.stage = Stage.CLEAN
        return inner(*args, **kwargs)

    def _step(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            rest = {name: value for name, value in kwargs.items() if name != "closure"}
            return self._take(inner, self._closure(closure), *args[1:], **rest)
        if self._loop.is_partial:
            self._group.require_last("optimizer.step()")
            self._group.require_wrapped("optimizer.step() was called between the micro-batches of a step")
            self._group.require_untouched()
            return None
        self._require_ready()
        return self._take(inner, *args, **kwargs)

    def _take(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._loop.is_stepping = True
        try:
            result = inner(*args, **kwargs)
        finally:
            self._loop.is_stepping = False
        self.step_done()
        return result

    def _require_ready(self) -> None:
        if self.stage is Stage.CLEAN:
            raise SettingError(
                "optimizer.step() was called without world.backward() before it",
                "loss.backward() leaves every worker a gradient of its own",
                "call world.backward(loss) instead of loss.backward()",
            )
        if self.stage is Stage.STALE:
            raise SettingError(
                "optimizer.step() was called with the gradients of two steps",
                "those of the step before were still there when world.backward() added to them",
                "call optimizer.zero_grad() between a step and the next backward",
            )

    def _closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """What an optimizer may call several times in a step; all workers get the same loss from it."""

        def evaluate() -> Any:
            if self.stage is not Stage.CLEAN:
                self.stage, self._taken = Stage.DONE, self._gradient()
            weighed: list[tuple[float, Tensor]] = []
            self._loop.weighed = weighed
            try:
                loss = closure()
            finally:
                self._loop.weighed = None
            if self._loop.is_partial:
                raise SettingError(
                    "optimizer.step(closure) was called with accumulate above 1, or more=True",
                    "the optimizer needs a whole gradient from each call of the closure",
                    "leave them out, or use an optimizer without a closure",
                )
            self._require_ready()
            return self._mean(loss, weighed)

        return evaluate

    def _mean(self, loss: Any, weighed: list[tuple[float, Tensor]]) -> Any:
        """The loss of all workers; of several, which the closure adds up, each weighs what its own backward said."""
        if self._loop.world.size == 1 or not isinstance(loss, Tensor | float):
            return loss
        parts = [(weighed[0][0], torch.as_tensor(loss))] if len(weighed) == 1 else weighed
        wide = torch.zeros(1, dtype=torch.float64, device=self._loop.world.device)
        for weight, part in parts:
            if weight:  # a mean of nothing is no number, and zero times that is none
                wide += weight * part.detach().double().reshape(1).to(wide.device)
        mean = self._loop.world.sum(wide)
        return mean.to(loss.dtype).reshape(loss.shape) if isinstance(loss, Tensor) else float(mean)


class Group:
    """Models that were wrapped together, with the optimizers that move them and what goes along."""

    def __init__(
        self, loop: Loop, model: nn.Module, parts: tuple[Any, ...], *, average_buffers: bool, compress: str = "none"
    ) -> None:
        self.loop = loop
        self.model = model
        self.num_steps = 0
        self.is_trained = False
        self.averages_buffers = average_buffers
        self._partial: list[tuple[Tensor, int]] = []  # gradients as the last pass left them, and their versions
        self._weights: list[tuple[Tensor, int]] = []  # and the weights
        # What was announced comes first: gradients of different sizes must not meet.
        self.exchange = GradientExchange(
            model,
            loop.world,
            average_buffers=average_buffers,
            compress=compress,
            before_sending=loop.agreement.settle,
            may_send=loop.may_send,
        )
        self.steppers: list[Stepper] = []
        self.others: list[Any] = []  # schedulers and loss scalers: anything else that steps and has a state
        for module in (part for part in parts if isinstance(part, nn.Module)):
            _replace(module, "zero_grad", functools.partial(self._zero_grad, module))
            vars(module)["__getstate__"] = MethodType(_state_without_gates, module)
        self.add(tuple(part for part in parts if not isinstance(part, nn.Module)))

    def add(self, parts: tuple[Any, ...]) -> None:
        """Take in optimizers, schedulers and loss scalers."""
        self.steppers += [Stepper(self, part) for part in parts if isinstance(part, Optimizer)]
        others = [part for part in parts if not isinstance(part, Optimizer)]
        self.others += others
        for other in others:
            for name in ("step", "update", "unscale_"):
                if hasattr(other, name):
                    _replace(other, name, functools.partial(self._gated, other, name))
            _replace(other, "state_dict", _without_gates)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, in the order in which they were wrapped."""
        return [stepper.optimizer for stepper in self.steppers]

    @property
    def has_gradient(self) -> bool:
        """Whether any of its parameters has one."""
        return any(parameter.grad is not None for parameter in self.model.parameters())

    def begin_backward(self) -> None:
        """Look at what is there before a backward adds to it."""
        if self.loop.is_partial:
            self.require_untouched()
            return
        for stepper in self.steppers:
            stepper.begin_backward()
        parameters = (p for p in self.model.parameters() if p.grad is not None and p.requires_grad)
        gradient = next((p.grad for p in parameters), None)
        if gradient is not None and self.loop.world.size > 1 and not is_summed(gradient):
            raise SettingError(
                "world.backward() was called on top of gradients that did not come from it",
                "loss.backward() leaves every worker a gradient of its own, and the sum would count it once a worker",
                "call world.backward() for every loss, or optimizer.zero_grad() before it",
            )

    def end_pass(self) -> None:
        """Note the gradients and weights of a pass that is not the last of its step."""
        parameters = list(self.model.parameters())
        self._partial = [(p.grad, p.grad._version) for p in parameters if p.grad is not None]
        # Without a gradient there is nothing to step: an average of weights may follow them at any time.
        self._weights = [(parameter, parameter._version) for parameter in parameters if parameter.grad is not None]

    def require_last(self, what: str) -> None:
        """Refuse to leave out a step without a word where the script itself has said that more is to come."""
        if self.loop.awaits_more:
            raise SettingError(
                f"{what} was called after world.backward(loss, more=True)",
                "more=True says that another backward follows before the step, and nothing has been exchanged yet",
                "leave it out of the last backward before a step",
            )

    def require_untouched(self) -> None:
        """Refuse changes to gradients that are not complete, and steps that were taken with them."""
        if any(parameter._version != version for parameter, version in self._weights):
            raise SettingError(
                "the weights were changed between the passes of a step",
                "its gradients are not complete there, and an optimizer that was not wrapped does not wait for them",
                "pass every optimizer to world.wrap(), also one that is made later: world.wrap(optimizer)",
            )
        is_changed = any(gradient._version != version for gradient, version in self._partial)
        if is_changed:
            raise SettingError(
                "the gradients were changed between the passes of a step",
                "they are a part of one worker's sum there, and clipping or unscaling belongs to the whole",
                "clip with world.clip_grad_norm(...), and pass a loss scaler to world.wrap()",
            )

    def end_backward(self) -> None:
        """The gradients are complete."""
        self._partial, self._weights = [], []
        # One worker does not ask which of several models the loss has reached.
        self.is_trained = self.is_trained or self.has_gradient
        for stepper in self.steppers:
            stepper.end_backward()

    @torch.no_grad()
    def divide(self, total: float) -> None:
        """Turn sums over counted things into means."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, total)

    def require_optimizer(self, what: str) -> None:
        """Refuse what would go wrong with an optimizer that nobody has told us of."""
        if not self.steppers and any(parameter.requires_grad for parameter in self.model.parameters()):
            raise SettingError(
                what,
                "the model that is trained was wrapped without its optimizer, which can be neither saved nor kept in "
                "step",
                "pass it along: world.wrap(model, optimizer)",
            )

    def require_wrapped(self, what: str) -> None:
        """Refuse a scheduler or a loss scaler that would act on every micro-batch, or be missing in a save."""
        known = [other.optimizer for other in self.others if hasattr(other, "optimizer")]
        for optimizer in self.optimizers:
            if is_scheduled(optimizer) and not any(each is optimizer for each in known):
                raise SettingError(
                    what,
                    "a scheduler of the optimizer was not passed to world.wrap(), so it is not saved or kept in step",
                    "pass it along: world.wrap(model, optimizer, scheduler), or world.wrap(scheduler) afterwards",
                )
        if _is_called_by_scaler() and not any(isinstance(other, torch.amp.GradScaler) for other in self.others):
            raise SettingError(
                what,
                "a loss scaler that was not passed to world.wrap() unscales the gradients of every micro-batch",
                "pass it along: world.wrap(model, optimizer, scaler)",
            )

    def _gated(self, owner: Any, name: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.loop.is_partial:
            if name == "step" and args and isinstance(args[0], Optimizer):
                self.require_last(f"{type(owner).__name__}.step(optimizer)")
            return None  # it belongs to the step, which is not complete
        if isinstance(owner, ReduceLROnPlateau):
            check_metric(self.loop.agreement, args[0] if args else kwargs["metrics"])
        result = inner(*args, **kwargs)
        for stepper in self.steppers:
            if args and args[0] is stepper.optimizer and name == "step" and stepper.stage is Stage.READY:
                stepper.step_done()  # a loss scaler has left it out
        return result

    def _zero_grad(self, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.loop.is_partial:
            return None
        cleared = set(module.parameters())
        for stepper in self.steppers:
            if cleared.issuperset(stepper.parameters):
                stepper.stage = Stage.CLEAN
        return inner(*args, **kwargs)


def _is_called_by_scaler() -> bool:
    """Whether a loss scaler that is enabled has called for the step; it leaves no trace on the gradients."""
    frames = itertools.islice(walk_stack(None), _MOST_FRAMES)
    return any(frame.f_code is torch.amp.GradScaler._maybe_opt_step.__code__ for frame, _ in frames)


def _state_without_gates(module: nn.Module) -> Any:
    """What a module is pickled and copied with: as it was before it was wrapped."""
    state: Any = type(module).__getstate__(module)
    if not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if name not in ("zero_grad", "__getstate__")}


def _without_gates(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A state without our gates: torch's schedulers save, and load, all that is set on them."""
    state = inner(*args, **kwargs)
    if not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if not isinstance(value, MethodType)}


def _replace(owner: Any, name: str, gate: Callable[..., Any]) -> None:
    inner = getattr(owner, name)

    def gated(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not owner:  # a copy of it, such as one that averages the weights
            return getattr(type(self), name)(self, *args, **kwargs)
        return gate(inner, *args, **kwargs)

    # What torch's schedulers note on a method (that they have replaced it already) must be found on ours.
    functools.update_wrapper(gated, inner)
    setattr(owner, name, MethodType(gated, owner))
