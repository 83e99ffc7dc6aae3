"""The folder of a study, which holds one: what lies there is compared before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stormo.errors import SettingError
from stormo.study.settings import Study
from stormo.system.files import BadFileError, read_object
from stormo.telemetry.files import write_json

_SETTINGS, _ARGUMENTS = "settings", "train_arguments"


def check_folder(study: Study) -> None:
    """Refuse a folder in which another study lies."""
    before, now = _before(study), study.identity()
    if before is None:
        return
    if isinstance(before.get(_SETTINGS), dict):  # which say it all, however they are written
        of_runs = {key: value for key, value in now[_SETTINGS].items() if key in before[_SETTINGS]}
        _compare(study, before[_SETTINGS], of_runs)
    else:  # of a release that kept none
        _compare(study, before, {_ARGUMENTS: now[_ARGUMENTS]})
    _compare(study, before, {key: value for key, value in now.items() if key not in (_SETTINGS, _ARGUMENTS)})


def open_folder(study: Study) -> None:
    """Make the folder, and keep what the study is."""
    study.output.parent.mkdir(parents=True, exist_ok=True)
    study.output.mkdir(mode=0o700, exist_ok=True)
    (study.output / "logs").mkdir(mode=0o700, exist_ok=True)
    before = _before(study)
    if before is None or _SETTINGS not in before:
        write_json(_path(study), study.identity())


def _path(study: Study) -> Path:
    return study.output / ("study.json" if study.node_id == 0 else f"study-node{study.node_id}.json")


def _before(study: Study) -> dict[str, Any] | None:
    """What the study that lies there is; None where there is none."""
    try:
        return read_object(_path(study))
    except FileNotFoundError:
        return None
    except BadFileError as error:
        raise SettingError(
            f"--output {study.output} was set",
            f"{_path(study).name} there is not what a study wrote ({error.problem})",
            "set another folder",
        ) from None


def _compare(study: Study, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key, value in now.items():
        if before.get(key) != value:
            flag = "" if key in (_ARGUMENTS, "task") else f" (--{key.replace('_', '-')})"
            raise SettingError(
                f"--output {study.output} was set",
                f"the study there has {key} = {_words(before.get(key))}, not {_words(value)}{flag}",
                "set the same options, or another folder",
            )


def _words(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return " ".join(str(item) for item in value) if isinstance(value, list) else str(value)
