"""The keywords of `stormo.train`, for editors and type checkers; a test makes this file from the schema."""

from __future__ import annotations

from typing import Literal, TypedDict

from stormo.config.schema import Precision, Schedule
from stormo.config.strategies import StrategyName


class TrainSettings(TypedDict, total=False):
    """Every flag of `stormo train`, with underscores."""

    # workers
    num_gpus: int | None
    max_restarts: int | None
    launcher: Literal["auto", "ssh"] | None
    hosts: str | None
    hostfile: str | None
    master_addr: str | None
    master_port: int | None
    device: Literal["auto", "cpu", "cuda"] | None
    backend: Literal["auto", "nccl", "gloo"] | None
    bind: bool | None
    timeout: float | None
    tune_link: bool | None
    strategy: StrategyName | None
    servers: int | None
    staleness: int | None
    compress: Literal["none", "bf16", "fp16", "powersgd"] | None
    compress_rank: int | None
    mesh: str | None
    zero: int | None

    # batch
    batch_size: int | Literal["auto"] | None
    global_batch_size: int | None
    accumulate: int | None
    ghost_batch_size: int | None
    grow_batch: str | None
    max_batch_size: int | None
    on_resize: Literal["keep", "scale"] | None
    epoch_samples: int | None

    # optimizer
    optimizer: Literal["sgd", "adamw", "lars", "larc", "lamb", "novograd", "muon", "schedule-free-adamw"] | None
    base_lr: float | None
    base_batch_size: int | None
    lr_rule: Literal["linear", "sqrt", "none"] | None
    momentum: float | None
    beta2: float | None
    eps: float | None
    trust_coefficient: float | None
    grad_averaging: bool | None
    nesterov: bool | None
    ns_steps: int | None
    adjust_lr: Literal["match_rms_adamw", "original"] | None
    adamw_lr: float | None
    weight_decay: float | None
    warmup_epochs: float | None
    warmup_from: float | None
    decay: Literal["none", "cosine", "linear", "step", "wsd", "wsd-sqrt", "one-cycle"] | None
    decay_every: float | None
    decay_factor: float | None
    decay_share: float | None
    clip_norm: float | None
    ema: float | None
    freeze: str | None
    gradient_noise_batch: int | None
    gradient_noise: float | None
    gradient_noise_decay: float | None
    noise_scale: bool | None
    average_every: str | None
    outer_lr: float | None
    outer_momentum: float | None

    # speed
    precision: Precision | None
    sync_batch_norm: bool | None
    compile: bool | None
    graph: bool | None
    channels_last: bool | None
    autotune: bool | None
    loader: Literal["auto", "resident", "streamed"] | None
    loader_workers: int | None
    validation_batch_size: int | None

    # sharding
    checkpoint_activations: bool | None
    offload: bool | None
    shard_modules: str | None
    schedule: Schedule | None
    micro_batches: int | None

    # stop
    epochs: int | None
    target_accuracy: float | None
    target_loss: float | None
    patience: int | None
    on_divergence: Literal["stop", "rollback", "ignore"] | None
    rollback_factor: float | None
    max_rollbacks: int | None

    # run
    run_name: str | None
    runs_folder: str | None
    init_from: str | None
    checkpoint_every: str | None
    keep_checkpoints: int | None
    async_checkpoint: bool | None
    seed: int | None
    deterministic: bool | None
    tensorboard: bool | None
    mlflow: bool | None
    wandb: bool | None
    sinks: str | None
    prometheus: int | None
    prometheus_host: str | None

    # energy
    energy: bool | None
    grid_intensity: float | None
    energy_price: float | None
    currency: str | None

    # command
    config: str | None
    verbose: bool | None
    preflight: bool | None
    stage: str | Literal[True] | None
    keep_staged: bool | None
    profile: str | None
