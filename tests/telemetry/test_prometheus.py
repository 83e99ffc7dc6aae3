"""What Prometheus is shown of a run, asked over HTTP as Prometheus asks; and the dashboard made for it."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import stormo
from stormo.errors import EXIT_USAGE, MissingPackageError, SettingError
from stormo.telemetry import prometheus
from stormo.telemetry.prometheus import METRICS, PrometheusSink
from stormo.telemetry.record import DivergenceNoticed, Notice, RunEnded, RunStarted, ValidationProgress
from tests.telemetry.prometheus_records import (
    EXPECTED,
    GPU,
    NODE,
    NOW_UNIX_S,
    RUN,
    STARTED,
    epoch_done,
    sample,
    step_done,
    whole_run,
)

DASHBOARDS = Path(prometheus.__file__).parent / "dashboards"
Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def served() -> Iterator[PrometheusSink]:
    """One server for all tests of this file: closing one takes half a second."""
    sink = PrometheusSink(0, strategy="replicate", clock=lambda: NOW_UNIX_S)
    yield sink
    sink.close()


@pytest.fixture
def sink(served: PrometheusSink) -> PrometheusSink:
    """The server, knowing of no run."""
    served._values = {name: {} for name in METRICS}
    served._samples_seen = 0
    served._run = ""
    return served


def scrape(sink: PrometheusSink) -> Values:
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (line.name, frozenset(line.labels.items())): line.value
        for family in text_string_to_metric_families(text)
        for line in family.samples
    }


def value(found: Values, name: str, labels: dict[str, str]) -> float | None:
    return found.get((name, frozenset(labels.items())))


def test_every_figure_of_a_run_is_shown(sink: PrometheusSink) -> None:
    for record in whole_run():
        sink.write(record)
    found = scrape(sink)
    assert {name: value(found, name, labels) for name, labels, _ in EXPECTED} == {
        name: wanted for name, _, wanted in EXPECTED
    }
    info = {**RUN, "task": "fashion-mnist", "strategy": "replicate", "world_size": "4", "version": stormo.__version__}
    assert value(found, "stormo_run_info", info) == 1
    assert {name for name, _, _ in EXPECTED} | {"stormo_run_info"} == set(METRICS)
    assert {name for name, _ in found} == set(METRICS)


def test_nothing_is_shown_before_the_run_starts_nor_of_what_was_not_measured(sink: PrometheusSink) -> None:
    assert scrape(sink) == {}
    sink.write(STARTED)
    sink.write(step_done(mfu=None, noise_scale=None, power_w=None))
    sink.write(epoch_done(energy_j=None))
    shown = {name for name, _ in scrape(sink)}
    assert "stormo_loss" in shown
    absent = {"stormo_mfu_ratio", "stormo_noise_scale_samples", "stormo_main_node_power_watts"}
    assert not shown & (absent | {"stormo_energy_joules_total"})


def test_a_figure_that_can_no_longer_be_read_disappears(sink: PrometheusSink) -> None:
    sink.write(STARTED)
    sink.write(sample([]))
    assert value(scrape(sink), "stormo_node_cpu_power_watts", NODE) == 120.0
    sink.write(sample([], cpu_power_w=None))
    assert value(scrape(sink), "stormo_node_cpu_power_watts", NODE) is None


def test_counters_are_there_from_the_start(sink: PrometheusSink) -> None:
    sink.write(STARTED)
    found = scrape(sink)
    assert value(found, "stormo_samples_total", RUN) == 0
    assert [value(found, "stormo_notices_total", {**RUN, "kind": kind}) for kind in ("info", "warning", "stop")] == [
        0
    ] * 3
    assert value(found, "stormo_divergences_total", {**RUN, "kind": "loss"}) == 0


def test_samples_and_time_never_fall_when_the_run_is_rolled_back(sink: PrometheusSink) -> None:
    sink.write(STARTED)
    for samples_seen, train_time_s in ((1000, 2.0), (600, 1.9), (900, 3.0)):
        sink.write(step_done(samples_seen=samples_seen, train_time_s=train_time_s))
    found = scrape(sink)
    assert value(found, "stormo_samples_total", RUN) == 1300  # 1000, then 300 again
    assert value(found, "stormo_training_seconds_total", RUN) == 3.0
    sink.write(step_done(samples_seen=900, train_time_s=2.0))
    assert value(scrape(sink), "stormo_training_seconds_total", RUN) == 3.0


def test_a_resumed_run_goes_on_with_its_count(sink: PrometheusSink) -> None:
    resumed = RunStarted(
        run_name="heron",
        run_folder="runs/heron",
        task="fashion-mnist",
        world_size=4,
        global_batch_size=2048,
        epochs=3,
        steps_per_epoch=10,
        resumed_at_step=20,
    )
    sink.write(resumed)
    found = scrape(sink)
    assert value(found, "stormo_step", RUN) == 20
    assert value(found, "stormo_samples_total", RUN) is None  # a zero would look like a restart of the counter
    sink.write(step_done(21, samples_seen=43_008))
    assert value(scrape(sink), "stormo_samples_total", RUN) == 43_008


def test_energy_adds_up_over_epochs_and_notices_by_kind(sink: PrometheusSink) -> None:
    sink.write(STARTED)
    for _ in range(2):
        sink.write(epoch_done(energy_j=1500.5))
        sink.write(Notice(kind="info", text="said"))
    sink.write(ValidationProgress(epoch=1, done=1, total=2))
    sink.write(RunEnded(summary={}))
    found = scrape(sink)
    assert value(found, "stormo_energy_joules_total", RUN) == 3001.0
    assert value(found, "stormo_notices_total", {**RUN, "kind": "info"}) == 2


def test_a_reason_to_slow_down_that_has_passed_becomes_zero(sink: PrometheusSink) -> None:
    sink.write(STARTED)
    for throttled in (["hot", "power limit"], ["hot"], None):
        sink.write(sample(throttled))
        found = scrape(sink)
        for reason in ("hot", "power limit"):
            wanted = float(reason in (throttled or ()))
            assert value(found, "stormo_gpu_throttled", {**GPU, "reason": reason}) == wanted


def test_a_lost_loss_is_shown_as_it_is(sink: PrometheusSink) -> None:
    sink.write(STARTED)
    sink.write(step_done(loss=float("nan")))
    lost = value(scrape(sink), "stormo_loss", RUN)
    assert lost is not None
    assert math.isnan(lost)


def test_it_listens_on_loopback_alone_lets_the_port_go_and_refuses_a_taken_one() -> None:
    sink = PrometheusSink(0, strategy="one")
    assert sink._server.server_address[0] == "127.0.0.1"
    with pytest.raises(SettingError, match=rf"--prometheus {sink.port} was set, but 127.0.0.1:{sink.port} cannot"):
        PrometheusSink(sink.port, strategy="one")
    sink.close()
    sink.close()
    with socket.create_server(("127.0.0.1", sink.port)):
        pass


@pytest.mark.parametrize(
    ("port", "host", "said"),
    [
        (-1, "127.0.0.1", "a number from 0 to 65535"),
        (65536, "127.0.0.1", "a number from 0 to 65535"),
        (0, "", "an address is needed"),
        (0, "no.such.host.invalid", "cannot be listened on"),
        (0, "192.0.2.1", "cannot be listened on"),
        (0, "a..b", "cannot be listened on"),
    ],
)
def test_an_address_that_cannot_be_served_is_refused_in_one_sentence(port: int, host: str, said: str) -> None:
    with pytest.raises(SettingError, match=said) as caught:
        PrometheusSink(port, host, strategy="one")
    assert caught.value.exit_code == EXIT_USAGE
    assert str(caught.value).count(". ") == 0


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"prometheus_client.*stormo\[prometheus\]"):
        PrometheusSink(0, strategy="one")


@pytest.mark.parametrize("name", sorted(METRICS))
def test_names_follow_the_rules_of_prometheus(name: str) -> None:
    metric = METRICS[name]
    assert re.fullmatch(r"stormo_[a-z0-9_]+", name)
    assert name.endswith("_total") == (metric.kind == "counter")
    assert metric.help.endswith(".")
    assert not re.search(r"_(ms|mhz|w|j|c|percent|fraction|gib|mib|kwh)(_|$)", name)
    assert "run" not in metric.labels


def dashboard() -> dict[str, Any]:
    content = json.loads((DASHBOARDS / "grafana.json").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def test_the_dashboard_uses_every_metric_there_is_and_no_other() -> None:
    expressions = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    used = set(re.findall(r"\bstormo_\w+", " ".join(expressions)))
    assert used == set(METRICS)
    for expression in expressions:
        for labels in re.findall(r"stormo_\w+({.*?})?", expression):
            assert 'run=~"$run"' in labels, expression


def test_the_dashboard_labels_its_curves_with_labels_there_are() -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            for name in re.findall(r"\bstormo_\w+", target["expr"]):
                known = {"run", *METRICS[name].labels}
                assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= known, target


def test_the_dashboard_asks_the_chosen_source_and_its_panels_do_not_overlap() -> None:
    page = dashboard()
    assert [variable["name"] for variable in page["templating"]["list"]] == ["datasource", "run"]
    assert page["templating"]["list"][1]["definition"] == "label_values(stormo_run_info, run)"
    panels = page["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
        for asked in [panel, *panel.get("targets", [])] if panel["type"] != "row" else []:
            assert asked["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_divergences_are_counted_by_kind(sink: PrometheusSink) -> None:
    sink.write(STARTED)
    (record,) = [record for record in whole_run() if isinstance(record, DivergenceNoticed)]
    sink.write(record)
    sink.write(record)
    assert value(scrape(sink), "stormo_divergences_total", {**RUN, "kind": "exploded"}) == 2
