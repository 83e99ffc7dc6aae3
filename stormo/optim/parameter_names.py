"""Parameters chosen by patterns of their names: which are frozen, and which learn at other rates."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from stormo.errors import SettingError, pluralize


def matching(model: nn.Module, pattern: str, said: str) -> list[nn.Parameter]:
    """The parameters with a name that fits; `said` begins the sentence where there are none."""
    named = dict(model.named_parameters(remove_duplicate=False))
    found = {id(parameter): parameter for name, parameter in named.items() if fnmatchcase(name, pattern)}
    if not found:
        near = difflib.get_close_matches(pattern, _patterns(named), n=3, cutoff=0.0)
        shown = pattern or "an empty pattern"
        raise SettingError(said, f"no parameter of the model fits {shown}", f"set something like {' or '.join(near)}")
    return list(found.values())


def _patterns(names: Iterable[str]) -> list[str]:
    """All names, and all that lies in each module."""
    found = dict.fromkeys(names)
    for name in list(found):
        parts = name.split(".")
        found |= dict.fromkeys(f"{'.'.join(parts[:end])}.*" for end in range(1, len(parts)))
    return list(found)


def freeze(model: nn.Module, patterns: str) -> str:
    """Take the gradients of the parameters whose names fit; say how many there are."""
    for pattern in patterns.split(","):
        for parameter in matching(model, pattern.strip(), f"--freeze {patterns} was set"):
            parameter.requires_grad_(False)
    every = list(model.parameters())
    frozen = [parameter for parameter in every if not parameter.requires_grad]
    if len(frozen) == len(every):
        raise SettingError(
            f"--freeze {patterns} was set",
            f"all {pluralize(len(every), 'parameter')} of the model are frozen then",
            "leave some to be trained",
        )
    values = [sum(parameter.numel() for parameter in some) for some in (frozen, every)]
    return (
        f"{len(frozen)} of the model's {pluralize(len(every), 'parameter')} are frozen: "
        f"{values[0]:,} of {values[1]:,} values."
    )


def lr_factor_of(model: nn.Module, factors: Mapping[str, float]) -> dict[int, float]:
    """The factor of each parameter by its id: that of the first pattern that fits one of its names."""
    found: dict[int, float] = {}
    for pattern, factor in factors.items():
        said = f"lr_factors of the task has {pattern!r}"
        if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor < math.inf:
            raise SettingError(
                f"{said}: {factor!r}", "it multiplies a learning rate", "set a number above 0, or freeze these"
            )
        for parameter in matching(model, str(pattern), said):
            found.setdefault(id(parameter), float(factor))
    return found
