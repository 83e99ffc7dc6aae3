"""A grid of settings in one word, and the runs that it stands for."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stormo.config.options import Option
from stormo.errors import SettingError, counted, unknown_name

MOST_RUNS = 1000  # an array of Slurm's default size
# One job script has one allocation, and one run folder after the other.
_NOT_SWEPT = ("workers", "command", "run_name", "runs_folder", "resume", "slurm")
_SWEPT = ("compress", "compress_rank")  # of the workers all the same: they need the same ones

Point = Mapping[str, Any]  # one combination: the value of each setting, by key


def read_grid(text: str, options: Sequence[Option]) -> list[Point]:
    """Every combination of `base_lr=0.01,0.02;seed=0,1`, the last setting varying fastest."""
    known = {
        option.key: option
        for option in options
        if option.name in _SWEPT
        or (option.section not in _NOT_SWEPT and option.name not in _NOT_SWEPT and not option.optional_value)
    }
    axes: dict[str, list[Any]] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, values = part.partition("=")
        key = name.strip().removeprefix("--").replace("-", "_")
        if not equals or not values.strip():
            raise SettingError(
                f"--sweep {text!r} was set", f"{part!r} has no values", "write it as base_lr=0.01,0.02;seed=0,1"
            )
        if key not in known:
            raise _not_swept(key, known, options)
        if key in axes:
            raise SettingError(f"--sweep {text!r} was set", f"{key} is there twice", "give all its values at once")
        axes[key] = [_value(known[key], value.strip()) for value in values.split(",")]
        if len(set(axes[key])) != len(axes[key]):
            raise SettingError(f"--sweep {text!r} was set", f"a value of {key} is there twice", "leave one of them out")
    if not axes:
        raise SettingError(f"--sweep {text!r} was set", "it names no setting", "write it as base_lr=0.01,0.02")
    points: list[Point] = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    _check_count(len(points), "--sweep", text)
    return points


def read_seeds(text: str) -> list[Point]:
    """The seeds of `0-4` or `0,7,9`."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part, flags=re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise SettingError(f"--array {text} was set", f"{part!r} is no range of seeds", "write it as 0-4 or 0,7,9")
        _check_count(int(match[2] or match[1]) - int(match[1]) + 1, "--array", text)
        seeds += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(set(seeds)) != len(seeds):
        raise SettingError(f"--array {text} was set", "a seed is there twice", "leave one of them out")
    _check_count(len(seeds), "--array", text)
    return [{"seed": seed} for seed in seeds]


def _check_count(count: int, flag: str, text: str) -> None:
    if count > MOST_RUNS:
        raise SettingError(
            f"{flag} {text} was set", f"it makes {counted(count, 'run')}, more than {MOST_RUNS}", "submit it in parts"
        )


def _not_swept(key: str, known: Iterable[str], options: Iterable[Option]) -> SettingError:
    if any(option.key == key for option in options):
        return SettingError(
            f"{key} was set in --sweep", "it is the same for all runs of a job", "set it by its flag, for all of them"
        )
    return unknown_name("setting of --sweep", key, known)


def _value(option: Option, text: str) -> Any:
    truth = {"true": True, "false": False}
    value = truth.get(text.lower(), text) if option.kind is bool else text
    return option.convert(value, f"{option.key} in --sweep")
