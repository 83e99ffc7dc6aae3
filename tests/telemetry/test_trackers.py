"""MLflow, Weights & Biases and sinks of other packages: the real packages, and a tiny distribution as pip leaves it."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stormo.config.schema import Run
from stormo.errors import MissingPackageError, SettingError
from stormo.telemetry import trackers
from stormo.telemetry.record import Notice, RunEnded
from tests.commands.test_train import here, summary
from tests.telemetry.test_tensorboard import started, step_done

_SINK = '''
import json

class Sink:
    """Writes what it gets into a file beside the run."""

    def start(self, run):
        self.file = run.folder / "tiny.jsonl"
        self._write("start", run.id, run.resumed_at_step, run.settings["batch.batch_size"])
        return "the only one"

    def log(self, step, values):
        self._write("log", step, {name: str(value) for name, value in values.items()})

    def end(self, summary):
        self._write("end", summary["stopped_by"])

    def _write(self, *words):
        with self.file.open("a") as file:
            print(json.dumps(words), file=file)

class Broken(Sink):
    def start(self, run): ...

    def log(self, step, values):
        raise ConnectionError("the server is gone")

class Poor:
    def start(self, run): ...
    def log(self, step, values): ...
'''
_NAMES = {"tiny": "Sink", "broken": "Broken", "poor": "Poor", "gone": "Gone"}


def install(folder: Path) -> None:
    """A tiny distribution with sinks, as pip leaves it."""
    info = folder / "tiny_sink-1.0.dist-info"
    info.mkdir()
    (folder / "tiny_sink.py").write_text(_SINK)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-sink\nVersion: 1.0\n")
    entries = "".join(f"{name} = tiny_sink:{found}\n" for name, found in _NAMES.items())
    (info / "entry_points.txt").write_text(f"[stormo.sinks]\n{entries}")


@pytest.fixture(scope="module", autouse=True)
def _distribution(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("site-packages")
    install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield
    sys.modules.pop("tiny_sink", None)


@dataclass(frozen=True)
class Trained:
    run: Path
    store: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """A run of one epoch that was resumed for a second one, with every tool that is installed."""
    folder = tmp_path_factory.mktemp("trained")
    store = f"file:{folder / 'mlruns'}"
    flags = [f"--{name}" for name in ("mlflow", "wandb") if importlib.util.find_spec(name) is not None]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_DIR", "MLFLOW_EXPERIMENT_ID"):
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(folder / "no-netrc"))
        patch.setenv("MLFLOW_TRACKING_URI", store)
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_EXPERIMENT_NAME", "birds")
        assert here("--run-name", "wren", "--epochs", "1", "--sinks", "tiny,broken", *flags) == 0
        assert here("--resume", "--epochs", "2") == 0  # the run has kept its sinks
        yield Trained(folder / "runs" / "wren", store)


def test_mlflow_has_one_run_with_settings_metrics_and_summary(trained: Trained) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    client = mlflow.MlflowClient(tracking_uri=trained.store)
    (run,) = client.search_runs([client.get_experiment_by_name("birds").experiment_id])
    assert (run.info.run_name, run.info.status) == ("wren", "FINISHED")
    assert run.data.params["batch.batch_size"] == "64"
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "validation/accuracy")]
    assert steps == [16, 32]
    assert run.data.metrics["summary/validation/accuracy"] == summary(trained.run)["validation"]["accuracy"]
    assert run.data.tags["stormo.stopped_by"] == "epochs"


def test_wandb_is_offline_without_a_login_and_continues_its_run(trained: Trained) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    own = json.loads((trained.run / "sink-wandb.json").read_text())["id"]
    first, second = sorted(trained.run.glob(f"wandb/offline-run-*-{own}"), key=lambda path: path.stat().st_mtime)
    for folder in (first, second):
        content = (folder / f"run-{own}.wandb").read_bytes()
        for word in (b"wren", b"batch.batch_size", b"validation/accuracy", b"summary/validation/accuracy"):
            assert word in content


def test_a_sink_of_another_package_gets_all_and_its_own_id_back(trained: Trained) -> None:
    words: list[Any] = [json.loads(line) for line in (trained.run / "tiny.jsonl").read_text().splitlines()]
    assert [rest for kind, *rest in words if kind == "start"] == [[None, None, "64"], ["the only one", 16, "64"]]
    assert [rest for kind, *rest in words if kind == "end"] == [["epochs"], ["epochs"]]
    epochs = [step for kind, step, values in (each for each in words if each[0] == "log") if "epoch/number" in values]
    assert epochs == [16, 32]


def test_a_sink_that_fails_costs_one_warning_a_start(trained: Trained) -> None:
    notices = [json.loads(line) for line in (trained.run / "events.jsonl").read_text().splitlines()]
    warnings = [each["text"] for each in notices if each["event"] == "notice" and each["kind"] == "warning"]
    sentence = "broken failed and gets no more of this run, which continues (ConnectionError: the server is gone)."
    assert warnings == [sentence, sentence]


def test_one_that_exits_costs_a_warning_too() -> None:
    class Exits:
        def start(self, run: Any) -> None:
            sys.exit(7)

        log = end = start

    sink = trackers.TrackerSink("lab", Exits())  # type: ignore[arg-type]
    sink.write(started())
    sink.close()
    (notice,) = sink.take_notices()
    assert notice.text == "lab failed and gets no more of this run, which continues (SystemExit: 7)."


def test_an_mlflow_server_that_is_not_there_fails_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    run = trackers.TrackedRun(name="a", task="a", folder=tmp_path, settings={}, resumed_at_step=None, id=None)
    with pytest.raises(ConnectionError, match=r"http://127.0.0.1:9 does not answer: .*Connection refused"):
        trackers.MlflowTracker().start(run)


def test_metrics_whose_names_mlflow_refuses_are_renamed() -> None:
    names = ["validation/acc@1 (%)", "f1/a-b_c.d: e"]
    assert [trackers.mlflow_name(name) for name in names] == ["validation/acc_1 ___", "f1/a-b_c.d: e"]


def test_one_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import threading

    class Hangs:
        def start(self, run: trackers.TrackedRun) -> None:
            threading.Event().wait(30.0)

        log = end = start

    monkeypatch.setattr(trackers, "_LONGEST_END_S", 0.01)
    sink = trackers.TrackerSink("far", Hangs())  # type: ignore[arg-type]
    for record in (started(), step_done(1, 1.0), RunEnded(summary={})):
        sink.write(record)
    sink.close()
    (notice,) = sink.take_notices()
    assert isinstance(notice, Notice)
    assert "far is not done after" in notice.text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tinny", "did you mean tiny"),
        ("gone", "tiny_sink:Gone cannot be used"),
        ("poor", "tiny_sink:Poor has no method end"),
    ],
)
def test_what_cannot_be_used_is_refused(name: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        trackers.RunSinks([name])


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_package_is_refused_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()  # as wandb makes one where it is used
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(MissingPackageError, match=rf"stormo\[{name}\]"):
        trackers.check(trackers.asked_trackers(Run(**{name: True})))


def test_mlflow_without_a_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_is_installed", lambda name: name != "sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(SettingError, match="set MLFLOW_TRACKING_URI"):
        trackers.check(["mlflow"])


@pytest.mark.parametrize(
    ("variables", "found"),
    [({}, False), ({"WANDB_API_KEY": "x"}, True), ({"WANDB_BASE_URL": "https://here.example:8080"}, True)],
)
def test_a_login_is_a_key_or_an_entry_for_the_host(tmp_path: Path, variables: dict[str, str], found: bool) -> None:
    file = tmp_path / "netrc"
    file.write_text("machine here.example login user password secret\n")
    file.chmod(0o600)
    assert trackers._has_wandb_login({"NETRC": str(file), **variables}) is found
