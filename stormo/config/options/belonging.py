"""What a setting that is named over others leaves of them: a method that is replaced takes along what is its alone.

A flag `--compress bf16` over a file with `compress = "powersgd"` and `compress_rank = 8` leaves nothing of that rank,
which no flag could take back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from stormo.config.schema import NESTEROV_OPTIMIZERS, OPTIMIZER_DEFAULTS
from stormo.config.strategies import names, with_option

Settings = Mapping[str, Any]

# Each says the same as the other, or takes its place.
_RIVALS = {
    "strategy": "mesh",
    "mesh": "strategy",
    "batch_size": "global_batch_size",
    "global_batch_size": "batch_size",
    "hosts": "hostfile",
    "hostfile": "hosts",
}


def _is(key: str, *values: Any) -> Callable[[Settings], bool]:
    return lambda settings: settings.get(key) in values


def _spread(*strategies: str, axis: str | None = None) -> Callable[[Settings], bool]:
    """Whether it is one of these strategies, or a mesh with this axis."""

    def holds(settings: Settings) -> bool:
        return settings.get("strategy") in strategies or (axis is not None and axis in (settings.get("mesh") or ""))

    return holds


def _has_units(settings: Settings) -> bool:
    """Whether modules are named for something: shards, activations that are computed again, parts that are compiled."""
    is_sharded = _spread(*names(lambda row: row.zero == 3), axis="shard")(settings)
    return bool(is_sharded or settings.get("checkpoint_activations") or settings.get("compile"))


_HOW = ("strategy", "mesh")
_ALWAYS = ("offload", "shard_modules", "ghost_batch_size", "max_batch_size", "nesterov", "base_batch_size")
# What is refused even where nobody has named it now, or, of some, beside what.
_REFUSED_UNASKED: dict[str, Callable[[Settings], bool]] = {
    **dict.fromkeys(_ALWAYS, lambda settings: True),
    "micro_batches": _is("strategy", *names(lambda row: row.schedule)),
}
# Settings that only some choices have: which settings make the choice, and whether it is one of these.
_OF_A_CHOICE: dict[str, tuple[tuple[str, ...], Callable[[Settings], bool]]] = {
    **dict.fromkeys(("servers", "staleness"), (_HOW, _spread(*with_option("servers")))),
    **dict.fromkeys(("average_every", "outer_lr", "outer_momentum"), (_HOW, _spread(*with_option("average_every")))),
    **dict.fromkeys(("schedule", "micro_batches"), (_HOW, _spread(*with_option("schedule"), axis="pipeline"))),
    "zero": (_HOW, _spread(axis="shard")),
    "offload": (_HOW, _spread(*names(lambda row: row.zero), axis="shard")),
    "shard_modules": ((*_HOW, "checkpoint_activations", "compile"), _has_units),
    "compress_rank": (("compress",), _is("compress", "powersgd")),
    "ghost_batch_size": (("sync_batch_norm",), _is("sync_batch_norm", False, None)),
    "max_batch_size": (("batch_size",), lambda settings: settings.get("batch_size") != "auto"),
    **{
        name: (("optimizer",), _is("optimizer", *(key for key, own in OPTIMIZER_DEFAULTS.items() if name in own)))
        for name in sorted({name for own in OPTIMIZER_DEFAULTS.values() for name in own})
    },
    "base_batch_size": (("lr_rule",), _is("lr_rule", "linear", "sqrt", None)),
    "nesterov": (("optimizer",), _is("optimizer", *NESTEROV_OPTIMIZERS)),
    "gradient_noise_decay": (("gradient_noise",), lambda settings: settings.get("gradient_noise") is not None),
    **dict.fromkeys(("rollback_factor", "max_rollbacks"), (("on_divergence",), _is("on_divergence", "rollback"))),
}


def without_effect(settings: Settings) -> set[str]:
    """Settings that mean nothing beside the others, all of which are there; most of them would be refused."""
    return {key for key, (_, holds) in _OF_A_CHOICE.items() if key in settings and not holds(settings)}


def left_below(weaker: Settings, stronger: Settings) -> dict[str, Any]:
    """What is left of settings that somebody has written down where stronger ones name another choice."""
    left = {key: value for key, value in weaker.items() if _RIVALS.get(key) not in stronger}
    if {**weaker, **stronger}.get("batch_size") == "auto":  # which goes with a global batch
        left |= {key: weaker[key] for key in ("batch_size", "global_batch_size") if key in weaker}
    return _without(left, replaced(left, stronger))


def left_unasked(weaker: Settings, stronger: Settings) -> dict[str, Any]:
    """The same of settings that nobody has named now, which stay for another time unless they would be refused."""
    both, gone = {**weaker, **stronger}, replaced(weaker, stronger)
    return _without(weaker, {key for key in gone & _REFUSED_UNASKED.keys() if _REFUSED_UNASKED[key](both)})


def replaced(weaker: Settings, stronger: Settings) -> set[str]:
    """Of the weaker settings those that belong to a choice for which the stronger ones name another."""
    both = {**weaker, **stronger}
    named = {key for key in weaker.keys() & _OF_A_CHOICE if not stronger.keys().isdisjoint(_OF_A_CHOICE[key][0])}
    return {key for key in named if not _OF_A_CHOICE[key][1](both)}


def _without(settings: Settings, keys: Set[str]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}
