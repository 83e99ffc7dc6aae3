"""Checks of the numbers that a user has set, each answered in one sentence before any process starts."""

from __future__ import annotations

import os
from collections.abc import Sequence

from stormo.config.layout import at_least
from stormo.config.plan.batch import per_worker
from stormo.config.plan.facts import Facts
from stormo.config.schema import NESTEROV_OPTIMIZERS, OPTIMIZER_DEFAULTS, TrainConfig
from stormo.errors import SettingError

_MAX_NAME_BYTES = 200
_MOST_LOADERS = 1024


def check_numbers(config: TrainConfig) -> None:
    """Refuse what cannot hold whatever the task and the devices are."""
    if config.stop.target_accuracy is not None and config.stop.target_accuracy >= 10:
        raise SettingError(
            f"--target-accuracy {config.stop.target_accuracy:g} was set",
            "it is a fraction, of which 1 is all",
            f"set --target-accuracy {config.stop.target_accuracy / 100:g}",
        )
    optimizer, stop, run = config.optimizer, config.stop, config.run
    at_least("--target-accuracy", stop.target_accuracy, 0)
    at_least("--batch-size", per_worker(config), 1)
    at_least("--accumulate", config.batch.accumulate, 1)
    _check_ghosts(config)
    at_least("--epoch-samples", config.batch.epoch_samples, 1)
    at_least("--gradient-noise-batch", optimizer.gradient_noise_batch, 1)
    at_least("--gradient-noise-decay", optimizer.gradient_noise_decay, 0)
    at_least("--max-batch-size", config.batch.max_batch_size, 1)
    at_least("--base-batch-size", optimizer.base_batch_size, 1)
    if config.batch.batch_size == "auto" and config.batch.accumulate > 1:
        raise SettingError(
            f"--accumulate {config.batch.accumulate} was set with --batch-size auto",
            "auto finds the passes that make up the global batch",
            "leave out --accumulate or set it to 1, or set --batch-size to a number",
        )
    at_least("--epochs", stop.epochs, 1)
    at_least("--patience", stop.patience, 1)
    at_least("--max-rollbacks", stop.max_rollbacks, 1)
    if not 0 < stop.rollback_factor < 1:
        raise SettingError(
            f"--rollback-factor {stop.rollback_factor:g} was set",
            "a rollback lowers the rate by it, so that it must lie between 0 and 1",
            "set something like --rollback-factor 0.5",
        )
    _check_rollbacks(config)
    at_least("--validation-batch-size", config.speed.validation_batch_size, 1)
    at_least("--loader-workers", config.speed.loader_workers, 0)
    _check_loaders(config.speed.loader_workers or 0)
    at_least("--keep-checkpoints", run.keep_checkpoints, 1)
    at_least("--grid-intensity", config.energy.grid_intensity, 0)
    at_least("--energy-price", config.energy.energy_price, 0)
    at_least("--seed", run.seed, 0)
    for flag, value in (
        ("--weight-decay", optimizer.weight_decay),
        ("--warmup-epochs", optimizer.warmup_epochs),
        ("--warmup-from", optimizer.warmup_from),
    ):
        at_least(flag, value, 0)
    for flag, value in (
        ("--base-lr", optimizer.base_lr),
        ("--clip-norm", optimizer.clip_norm),
        ("--gradient-noise", optimizer.gradient_noise),
        ("--eps", optimizer.eps),
        ("--trust-coefficient", optimizer.trust_coefficient),
        ("--decay-every", optimizer.decay_every),
        ("--decay-factor", optimizer.decay_factor),
    ):
        if value is not None and value <= 0:
            raise SettingError(f"{flag} {value:g} was set", "it must be above 0", f"set {flag} to a positive number")
    for flag, value, example in (("--momentum", optimizer.momentum, 0.9), ("--beta2", optimizer.beta2, 0.99)):
        if value is not None and not 0 <= value < 1:
            raise SettingError(
                f"{flag} {value:g} was set", "it must lie in [0, 1)", f"set something like {flag} {example}"
            )
    _check_belongs(config)
    if optimizer.nesterov and (optimizer.momentum == 0 or optimizer.optimizer not in NESTEROV_OPTIMIZERS):
        raise SettingError(
            f"--nesterov was set with --optimizer {optimizer.optimizer} --momentum {optimizer.momentum:g}",
            f"Nesterov's momentum needs {_either(NESTEROV_OPTIMIZERS)} and a momentum above 0",
            "set --no-nesterov, or "
            + ("--momentum 0.9" if optimizer.momentum == 0 else f"--optimizer {_either(NESTEROV_OPTIMIZERS)}"),
        )
    if run.run_name is not None:
        check_run_name(run.run_name)
    if (optimizer.warmup_from or 0) > 1:
        raise SettingError(
            f"--warmup-from {optimizer.warmup_from:g} was set",
            "it is the fraction of the rate that warm-up starts from",
            "set a number from 0 to 1",
        )
    if run.seed >= 2**63:
        raise SettingError(f"--seed {run.seed} was set", "it must fit in 63 bits", "set a smaller seed")


def check_run_name(name: str) -> None:
    """Refuse what is no folder's name, or could not be typed after a verb."""
    is_name = bool(name) and "/" not in name and name not in (".", "..") and len(os.fsencode(name)) <= _MAX_NAME_BYTES
    if not is_name or name.startswith("-") or not name.isprintable():
        raise SettingError(
            f"--run-name {name[:40]!r} was set",
            "it names a folder in --runs-folder",
            f"set a plain name of at most {_MAX_NAME_BYTES} bytes, without / and line ends and not with - in front",
        )


def _check_rollbacks(config: TrainConfig) -> None:
    """Refuse what the user has set for rollbacks where there are none; a task's defaults may name both."""
    stop = config.stop
    for name in ("rollback_factor", "max_rollbacks"):
        if name in config.given and stop.on_divergence != "rollback":
            flag = f"--{name.replace('_', '-')}"
            raise SettingError(
                f"{flag} {getattr(stop, name):g} was set with --on-divergence {stop.on_divergence}",
                "a run goes back only under --on-divergence rollback",
                f"leave out {flag}, or set --on-divergence rollback",
            )


def _check_belongs(config: TrainConfig) -> None:
    """Refuse what the user has set for another optimizer than the one that steps; a task's defaults may name both."""
    optimizer = config.optimizer
    known = {name for taken in OPTIMIZER_DEFAULTS.values() for name in taken}
    for name in sorted((known & config.given) - OPTIMIZER_DEFAULTS[optimizer.optimizer].keys()):
        value, flag = getattr(optimizer, name), f"--{name.replace('_', '-')}"
        if value is False:
            continue
        raise SettingError(
            f"{flag}{'' if value is True else f' {value:g}'} was set with --optimizer {optimizer.optimizer}",
            f"it belongs to {_either([other for other, taken in OPTIMIZER_DEFAULTS.items() if name in taken])}",
            f"leave out {flag}, or set another --optimizer",
        )


def _either(names: Sequence[str]) -> str:
    return " or ".join([*([", ".join(names[:-1])] if names[1:] else []), names[-1]])


def _check_loaders(count: int) -> None:
    if count > _MOST_LOADERS:
        raise SettingError(
            f"--loader-workers {count} was set",
            f"so many processes are started by each worker, and more than {_MOST_LOADERS} read no faster",
            "set about as many as a worker has cores",
        )


def _check_ghosts(config: TrainConfig) -> None:
    size = config.batch.ghost_batch_size
    if size is None:
        return
    if size < 2:
        raise SettingError(
            f"--ghost-batch-size {size} was set",
            "batch norm divides by the deviation of a ghost's samples, and fewer than 2 have none",
            "set --ghost-batch-size 2 or more; 32 is usual",
        )
    if config.speed.sync_batch_norm:
        raise SettingError(
            f"--ghost-batch-size {size} was set with --sync-batch-norm",
            f"one takes batch-norm statistics over {size} samples of a worker and the other over those of all workers",
            "leave one of them out, or set --no-sync-batch-norm",
        )


def check_data(config: TrainConfig, facts: Facts) -> None:
    """Refuse to go on with a run on other data."""
    before, now = config.resumed.data_sha256 if config.resumed else None, facts.data_sha256
    if before is not None and now is not None and before != now:
        raise SettingError(
            f"a run that was trained on data of SHA-256 {before} was to go on",
            f"the data here ({facts.data}) has {now}",
            "go on where the same data is (another release of Python has another library), or start a new run",
        )
