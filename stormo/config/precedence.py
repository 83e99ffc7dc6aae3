"""Which settings belong to which choice, and what a stronger source leaves of a weaker one.

`compress_rank` belongs to `--compress powersgd`. Where the user sets it for another choice it is refused. Where a flag
`--compress bf16` overrides a file with `compress = "powersgd"` and `compress_rank = 8`, the rank is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from stormo.config.schema import DECAY_SHARES, OPTIMIZER_DEFAULTS
from stormo.config.strategies import names, with_option
from stormo.errors import SettingError

Settings = Mapping[str, Any]

# Pairs of which one replaces the other.
_RIVALS = {
    "strategy": "mesh",
    "mesh": "strategy",
    "batch_size": "global_batch_size",
    "global_batch_size": "batch_size",
    "hosts": "hostfile",
    "hostfile": "hosts",
}


@dataclass(frozen=True, slots=True)
class _Choice:
    """The choice that a setting belongs to."""

    decided_by: tuple[str, ...]  # settings
    holds: Callable[[Settings], bool]
    flags: tuple[str, ...]  # of which each makes this choice


def _is(key: str, *values: Any) -> Callable[[Settings], bool]:
    return lambda settings: settings.get(key) in values


def _strategy(flags: tuple[str, ...], *strategies: str, axis: str | None = None) -> _Choice:
    """One of these strategies, or a mesh with this axis."""

    def holds(settings: Settings) -> bool:
        return settings.get("strategy") in strategies or (axis is not None and axis in (settings.get("mesh") or ""))

    return _Choice(("strategy", "mesh"), holds, flags)


def _optimizer(*optimizers: str) -> _Choice:
    return _Choice(("optimizer",), _is("optimizer", *optimizers), (f"--optimizer {optimizers[0]}", *optimizers[1:]))


_NOT_SCHEDULE_FREE = ("another --optimizer than schedule-free-adamw",)
_SHARD = _strategy(("--strategy fsdp",), *names(lambda row: row.zero), axis="shard")
_FSDP = _strategy(("--strategy fsdp",), *names(lambda row: row.zero == 3), axis="shard")
_CHOICES: dict[str, _Choice] = {
    **dict.fromkeys(("servers", "staleness"), _strategy(("--strategy server",), *with_option("servers"))),
    **dict.fromkeys(
        ("average_every", "outer_lr", "outer_momentum"), _strategy(("--strategy local",), *with_option("average_every"))
    ),
    **dict.fromkeys(
        ("schedule", "micro_batches"),
        _strategy(("--strategy pipeline", "an axis pipeline of --mesh"), *with_option("schedule"), axis="pipeline"),
    ),
    "zero": _strategy(("an axis shard of --mesh",), axis="shard"),
    "offload": _SHARD,
    "shard_modules": _Choice(
        (*_FSDP.decided_by, "checkpoint_activations", "compile"),
        lambda settings: bool(
            (_FSDP.holds(settings) and settings.get("zero") in (None, 3))
            or settings.get("checkpoint_activations")
            or settings.get("compile")
        ),
        ("--strategy fsdp", "--checkpoint-activations", "--compile"),
    ),
    "compress_rank": _Choice(("compress",), _is("compress", "powersgd"), ("--compress powersgd",)),
    "ghost_batch_size": _Choice(("sync_batch_norm",), _is("sync_batch_norm", False, None), ("--no-sync-batch-norm",)),
    "max_batch_size": _Choice(
        ("batch_size",), lambda settings: settings.get("batch_size") != "auto", ("a number as --batch-size",)
    ),
    **{
        name: _optimizer(*(optimizer for optimizer, own in OPTIMIZER_DEFAULTS.items() if name in own))
        for name in sorted({name for own in OPTIMIZER_DEFAULTS.values() for name in own})
    },
    "base_batch_size": _Choice(("lr_rule",), _is("lr_rule", "linear", "sqrt", None), ("--lr-rule linear", "sqrt")),
    # The average of the weights takes the place of both.
    "decay": _Choice(
        ("optimizer",),
        lambda settings: settings.get("optimizer") != "schedule-free-adamw" or settings.get("decay") in (None, "none"),
        _NOT_SCHEDULE_FREE,
    ),
    "ema": _Choice(("optimizer",), lambda given: given.get("optimizer") != "schedule-free-adamw", _NOT_SCHEDULE_FREE),
    "decay_share": _Choice(("decay",), _is("decay", *DECAY_SHARES), ("--decay wsd", *list(DECAY_SHARES)[1:])),
    **dict.fromkeys(
        ("warmup_epochs", "warmup_from"),
        _Choice(("decay",), lambda settings: settings.get("decay") != "one-cycle", ("another --decay than one-cycle",)),
    ),
    "gradient_noise_decay": _Choice(
        ("gradient_noise",), lambda settings: settings.get("gradient_noise") is not None, ("--gradient-noise",)
    ),
    **dict.fromkeys(
        ("rollback_factor", "max_rollbacks"),
        _Choice(("on_divergence",), _is("on_divergence", "rollback"), ("--on-divergence rollback",)),
    ),
}
# Refused wherever they come from; the others only where the user sets them now.
_ALWAYS_REFUSED = {
    *("offload", "shard_modules", "ghost_batch_size", "max_batch_size", "nesterov", "base_batch_size", "decay")
}


def check_choices(settings: Settings, given: Set[str]) -> None:
    """Refuse settings of a choice that was not made; `given` are those that the user has set."""
    for key in sorted(unused_settings(settings) & (given | _ALWAYS_REFUSED)):
        value, flag = settings[key], f"--{key.replace('_', '-')}"
        if value is not None and value is not False:
            *others, last = _CHOICES[key].flags
            raise SettingError(
                flag + ("" if value is True else f" {value}") + " was set",
                f"it needs {', '.join(others)} or {last}" if others else f"it needs {last}",
                f"set {'one of them' if others else 'that'}, or leave it out",
            )


def unused_settings(settings: Settings) -> set[str]:
    """Settings that have no effect beside the others; all settings must be given."""
    return {key for key, choice in _CHOICES.items() if key in settings and not choice.holds(settings)}


def drop_overridden(weaker: Settings, stronger: Settings) -> dict[str, Any]:
    """The weaker settings without those that the stronger ones replace or leave without effect."""
    left = {key: value for key, value in weaker.items() if _RIVALS.get(key) not in stronger}
    if {**weaker, **stronger}.get("batch_size") == "auto":  # auto takes a global batch beside it
        left |= {key: weaker[key] for key in ("batch_size", "global_batch_size") if key in weaker}
    return _without(left, _overridden(left, stronger))


def drop_incompatible(weaker: Settings, stronger: Settings) -> dict[str, Any]:
    """The weaker settings, which nobody has set now, without those that would be refused beside the stronger ones."""
    return _without(weaker, _overridden(weaker, stronger) & _ALWAYS_REFUSED)


def _overridden(weaker: Settings, stronger: Settings) -> set[str]:
    """The weaker settings whose choice the stronger ones replace by another."""
    both = {**weaker, **stronger}
    decided = {
        key for key in weaker.keys() & _CHOICES.keys() if not stronger.keys().isdisjoint(_CHOICES[key].decided_by)
    }
    return {key for key in decided if not _CHOICES[key].holds(both)}


def _without(settings: Settings, keys: Set[str]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}
