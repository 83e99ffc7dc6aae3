"""Turns dataclasses into flags, TOML keys and help, and back: settings are declared once, in `config` and in a task.

`declared` reads the fields, once for flags and TOML alike; `flags` is the command line, `toml` the files, `settings`
the configuration that they come to, `belonging` what one leaves of another, `words` a command line made of them.
"""

from stormo.config.options.belonging import left_below, left_unasked, without_effect
from stormo.config.options.declared import Option, defaults_of_task, options_of, train_options
from stormo.config.options.flags import (
    Parser,
    Positional,
    UsageError,
    build_parser,
    parse_flags,
    peek_flags,
    take_flags,
)
from stormo.config.options.settings import flat_settings, make_config
from stormo.config.options.toml import asked_by_file, check_masked, read_toml, settings_from_toml, to_toml
from stormo.config.options.words import as_flags, without_flags

__all__ = [
    "Option",
    "Parser",
    "Positional",
    "UsageError",
    "as_flags",
    "asked_by_file",
    "build_parser",
    "check_masked",
    "defaults_of_task",
    "flat_settings",
    "left_below",
    "left_unasked",
    "make_config",
    "options_of",
    "parse_flags",
    "peek_flags",
    "read_toml",
    "settings_from_toml",
    "take_flags",
    "to_toml",
    "train_options",
    "without_effect",
    "without_flags",
]
