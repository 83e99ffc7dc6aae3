"""`world.backward`: each worker's loss is scaled by its share of the global batch, and gradients leave on the way."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from stormo.errors import SettingError, StormoError
from stormo.script.collective_check import call_site
from stormo.script.loop import BatchInfo, LoaderBase, Loop
from stormo.script.loss_graph import LossTerms, item_counts_differ, read_terms
from stormo.script.stepping import Group

_NUM_CHECKS = 3  # of the losses of one line: what they are means over does not change from batch to batch
_Weighting = Literal["samples", "count", "sum"]


@dataclass(slots=True)
class _Term:
    """One of the losses that a step adds up, over all of its micro-batches."""

    weighting: _Weighting
    first_total: float = 0.0  # the count of all workers in the first micro-batch,
    total: float = 0.0  # and in all of them so far

    @property
    def divisor(self) -> float:
        """What its gradient is divided by in the end: a count is known only after the last micro-batch."""
        return self.total / self.first_total if self.weighting == "count" else 1.0


class Backward:
    """`world.backward`."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._terms: dict[tuple[int | None, int], _Term] = {}  # of this step, by loader and loss of a micro-batch
        self._last: dict[int | None, tuple[BatchInfo | None, int]] = {}  # of each loader: its batch, and losses so far
        self._num_checks: dict[str, int] = {}  # by line of the script

    def __call__(
        self,
        loss: Tensor,
        count: float | None,
        reduction: str | None,
        loader: LoaderBase | None,
        more: bool,
        **options: Any,
    ) -> None:
        """Add this micro-batch to the gradient of the step; after the last one it is the same on all workers."""
        _check_arguments(loss, reduction, count)
        loop, groups, is_sum = self._loop, self._loop.groups, reduction == "sum"
        source = self._source(loader, needs_batch=count is None and not is_sum)
        info = None if source is None else source.batch_info
        self._mark_trained(loop.iterating if loader is None else [loader], more=more)
        if not loop.is_accumulating:  # a new step, whatever became of the last one
            self._terms, self._last = {}, {}
        for group in groups:
            group.begin_backward()
        loop.is_cut_off = False
        is_last = not more and (info is None or info.is_last)
        site = call_site()
        post = self._post_text(site, is_last=is_last, is_sum=is_sum)
        if source is not None and count is None and reduction is None:
            self._check_reduction(loss, source, site, post)
        weight = self._weight(source, count, post, is_sum=is_sum)
        for group in groups if not (loop.is_accumulating or is_last) else []:
            group.set_aside()
        try:
            before = None
            for group in groups[::-1] if is_last else []:  # what was wrapped last computes last
                group.exchange.arm(before)
                before = group.exchange
            if loop.closure_losses is not None:
                loop.closure_losses.append((weight, loss.detach()))
            self._run(loss, weight, options)
        except BaseException as error:
            for group in groups:
                group.exchange.cancel()
                group.put_back()
            loop.check.break_off(
                StormoError(f"a backward failed on rank {loop.world.rank} ({error}), which the others wait for.")
            )
            raise
        loop.is_accumulating, loop.awaits_more = not is_last, more
        loop.has_micro_batch = not is_last and (loop.has_micro_batch or not more)
        if is_last:
            self._finish()
        else:
            for group in groups:
                group.end_micro_batch()

    def _run(self, loss: Tensor, weight: float, options: dict[str, Any]) -> None:
        """A loss of weight 0 may be a mean of nothing: NaN, and so is zero times that."""
        if weight:
            (loss * weight if weight != 1.0 else loss).backward(**options)
        elif self._loop.runs_together:  # other workers wait for this one there
            with _zeros_stay_zeros(loss):
                (loss * 0.0).backward(**options)

    def _source(self, loader: LoaderBase | None, *, needs_batch: bool) -> LoaderBase | None:
        """The loader that the loss belongs to."""
        loaders = [loader] if loader is not None else self._loop.iterating
        found = [(each, each.batch_info) for each in loaders if each.batch_info is not None]
        if not found and needs_batch:
            raise SettingError(
                "world.backward() was called outside of a loop over a loader of world.loader()",
                "the weight of this worker's loss is unknown",
                "take the batch from such a loader, or set count= to what the loss is a mean over",
            )
        if len({(info.num_samples, info.step_samples, info.is_last) for _, info in found}) > 1:
            raise SettingError(
                "world.backward() was called with several active loaders",
                "the loss belongs to one of them, and their batches have different weights",
                "name it: world.backward(loss, loader=...)",
            )
        return found[-1][0] if found else None

    def _mark_trained(self, loaders: list[LoaderBase], *, more: bool) -> None:
        """A loss without loader= is of all active loaders, as in a zip() of them."""
        for loader in loaders:
            info = loader.batch_info
            if info is None:
                continue
            if not loader.trains:
                loader.check_first(info)
                loader.trains = True
            if info.is_trained and not info.is_last:
                raise SettingError(
                    "world.backward() was called twice for one batch with accumulate above 1",
                    "the gradients of several losses would be mixed up",
                    "set more=True for all but the last loss of a batch, or leave accumulate out",
                )
            info.is_trained = not more

    def _post_text(self, site: str, *, is_last: bool, is_sum: bool) -> str:
        text = f"world.backward in {site}" + (", a sum" if is_sum else "")
        text += "" if is_last else ", not the last of a step"
        if self._loop.world.size > 1:
            text += "".join(f", over {group.exchange.signature}" for group in self._loop.groups)
        return text

    def _check_reduction(self, loss: Tensor, source: LoaderBase, site: str, post: str) -> None:
        """In the first batches at a line: refuse a sum that would be taken for a mean, warn of a mean over tokens."""
        world = self._loop.world
        num_checks = self._num_checks[site] = self._num_checks.get(site, 0) + 1
        if (world.size == 1 and source.accumulate == 1) or num_checks > _NUM_CHECKS:
            return
        info = source.batch_info
        assert info is not None
        terms = LossTerms(False, []) if info.is_padding else read_terms(loss, info.num_samples, info.step_samples)
        if world.size > 1:
            self._loop.check.exchange(post)
        gathered = world.gather_objects([terms.has_sum, info.num_samples, terms.divisors])
        has_sum, num_samples, divisors = zip(*world.broadcast_object(gathered), strict=True)
        if any(has_sum):
            raise SettingError(
                f"world.backward() in {site} was given a loss that is, or contains, a sum over the batch",
                "it would be taken for a mean, so that steps shrink with the number of workers and micro-batches",
                'set reduction="sum" (in a separate call if other parts are means), or count= to what divides it',
            )
        if item_counts_differ(list(num_samples), list(divisors)):
            self._loop.warn_once(
                f"means {site}",
                f"the loss of world.backward() in {site} is a mean over items other than samples, and the workers have "
                "different numbers of them; it is weighted by samples now, so set count= to the number of items.",
            )

    def _weight(self, source: LoaderBase | None, count: float | None, post: str, *, is_sum: bool) -> float:
        """The factor of this worker's loss; posts the backward on the way."""
        info = None if source is None else source.batch_info
        own: float = 0 if info is None else info.num_samples
        if is_sum:
            self._term(source, "sum")
            self._loop.check.post(post)
            return 0.0 if info is not None and info.is_padding else 1.0
        if count is None and info is not None and info.step_samples is not None:
            self._term(source, "samples")
            self._loop.check.post(post)
            return own / info.step_samples
        term = self._term(source, "count")
        if count is None:
            assert info is not None
            self._loop.check.post(post)
            total: float = info.micro_batch_samples
        else:
            own = 0.0 if info is not None and info.is_padding else float(count)
            if not (math.isfinite(own) and own >= 0):
                raise SettingError(
                    f"world.backward(count={own:g}) was called", "it is no count", "set what the loss is a mean over"
                )
            total = math.fsum(self._loop.check.exchange_floats(post, own))
        term.total += total
        term.first_total = term.first_total or total
        return own / term.first_total if term.first_total else 0.0

    def _term(self, source: LoaderBase | None, weighting: _Weighting) -> _Term:
        """Which of the step's losses this is: the n-th of a micro-batch goes with the n-th of the loader's others.

        Without a loader every backward is a separate loss.
        """
        number, info = (None, None) if source is None else (source.number, source.batch_info)
        last, num_losses = self._last.get(number, (info, 0))
        index = num_losses if info is last else 0
        self._last[number] = info, index + 1
        term = self._terms.setdefault((number, index), _Term(weighting))
        if term.weighting != weighting:
            raise SettingError(
                "world.backward() was called with count= or reduction= for some micro-batches of a step only",
                "their losses would be weighted by different things",
                "set them for all micro-batches or for none",
            )
        return term

    def _finish(self) -> None:
        self._loop.check.wait()
        groups = self._trained_groups()
        for group in groups[::-1]:
            group.exchange.send_rest()
        for group in groups:
            group.exchange.finish()
        terms = list(self._terms.values())
        if any(term.weighting == "count" and term.total <= 0 for term in terms):
            raise SettingError(
                "world.backward() was called with counts that add up to 0",
                "the loss is a mean over nothing",
                "skip such batches on all workers",
            )
        divisor = terms[0].divisor
        if any(term.divisor != divisor for term in terms):
            raise SettingError(
                "world.backward() was called for several losses with counts that differ between the micro-batches",
                "their gradients are one sum when the counts are known",
                "add the losses up and call it once with one count=, or leave accumulate out",
            )
        for group in groups:
            if divisor != 1.0:
                group.divide(divisor)
            group.end_backward()
        for group in self._loop.groups:
            group.put_back()

    def _trained_groups(self) -> list[Group]:
        """Those that got a gradient on some worker: of several, such as a GAN's, the others are not exchanged."""
        groups = self._loop.groups
        if len(groups) < 2 or self._loop.world.size == 1:
            return groups
        touched = sum(1 << index for index, group in enumerate(groups) if group.exchange.is_touched)
        trained = functools.reduce(operator.or_, self._loop.check.exchange("the end of a backward", number=touched))
        for index, group in enumerate(groups):
            if not trained >> index & 1:
                group.exchange.cancel()
        return [group for index, group in enumerate(groups) if trained >> index & 1]


def _check_arguments(loss: Any, reduction: str | None, count: float | None) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        kind = f"tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        gradient = " without a gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        raise SettingError(
            f"world.backward() was given a {kind}{gradient}",
            "the loss is one number that depends on the wrapped model",
            "pass the mean over this worker's samples, such as loss.mean()",
        )
    if reduction not in (None, "mean", "sum") or (reduction == "sum" and count is not None):
        raise SettingError(
            f"world.backward(reduction={reduction!r}, count={count}) was called",
            'reduction is "mean" or "sum", and a sum has no count=',
            'set reduction="sum" alone, or leave it out for a mean',
        )


@contextmanager
def _zeros_stay_zeros(loss: Tensor) -> Iterator[None]:
    """In a backward of a loss of weight 0, keep gradients of zeros zero behind every operation.

    Derivatives are linear: zeros make zeros. But zero times infinity, as behind a mean of nothing, is NaN.
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
