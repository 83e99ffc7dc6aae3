"""`stormo.World`: what a script with a training loop of its own needs to run on one device or on thousands.

world = stormo.World()
model, optimizer = world.wrap(model, optimizer)
loader = world.loader(loader)
world.backward(loss)                      # instead of loss.backward()
accuracy = world.sum(num_right) / world.sum(num_seen)
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

from torch import Tensor, nn

from stormo.data.order import derive_seed, seed_generators
from stormo.distributed.world import World as Workers
from stormo.errors import SettingError
from stormo.launch import Lifeline
from stormo.script import joining, saving
from stormo.script.agreement import Agreement
from stormo.script.backward import Backward
from stormo.script.choosing import Loaded, make_loader
from stormo.script.energy import ScriptMeter
from stormo.script.loop import Loop
from stormo.script.refusals import check_compress, check_parts, late_group
from stormo.script.sharing import seed_here
from stormo.script.starts import no_starts
from stormo.script.stopping import Stopping, exit_code_of
from stormo.script.strays import watch
from stormo.script.together import Together
from stormo.script.wrapping import take_in

Compress = Literal["none", "bf16", "fp16"]

_A = TypeVar("_A")
_B = TypeVar("_B")
_C = TypeVar("_C")

_the_world: World | None = None


class World(Together):
    """The workers of a script, seen from one of them; with one worker the script computes what it did without.

    Args:
        device: cpu or cuda; by default what `stormo run` was told, else a GPU where there is one.
        backend: nccl or gloo; by default what fits the device.
        timeout_s: how long a worker waits for the others before it gives up; default 600.
        energy: measure what the nodes draw, and say it when the script ends; not said where nothing can be read.
    """

    def __init__(
        self,
        device: str | None = None,
        *,
        backend: str | None = None,
        timeout_s: float | None = None,
        energy: bool = True,
    ) -> None:
        global _the_world  # noqa: PLW0603
        if _the_world is not None:
            raise SettingError(
                "stormo.World() was called a second time", "a process is one worker of one world", "use the first one"
            )
        joined = joining.join(device, backend, timeout_s)
        _the_world = self
        self._set_up(joined.world, joined.lifeline, energy=energy)
        watch(self._loop)
        joining.at_exit(self.close)

    @classmethod
    def _of(cls, workers: Workers, lifeline: Lifeline) -> World:
        """On workers that have met already, besides the one of this process."""
        self = cls.__new__(cls)
        self._set_up(workers, lifeline)
        return self

    def _set_up(self, workers: Workers, lifeline: Lifeline, *, energy: bool = False) -> None:
        self._workers = workers
        self._lifeline = lifeline
        self._stopping = Stopping(announces=self._workers.place.launcher == "alone")
        self._seen_casts = 0
        self._staged = []
        self._meter = ScriptMeter(workers) if energy else None
        self._starts = no_starts() if self._meter is None else self._meter.starts
        self._is_apart = False
        agreement = Agreement(self._workers, self._stopping.wanted)
        self._loop = Loop(world=self._workers, agreement=agreement, begin=self._part_ways)
        self._backward = Backward(self._loop)
        if self.size > 1:
            saving.synchronise_generators(self._loop)

    # What is trained

    @overload
    def wrap(self, first: _A, /, *, sync_batch_norm: bool = True, compress: Compress = "none") -> _A: ...
    @overload
    def wrap(
        self, first: _A, second: _B, /, *, sync_batch_norm: bool = True, compress: Compress = "none"
    ) -> tuple[_A, _B]: ...
    @overload
    def wrap(
        self, first: _A, second: _B, third: _C, /, *, sync_batch_norm: bool = True, compress: Compress = "none"
    ) -> tuple[_A, _B, _C]: ...
    @overload
    def wrap(self, *parts: Any, sync_batch_norm: bool = True, compress: Compress = "none") -> Any: ...
    def wrap(self, *parts: Any, sync_batch_norm: bool = True, compress: Compress = "none") -> Any:
        """Take in models, their optimizers, schedulers and loss scalers; returns these very objects.

        The models move to the device and start with the main worker's weights.

        Args:
            parts: at least one model, in any order with the rest; or optimizers, schedulers and loss scalers that were
                made after their model was wrapped.
            sync_batch_norm: batch-norm statistics over all workers' samples, so that the result does not depend on
                their number; without it each has its own, and their running averages are averaged after every step.
                Layers with ghost batch norm (`convert_ghost_batch_norm`) keep it in either case.
            compress: over a slow network gradients may travel as "bf16" or "fp16", in half the bytes of float32, and
                are summed in float32.
        """
        models = [part for part in parts if isinstance(part, nn.Module)]
        group = None if models else late_group(parts, self._loop.groups)
        check_parts(parts, models, group)
        check_compress(compress, models)
        self._agree("world.wrap" + ("" if compress == "none" else f"(…, compress={compress!r})"))
        take_in(self._loop, parts, models, group, sync_batch_norm=sync_batch_norm, compress=compress)
        return parts[0] if len(parts) == 1 else parts

    def loader(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shuffle: bool = False,
        accumulate: int = 1,
        sharded: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed: int | None = None,
        batch_dim: int = 0,
    ) -> Loaded:
        """This worker's share of every batch, on its device; nothing is dropped or repeated.

        Args:
            data: a torch DataLoader, whose batches are shared between the workers so that a step stays what it was;
                or a data set, map-style or iterable.
            batch_size: samples of one worker in one pass, for a data set.
            global_batch_size: samples of all workers in one step, instead.
            shuffle: another order in every epoch, the same whatever the number of workers.
            accumulate: passes that make one step; `optimizer.step()` waits for the last of them.
            sharded: every worker brings a part of its own, of any length, instead of all seeing the same data.
            num_workers: processes that read the data set, for each worker.
            collate_fn: makes a batch of a list of samples.
            seed: of the order and of what a data set draws; default: from the script's own random state.
            batch_dim: along which dimension the samples of a stream's batches lie, to be cut there; 1 where they are
                time-major. Tensors with fewer dimensions have them along the first.
        """
        self._agree("world.loader")
        seed = self._workers.share_json(seed_here() if seed is None else seed)
        return make_loader(
            self._loop,
            data,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            accumulate=accumulate,
            sharded=sharded,
            num_workers=num_workers,
            collate_fn=collate_fn,
            seed=seed,
            batch_dim=batch_dim,
        )

    def backward(
        self,
        loss: Tensor,
        *,
        count: float | None = None,
        reduction: Literal["mean", "sum"] | None = None,
        loader: Loaded | None = None,
        more: bool = False,
        **options: Any,
    ) -> None:
        """`loss.backward()` for the mean over all workers' samples, however unequal their shares; or for their sum.

        Args:
            loss: the mean over this worker's samples, a scalar; or their sum, with reduction="sum".
            count: what the loss is a mean over, where that is not the batch's samples (tokens, pixels that count).
                Losses of one batch, and all losses without a loader, are each a mean of their own and are added up.
            reduction: "sum" for a loss that is a sum over the samples: gradients are added up over workers and passes.
                Without it the first losses of a line are looked at, and a sum that shows is refused; "mean" looks at
                nothing.
            loader: which loader the batch is from, where several are under way.
            more: another backward follows before the step; saves an exchange between the workers.
            options: handed to torch, such as retain_graph.
        """
        self._backward(loss, count=count, reduction=reduction, loader=loader, more=more, options=options)
        self._lifeline.alive(self._loop.num_steps)
        self._starts.advance(self._loop.num_steps)

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the batch under way is the last of its step: True for all of them without `accumulate=`."""
        given = [loader.given for loader in self._loop.iterating if loader.given is not None]
        if not given:
            raise SettingError(
                "world.is_last_micro_batch was asked for outside of a loop over a loader",
                "no batch is under way",
                "ask inside the loop",
            )
        return all(each.is_last for each in given)

    def clip_grad_norm(self, parameters: Any, max_norm: float) -> Tensor | None:
        """Clip the gradient of a complete step to a norm, and return what it was; None between its passes."""
        parameters = list(parameters)
        if self._loop.is_partial:
            return None
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    # Saving, loading, stopping

    def save(self, folder: str | Path, *, keep: int = 2, **extra: Any) -> None:
        """Save all that was wrapped, the loaders' positions, the random state and any values of your own.

        Inside a loop, or after a break because of `stop_requested`, a load goes on with the next batch; after any
        other break, with the next epoch.

        Args:
            folder: each save makes a checkpoint of its own in it, whole or not at all.
            keep: how many of the newest stay.
            extra: numbers, text, tensors, lists and dicts, which `load` gives back.
        """
        self._agree("world.save")
        with self._starts.saving(Path(folder), self._loop.num_steps):
            saving.save(self._loop, Path(folder), extra, keep=keep)

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Go on from the newest checkpoint of a folder; the saved values of your own, or {} where there is none.

        The next iteration of a loader that was saved in the middle of an epoch gives the rest of that epoch.
        """
        self._agree("world.load")
        if self._loop.iterating:
            raise SettingError(
                "world.load() was called inside a loop over a loader",
                "that loop would go on where it is",
                "call it before the loops",
            )
        extra = saving.load(self._loop, Path(folder))
        if extra is None:
            return {}
        self._is_apart = True
        self._starts.loaded(Path(folder), self._loop.num_steps)
        return extra

    @property
    def stop_requested(self) -> bool:
        """Whether any worker was asked to stop (SIGTERM, SIGUSR1, Ctrl-C, request_stop()), agreed by all of them.

        From its first use on, these signals no longer end the script by themselves; a second Ctrl-C does.
        """
        self._stopping.listen()
        agreement = self._loop.agreement
        if agreement.num_casts == self._seen_casts:  # no batch since the last look that could have carried the news
            self._agree("world.stop_requested")
        agreement.settle()
        self._seen_casts = agreement.num_casts
        self._loop.told_to_stop = agreement.agreed_flag > 0
        return self._loop.told_to_stop

    def request_stop(self) -> None:
        """Ask all workers to stop; any worker may, and all see it in `stop_requested` at the same batch."""
        self._stopping.ask()

    @property
    def exit_code(self) -> int:
        """What to end with: 0, or after a signal 75 (to be resumed) or 130 (Ctrl-C)."""
        return exit_code_of(self._loop.agreement.agreed_flag)

    def close(self) -> None:
        """Leave, and say what was drawn; happens by itself when the script ends."""
        self._loop.agreement.require_worker("world.close()")
        self._loop.agreement.is_closed = True
        total = self._meter.close() if self._meter is not None else None
        for group in self._loop.groups:
            group.exchange.close()
        for hold in self._staged:
            hold.release()
        self._workers.close()
        if total is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody can read it
                builtins.print(total, file=sys.stderr, flush=True)  # noqa: T201
                if (over_all := self._starts.sentence()) is not None:
                    builtins.print(over_all, file=sys.stderr, flush=True)  # noqa: T201
        self._lifeline.close()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    # Within

    def _part_ways(self) -> None:
        """Once training starts, every worker draws its own dropout; the main one goes on as a single one would."""
        if self.size > 1 and not self._is_apart and not self.is_main:
            seed_generators(derive_seed(seed_here(), "worker", self.rank))
        self._is_apart = True
