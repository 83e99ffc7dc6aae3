"""The records of one run in which every figure is known, and what Prometheus should be shown of them."""

from __future__ import annotations

from typing import Any

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

STARTED = RunStarted(
    run_name="heron",
    run_folder="runs/heron",
    task="fashion-mnist",
    world_size=4,
    global_batch_size=2048,
    epochs=3,
    steps_per_epoch=10,
)
CHECKPOINT = CheckpointSaved(epoch=1, step=10, path="checkpoints/10", weights_sha256="00", save_time_s=0.25)
DIVERGENCE = DivergenceNoticed(
    epoch=1,
    step=7,
    kind="exploded",
    loss=1e9,
    learning_rate=0.1,
    rolled_back_to_step=None,
    rate_factor=1.0,
    text="The loss exploded.",
)


def step_done(step: int = 5, *, samples_seen: int = 10_240, **changes: Any) -> StepDone:
    figures: dict[str, Any] = {
        "epoch": 1,
        "step": step,
        "step_in_epoch": step,
        "samples_seen": samples_seen,
        "loss": 1.5,
        "learning_rate": 0.125,
        "samples_per_s": 4096.0,
        "units_per_s": 8192.0,
        "input_wait_fraction": 0.0625,
        "train_time_s": 2.5,
        "unit": "images",
        "mfu": 0.375,
        "noise_scale": 512.0,
        "power_w": 350.0,
    }
    return StepDone(**figures | changes)


def epoch_done(*, energy_j: float | None = 3000.0) -> EpochDone:
    return EpochDone(
        epoch=1,
        step=10,
        samples_seen=20_480,
        epoch_time_s=5.0,
        cumulative_time_s=5.0,
        validation_time_s=0.5,
        samples_per_s=4096.0,
        units_per_s=8192.0,
        train_loss=1.25,
        learning_rate=0.125,
        input_wait_fraction=0.0625,
        peak_memory_bytes=1 << 33,
        peak_reserved_memory_bytes=1 << 34,
        validation={"loss": 0.75, "accuracy": 0.875},
        unit="images",
        energy_j=energy_j,
        power_w=600.0,
    )


def sample(throttled: list[str] | None, **changes: Any) -> NodeSampled:
    gpu = {
        "uuid": "GPU-1",
        "name": "NVIDIA H200",
        "index": 0,
        "utilisation": 0.75,
        "memory_used_bytes": 2 << 30,
        "memory_total_bytes": 140 << 30,
        "power_w": 300.0,
        "power_limit_w": 700.0,
        "temperature_c": 61.0,
        "sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 3201.0,
        "throttled": throttled,
    }
    node: dict[str, Any] = {
        "time_unix_s": 1_700_000_000.0,
        "host": "n1",
        "cpu_fraction": 0.5,
        "num_cpus": 16,
        "load_1": 8.0,
        "memory_used_bytes": 32 << 30,
        "memory_total_bytes": 128 << 30,
        "disk_read_bytes_per_s": 1e6,
        "disk_write_bytes_per_s": 2e6,
        "network_in_bytes_per_s": 3e6,
        "network_out_bytes_per_s": 4e6,
        "cpu_temperature_c": 55.0,
        "cpu_clock_mhz": 2900.0,
        "cpu_power_w": 120.0,
        "gpus": [gpu],
    }
    return NodeSampled(sample=node | changes)


def whole_run() -> list[Record]:
    """A record of every kind, so that every metric has a value."""
    return [
        STARTED,
        Notice(kind="warning", text="Something was ignored."),
        sample(["power limit"]),
        step_done(),
        epoch_done(),
        CHECKPOINT,
        DIVERGENCE,
    ]


RUN = {"run": "heron"}
NODE = {**RUN, "host": "n1"}
GPU = {**NODE, "gpu": "0", "uuid": "GPU-1"}
NOW_UNIX_S = 1_700_000_000.0
# Every metric once: (name, labels) and its value after `whole_run`.
EXPECTED: list[tuple[str, dict[str, str], float]] = [
    ("stormo_epochs_planned", RUN, 3),
    ("stormo_epoch", RUN, 1),
    ("stormo_step", RUN, 10),
    ("stormo_progress_timestamp_seconds", RUN, NOW_UNIX_S),
    ("stormo_training_seconds_total", RUN, 5.0),
    ("stormo_samples_total", RUN, 20_480),
    ("stormo_samples_per_second", RUN, 4096.0),
    ("stormo_units_per_second", {**RUN, "unit": "images"}, 8192.0),
    ("stormo_loss", RUN, 1.5),
    ("stormo_learning_rate", RUN, 0.125),
    ("stormo_global_batch_size", RUN, 2048),
    ("stormo_mfu_ratio", RUN, 0.375),
    ("stormo_input_wait_ratio", RUN, 0.0625),
    ("stormo_noise_scale_samples", RUN, 512.0),
    ("stormo_epoch_loss", RUN, 1.25),
    ("stormo_epoch_seconds", RUN, 5.0),
    ("stormo_validation_seconds", RUN, 0.5),
    ("stormo_validation", {**RUN, "metric": "accuracy"}, 0.875),
    ("stormo_peak_memory_bytes", RUN, 1 << 33),
    ("stormo_peak_reserved_memory_bytes", RUN, 1 << 34),
    ("stormo_energy_joules_total", RUN, 3000.0),
    ("stormo_job_power_watts", RUN, 600.0),
    ("stormo_main_node_power_watts", RUN, 350.0),
    ("stormo_checkpoints_total", RUN, 1),
    ("stormo_checkpoint_seconds_total", RUN, 0.25),
    ("stormo_checkpoint_last_step", RUN, 10),
    ("stormo_notices_total", {**RUN, "kind": "warning"}, 1),
    ("stormo_divergences_total", {**RUN, "kind": "exploded"}, 1),
    ("stormo_node_cpu_ratio", NODE, 0.5),
    ("stormo_node_cpus", NODE, 16),
    ("stormo_node_load1", NODE, 8.0),
    ("stormo_node_memory_used_bytes", NODE, 32 << 30),
    ("stormo_node_memory_size_bytes", NODE, 128 << 30),
    ("stormo_node_disk_read_bytes_per_second", NODE, 1e6),
    ("stormo_node_disk_write_bytes_per_second", NODE, 2e6),
    ("stormo_node_network_in_bytes_per_second", NODE, 3e6),
    ("stormo_node_network_out_bytes_per_second", NODE, 4e6),
    ("stormo_node_cpu_temperature_celsius", NODE, 55.0),
    ("stormo_node_cpu_frequency_hertz", NODE, 2.9e9),
    ("stormo_node_cpu_power_watts", NODE, 120.0),
    ("stormo_gpu_info", {**GPU, "name": "NVIDIA H200"}, 1),
    ("stormo_gpu_utilisation_ratio", GPU, 0.75),
    ("stormo_gpu_memory_used_bytes", GPU, 2 << 30),
    ("stormo_gpu_memory_size_bytes", GPU, 140 << 30),
    ("stormo_gpu_power_watts", GPU, 300.0),
    ("stormo_gpu_power_limit_watts", GPU, 700.0),
    ("stormo_gpu_temperature_celsius", GPU, 61.0),
    ("stormo_gpu_sm_clock_hertz", GPU, 1.98e9),
    ("stormo_gpu_memory_clock_hertz", GPU, 3.201e9),
    ("stormo_gpu_throttled", {**GPU, "reason": "power limit"}, 1),
]
