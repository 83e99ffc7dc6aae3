"""Shows a run to Prometheus: its newest records as metrics at http://HOST:PORT/metrics, while the run lasts.

Names follow Prometheus' rules: base units, `_total` for what only grows, `_ratio` for shares of one. A figure that was
not measured has no series. `dashboards/` holds a configuration of Prometheus and a dashboard of Grafana for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stormo.errors import SettingError, require_package
from stormo.telemetry.capped_server import CappedServer
from stormo.telemetry.record import (
    CheckpointSaved,
    DivergenceNoticed,
    EpochDone,
    NodeSampled,
    Notice,
    Record,
    RunStarted,
    StepDone,
)
from stormo.version import __version__

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


_NODE = ("host",)
_GPU = ("host", "gpu", "uuid")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; its labels come after `run`, which all have."""

    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()
    key: str | None = None  # of a node's sample, and what turns its unit into the metric's
    factor: float = 1


def _of_node(help: str, key: str, factor: float = 1) -> Metric:
    return Metric("gauge", help, _NODE, key, factor)


def _of_gpu(help: str, key: str, factor: float = 1) -> Metric:
    return Metric("gauge", help, _GPU, key, factor)


METRICS: dict[str, Metric] = {
    "stormo_run_info": Metric("gauge", "Always 1.", ("task", "strategy", "world_size", "version")),
    "stormo_epochs_planned": Metric("gauge", "Epochs of the run at most."),
    "stormo_epoch": Metric("gauge", "Current epoch, counted from 1."),
    "stormo_step": Metric("gauge", "Optimizer steps since the start of the run; falls when the run is rolled back."),
    "stormo_progress_timestamp_seconds": Metric("gauge", "When progress was last reported, in Unix time."),
    "stormo_training_seconds_total": Metric("counter", "Time spent training, without validation and checkpoints."),
    "stormo_samples_total": Metric("counter", "Samples trained on; those computed again after a rollback count again."),
    "stormo_samples_per_second": Metric("gauge", "Samples a second over all workers, over the last steps."),
    "stormo_units_per_second": Metric("gauge", "Speed in what the task counts: images, tokens, ...", ("unit",)),
    "stormo_loss": Metric("gauge", "Mean training loss of the last steps, over all workers."),
    "stormo_learning_rate": Metric("gauge", "Learning rate of the last step."),
    "stormo_global_batch_size": Metric("gauge", "Samples a step, over all workers."),
    "stormo_mfu_ratio": Metric("gauge", "Share of the devices' published peak that the model uses."),
    "stormo_input_wait_ratio": Metric("gauge", "Share of the training time spent waiting for data."),
    "stormo_noise_scale_samples": Metric("gauge", "Gradient noise scale: the batch beyond which a larger pays less."),
    "stormo_epoch_loss": Metric("gauge", "Mean training loss of the last whole epoch."),
    "stormo_epoch_seconds": Metric("gauge", "Training time of the last whole epoch."),
    "stormo_validation_seconds": Metric("gauge", "Time of the last validation."),
    "stormo_validation": Metric("gauge", "Result of the last validation.", ("metric",)),
    "stormo_peak_memory_bytes": Metric("gauge", "Highest device memory of a worker."),
    "stormo_peak_reserved_memory_bytes": Metric("gauge", "The most that the allocator of a worker took of its GPU."),
    "stormo_energy_joules_total": Metric(
        "counter", "Energy of all nodes over the epochs done since the last start, with validation."
    ),
    "stormo_job_power_watts": Metric("gauge", "Mean power of all nodes over the last whole epoch."),
    "stormo_main_node_power_watts": Metric("gauge", "Power of rank 0's node over the last seconds."),
    "stormo_checkpoints_total": Metric("counter", "Checkpoints saved."),
    "stormo_checkpoint_seconds_total": Metric("counter", "Time spent saving checkpoints."),
    "stormo_checkpoint_last_step": Metric("gauge", "Step of the newest checkpoint."),
    "stormo_notices_total": Metric("counter", "Notices to the user.", ("kind",)),
    "stormo_divergences_total": Metric("counter", "Times that training diverged.", ("kind",)),
    "stormo_node_cpu_ratio": _of_node("Share of the processors' time in use.", "cpu_fraction"),
    "stormo_node_cpus": _of_node("Logical processors.", "num_cpus"),
    "stormo_node_load1": _of_node("Load average of a minute.", "load_1"),
    "stormo_node_memory_used_bytes": _of_node("Memory in use, without caches.", "memory_used_bytes"),
    "stormo_node_memory_size_bytes": _of_node("Memory in total.", "memory_total_bytes"),
    "stormo_node_disk_read_bytes_per_second": _of_node("Read from local disks.", "disk_read_bytes_per_s"),
    "stormo_node_disk_write_bytes_per_second": _of_node("Written to local disks.", "disk_write_bytes_per_s"),
    "stormo_node_network_in_bytes_per_second": _of_node("Received, RDMA with it.", "network_in_bytes_per_s"),
    "stormo_node_network_out_bytes_per_second": _of_node("Sent, RDMA with it.", "network_out_bytes_per_s"),
    "stormo_node_cpu_temperature_celsius": _of_node("Temperature of the hottest processor.", "cpu_temperature_c"),
    "stormo_node_cpu_frequency_hertz": _of_node("Mean clock of the cores.", "cpu_clock_mhz", 1e6),
    "stormo_node_cpu_power_watts": _of_node("Power of all processor packages.", "cpu_power_w"),
    "stormo_gpu_info": Metric("gauge", "Always 1.", (*_GPU, "name")),
    "stormo_gpu_utilisation_ratio": _of_gpu("Share of the time in which a kernel ran.", "utilisation"),
    "stormo_gpu_memory_used_bytes": _of_gpu("Device memory in use.", "memory_used_bytes"),
    "stormo_gpu_memory_size_bytes": _of_gpu("Device memory in total.", "memory_total_bytes"),
    "stormo_gpu_power_watts": _of_gpu("Power drawn.", "power_w"),
    "stormo_gpu_power_limit_watts": _of_gpu("Power it may draw.", "power_limit_w"),
    "stormo_gpu_temperature_celsius": _of_gpu("Temperature of the chip.", "temperature_c"),
    "stormo_gpu_sm_clock_hertz": _of_gpu("Clock of its processors.", "sm_clock_mhz", 1e6),
    "stormo_gpu_memory_clock_hertz": _of_gpu("Clock of its memory.", "memory_clock_mhz", 1e6),
    "stormo_gpu_throttled": Metric("gauge", "1 while slowed down for the reason, 0 afterwards.", (*_GPU, "reason")),
}
_HIGHEST_PORT = 65535
_NOTICES = ("info", "warning", "stop")
_DIVERGENCES = ("loss", "weights", "validation", "exploded", "lost")


class PrometheusSink:
    """Serves the metrics of one run until `close`; port 0 takes any free one."""

    def __init__(
        self, port: int, host: str = "127.0.0.1", *, strategy: str, clock: Callable[[], float] = time.time
    ) -> None:
        check(port, host)
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder

        self._strategy = strategy
        self._clock = clock
        self._run = ""
        self._lock = threading.Lock()  # the server's threads read what the run writes
        self._values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in METRICS}
        self._samples_seen = 0
        registry = CollectorRegistry()
        registry.register(self)

        def answer(accept: str) -> tuple[str, bytes]:
            encode, kind = choose_encoder(accept)
            return kind, encode(registry)

        try:
            self._server = CappedServer(host, port, answer)
        except (OSError, UnicodeError) as error:  # a name that cannot be one, like a..b, is a UnicodeError
            why = getattr(error, "strerror", None) or error
            raise SettingError(
                f"--prometheus {port} was set",
                f"{host}:{port} cannot be listened on ({why})",
                "set another port, or another --prometheus-host",
            ) from None
        self.port: int = self._server.server_port
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def write(self, record: Record) -> None:
        """Update the metrics from one record."""
        with self._lock:
            match record:
                case RunStarted():
                    self._start(record)
                case StepDone():
                    self._take_step(record)
                case EpochDone():
                    self._take_epoch(record)
                case NodeSampled():
                    self._take_sample(record.sample)
                case CheckpointSaved():
                    self._add("stormo_checkpoints_total", 1)
                    self._add("stormo_checkpoint_seconds_total", record.save_time_s)
                    self._set("stormo_checkpoint_last_step", record.step)
                case Notice():
                    self._add("stormo_notices_total", 1, record.kind)
                case DivergenceNoticed():
                    self._add("stormo_divergences_total", 1, record.kind)

    def close(self) -> None:
        """Free the port; may be called again."""
        self._server.close()

    def collect(self) -> Iterator[Family]:
        """Every metric that has a value, for the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        with self._lock:
            values = {name: dict(series) for name, series in self._values.items()}
        for name, metric in METRICS.items():
            if values[name]:
                family = families[metric.kind](name, metric.help, labels=("run", *metric.labels))
                for labels, value in values[name].items():
                    family.add_metric(labels, value)
                yield family

    def _start(self, record: RunStarted) -> None:
        self._run = record.run_name
        self._set("stormo_run_info", 1, record.task, self._strategy, str(record.world_size), __version__)
        self._set("stormo_epochs_planned", record.epochs)
        self._set("stormo_global_batch_size", record.global_batch_size)
        self._set("stormo_step", record.resumed_at_step or 0)
        # A series that exists from the start shows its first increase.
        if record.resumed_at_step is None:
            self._add("stormo_samples_total", 0)
        self._add("stormo_checkpoints_total", 0)
        self._add("stormo_checkpoint_seconds_total", 0)
        for kind in _NOTICES:
            self._add("stormo_notices_total", 0, kind)
        for kind in _DIVERGENCES:
            self._add("stormo_divergences_total", 0, kind)

    def _take_step(self, record: StepDone) -> None:
        self._take_progress(record, record.train_time_s)
        self._set("stormo_samples_per_second", record.samples_per_s)
        self._set("stormo_units_per_second", record.units_per_s, record.unit)
        self._set("stormo_loss", record.loss)
        self._set("stormo_learning_rate", record.learning_rate)
        self._set("stormo_input_wait_ratio", record.input_wait_fraction)
        self._set("stormo_mfu_ratio", record.mfu)
        self._set("stormo_noise_scale_samples", record.noise_scale)
        self._set("stormo_main_node_power_watts", record.power_w)
        if record.global_batch_size is not None:
            self._set("stormo_global_batch_size", record.global_batch_size)

    def _take_epoch(self, record: EpochDone) -> None:
        self._take_progress(record, record.cumulative_time_s)
        self._set("stormo_epoch_loss", record.train_loss)
        self._set("stormo_epoch_seconds", record.epoch_time_s)
        self._set("stormo_validation_seconds", record.validation_time_s)
        self._set("stormo_peak_memory_bytes", record.peak_memory_bytes)
        self._set("stormo_peak_reserved_memory_bytes", record.peak_reserved_memory_bytes)
        self._set("stormo_job_power_watts", record.power_w)
        for metric, value in record.validation.items():
            self._set("stormo_validation", value, metric)
        if record.energy_j is not None:
            self._add("stormo_energy_joules_total", record.energy_j)

    def _take_progress(self, record: StepDone | EpochDone, train_time_s: float) -> None:
        self._set("stormo_epoch", record.epoch)
        self._set("stormo_step", record.step)
        self._set("stormo_progress_timestamp_seconds", self._clock())
        self._raise("stormo_training_seconds_total", train_time_s)
        # A rollback lowers it, which a counter must not. A resumed run continues its count.
        self._add("stormo_samples_total", max(record.samples_seen - self._samples_seen, 0))
        self._samples_seen = record.samples_seen

    def _take_sample(self, sample: Mapping[str, Any]) -> None:
        host = str(sample["host"])
        self._set_all(_NODE, sample, host)
        for gpu in sample["gpus"]:
            labels = (host, str(gpu["index"]), str(gpu["uuid"]))
            self._set("stormo_gpu_info", 1, *labels, str(gpu["name"]))
            self._set_all(_GPU, gpu, *labels)
            reasons = self._values["stormo_gpu_throttled"]
            for known in [series for series in reasons if series[1:4] == labels]:
                reasons[known] = 0
            for reason in gpu["throttled"] or ():
                self._set("stormo_gpu_throttled", 1, *labels, str(reason))

    def _set_all(self, kind: tuple[str, ...], figures: Mapping[str, Any], *labels: str) -> None:
        for name, metric in METRICS.items():
            if metric.key is not None and metric.labels == kind:
                value = figures[metric.key]
                self._set(name, None if value is None else value * metric.factor, *labels)

    def _set(self, name: str, value: float | None, *labels: str) -> None:
        if value is None:  # the last value would pass for a new one
            self._values[name].pop((self._run, *labels), None)
        else:
            self._values[name][self._run, *labels] = value

    def _raise(self, name: str, value: float) -> None:
        # Rank 0's time may be a little ahead of the slowest worker's, which must not show as a restart.
        series = self._values[name]
        series[self._run,] = max(value, series.get((self._run,), value))

    def _add(self, name: str, value: float, *labels: str) -> None:
        series = self._values[name]
        series[self._run, *labels] = series.get((self._run, *labels), 0) + value


def check(port: int, host: str) -> None:
    """Refuse settings that cannot be served."""
    require_package("prometheus_client", f"--prometheus {port}", "prometheus")
    if not 0 <= port <= _HIGHEST_PORT:
        raise SettingError(
            f"--prometheus {port} was set", f"a port is a number from 0 to {_HIGHEST_PORT}", "set one like 9701"
        )
    if not host:
        raise SettingError(
            "--prometheus-host was set to nothing", "an address is needed", "leave it out for 127.0.0.1, or name one"
        )
