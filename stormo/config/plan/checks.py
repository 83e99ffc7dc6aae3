"""Checks of the numbers that a user has set; they fail before any process starts."""

from __future__ import annotations

import os

from stormo.config.layout import at_least
from stormo.config.plan.batch import per_worker
from stormo.config.plan.steps import Facts
from stormo.config.precedence import check_choices
from stormo.config.schema import SECTIONS, TrainConfig
from stormo.config.strategies import with_option
from stormo.errors import SettingError

_MAX_NAME_BYTES = 200


def check_numbers(config: TrainConfig) -> None:
    """Refuse what cannot hold for any task and any devices."""
    optimizer, batch, stop, run = config.optimizer, config.batch, config.stop, config.run
    if stop.target_accuracy is not None and stop.target_accuracy >= 10:
        raise SettingError(
            f"--target-accuracy {stop.target_accuracy:g} was set",
            "it is a fraction, of which 1 is all",
            f"set --target-accuracy {stop.target_accuracy / 100:g}",
        )
    for flag, value, least in (
        ("--target-accuracy", stop.target_accuracy, 0),
        ("--batch-size", per_worker(config), 1),
        ("--accumulate", batch.accumulate, 1),
        ("--ghost-batch-size", batch.ghost_batch_size, 2),  # one sample has no variance
        ("--epoch-samples", batch.epoch_samples, 1),
        ("--gradient-noise-batch", optimizer.gradient_noise_batch, 1),
        ("--gradient-noise-decay", optimizer.gradient_noise_decay, 0),
        ("--max-batch-size", batch.max_batch_size, 1),
        ("--base-batch-size", optimizer.base_batch_size, 1),
        ("--epochs", stop.epochs, 1),
        ("--patience", stop.patience, 1),
        ("--max-rollbacks", stop.max_rollbacks, 1),
        ("--validation-batch-size", config.speed.validation_batch_size, 1),
        ("--loader-workers", config.speed.loader_workers, 0),
        ("--keep-checkpoints", run.keep_checkpoints, 1),
        ("--grid-intensity", config.energy.grid_intensity, 0),
        ("--energy-price", config.energy.energy_price, 0),
        ("--seed", run.seed, 0),
        ("--weight-decay", optimizer.weight_decay, 0),
        ("--warmup-epochs", optimizer.warmup_epochs, 0),
        ("--warmup-from", optimizer.warmup_from, 0),
        ("--micro-batches", config.sharding.micro_batches, 1),
        ("--compress-rank", config.workers.compress_rank, 1),
        ("--ns-steps", optimizer.ns_steps, 1),
    ):
        at_least(flag, value, least)
    for flag, value in (
        ("--base-lr", optimizer.base_lr),
        ("--clip-norm", optimizer.clip_norm),
        ("--gradient-noise", optimizer.gradient_noise),
        ("--eps", optimizer.eps),
        ("--trust-coefficient", optimizer.trust_coefficient),
        ("--adamw-lr", optimizer.adamw_lr),
        ("--decay-every", optimizer.decay_every),
        ("--decay-factor", optimizer.decay_factor),
        ("--outer-lr", optimizer.outer_lr),
    ):
        if value is not None and value <= 0:
            raise SettingError(f"{flag} {value:g} was set", "it must be above 0", f"set {flag} to a positive number")
    _check_too_large(config)
    for flag, value, example in (
        ("--momentum", optimizer.momentum, 0.9),
        ("--beta2", optimizer.beta2, 0.99),
        ("--ema", optimizer.ema, 0.999),
        ("--outer-momentum", optimizer.outer_momentum, 0.9),
    ):
        if value is not None and not 0 <= value < 1:
            raise SettingError(
                f"{flag} {value:g} was set", "it must lie in [0, 1)", f"set something like {flag} {example}"
            )
    if not 0 < stop.rollback_factor < 1:
        raise SettingError(
            f"--rollback-factor {stop.rollback_factor:g} was set",
            "a rollback lowers the learning rate by it, so it must lie between 0 and 1",
            "set something like --rollback-factor 0.5",
        )
    if (optimizer.warmup_from or 0) > 1:
        raise SettingError(
            f"--warmup-from {optimizer.warmup_from:g} was set",
            "it is a fraction of the learning rate",
            "set a number from 0 to 1",
        )
    if batch.batch_size == "auto" and batch.accumulate > 1:
        raise SettingError(
            f"--accumulate {batch.accumulate} was set with --batch-size auto",
            "auto finds the number of micro-batches",
            "leave out --accumulate or set it to 1, or set --batch-size to a number",
        )
    if optimizer.momentum == 0 and optimizer.specific_options().get("nesterov"):
        raise SettingError(
            "--nesterov was set with --momentum 0",
            "Nesterov momentum needs a momentum above 0",
            "set --no-nesterov, or --momentum 0.9",
        )
    _check_schedule(config)
    if run.run_name is not None:
        check_run_name(run.run_name)
    check_choices({k: v for name in SECTIONS for k, v in vars(getattr(config, name)).items()}, config.given)


def _check_schedule(config: TrainConfig) -> None:
    share, optimizer = config.optimizer.decay_share, config.optimizer.optimizer
    if share is not None and not 0 < share <= 1:
        said = f"--decay-share {share:g} was set"
        raise SettingError(said, "it is a share of all steps", "set a number above 0, up to 1")
    if optimizer == "schedule-free-adamw":
        check_schedule_free(f"--optimizer {optimizer}", config.workers.strategy)


def check_schedule_free(optimizer: str, strategy: str) -> None:
    """Refuse strategies that cannot train with a schedule-free optimizer; `optimizer` names it in the error."""
    if strategy in with_option("servers") | with_option("average_every"):
        raise SettingError(
            f"--strategy {strategy} was set with {optimizer}",
            "it trains other weights than it validates, and the workers exchange only one of the two",
            "set --strategy ddp, or --optimizer adamw",
        )


def _check_too_large(config: TrainConfig) -> None:
    for flag, value, most, why in (
        ("--accumulate", config.batch.accumulate, 100_000, "every step would run that many micro-batches"),
        ("--gradient-noise-decay", config.optimizer.gradient_noise_decay, 100, "the first step would end the noise"),
        ("--loader-workers", config.speed.loader_workers, 1024, "each worker needs at most one for each of its cores"),
        ("--gradient-noise", config.optimizer.gradient_noise, 1e6, "it is a variance, and would drown every gradient"),
    ):
        if value is not None and value > most:
            raise SettingError(f"{flag} {value:g} was set", why, f"set {flag} {most:g} or less")


def check_run_name(name: str) -> None:
    """Refuse what is no name of a folder, or looks like a flag."""
    is_name = bool(name) and "/" not in name and name not in (".", "..") and len(os.fsencode(name)) <= _MAX_NAME_BYTES
    if not is_name or name.startswith("-") or not name.isprintable():
        raise SettingError(
            f"--run-name {name[:40]!r} was set",
            "it names a folder in --runs-folder",
            f"set a plain name of at most {_MAX_NAME_BYTES} bytes, without / and line ends and not with - in front",
        )


def check_data(config: TrainConfig, facts: Facts) -> None:
    """Refuse to resume a run with other data."""
    before, now = config.resumed.data_sha256 if config.resumed else None, facts.data_sha256
    if before is not None and now is not None and before != now:
        raise SettingError(
            f"a run that was trained on data of SHA-256 {before} was to resume",
            f"the data here ({facts.data}) has {now}",
            "resume where the same data is (another release of Python has another library), or start a new run",
        )
