"""A run as the real Prometheus sees it: the shipped configuration, one scrape, and every figure asked back from it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stormo.telemetry import prometheus
from stormo.telemetry.prometheus import METRICS, PrometheusSink
from tests.system.conftest import Need
from tests.telemetry.prometheus_records import EXPECTED, NOW_UNIX_S, whole_run

DASHBOARDS = Path(prometheus.__file__).parent / "dashboards"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    """No host is needed here, and none to be cleaned."""


@pytest.fixture(scope="module")
def sink() -> Iterator[PrometheusSink]:
    """A run that Prometheus may look at."""
    sink = PrometheusSink(0, strategy="replicate", clock=lambda: NOW_UNIX_S)
    for record in whole_run():
        sink.write(record)
    yield sink
    sink.close()


class Server:
    """Prometheus, running."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}/api/v1/query?"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector that an expression stands for now."""
        with urllib.request.urlopen(
            self._address + urllib.parse.urlencode({"query": expression}), timeout=10
        ) as answer:
            content = json.load(answer)
        assert content["status"] == "success", content
        result: list[dict[str, Any]] = content["data"]["result"]
        return result

    def wait_for(self, expression: str, process: subprocess.Popen[str]) -> None:
        """Wait until an expression stands for something."""
        deadline_s = time.monotonic() + 60.0
        while time.monotonic() < deadline_s and process.poll() is None:
            try:
                if self.query(expression):
                    return
            except OSError:  # not listening yet, or not ready: 503
                pass
            time.sleep(0.1)
        process.kill()
        pytest.fail(f"{expression} stayed empty: {process.communicate()[0][-2000:]}")


@pytest.fixture(scope="module")
def server(sink: PrometheusSink, need: Need, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Prometheus with the shipped configuration, but another port and pace; it has looked at the run twice."""
    need("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    shipped = (DASHBOARDS / "prometheus.yml").read_text()
    config = shipped.replace("127.0.0.1:9701", f"127.0.0.1:{sink.port}").replace(
        "scrape_interval: 5s", "scrape_interval: 1s"
    )
    assert config.count(str(sink.port)) == 1
    assert "scrape_interval: 1s" in config
    (folder / "prometheus.yml").write_text(config)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        server = Server(port)
        server.wait_for("count_over_time(stormo_step[1m]) > 1", process)
        yield server
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_the_shipped_configuration_is_valid(need: Need) -> None:
    need("promtool", "prometheus")
    checked = subprocess.run(
        ["promtool", "check", "config", str(DASHBOARDS / "prometheus.yml")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert "SUCCESS" in checked.stdout


def test_names_and_kinds_pass_the_lint_of_prometheus(sink: PrometheusSink, need: Need) -> None:
    need("promtool", "prometheus")
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_every_figure_comes_back_from_prometheus(server: Server) -> None:
    for name, labels, value in EXPECTED:
        matchers = ",".join(f'{label}="{text}"' for label, text in labels.items())
        (found,) = server.query(f"{name}{{{matchers}}}")
        assert float(found["value"][1]) == value, name
    (info,) = server.query("stormo_run_info")
    assert {label: info["metric"][label] for label in ("run", "task", "strategy", "world_size")} == {
        "run": "heron",
        "task": "fashion-mnist",
        "strategy": "replicate",
        "world_size": "4",
    }
    assert info["metric"]["job"] == "stormo"


def test_prometheus_knows_the_kind_and_help_of_every_metric(server: Server) -> None:
    address = server._address.replace("/query?", "/metadata")
    with urllib.request.urlopen(address, timeout=10) as answer:
        known = json.load(answer)["data"]
    for name, metric in METRICS.items():
        # OpenMetrics names a counter without its ending, the older format with it; which one is asked for may change.
        (found,) = known.get(name) or known[name.removesuffix("_total")]
        assert (found["type"], found["help"]) == (metric.kind, metric.help)


def test_every_curve_of_the_dashboard_has_points(server: Server) -> None:
    page = json.loads((DASHBOARDS / "grafana.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in page["panels"] for target in panel.get("targets", [])]
    assert len(asked) > len(METRICS) / 2
    empty = [expression for expression in asked if not server.query(re.sub(r"\$run", "heron", expression))]
    assert empty == []
