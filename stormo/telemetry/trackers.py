"""Sends a run to the tools in which people look at it: MLflow, Weights & Biases, and sinks of other packages.

A tool is a class with three methods, `Tracker`. Other packages name theirs in the entry point group `stormo.sinks`.
Each runs in a thread of its own: a slow server delays no training, and one that fails costs a warning.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from stormo.config.schema import Run
from stormo.errors import MissingPackageError, SettingError, unknown_name
from stormo.system.files import read_object
from stormo.telemetry.folder import RunFolder, to_json, write_json
from stormo.telemetry.record import EpochDone, Notice, Record, RunEnded, RunStarted, Sink, StepDone, ValueLogged
from stormo.telemetry.runs_folder import flat, flat_config
from stormo.telemetry.tensorboard import scalars_of

GROUP = "stormo.sinks"
_LONGEST_CONNECT_S = 10.0
_LONGEST_END_S = 120.0  # that a tool may take for what it has not sent when the run ends
_PROJECT = "stormo"  # of MLflow and W&B, where their variables name none
_MOST_PARAMS = 100  # of one call of MLflow
_MOST_CHARACTERS = 500  # of a value that MLflow shows


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """What a tool is told when a run starts or resumes."""

    name: str
    task: str
    folder: Path
    settings: Mapping[str, str]  # "optimizer.base_lr" → "0.1"; secrets are masked
    resumed_at_step: int | None
    id: str | None  # what `start` returned when the run began, to continue it


class Tracker(Protocol):
    """A tool that takes a run, on rank 0 only, in one thread; made without arguments."""

    def start(self, run: TrackedRun) -> str | None:
        """Begin a run, or continue `run.id`; returns the id that finds it again."""

    def log(self, step: int, values: Mapping[str, float | Path]) -> None:
        """Take numbers, and pictures as paths of PNG files."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """Take the content of summary.json, empty if there is none, and finish."""


class MlflowTracker:
    """A run of MLflow, where MLflow's own variables say; by default in its local store."""

    def start(self, run: TrackedRun) -> str:
        """Begin or continue it; settings are its parameters, which MLflow never changes."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        _require_server(os.environ.get("MLFLOW_TRACKING_URI", ""))
        self._client, self._folder = MlflowClient(), run.folder
        if run.id is not None:
            self._client.update_run(run.id, status="RUNNING")
            self._id = run.id
            return self._id
        tags = {"mlflow.source.name": run.task, "stormo.folder": str(run.folder)}
        self._id = self._client.create_run(self._experiment(), run_name=run.name, tags=tags).info.run_id
        params = [Param(key, value[:_MOST_CHARACTERS]) for key, value in run.settings.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _MOST_PARAMS])
        return self._id

    def _experiment(self) -> str:
        if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def log(self, step: int, values: Mapping[str, float | Path]) -> None:
        """Numbers become metrics, pictures artifacts."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        numbers = {name: value for name, value in values.items() if not isinstance(value, Path)}
        metrics = [Metric(mlflow_name(name), value, now_ms, step) for name, value in numbers.items()]
        if metrics:
            self._client.log_batch(self._id, metrics=metrics)
        for value in values.values():
            if isinstance(value, Path):
                self._client.log_artifact(self._id, str(value), str(value.parent.relative_to(self._folder)))

    def end(self, summary: Mapping[str, Any]) -> None:
        """Numbers of the summary become metrics, texts tags."""
        figures = _figures(summary)
        self.log(
            int(figures.get("steps") or 0),
            {f"summary/{name}": value for name, value in figures.items() if isinstance(value, int | float)},
        )
        for name, value in figures.items():
            if isinstance(value, str):
                self._client.set_tag(self._id, f"stormo.{name}", value)
        states = {"error": "FAILED", "divergence": "FAILED", "signal": "KILLED"}
        self._client.set_terminated(self._id, states.get(str(summary.get("stopped_by", "error")), "FINISHED"))


def _require_server(uri: str) -> None:
    """Fail at once where no server listens: MLflow itself would try for minutes."""
    from urllib.request import getproxies

    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or parts.scheme in getproxies():
        return
    try:
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        socket.create_connection((parts.hostname or "", port), _LONGEST_CONNECT_S).close()
    except OSError as error:
        raise ConnectionError(f"{uri} does not answer: {error}") from error


def mlflow_name(name: str) -> str:
    """A metric's name as MLflow takes it: it would refuse acc@1."""
    return re.sub(r"[^\w.\-/: ]", "_", name)


class WandbTracker:
    """A run of Weights & Biases; offline, in the run folder, where nobody is logged in and WANDB_MODE says nothing."""

    def start(self, run: TrackedRun) -> str:
        """Begin or continue it."""
        import wandb

        is_offline = "WANDB_MODE" not in os.environ and not _has_wandb_login(os.environ)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            name=run.name,
            id=run.id,
            resume="allow" if run.id is not None else None,
            config=dict(run.settings),
            dir=None if "WANDB_DIR" in os.environ else str(run.folder),
            mode="offline" if is_offline else None,
            reinit="create_new",
            # The terminal shows stormo's own lines, and is nobody's log.
            settings=wandb.Settings(silent=True, console="off"),
        )
        # W&B drops what comes at an earlier step of its own, as after a resume; so the step is a value.
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, step: int, values: Mapping[str, float | Path]) -> None:
        """Pictures become images."""
        import wandb

        shown = {name: wandb.Image(str(value)) if isinstance(value, Path) else value for name, value in values.items()}
        self._run.log({"step": step, **shown})

    def end(self, summary: Mapping[str, Any]) -> None:
        """The figures of the summary become W&B's."""
        self._run.summary.update({f"summary/{name}": value for name, value in _figures(summary).items()})
        self._run.finish(exit_code=int(summary.get("stopped_by", "error") in ("error", "divergence")))


def _has_wandb_login(environ: Mapping[str, str]) -> bool:
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc(environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _figures(summary: Mapping[str, Any]) -> dict[str, str | float]:
    """Numbers and texts, also those of inner mappings; what was not measured is left out."""
    return {name: value for name, value in flat(to_json(summary), "/") if isinstance(value, str | int | float)}


_TITLES = {"mlflow": "MLflow", "wandb": "Weights & Biases"}
_OWN = (
    EntryPoint("mlflow", f"{__name__}:MlflowTracker", GROUP),
    EntryPoint("wandb", f"{__name__}:WandbTracker", GROUP),
)


def asked_trackers(run: Run) -> list[str]:
    """The names of the tools that the settings ask for."""
    given = [] if run.sinks is None else [name.strip() for name in run.sinks.split(",")]  # an empty one is unknown
    return [*(["mlflow"] if run.mlflow else []), *(["wandb"] if run.wandb else []), *given]


def check(names: Sequence[str]) -> dict[str, EntryPoint]:
    """The tools of these names; refuses those that are not installed."""
    known = {entry.name: entry for entry in (*entry_points(group=GROUP), *_OWN)}
    for name in names:
        if name not in known:
            raise unknown_name("sink", name, known)
        if name in _TITLES and not _is_installed(name):
            raise MissingPackageError(name, _TITLES[name], name)
    has_store = _is_installed("sqlalchemy") or os.environ.get("MLFLOW_TRACKING_URI")
    if "mlflow" in names and not has_store:
        raise SettingError(
            "MLflow was asked for",
            "mlflow-skinny has no store of its own",
            "set MLFLOW_TRACKING_URI, or pip install 'stormo[mlflow]'",
        )
    return {name: known[name] for name in names}


def _is_installed(name: str) -> bool:
    """Whether a package is there; a folder of that name, as W&B makes one, is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def _load(entry: EntryPoint) -> Tracker:
    """A tool, ready to start; one that cannot be imported is refused."""
    asked = f"sink {entry.name} was asked for"
    try:
        tracker: Tracker = entry.load()()
    except Exception as error:
        raise SettingError(asked, f"{entry.value} cannot be used ({error!r})", "repair it, or leave it out") from error
    if missing := [method for method in ("start", "log", "end") if not callable(getattr(tracker, method, None))]:
        raise SettingError(asked, f"{entry.value} has no method {missing[0]}", "add it, or leave it out")
    return tracker


class RunSinks:
    """All sinks of a run, its trackers among them; `tell` gets what these have to say, or else the other sinks do."""

    def __init__(self, trackers: Sequence[str], tell: Callable[[Notice], None] | None = None) -> None:
        self.trackers = [TrackerSink(name, _load(entry)) for name, entry in check(trackers).items()]
        self._sinks: list[Sink] = []
        self._tell = tell or self._write

    def add(self, *sinks: Sink) -> None:
        """From now on these get every record, before those that were there."""
        self._sinks = [*sinks, *self._sinks]

    def write(self, record: Record) -> None:
        """Hand a record to all."""
        self._pass_notices()
        self._write(record)
        for tracker in self.trackers:
            tracker.write(record)

    def close(self) -> None:
        """Close all; may be called again, and what is written afterwards goes nowhere."""
        for tracker in self.trackers:
            tracker.close()
        self._pass_notices()
        sinks, self._sinks, self.trackers = self._sinks, [], []
        for sink in sinks:
            sink.close()

    def _write(self, record: Record) -> None:
        for sink in self._sinks:
            sink.write(record)

    def _pass_notices(self) -> None:
        for tracker in self.trackers:
            for notice in tracker.take_notices():
                self._tell(notice)


class TrackerSink:
    """Hands records to a tool, in its own thread; after its first failure it gets none."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self._notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        self._tracker = tracker
        self._title = _TITLES.get(name, name)
        self._folder = Path()
        self._summary: Mapping[str, Any] = {}
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.started = threading.Event()  # or failed to

    def write(self, record: Record) -> None:
        """Take one record; returns at once."""
        if isinstance(record, RunStarted):
            self._folder = Path(record.run_folder).resolve()
            self._thread = threading.Thread(target=self._work, name=f"stormo {self.name}", daemon=True)
            self._calls.put(lambda: self._start(record))
            self._thread.start()
        elif self._thread is None or not self._thread.is_alive():
            return  # it has failed
        elif isinstance(record, StepDone | EpochDone | ValueLogged):
            values: dict[str, float | Path] = {**scalars_of(record)}
            if isinstance(record, ValueLogged) and record.file is not None:
                values[record.name] = self._folder / record.file
            self._calls.put(lambda: self._tracker.log(record.step, values))
        elif isinstance(record, RunEnded):
            self._summary = record.summary

    def close(self) -> None:
        """Send what is left."""
        if self._thread is None:
            return
        self._calls.put(lambda: self._tracker.end(self._summary))
        self._calls.put(None)
        self._thread.join(_LONGEST_END_S)
        if self._thread.is_alive():
            self._warn(f"is not done after {_LONGEST_END_S:.0f} s; what is missing there is in the run folder")

    def take_notices(self) -> Iterator[Notice]:
        """What its thread has to say to the user since the last time."""
        while not self._notices.empty():
            yield self._notices.get()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except (Exception, SystemExit) as error:
                self._warn(f"failed and gets no more of this run, which continues ({_first_line(error)})")
                return
            finally:
                self.started.set()

    def _start(self, record: RunStarted) -> None:
        file = self._folder / f"sink-{self.name}.json"
        known = read_object(file).get("id") if file.is_file() else None
        found = self._tracker.start(
            TrackedRun(
                name=record.run_name,
                task=record.task,
                folder=self._folder,
                settings=flat_config(RunFolder(self._folder).config),
                resumed_at_step=record.resumed_at_step,
                id=known if isinstance(known, str) else None,
            )
        )
        if found is not None:
            write_json(file, {"id": str(found)})
            self._notices.put(Notice(kind="info", text=f"{self._title} has this run as {found}"))

    def _warn(self, text: str) -> None:
        self._notices.put(Notice(kind="warning", text=f"{self._title} {text}."))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
