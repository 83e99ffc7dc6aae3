"""TOML files of settings: the user's, and the `config.toml` of a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from stormo.config.options import Option
from stormo.config.precedence import unused_settings
from stormo.config.schema import CALL_ONLY, EFFECTIVE, OTHER_SECTIONS, SECTIONS, NodeRange, ResolvedBatch, TrainConfig
from stormo.errors import SettingError, unknown_name
from stormo.system import files
from stormo.system.files import MASK, is_secret_name, masked


def read_toml(path: Path, what: str | None = None) -> dict[str, Any]:
    """Parse a TOML file; `what` begins the error of a file that the user has not named."""
    is_typed = what is None
    what = what or f"--config {path} was set"
    try:
        return files.read_toml(path, follow=is_typed)
    except OSError as error:
        why = error.problem if isinstance(error, files.BadFileError) else f"it cannot be read ({error.strerror})"
        raise SettingError(what, why, "check the path") from None
    except ValueError as error:
        instead = "save it as UTF-8" if isinstance(error, UnicodeDecodeError) else "fix that line"
        data = files.read_bytes(path, files.MAX_TOML_BYTES, follow=is_typed)
        if any(line.partition(b"#")[0].strip() == b"[task]" for line in data.splitlines()):
            instead += "; the section of a task's own options is [task_options], as task names what is trained"
        raise SettingError(what, f"it is not valid TOML ({error})", instead) from None


def settings_from_toml(document: Mapping[str, Any], options: Sequence[Option], source: str) -> dict[str, Any]:
    """The settings of a parsed TOML file, by key, each checked and converted."""
    settings: dict[str, Any] = {}
    sections = {option.section for option in options} | {"task"}
    for name, value in document.items():
        if name == "task":
            if not isinstance(value, str):
                raise SettingError(
                    f"task in {source} is no text", "it names what is trained", "put its options under [task_options]"
                )
            settings["task"] = value
        if name in ("task", EFFECTIVE, *OTHER_SECTIONS) and name not in sections - {"task"}:
            continue  # results of an earlier run, and sections of other commands
        section = "task" if name == "task_options" else name
        if section in sections and not isinstance(value, Mapping):
            raise SettingError(
                f"{name} in {source} was set to {value!r}",
                "it is a section",
                f"write [{name}] on its own line, and its settings below",
            )
        if section not in sections:
            own = next((option.section for option in options if option.name == name.replace("-", "_")), None)
            if own is not None and not isinstance(value, Mapping):
                below = "task_options" if own == "task" else own
                raise SettingError(
                    f"{name} in {source} was set to {value!r}",
                    "it is in no section",
                    f"write it below [{below}]",
                )
            raise unknown_name(f"section of {source}", name, sections | {"task_options"})
        declared = {option.name: option for option in options if option.section == section}
        for key, content in value.items():
            option = declared.get(key.replace("-", "_"))
            if option is None:
                known = [name for name, one in declared.items() if not one.optional_value]
                raise unknown_name(f"key in section [{name}] of {source}", key, known)
            if option.optional_value:
                raise SettingError(f"{key} was set in {source}", "it is a setting of one call", f"set {option.flag}")
            settings[option.key] = option.convert(content, f"{key} in {source}")
    return settings


def file_settings(document: Mapping[str, Any], options: Sequence[Option], source: str) -> dict[str, Any]:
    """The settings of a `--config` file; those of a run's file that have no effect are left out."""
    settings = settings_from_toml(document, options, source)
    idle = unused_settings(settings) if EFFECTIVE in document else set()
    return {key: value for key, value in settings.items() if key not in idle}


def require_secrets(document: Mapping[str, Any], given: Container[str], source: str) -> None:
    """Refuse the file of a run whose secret options were masked, unless they are given again."""
    of_task = document.get("task_options")
    for key, value in of_task.items() if isinstance(of_task, Mapping) else ():
        if value == MASK and is_secret_name(key) and f"task.{key}" not in given:
            flag = f"--task.{key.replace('_', '-')}"
            raise SettingError(
                f"{key} in {source} is {MASK}", "secrets are not written to the files of a run", f"set {flag} again"
            )


def refuse_secrets(config: TrainConfig, what: str, file: str) -> None:
    """Refuse a secret option of the task where the command line itself is written to a file."""
    for key, value in vars(config.task_options).items() if config.task_options is not None else ():
        if f"task.{key}" in config.given and masked(key, value) != value:
            flag = f"--task.{key.replace('_', '-')}"
            raise SettingError(
                f"{flag} was set for {what}",
                f"secrets are not written to files, and {file} would hold it",
                f"set it empty ({flag}=), and let the task read it from a file or an environment variable",
            )


def to_toml(config: TrainConfig, effective: ResolvedBatch) -> str:
    """The settings and the resolved batch, as TOML that `--config` reads; automatic values are left out."""
    lines = [f"task = {json.dumps(config.task)}"]
    sections = {section: dataclasses.asdict(getattr(config, section)) for section in SECTIONS if section != "command"}
    if config.batch.global_batch_size is not None and config.batch.batch_size != "auto":
        del sections["batch"]["batch_size"]  # only one of the two is set
    for name in CALL_ONLY:
        del sections["workers"][name]
    del sections["run"]["resume"]
    del sections["run"]["run_name"]  # a run that repeats this one has another
    if config.task_options is not None:
        asked = dataclasses.asdict(config.task_options)
        sections["task_options"] = {key: masked(key, value) for key, value in asked.items()}
    sections[EFFECTIVE] = dataclasses.asdict(effective)
    for section, values in sections.items():
        lines += ["", f"[{section}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(one)}' for key, one in value.items() if one is not None)}}}"
    # A JSON string is a TOML string except for one character, which TOML requires to be escaped.
    text = str(value) if isinstance(value, NodeRange) else value
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
