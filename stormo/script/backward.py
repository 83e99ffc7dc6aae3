"""Backward of a user's loop: every worker's loss weighs what its samples are of all, and gradients leave on the way."""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from stormo.errors import SettingError, StormoError
from stormo.script.agreement import call_site
from stormo.script.choosing import Loaded
from stormo.script.giving import Giver
from stormo.script.loop import Given, Loop
from stormo.script.means import Look, differ, look
from stormo.script.refusals import check_loss, check_reduction
from stormo.script.stepping import Group


@dataclass(slots=True)
class _Term:
    """One of the losses that a step adds up, over all passes of the step."""

    weighed_by: Literal["samples", "count", "nothing"]  # a count is known after the last pass; a sum weighs nothing
    reference: float = 0.0  # that of all workers in the first pass,
    total: float = 0.0  # and in all passes so far

    @property
    def is_counted(self) -> bool:
        """Whether what it is a mean over is known after the last pass alone."""
        return self.weighed_by == "count"

    @property
    def divisor(self) -> float:
        """What its gradient is to be divided by in the end."""
        return self.total / self.reference if self.is_counted else 1.0


_NUM_LOOKS = 3  # at the losses of one line: what they are means over does not change from batch to batch


class Backward:
    """`world.backward`."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._terms: dict[tuple[int | None, int], _Term] = {}  # of this step: of which loader, which loss of a pass
        self._passes: dict[int | None, tuple[Given | None, int]] = {}  # of each loader the last, and its losses so far
        self._num_looks: dict[str, int] = {}  # at the losses of a line of the script

    def __call__(
        self,
        loss: Tensor,
        *,
        count: float | None,
        reduction: str | None,
        loader: Loaded | None,
        more: bool,
        options: dict[str, Any],
    ) -> None:
        """Add this pass's part of the step's gradient; after the last pass it is the same on all workers."""
        check_loss(loss)
        check_reduction(reduction, count)
        giver = self._giver(loader, is_weighed=count is not None or reduction == "sum")
        given = None if giver is None else giver.given
        # A loss without a name is of all loaders that are under way, as in a zip() of them.
        others = [each.given for each in self._loop.iterating] if loader is None else []
        self._check_order(given, [one for one in others if one is not None and one is not given], more=more)
        if not self._loop.is_partial:  # a new step, whatever became of the last one
            self._terms, self._passes = {}, {}
        groups = self._loop.groups
        for group in groups:
            group.begin_backward()
        is_last = not more and (given is None or given.is_last)
        site = call_site()
        what = self._described(site, is_last=is_last, is_sum=reduction == "sum")
        if giver is not None and count is None and reduction is None:
            self._look(loss, giver, site, what)
        weight = self._weight(giver, count, what, is_sum=reduction == "sum")
        try:
            before = None
            for group in _in_turn(groups) if is_last else []:
                group.exchange.arm(before)
                before = group.exchange
            if self._loop.weighed is not None:
                self._loop.weighed.append((weight, loss.detach()))
            self._go_back(loss, weight, options)
        except BaseException as error:
            for group in groups:
                group.exchange.cancel()
            self._loop.agreement.break_off(
                StormoError(f"a backward failed on rank {self._loop.world.rank} ({error}), which the others wait for.")
            )
            raise
        self._loop.is_partial, self._loop.awaits_more = not is_last, more
        if not is_last:
            for group in groups:
                group.end_pass()
        if given is not None and not given.is_last:
            for group in (group for group in groups if group.has_gradient):
                group.require_optimizer("world.backward() was called for a pass that is not the last of a step")
        if is_last:
            self._finish()

    def _go_back(self, loss: Tensor, weight: float, options: dict[str, Any]) -> None:
        """A loss that weighs nothing may be the mean of nothing: no number at all, and zero times that is none."""
        if weight:
            (loss * weight if weight != 1.0 else loss).backward(**options)
        elif self._loop.sums_in_models:  # other workers wait for this one there
            with zeros_stay_zeros(loss):
                (loss * 0.0).backward(**options)

    def _check_order(self, given: Given | None, others: list[Given], *, more: bool) -> None:
        for giver in self._loop.iterating:
            if giver.given is None or giver.trains or not (giver.given is given or giver.given in others):
                continue
            giver.check_first(giver.given)
            giver.trains = True
        for one in others:
            one.is_trained = not more
        if given is None:
            return
        if given.is_trained and not given.is_last:
            raise SettingError(
                "world.backward() was called twice for one batch with accumulate above 1",
                "gradients of several losses would be mixed up between the passes of a step",
                "call it with more=True for all but the last loss of a batch, or leave accumulate out",
            )
        given.is_trained = not more

    def _giver(self, loader: Loaded | None, *, is_weighed: bool) -> Giver | None:
        """The loader that the loss belongs to."""
        loaders: list[Giver] = [loader] if loader is not None else self._loop.iterating
        givers = [each for each in loaders if each.given is not None]
        found = [each.given for each in givers if each.given is not None]
        if not found and not is_weighed:
            raise SettingError(
                "world.backward() was called outside of a loop over a loader of world.loader()",
                "what this worker's loss weighs among all is not known",
                "take the batch from such a loader, or set count= to what the loss is a mean over",
            )
        if len({(each.num_samples, each.step_samples, each.is_last) for each in found}) > 1:
            raise SettingError(
                "world.backward() was called with several loaders under way",
                "their batches weigh differently and the loss belongs to one of them",
                "say which: world.backward(loss, loader=...)",
            )
        return givers[-1] if givers else None

    def _described(self, site: str, *, is_last: bool, is_sum: bool) -> str:
        what = f"world.backward in {site}" + (", a sum" if is_sum else "")
        what += "" if is_last else ", not the last of a step"
        return what + "".join(
            f", over {group.exchange.signature}" for group in self._loop.groups if self._loop.world.size > 1
        )

    def _look(self, loss: Tensor, giver: Giver, site: str, what: str) -> None:
        """Refuse, the first times at a line, a sum that would be taken for a mean; tell of means over other things."""
        size = self._loop.world.size
        num_looks = self._num_looks[site] = self._num_looks.get(site, 0) + 1
        if (size == 1 and giver.accumulate == 1) or num_looks > _NUM_LOOKS:
            return
        given = giver.given
        assert given is not None
        found = Look(False, []) if given.is_ghost else look(loss, given.num_samples, given.step_samples)
        if size > 1:
            self._loop.agreement.exchange(what)
        gathered = self._loop.world.gather_json([found.is_sum, given.num_samples, found.divisors])
        looks: list[tuple[bool, int, list[float]]] = self._loop.world.share_json(gathered)
        if any(is_sum for is_sum, _, _ in looks):
            raise SettingError(
                f"world.backward() in {site} was given a loss that is a sum over the batch, or has one in it",
                "it is taken for a mean over the samples, so that the step would shrink with the number of workers and "
                "of micro-batches",
                'say world.backward(loss, reduction="sum"), in a call of its own if other parts of the loss are means, '
                "or set count= to what the sum is divided by",
            )
        if differ(looks):
            self._loop.tell(
                f"means {site}",
                f"the loss of world.backward() in {site} is a mean over other things than samples, of which a share "
                "has more or less than another; set count= to what it is a mean over, as it is weighed by samples now.",
            )

    def _weight(self, giver: Giver | None, count: float | None, what: str, *, is_sum: bool) -> float:
        """What this loss weighs among all; announces the backward on the way."""
        given = None if giver is None else giver.given
        is_counted = count is not None or (given is not None and given.step_samples is None)
        term = self._term(giver, "nothing" if is_sum else "count" if is_counted else "samples")
        if is_sum:
            self._loop.agreement.cast(what)
            return 0.0 if given is not None and given.is_ghost else 1.0
        if not term.is_counted:
            assert given is not None
            assert given.step_samples is not None
            self._loop.agreement.cast(what)
            return given.num_samples / given.step_samples
        own, total = self._counts(given, count, what)
        term.total += total
        term.reference = term.reference or total
        return own / term.reference if term.reference else 0.0

    def _term(self, giver: Giver | None, weighed_by: Literal["samples", "count", "nothing"]) -> _Term:
        """Which of the step's losses this is: the first of a pass is one with the first of the loader's other passes.

        Without a loader there are no passes, and every backward has a loss of its own.
        """
        number, given = (None, None) if giver is None else (giver.number, giver.given)
        last, num_losses = self._passes.get(number, (given, 0))
        index = num_losses if given is last else 0
        self._passes[number] = given, index + 1
        term = self._terms.setdefault((number, index), _Term(weighed_by))
        if term.weighed_by != weighed_by:
            raise SettingError(
                "world.backward() was called with count= or reduction= for some passes of a step only",
                "their losses would be weighed by different things",
                "set them for all passes or for none",
            )
        return term

    def _counts(self, given: Given | None, count: float | None, what: str) -> tuple[float, float]:
        """This worker's count, and that of all."""
        if count is None:
            assert given is not None
            self._loop.agreement.cast(what)
            return given.num_samples, given.pass_samples
        own = 0.0 if given is not None and given.is_ghost else float(count)
        if not (math.isfinite(own) and own >= 0):
            raise SettingError(
                f"world.backward(count={own:g}) was called", "it is no count", "set what the loss is a mean over"
            )
        agreed = self._loop.agreement.exchange(what, number=struct.unpack("<q", struct.pack("<d", own))[0])
        return own, math.fsum(struct.unpack("<d", struct.pack("<q", number))[0] for number in agreed.numbers)

    def _finish(self) -> None:
        self._loop.agreement.settle()
        groups = self._trained_groups()
        for group in _in_turn(groups):
            group.exchange.send_rest()
        for group in groups:
            group.exchange.finish()
        terms = list(self._terms.values())
        if any(term.is_counted and term.total <= 0 for term in terms):
            raise SettingError(
                "world.backward() was called with counts that add up to 0",
                "the loss is a mean over nothing then",
                "leave such batches out on all workers",
            )
        first = terms[0].divisor
        if any(term.divisor != first for term in terms):
            if len({term.is_counted for term in terms}) > 1:
                raise SettingError(
                    "world.backward() was called with count= for some losses of a step of several passes only",
                    "what these are means over is known after the last pass, when all gradients are one sum",
                    "set count= for all of them or for none, or leave accumulate out",
                )
            raise SettingError(
                "world.backward() was called for several losses with counts that change between the passes of a step",
                "their gradients are one sum by the time the counts are known",
                "add the losses of a pass up and call it once with one count=, or leave accumulate out",
            )
        for group in groups:
            if first != 1.0:
                group.divide(first)
            group.end_backward()

    def _trained_groups(self) -> list[Group]:
        """Those that got a gradient on some worker: of several, such as a GAN's, the others need not be exchanged."""
        groups = self._loop.groups
        if len(groups) < 2 or self._loop.world.size == 1:
            return groups
        touched = sum(1 << index for index, group in enumerate(groups) if group.exchange.is_touched)
        agreed = self._loop.agreement.exchange("the end of a backward", number=touched)
        trained = functools.reduce(operator.or_, agreed.numbers)
        for index, group in enumerate(groups):
            if not trained >> index & 1:
                group.exchange.cancel()
        return [group for index, group in enumerate(groups) if trained >> index & 1]


@contextmanager
def zeros_stay_zeros(loss: Tensor) -> Iterator[None]:
    """In a backward of a loss that weighs nothing, let a gradient of zeros stay one behind every operation.

    Derivatives are linear: zeros make zeros. But zero times infinity, as behind a mean of nothing, is no number.
    Operations written in Python are left alone: those of a batch norm bring the gradients of other workers.
    """
    handles, waiting, seen = [], [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
        if not isinstance(node, BackwardCFunction):
            handles.append(node.register_hook(_zeros_of_zeros))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zeros_of_zeros(made: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> Any:
    if any(each is not None and bool(each.any()) for each in given):
        return None
    return tuple(None if each is None else torch.zeros_like(each) for each in made)


def _in_turn(groups: list[Group]) -> list[Group]:
    """As their gradients mostly come, the same on all workers: what was wrapped last computes last."""
    return groups[::-1]
