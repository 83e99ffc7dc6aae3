"""Writes what a run leaves behind: its folder, records, checkpoints and summary.

Only rank 0 writes, except for the checkpoints of a sharded model: every rank writes its part.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stormo import checkpoint
from stormo.config.plan import Plan
from stormo.config.schema import TrainConfig
from stormo.config.toml import to_toml
from stormo.distributed.world import World
from stormo.energy.node_recorder import NodeRecorder
from stormo.energy.summary import energy_sentence
from stormo.errors import StormoError, pluralize
from stormo.launch.environments.torchrun import launch_id
from stormo.profiling.ranges import range_of
from stormo.system.process import SetupTimer
from stormo.telemetry.console import PlainConsole, make_console
from stormo.telemetry.environment import collect_environment, scheduler_job
from stormo.telemetry.events import EventFile
from stormo.telemetry.folder import RunFolder, read_environment, read_summary, write_json, write_whole
from stormo.telemetry.prometheus import PrometheusSink
from stormo.telemetry.record import CheckpointSaved, Notice, Record, RunEnded, RunStarted, Sink
from stormo.telemetry.runs_folder import forget_launch, note_launch
from stormo.telemetry.tensorboard import TensorBoardFile
from stormo.telemetry.text import run_reference
from stormo.telemetry.trackers import RunSinks, asked_trackers
from stormo.training.run_folder import lock_folder, open_folder, remove_unbegun, torch_environment
from stormo.training.state import Progress, RunState
from stormo.training.summary import make_summary, pipeline_sentence, staleness_sentence


class RunRecorder:
    """Opens the folder of a run, new or resumed, and writes into it until the end."""

    def __init__(
        self,
        config: TrainConfig,
        plan: Plan,
        world: World,
        state: RunState,
        setup_times: SetupTimer,
        node_recorder: NodeRecorder,
    ) -> None:
        self.node_recorder = node_recorder
        self._config = config
        self._plan = plan
        self._world = world
        self._state = state
        self._setup_times = setup_times
        self._began_unix_s = setup_times.began_unix_s
        self._wall_before_s = 0.0
        self._launches: Collection[str] = ()  # ids of the torchruns that started these ranks
        self._weights_sha256: str | None = None
        self._resumed_from: Path | None = None  # a checkpoint, on rank 0
        self._has_summary = False  # the resumed run has ended after its last epoch
        self._saver = checkpoint.Saver(world, in_background=config.run.async_checkpoint)
        self._saving: CheckpointSaved | None = None  # the record of the save under way, on rank 0
        self._prometheus: PrometheusSink | None = None
        run = config.run
        self._sinks = RunSinks(asked_trackers(run) if world.is_main else ())
        if world.is_main:
            if run.prometheus is not None:  # first: a port that is taken must not leave a folder behind
                strategy = plan.layout.strategy
                self._prometheus = PrometheusSink(run.prometheus, run.prometheus_host, strategy=strategy)
                self._sinks.add(self._prometheus)
            self.folder = open_folder(config)
            self._lock = lock_folder(self.folder)

    def restore(self) -> None:
        """Restore the newest checkpoint of a resumed run, or the one that was named. All ranks call it."""
        run = self._config.run
        if run.resume is None:
            return
        path = self._checkpoint_to_resume(run.resume) if self._world.is_main else None
        shared = self._world.broadcast_object(None if path is None else str(path.resolve()))
        if shared is None:
            return
        self._state.restore(self._world, path or Path(shared), run.seed)
        if path is not None:
            self._resumed_from = path
            self._weights_sha256 = checkpoint.read_manifest(path).weights_sha256
        self._wall_before_s = self._state.progress.wall_time_s
        self._has_summary = self._world.broadcast_object(self._has_ended() if self._world.is_main else None)

    def _has_ended(self) -> bool:
        """Whether the run ended at this very step; one that was killed has no summary."""
        summary = self._last_summary()
        return summary.get("stopped_by") == "epochs" and summary.get("steps") == self._state.progress.step

    def _last_summary(self) -> Mapping[str, Any]:
        with contextlib.suppress(StormoError):  # one that cannot be read is replaced at the end
            return read_summary(self.folder) or {}
        return {}

    @property
    def is_past_end(self) -> bool:
        """Whether the resumed run has nothing left to do: no epoch, and no changed settings to save."""
        progress, plan = self._state.progress, self._plan
        if not progress.num_resumes or progress.epoch - 1 > plan.epochs:
            return bool(progress.num_resumes)
        return progress.epoch > plan.epochs and self._has_summary and not self._config.changed

    def close_unchanged(self) -> None:
        """Say that there is nothing to train, and leave the run folder unchanged."""
        if not self._world.is_main:
            return
        self._sinks.add(*self._console())
        self.record(_past_end(self.folder.name, self._state.progress, self._plan))
        self.close()

    def close(self) -> None:
        """Close the sinks and unlock the run folder."""
        if not self._world.is_main:
            return
        self._sinks.close()
        if self._lock is not None:
            self._lock.close()

    def _checkpoint_to_resume(self, named: str) -> Path | None:
        if named and (Path(named) / "manifest.json").is_file():
            return Path(named)
        published = checkpoint.find(self.folder.checkpoints)
        return published[0].path if published else None

    def supersede_after(self, path: Path | None) -> None:
        """Rename the checkpoints after this one, or all of them, so that no resume finds them."""
        step = -1 if path is None else checkpoint.read_manifest(path).step
        for found in checkpoint.find(self.folder.checkpoints):
            if found.step < step or (path is not None and found.path.resolve() == path.resolve()):
                return
            found.path.rename(found.path.with_name(f"superseded-{found.path.name}-{time.time_ns()}"))

    def start(self) -> None:
        """Write the settings and open every sink. All ranks call it."""
        self._open_node_files()
        launches = {one for one in self._world.gather_objects(launch_id(os.environ)) or [] if one is not None}
        if not self._world.is_main:
            return
        if self._resumed_from is not None:
            self.supersede_after(self._resumed_from)
        folder = self.folder
        is_new = not (folder.is_run or folder.checkpoints.exists() or folder.tensorboard.exists())
        try:
            self._open_sinks(launches)
            self._note_launches(launches)
        except OSError:
            if is_new:
                remove_unbegun(self.folder)
            raise

    def _note_launches(self, launches: Collection[str]) -> None:
        try:
            for launch in launches:
                note_launch(self.folder.path.parent, launch, self.folder.name)
            self._launches = launches
        except OSError as error:
            text = f"A restart by torchrun would not find this run ({error}); give it a name by --run-name."
            self.record(Notice(kind="warning", text=text))

    def _open_sinks(self, launches: Collection[str]) -> None:
        config, plan, progress = self._config, self._plan, self._state.progress
        named = replace(config, run=replace(config.run, run_name=self.folder.name))
        summary = self._last_summary()
        write_whole(self.folder.config, to_toml(named, plan.initial))
        before = (read_environment(self.folder) or {}).get("launches") or []
        known = sorted({*before, *launches})
        environment = collect_environment(torch_environment(self._world) | ({"launches": known} if known else {}))
        write_json(self.folder.environment, environment)
        tensorboard = [TensorBoardFile(self.folder.tensorboard)] if config.run.tensorboard else []
        self._sinks.add(EventFile(self.folder), *tensorboard)
        started = RunStarted(
            run_name=self.folder.name,
            run_folder=str(self.folder.path),
            task=config.task,
            world_size=self._world.size,
            global_batch_size=plan.global_batch_size,
            epochs=plan.epochs,
            steps_per_epoch=plan.steps_per_epoch,
            resumed_at_step=progress.step if progress.num_resumes else None,
            explanation=plan.lines(),
            job=scheduler_job(os.environ),
        )
        minor = () if config.command.verbose else plan.minor_lines(config)
        shown = replace(started, explanation=tuple(line for line in plan.lines() if line not in minor))
        console = self._console()
        self._sinks.write(started)  # the files have the whole plan
        self._sinks.add(*console)  # before it writes, so that it is closed where that fails
        for sink in console:
            sink.write(shown)
        if self._prometheus is not None:
            self.record(Notice(kind="info", text=f"Prometheus finds this run at {self._prometheus.address}"))
        for notice in _start_notices(config, plan, progress, self.folder.name, summary):
            self.record(notice)

    def _console(self) -> list[Sink]:
        if sys.stdout is None:  # it was closed
            return []
        # mpirun gives rank 0 a pseudo-terminal, whatever the user looks at.
        return [PlainConsole(sys.stdout) if self._world.rank_info.launcher == "mpi" else make_console(sys.stdout)]

    def _open_node_files(self) -> None:
        """Open the file of every node's recorder in the run folder, where the node sees it."""
        shared = self._world.broadcast_object(str(self.folder.path.resolve()) if self._world.is_main else "")
        self.run_folder = Path(shared)
        if self._state.strategy.sharded_checkpoint:
            checkpoint.require_seen(self._world, self.run_folder)  # now, not at the first checkpoint
        progress = self._state.progress
        if self.run_folder.is_dir():
            path = RunFolder(self.run_folder).nodes / f"{self._world.rank_info.node_id}.jsonl"
            self.node_recorder.attach(path, progress.step if progress.num_resumes else None, progress.step)

    def record(self, record: Record) -> None:
        """Write a record to every sink; only rank 0 has any."""
        self._record_saved()
        self._sinks.write(record)

    def save(self, metric: float | None) -> None:
        """Publish a checkpoint, or start to do so in the background. All ranks call it."""
        progress = self._state.progress
        began = time.perf_counter()
        self.node_recorder.enter("checkpoint", progress.step)
        with range_of("checkpoint"):
            self.wait_for_save()
            progress.wall_time_s = self._wall_before_s + time.time() - self._began_unix_s
            if not progress.trend.num_uneasy:
                stable = [step for step in progress.stable_steps if step < progress.step]
                progress.stable_steps = [*stable[-1:], progress.step]
            self._save(metric, began)
        self.node_recorder.enter("idle", progress.step)

    def _save(self, metric: float | None, began: float) -> None:
        world, run, progress = self._world, self._config.run, self._state.progress
        policy = checkpoint.RetentionPolicy(
            step=progress.step,
            identity=self.folder.name if world.is_main else "",
            keep_last=run.keep_checkpoints,
            keep_best=1,
            metric=metric,
            keep_steps=self._steps_to_keep(),
        )
        folder = self.folder.checkpoints if world.is_main else None
        with self._state.strategy.averaged_weights():  # until they are written, or copied
            self._saver.begin(self._state.content(world, run.seed), folder, policy)
            if not run.async_checkpoint:
                self._saver.wait()
        if world.is_main:
            self._saving = CheckpointSaved(
                epoch=progress.epoch,
                step=progress.step,
                path="",
                weights_sha256="",
                save_time_s=time.perf_counter() - began,
            )
        self._record_saved()

    def wait_for_save(self) -> None:
        """Wait for the checkpoint being written. All ranks call it, and all raise if it failed."""
        self._saver.wait()
        self._record_saved()

    def _record_saved(self) -> None:
        """Record a checkpoint once it is published."""
        if self._saving is None or (done := self._saver.finished()) is None:
            return
        saving, self._saving = self._saving, None
        self._weights_sha256 = done.saved.weights_sha256
        path = str(done.saved.path.relative_to(self.folder.path))
        self._sinks.write(
            replace(saving, path=path, weights_sha256=done.saved.weights_sha256, write_time_s=done.write_time_s)
        )
        for notice in done.saved.notices:
            self._sinks.write(Notice(kind="warning", text=notice))

    def _steps_to_keep(self) -> list[int]:
        """Steps of the checkpoints that a divergence may need, however many newer ones there are."""
        on_divergence, progress = self._config.stop.on_divergence, self._state.progress
        if on_divergence == "ignore":
            return []
        # All recent checkpoints may be of a high loss, and the newest stable one may have caused it. Rollbacks in a row
        # go further and further back, at last to the initial weights.
        return [*([0] if on_divergence == "rollback" else []), *progress.stable_steps]

    def end(self, stopped_by: str, **more: Any) -> None:
        """Write the summary and close every sink. All ranks call it, except after an error."""
        if stopped_by == "error":  # other ranks may be gone
            self._saver.abandon()
            self._record_saved()
        else:
            try:
                self.wait_for_save()
            except BaseException:
                with contextlib.suppress(OSError):  # a full disk must not hide what went wrong
                    self.end("error")
                raise
        if stopped_by == "signal" and self._world.is_main:
            reference = run_reference(self.folder.name, str(self.folder.path))
            step = self._state.progress.step
            text = f"stopped at step {step}, saved; resume with: stormo train --resume {reference}"
            self.record(Notice(kind="info", text=text))
        self.node_recorder.close()
        if stopped_by != "error":
            self._world.barrier()  # all nodes have closed their files
        if not self._world.is_main:
            return
        summary = {
            "run_name": self.folder.name,
            **make_summary(self._config, self._plan, self._state, self.folder.path, stopped_by),
            "setup_time_s": sum(self._setup_times.times_s.values()),
            "setup_parts_s": self._setup_times.times_s,
            "wall_time_s": self._wall_before_s + time.time() - self._began_unix_s,
            "weights_sha256": self._weights_sha256,
            **more,
        }
        figures = [pipeline_sentence(summary), staleness_sentence(summary)]
        figures += [energy_sentence(summary)] if self._config.energy.energy else []
        for sentence in (*figures, summary["noise_scale_advice"]):
            if sentence is not None and stopped_by != "error":  # the user must see the error first
                self.record(Notice(kind="info", text=sentence))
        if self.node_recorder.failure is not None:
            text = f"The energy account of this node is incomplete: {self.node_recorder.failure}."
            self.record(Notice(kind="warning", text=text))
        self.record(RunEnded(summary=summary))
        for launch in self._launches if stopped_by in ("target", "epochs") else ():
            forget_launch(self.folder.path.parent, launch)
        self.close()


def _past_end(name: str, progress: Progress, plan: Plan) -> Notice:
    """The notice of a run that has nothing left to do."""
    done = progress.epoch - 1
    if done == plan.epochs:
        return _all_done(name, plan)
    text = f"{name} has done {pluralize(done, 'epoch')} already, of {plan.epochs} now; it is left as it is"
    return Notice(kind="info", text=f"{text}: set --epochs above {done} to train on")


def _all_done(name: str, plan: Plan) -> Notice:
    return Notice(
        kind="info", text=f"{name} has done its {pluralize(plan.epochs, 'epoch')}; raise --epochs to train on"
    )


def _start_notices(
    config: TrainConfig, plan: Plan, progress: Progress, name: str, summary: Mapping[str, Any]
) -> Iterator[Notice]:
    """What the user should know of a resumed run; `summary` is its last one, or empty."""
    is_resume = config.run.resume is not None
    if progress.num_resumes and progress.epoch > plan.epochs:
        yield _all_done(name, plan)
    diverged_at = summary.get("diverged_at_step") if summary.get("stopped_by") == "divergence" else None
    if is_resume and not progress.num_resumes and diverged_at is None:
        yield Notice(kind="info", text=f"{name} has no checkpoint yet: it starts from the beginning")
    if progress.num_rollbacks:
        times = pluralize(progress.num_rollbacks, "rollback")
        text = f"after {times} the learning rate is × {progress.rate_factor:g} of the schedule"
        yield Notice(kind="info", text=text)
    if is_resume and diverged_at is not None:
        where = f"; it resumes from step {progress.step}"
        if not progress.num_resumes:
            where = " and has no good checkpoint: it starts from the beginning"
        text = f"{name} diverged at step {diverged_at}{where}"
        if not config.changed:
            text += " with the same settings and would diverge there again: set a lower --base-lr, or --clip-norm"
        yield Notice(kind="warning", text=text)
