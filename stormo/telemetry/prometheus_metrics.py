"""The metrics Prometheus is shown: name, kind, help and labels of each, and which keys of a sample those of a node are.

The run's own come from its records, in `prometheus`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_GPU = ("host", "gpu", "uuid")


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table: its labels come after `run`, which all have."""

    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, Metric] = {
    "stormo_run_info": Metric("gauge", "Always 1.", ("task", "strategy", "world_size", "version")),
    "stormo_epochs_planned": Metric("gauge", "Epochs the run is to last at most."),
    "stormo_epoch": Metric("gauge", "Epoch under way, counted from 1."),
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
    "stormo_main_node_power_watts": Metric("gauge", "Power of the main worker's node over the last seconds."),
    "stormo_checkpoints_total": Metric("counter", "Checkpoints saved."),
    "stormo_checkpoint_seconds_total": Metric("counter", "Time spent saving checkpoints."),
    "stormo_checkpoint_last_step": Metric("gauge", "Step of the newest checkpoint."),
    "stormo_notices_total": Metric("counter", "Sentences said to the user.", ("kind",)),
    "stormo_divergences_total": Metric("counter", "Times the loss was lost.", ("kind",)),
    "stormo_node_cpu_ratio": Metric("gauge", "Share of the processors' time in use.", ("host",)),
    "stormo_node_cpus": Metric("gauge", "Logical processors.", ("host",)),
    "stormo_node_load1": Metric("gauge", "Load average of a minute.", ("host",)),
    "stormo_node_memory_used_bytes": Metric("gauge", "Memory in use, without caches.", ("host",)),
    "stormo_node_memory_size_bytes": Metric("gauge", "Memory there is.", ("host",)),
    "stormo_node_disk_read_bytes_per_second": Metric("gauge", "Read from local disks.", ("host",)),
    "stormo_node_disk_write_bytes_per_second": Metric("gauge", "Written to local disks.", ("host",)),
    "stormo_node_network_in_bytes_per_second": Metric("gauge", "Received, RDMA with it.", ("host",)),
    "stormo_node_network_out_bytes_per_second": Metric("gauge", "Sent, RDMA with it.", ("host",)),
    "stormo_node_cpu_temperature_celsius": Metric("gauge", "Temperature of the hottest processor.", ("host",)),
    "stormo_node_cpu_frequency_hertz": Metric("gauge", "Mean clock of the cores.", ("host",)),
    "stormo_node_cpu_power_watts": Metric("gauge", "Power of all processor packages.", ("host",)),
    "stormo_gpu_info": Metric("gauge", "Always 1.", (*_GPU, "name")),
    "stormo_gpu_utilisation_ratio": Metric("gauge", "Share of the time in which a kernel ran.", _GPU),
    "stormo_gpu_memory_used_bytes": Metric("gauge", "Device memory in use.", _GPU),
    "stormo_gpu_memory_size_bytes": Metric("gauge", "Device memory there is.", _GPU),
    "stormo_gpu_power_watts": Metric("gauge", "Power drawn.", _GPU),
    "stormo_gpu_power_limit_watts": Metric("gauge", "Power it may draw.", _GPU),
    "stormo_gpu_temperature_celsius": Metric("gauge", "Temperature of the chip.", _GPU),
    "stormo_gpu_sm_clock_hertz": Metric("gauge", "Clock of its processors.", _GPU),
    "stormo_gpu_memory_clock_hertz": Metric("gauge", "Clock of its memory.", _GPU),
    "stormo_gpu_throttled": Metric("gauge", "1 while slowed down for the reason, 0 afterwards.", (*_GPU, "reason")),
}
# A sample's key, and what turns its unit into the metric's.
NODE_KEYS: dict[str, tuple[str, float]] = {
    "stormo_node_cpu_ratio": ("cpu_fraction", 1),
    "stormo_node_cpus": ("num_cpus", 1),
    "stormo_node_load1": ("load_1", 1),
    "stormo_node_memory_used_bytes": ("memory_used_bytes", 1),
    "stormo_node_memory_size_bytes": ("memory_total_bytes", 1),
    "stormo_node_disk_read_bytes_per_second": ("disk_read_bytes_per_s", 1),
    "stormo_node_disk_write_bytes_per_second": ("disk_write_bytes_per_s", 1),
    "stormo_node_network_in_bytes_per_second": ("network_in_bytes_per_s", 1),
    "stormo_node_network_out_bytes_per_second": ("network_out_bytes_per_s", 1),
    "stormo_node_cpu_temperature_celsius": ("cpu_temperature_c", 1),
    "stormo_node_cpu_frequency_hertz": ("cpu_clock_mhz", 1e6),
    "stormo_node_cpu_power_watts": ("cpu_power_w", 1),
}
GPU_KEYS: dict[str, tuple[str, float]] = {
    "stormo_gpu_utilisation_ratio": ("utilisation", 1),
    "stormo_gpu_memory_used_bytes": ("memory_used_bytes", 1),
    "stormo_gpu_memory_size_bytes": ("memory_total_bytes", 1),
    "stormo_gpu_power_watts": ("power_w", 1),
    "stormo_gpu_power_limit_watts": ("power_limit_w", 1),
    "stormo_gpu_temperature_celsius": ("temperature_c", 1),
    "stormo_gpu_sm_clock_hertz": ("sm_clock_mhz", 1e6),
    "stormo_gpu_memory_clock_hertz": ("memory_clock_mhz", 1e6),
}
