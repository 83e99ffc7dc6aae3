"""Keeps backward, step and zero_grad of a user's loop in order, and lets a step wait for all of its micro-batches.

The user's objects stay what they are: their `step` and `zero_grad` are replaced on the object itself, so schedulers
and loss scalers made before or after find them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from traceback import walk_stack
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stormo.errors import SettingError
from stormo.optim.task_optimizer import is_scheduled
from stormo.parallel.buckets import is_summed
from stormo.parallel.exchange import GradientExchange
from stormo.script.loop import Loop
from stormo.script.sharding import ShardedExchange

_MOST_FRAMES = 12  # between a step and the loss scaler that calls it: torch's wrappers and ours


class OptimizerGate:
    """Stands before `step` and `zero_grad` of one optimizer."""

    def __init__(self, group: Group, optimizer: Optimizer) -> None:
        self._group = group
        self._loop = group.loop
        self.optimizer = optimizer
        self.has_backward = False  # there was one since the gradients were cleared
        self.is_pending = False  # and no step since
        replace_method(optimizer, "step", self._step)
        replace_method(optimizer, "zero_grad", self._zero_grad)

    @property
    def parameters(self) -> list[Tensor]:
        """All that it moves."""
        return [parameter for settings in self.optimizer.param_groups for parameter in settings["params"]]

    def end_backward(self) -> None:
        """The gradients are complete, if there are any."""
        # On top of those of a step that was taken, they are no step to come: as of a critic under its generator's loss.
        if not self.has_backward and any(parameter.grad is not None for parameter in self.parameters):
            self.has_backward = self.is_pending = True

    def cleared(self) -> None:
        """The gradients are gone."""
        self.has_backward = self.is_pending = False

    def step_done(self) -> None:
        """A step was taken, or skipped by a loss scaler."""
        self.is_pending = False
        with self._loop.around_step():
            self._group.num_steps += 1
        for loader in self._loop.iterating:
            loader.step_taken()

    def _zero_grad(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._loop.has_micro_batch:
            self._group.require_settled(self.parameters)
            return None
        self.cleared()
        self._group.forget(self.parameters)
        return _clear(self._loop, inner, *args, **kwargs)

    def _step(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            rest = {name: value for name, value in kwargs.items() if name != "closure"}
            return self._take(inner, self._closure(closure), *args[1:], **rest)
        if self._loop.is_accumulating:
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
        if not self.has_backward:
            raise SettingError(
                "optimizer.step() was called without world.backward() before it",
                "loss.backward() gives every worker its own gradient",
                "call world.backward(loss) instead of loss.backward()",
            )

    def _closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """What an optimizer may call several times in a step; all workers get the same loss from it."""

        def evaluate() -> Any:
            self.has_backward = False
            losses: list[tuple[float, Tensor]] = []
            self._loop.closure_losses = losses
            try:
                loss = closure()
            finally:
                self._loop.closure_losses = None
            if self._loop.is_accumulating:
                raise SettingError(
                    "optimizer.step(closure) was called with accumulate above 1, or more=True",
                    "the optimizer needs a whole gradient from each call of the closure",
                    "leave them out, or use an optimizer without a closure",
                )
            self._require_ready()
            return self._mean(loss, losses)

        return evaluate

    def _mean(self, loss: Any, losses: list[tuple[float, Tensor]]) -> Any:
        """The loss of all workers; of several that the closure adds up, each with the weight of its backward."""
        if self._loop.world.size == 1 or not isinstance(loss, Tensor | float):
            return loss
        parts = [(losses[0][0], torch.as_tensor(loss))] if len(losses) == 1 else losses
        wide = torch.zeros(1, dtype=torch.float64, device=self._loop.world.device)
        for weight, part in parts:
            if weight:  # a mean of nothing is NaN, and so is zero times that
                wide += weight * part.detach().double().reshape(1).to(wide.device)
        mean = self._loop.world.sum(wide)
        return mean.to(loss.dtype).reshape(loss.shape) if isinstance(loss, Tensor) else float(mean)


class Group:
    """Models that were wrapped together, with their optimizers, schedulers and loss scalers."""

    def __init__(
        self,
        loop: Loop,
        model: nn.Module,
        parts: tuple[Any, ...],
        *,
        average_buffers: bool,
        compress: str = "none",
        is_sharded: bool = False,
    ) -> None:
        self.loop = loop
        self.is_sharded = is_sharded
        self.model = model
        self.num_steps = 0
        self.is_trained = False
        self.averages_buffers = average_buffers
        self._partial: list[tuple[Tensor, int]] = []  # weights and gradients of a micro-batch, with their versions
        self._left: dict[Tensor, Tensor] = {}  # gradients of the step before, while micro-batches add up
        self._settled: dict[Tensor, int] = {}  # versions of the gradients after the last whole micro-batch
        # Posts come first: gradients of different sizes must not meet.
        self.exchange = (ShardedExchange if is_sharded else GradientExchange)(
            model,
            loop.world,
            average_buffers=average_buffers,
            compress=compress,
            before_sending=loop.check.wait,
            may_send=loop.may_send,
        )
        self.gates: list[OptimizerGate] = []
        self.others: list[Any] = []  # schedulers and loss scalers
        for module in (part for part in parts if isinstance(part, nn.Module)):
            replace_method(module, "zero_grad", functools.partial(self._zero_grad, module))
            vars(module)["__getstate__"] = MethodType(_state_without_gates, module)
        self.add(tuple(part for part in parts if not isinstance(part, nn.Module)))

    def add(self, parts: tuple[Any, ...]) -> None:
        """Take in optimizers, schedulers and loss scalers."""
        self.gates += [OptimizerGate(self, part) for part in parts if isinstance(part, Optimizer)]
        others = [part for part in parts if not isinstance(part, Optimizer)]
        self.others += others
        for other in others:
            for name in ("step", "update", "unscale_"):
                if hasattr(other, name):
                    replace_method(other, name, functools.partial(self._other_step, other, name))
            replace_method(other, "state_dict", _without_gates)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, in the order in which they were wrapped."""
        return [gate.optimizer for gate in self.gates]

    def begin_backward(self) -> None:
        """Look at what is there before a backward adds to it."""
        if self.loop.is_accumulating:
            self.require_untouched()
            return
        self._left = {}
        if self.loop.is_cut_off or self.loop.world.size == 1:
            return
        trained = (p.grad for p in self.model.parameters() if p.grad is not None and p.requires_grad)
        gradient = next(trained, None)
        if gradient is not None and not is_summed(gradient):
            raise SettingError(
                "world.backward() was called on top of gradients that did not come from it",
                "loss.backward() gives every worker its own gradient, which the sum would count once a worker",
                "call world.backward() for every loss, or optimizer.zero_grad() before it",
            )

    def set_aside(self) -> None:
        """Before the first of several micro-batches: what the step before has left is not summed or divided again."""
        gradients = {p: p.grad for p in self.model.parameters() if p.grad is not None}
        # Without a mark they are of a step that a break has cut off, and count in this one.
        is_alone = self.loop.world.size == 1
        self._left = {p: gradient for p, gradient in gradients.items() if is_alone or is_summed(gradient)}
        for parameter in self._left:
            parameter.grad = None

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Clear what was set aside of these."""
        for parameter in parameters:
            self._left.pop(parameter, None)

    @torch.no_grad()
    def put_back(self) -> None:
        """Add what was set aside."""
        for parameter, gradient in self._left.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._left = {}

    def end_micro_batch(self) -> None:
        """Note gradients and weights after a micro-batch that is not the last of its step."""
        # Weights without a gradient may change at any time: an average follows them.
        both = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]
        self._partial = [(tensor, tensor._version) for pair in both for tensor in pair]
        if not self.loop.awaits_more:
            self._settled = {p: gradient._version for p, gradient in both}

    def end_backward(self) -> None:
        """The gradients are complete."""
        self._partial = []
        # A single worker does not ask which of several models the loss has reached.
        self.is_trained = self.is_trained or any(p.grad is not None for p in self.model.parameters())
        for gate in self.gates:
            gate.end_backward()

    @torch.no_grad()
    def divide(self, total: float) -> None:
        """Turn sums over what was counted into means."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, total)

    def require_last(self, what: str) -> None:
        """Refuse a step after a backward that said more=True."""
        if self.loop.awaits_more:
            raise SettingError(
                f"{what} was called after world.backward(loss, more=True)",
                "more=True says that another backward follows before the step",
                "leave it out of the last backward before a step",
            )

    def require_untouched(self) -> None:
        """Refuse changes of gradients that are not complete, and steps that were taken with them."""
        if any(tensor._version != version for tensor, version in self._partial):
            raise SettingError(
                "the weights or gradients were changed between the micro-batches of a step",
                "the gradients are not complete there",
                "pass every optimizer and loss scaler to world.wrap(), and clip with world.clip_grad_norm(...)",
            )

    def require_settled(self, parameters: list[Tensor]) -> None:
        """Refuse a `zero_grad` after some losses of a micro-batch that is not the first: it would clear the others."""
        if self.loop.awaits_more and any(
            p.grad is not None and p.grad._version != self._settled.get(p) for p in parameters
        ):
            raise SettingError(
                "zero_grad() was called between two losses of a batch with accumulate above 1",
                "what the batches before have added would be cleared too",
                "call it before the first loss of a batch, or leave accumulate out",
            )

    def require_wrapped(self, what: str) -> None:
        """Refuse an optimizer, scheduler or loss scaler that acts on every micro-batch, or is missing in a save."""
        scheduled = [other.optimizer for other in self.others if hasattr(other, "optimizer")]
        missing = None
        if self.is_trained and not self.gates and any(p.requires_grad for p in self.model.parameters()):
            missing = "optimizer"
        elif any(is_scheduled(one) and not any(one is each for each in scheduled) for one in self.optimizers):
            missing = "scheduler"
        elif _is_called_by_scaler() and not any(isinstance(other, torch.amp.GradScaler) for other in self.others):
            missing = "scaler"
        if missing is not None:
            raise SettingError(
                what,
                f"the {missing} was not passed to world.wrap(), so it is not saved and acts on every micro-batch",
                f"pass it along with the model, or afterwards: world.wrap({missing})",
            )

    def _other_step(self, owner: Any, name: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`step`, `update` or `unscale_` of a scheduler or loss scaler: once a step."""
        if self.loop.is_accumulating:
            if name == "step" and args and isinstance(args[0], Optimizer):
                self.require_last(f"{type(owner).__name__}.step(optimizer)")
            return None
        result = inner(*args, **kwargs)
        for gate in self.gates:
            if args and args[0] is gate.optimizer and name == "step" and gate.is_pending:
                gate.step_done()  # the loss scaler has skipped it
        return result

    def _zero_grad(self, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.loop.has_micro_batch:
            self.require_settled(list(module.parameters()))
            return None
        cleared = set(module.parameters())
        for gate in self.gates:
            if cleared.issuperset(gate.parameters):
                gate.cleared()
        self.forget(cleared)
        return _clear(self.loop, inner, *args, **kwargs)


def _clear(loop: Loop, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A `zero_grad`, perhaps after the first of several losses of a step."""
    partial = loop.groups if loop.is_accumulating else []
    for group in partial:
        group.require_untouched()
    result = inner(*args, **kwargs)
    for group in partial:
        group.end_micro_batch()
    return result


def _is_called_by_scaler() -> bool:
    """Whether a loss scaler has called for the step; unscaling changes gradients without a new version of them."""
    callers = (frame.f_locals.get("self") for frame, _ in itertools.islice(walk_stack(None), _MOST_FRAMES))
    return any(isinstance(caller, torch.amp.GradScaler) and caller.is_enabled() for caller in callers)


def _state_without_gates(module: nn.Module) -> Any:
    """What a module is pickled and copied with: as it was before it was wrapped."""
    state: Any = type(module).__getstate__(module)
    if not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if name not in ("zero_grad", "forward", "__getstate__")}


def _without_gates(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A state without our gates: torch's schedulers save, and load, all that is set on them."""
    state = inner(*args, **kwargs)
    if not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if not isinstance(value, MethodType)}


def replace_method(owner: Any, name: str, gate: Callable[..., Any]) -> None:
    """Put a gate before a method, on this object alone."""
    inner = getattr(owner, name)

    def gated(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not owner:  # a copy of it, such as one that averages the weights
            return getattr(type(self), name)(self, *args, **kwargs)
        return gate(inner, *args, **kwargs)

    # What torch's schedulers note on a method (that they have replaced it already) must be found on ours.
    functools.update_wrapper(gated, inner)
    setattr(owner, name, MethodType(gated, owner))
