"""`stormo.World`: what a script with its own training loop needs to run on one device or on thousands.

world = stormo.World()
model, optimizer = world.wrap(model, optimizer)
loader = world.loader(loader)
world.backward(loss)                      # instead of loss.backward()
accuracy = world.sum(num_right) / world.sum(num_seen)
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from stormo.data.generators import seed_generators
from stormo.data.order import derive_seed
from stormo.data.staging.node_cache import Lease
from stormo.data.staging.nodes import local_folder, stage_on_nodes
from stormo.distributed import values
from stormo.distributed.world import World as Workers
from stormo.energy.node_recorder import NoNodeRecorder
from stormo.errors import SettingError
from stormo.launch import FailureReporter
from stormo.launch.nodes import PROFILE
from stormo.script import joining, saving
from stormo.script.backward import Backward
from stormo.script.collective_check import CollectiveCheck, call_site
from stormo.script.energy import Energy, ScriptMeter, StartRecorder
from stormo.script.loader_factory import Batches, Loader, make_loader
from stormo.script.logs import ScriptLog
from stormo.script.loop import Loop
from stormo.script.sharding import whole_tensor
from stormo.script.wrapping import warn_of_unwrapped_optimizers, wrap
from stormo.system.signals import StopFlag

Compress = Literal["none", "bf16", "fp16"]


class WrapOptions(TypedDict, total=False):
    """The options of `wrap`, which says what they are."""

    sync_batch_norm: bool
    compress: Compress
    strategy: Literal["ddp", "fsdp"]
    precision: Literal["fp32", "bf16"]


_A = TypeVar("_A")
_B = TypeVar("_B")
_C = TypeVar("_C")

_the_world: World | None = None


class World:
    """The workers of a script, seen from one of them; with one worker the script computes what it did without.

    Args:
        device: cpu or cuda; default: that of `stormo run`, else a GPU if there is one.
        backend: nccl or gloo; by default what fits the device.
        timeout_s: how long a worker waits for the others before it gives up; default 600.
        energy: measure what the nodes draw, and print it when the script ends, if anything can be read.
        run_folder: where `log` writes, such as runs/mine; a script that is started again continues it.
        sinks: other tools that get what is logged: "mlflow", "wandb", and those of other packages.
    """

    def __init__(
        self,
        device: str | None = None,
        *,
        backend: str | None = None,
        timeout_s: float | None = None,
        energy: bool = True,
        run_folder: str | Path | None = None,
        sinks: Sequence[str] = (),
    ) -> None:
        global _the_world  # noqa: PLW0603
        if _the_world is not None:
            raise SettingError(
                "stormo.World() was called a second time", "a process is one worker", "use the first one"
            )
        workers, reporter = joining.join(device, backend, timeout_s)
        _the_world = self
        self._set_up(workers, reporter, energy=energy, run_folder=run_folder, sinks=sinks)
        warn_of_unwrapped_optimizers(self._loop)
        joining.at_exit(self.close)

    @classmethod
    def _of(cls, workers: Workers, reporter: FailureReporter, **options: Any) -> World:
        """On workers that have met already, besides the one of this process."""
        self = cls.__new__(cls)
        self._set_up(workers, reporter, **options)
        return self

    def _set_up(
        self,
        workers: Workers,
        reporter: FailureReporter,
        *,
        energy: bool = False,
        run_folder: str | Path | None = None,
        sinks: Sequence[str] = (),
    ) -> None:
        self._workers = workers
        self._reporter = reporter
        self._stop = StopFlag(announces=workers.rank_info.launcher == "alone")
        self._seen_posts = 0
        self._staged: list[Lease] = []
        self._meter = ScriptMeter(workers) if energy else None
        self._starts = StartRecorder(NoNodeRecorder(), 0) if self._meter is None else self._meter.starts
        self._has_own_seed = False
        self._log = ScriptLog(None if run_folder is None else Path(run_folder), sinks, workers)
        check = CollectiveCheck(workers, self._stop)
        self._loop = Loop(world=workers, check=check, begin=self._draw_own_numbers)
        self._backward = Backward(self._loop)
        self._profile: Any = None
        if (asked := os.environ.get(PROFILE)) is not None:
            from stormo.script.profiling import ScriptProfile  # torch's profiler takes time to import

            self._profile = ScriptProfile(asked, self._loop, Path("." if run_folder is None else run_folder))
            self._loop.around_step = self._profile.around
        if self.size > 1:
            saving.synchronise_generators(workers)

    # Who am I

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._workers.rank

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self._workers.size

    @property
    def local_rank(self) -> int:
        """This worker's number on its node."""
        return self._workers.rank_info.local_rank

    @property
    def node_id(self) -> int:
        """Which node this worker is on."""
        return self._workers.rank_info.node_id

    @property
    def device(self) -> torch.device:
        """Where this worker computes."""
        return self._workers.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the worker that prints and writes."""
        return self._workers.is_main

    def print(self, *args: Any, **options: Any) -> None:
        """Print on rank 0."""
        if self.is_main:
            builtins.print(*args, **{"flush": True} | options)  # noqa: T201

    def log(self, name: str, value: Any) -> None:
        """Log a number, an image (uint8, HWC or CHW) or a figure of matplotlib by name, at the current step.

        Rank 0 writes its own value into the `run_folder` of `World`, where TensorBoard and `stormo report` find it, and
        to the `sinks`. Sum or average first what is of all workers: `world.log("loss", world.mean(loss.item()))`.
        """
        self._log.write(name, value, self._loop.num_steps)

    # What is trained

    @overload
    def wrap(self, first: _A, /, **options: Unpack[WrapOptions]) -> _A: ...
    @overload
    def wrap(self, first: _A, second: _B, /, **options: Unpack[WrapOptions]) -> tuple[_A, _B]: ...
    @overload
    def wrap(self, first: _A, second: _B, third: _C, /, **options: Unpack[WrapOptions]) -> tuple[_A, _B, _C]: ...
    @overload
    def wrap(self, *parts: Any, **options: Unpack[WrapOptions]) -> Any: ...
    def wrap(
        self,
        *parts: Any,
        sync_batch_norm: bool = True,
        compress: Compress = "none",
        strategy: Literal["ddp", "fsdp"] = "ddp",
        precision: Literal["fp32", "bf16"] = "fp32",
    ) -> Any:
        """Take in models, their optimizers, schedulers and loss scalers; returns these very objects.

        The models move to the device and start with rank 0's weights.

        Args:
            parts: at least one model, in any order with the rest; or optimizers, schedulers and loss scalers that were
                made after their model was wrapped.
            sync_batch_norm: batch-norm statistics over all workers' samples, so that the result does not depend on
                their number; without it each worker has its own, and running averages are averaged after every step.
                Layers with ghost batch norm (`convert_ghost_batch_norm`) keep it in either case.
            compress: over a slow network gradients may travel as "bf16" or "fp16", in half the bytes of float32, and
                are summed in float32.
            strategy: "ddp", a replica of the model on every worker; "fsdp", a shard of its weights, gradients and
                optimizer state, by torch's fully_shard, block by block.
            precision: "bf16" runs the forward of the models under autocast; weights and outputs stay float32.
        """
        wrap(
            self._loop,
            parts,
            sync_batch_norm=sync_batch_norm,
            compress=compress,
            strategy=strategy,
            precision=precision,
        )
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
    ) -> Loader:
        """This worker's share of every batch, on its device; nothing is dropped or repeated.

        Args:
            data: a torch DataLoader, whose batches are shared between the workers so that a step stays what it was;
                or a data set, map-style or iterable.
            batch_size: samples of one worker in one micro-batch, for a data set.
            global_batch_size: samples of all workers in one step, instead.
            shuffle: another order in every epoch, the same whatever the number of workers.
            accumulate: micro-batches of one step; `optimizer.step()` waits for the last of them.
            sharded: every worker brings its own part of the data, of any length, instead of all reading the same.
            num_workers: processes that read the data set, for each worker.
            collate_fn: makes a batch of a list of samples.
            seed: of the order and of what a data set draws; default: from the script's own random state.
            batch_dim: along which dimension the samples of a stream's batches lie; 1 if they are time-major. Tensors
                with fewer dimensions have them along the first.
        """
        self._exchange("world.loader")
        seed = self._workers.broadcast_object(_seed_of_state() if seed is None else seed)
        batches = Batches(batch_size, global_batch_size, shuffle, num_workers, collate_fn)
        return make_loader(self._loop, data, batches, accumulate=accumulate, sharded=sharded, seed=seed, dim=batch_dim)

    def backward(
        self,
        loss: Tensor,
        *,
        count: float | None = None,
        reduction: Literal["mean", "sum"] | None = None,
        loader: Loader | None = None,
        more: bool = False,
        **options: Any,
    ) -> None:
        """`loss.backward()` for the mean over all workers' samples, however unequal their shares; or for their sum.

        Args:
            loss: the mean over this worker's samples, a scalar; or their sum, with reduction="sum".
            count: what the loss is a mean over, if not the batch's samples (tokens, pixels that count).
                Losses of one batch, and all losses without a loader, are separate means, which are added up.
            reduction: "sum" for a loss that is a sum over the samples: gradients are added up over workers and
                micro-batches. Without it the first losses of a line are looked at, and a sum that shows is refused;
                "mean" looks at nothing.
            loader: which loader the batch is from, if several are active.
            more: another backward follows before the step; saves an exchange between the workers.
            options: passed to torch, such as retain_graph.
        """
        with self._loop.around_step():
            self._backward(loss, count, reduction, loader, more, **options)
        self._reporter.alive(self._loop.num_steps)
        self._starts.advance(self._loop.num_steps)

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the current batch is the last of its step: always True without `accumulate=`."""
        infos = [loader.batch_info for loader in self._loop.iterating if loader.batch_info is not None]
        if not infos:
            raise SettingError(
                "world.is_last_micro_batch was read outside of a loop over a loader",
                "there is no batch",
                "read it inside",
            )
        return all(info.is_last for info in infos)

    def clip_grad_norm(self, parameters: Any, max_norm: float) -> Tensor | None:
        """Clip the gradient of a complete step to a norm, and return what it was; None between its micro-batches."""
        parameters = list(parameters)
        return None if self._loop.is_accumulating else whole_tensor(nn.utils.clip_grad_norm_(parameters, max_norm))

    # What the workers do together

    def sum(self, value: _A) -> _A:
        """The sum over all workers: of a number, a tensor, or a dict, list or tuple of them."""
        self._exchange(f"world.sum of {values.describe(value)}")
        found: _A = values.reduce_sum(value, self._workers)
        return found

    def mean(self, value: _A, *, count: float = 1.0) -> _A:
        """The mean over all workers: of a number, a tensor, or a dict, list or tuple of them.

        Args:
            value: this worker's mean, such as the loss of its share.
            count: what that is a mean over, such as `loader.num_samples`; where it is 0 the value does not matter.
        """
        if not (math.isfinite(count) and count >= 0):
            raise SettingError(f"world.mean(count={count:g}) was called", "it is no count", "set 0 or more")
        self._exchange(f"world.mean of {values.describe(value)}")
        sums, total = values.reduce_sum((values.scale(value, count), float(count)), self._workers)
        if not total:
            raise SettingError("world.mean() was called with counts that add up to 0", "it has no mean", "leave it out")
        found: _A = values.divide(sums, total, value)
        return found

    def max(self, value: _A) -> _A:
        """The largest over all workers: of a number, a tensor, or a dict, list or tuple of them."""
        self._exchange(f"world.max of {values.describe(value)}")
        found: _A = values.reduce_max(value, self._workers)
        return found

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any worker."""
        return builtins.any(self._exchange("world.any", int(bool(flag))))

    def share(self, value: Any) -> Any:
        """Rank 0's value, on all workers: numbers, text, tensors, lists, tuples, sets and dicts."""
        self._exchange("world.share")
        payloads = [values.pack(value, "shared")] if self.is_main else None
        return values.unpack(values.broadcast_bytes(self._workers, payloads)[0])

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, by rank, on all workers: numbers, text, tensors, lists, tuples, sets and dicts."""
        self._exchange("world.gather")
        payloads = self._workers.gather_bytes(values.pack(value, "gathered"))
        return [values.unpack(payload) for payload in values.broadcast_bytes(self._workers, payloads)]

    def barrier(self) -> None:
        """Wait until all workers are here."""
        self._exchange("world.barrier")

    def energy(self) -> Energy:
        """What all nodes drew since `World()`: joules, with an error bound; printed, it is a sentence.

        The difference of two is what was drawn in between.
        """
        if self._meter is None:
            raise SettingError("world.energy() was called", "World(energy=False) measures nothing", "leave it out")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._exchange("world.energy")
        return self._meter.total()

    @contextmanager
    def once_per_node(self) -> Iterator[bool]:
        """`with world.once_per_node() as mine:` mine is True in one process of each node; the others wait for it."""
        self._exchange("world.once_per_node")
        with self._workers.once_per_node() as mine:
            self._loop.check.is_alone = mine and self._workers.rank_info.local_size > 1
            try:
                yield mine
            finally:
                self._loop.check.is_alone = False

    def stage(self, path: str | Path, folder: str | Path = "", *, keep: bool = False) -> Path:
        """Copy a data set to this node's own storage, once for all its workers; the path of the copy.

        A verified copy that is there already is used. It is removed when the last script that uses it ends.

        Args:
            path: a folder or a file.
            folder: on this node; default $SLURM_TMPDIR, $TMPDIR or /tmp.
            keep: leave the copy for later scripts on the node.
        """
        self._exchange("world.stage")
        copy = stage_on_nodes(self._workers, path, local_folder(str(folder)), keep=keep)
        joining.before_error_exit(copy.lease.release)
        self._staged.append(copy.lease)
        if copy.sentence is not None:
            self.print(copy.sentence)
        return copy.path

    # Saving, loading, stopping

    def save(self, folder: str | Path, *, keep: int = 2, **extra: Any) -> None:
        """Save all that was wrapped, the loaders' positions, the random state and any values of your own.

        Inside a loop, or after a break because of `stop_requested`, a load resumes with the next batch; after any
        other break, with the next epoch.

        Args:
            folder: each save makes a new checkpoint in it, whole or not at all.
            keep: how many of the newest stay.
            extra: numbers, text, tensors, lists and dicts, which `load` gives back.
        """
        self._exchange("world.save")
        with self._starts.saving(Path(folder), self._loop.num_steps):
            saving.save(self._loop, Path(folder), extra, keep=keep)

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Resume from the newest checkpoint of a folder; the saved values of your own, or {} if there is none.

        The next iteration of a loader that was saved in the middle of an epoch gives the rest of that epoch.
        """
        self._exchange("world.load")
        if self._loop.iterating:
            raise SettingError(
                "world.load() was called inside a loop over a loader",
                "the loop would not move",
                "call it before the loop",
            )
        extra = saving.load(self._loop, Path(folder))
        if extra is None:
            return {}
        self._has_own_seed = True
        self._starts.loaded(Path(folder), self._loop.num_steps)
        return extra

    @property
    def stop_requested(self) -> bool:
        """Whether any worker was asked to stop (SIGTERM, SIGUSR1, Ctrl-C, request_stop()), agreed by all of them.

        From its first use on, these signals no longer end the script by themselves; a second Ctrl-C does.
        """
        self._stop.listen()
        check = self._loop.check
        if check.num_posts == self._seen_posts:  # no post since the last time could have carried a stop
            self._exchange("world.stop_requested")
        check.wait()
        self._seen_posts = check.num_posts
        self._loop.saw_stop = check.agreed_stop > 0
        return self._loop.saw_stop

    def request_stop(self) -> None:
        """Ask all workers to stop; any worker may, and all see it in `stop_requested` at the same batch."""
        self._stop.request()

    @property
    def exit_code(self) -> int:
        """What to end with: 0, or after a signal 75 (to be resumed) or 130 (Ctrl-C)."""
        return joining.exit_code_of(self._loop.check.agreed_stop)

    def close(self) -> None:
        """Leave, and print the energy; called automatically when the script ends."""
        self._loop.check.require_worker("world.close()")
        if self._profile is not None:
            self._profile.close()
        self._loop.check.is_closed = True
        total = self._meter.close() if self._meter is not None else None
        self._log.close()
        for group in self._loop.groups:
            group.exchange.close()
        for lease in self._staged:
            lease.release()
        self._workers.close()
        if total is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody can read it
                builtins.print(total, file=sys.stderr, flush=True)  # noqa: T201
                if (over_all := self._starts.sentence()) is not None:
                    builtins.print(over_all, file=sys.stderr, flush=True)  # noqa: T201
        self._reporter.close()

    # Within

    def _exchange(self, what: str, number: int = 0) -> list[int]:
        return self._loop.check.exchange(f"{what} in {call_site()}", number=number)

    def _draw_own_numbers(self) -> None:
        """Once training starts, every worker draws its own dropout; rank 0 continues as a single one would."""
        if self.size > 1 and not self._has_own_seed and not self.is_main:
            seed_generators(derive_seed(_seed_of_state(), "worker", self.rank))
        self._has_own_seed = True


def _seed_of_state() -> int:
    """A number that stands for the random state as it is, without drawing from it."""
    return int.from_bytes(hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest()[:6], "little")
